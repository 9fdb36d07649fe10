//! Whether streams wait for words of a device's memory, and whether the memory operations of one call
//! run in order.
//!
//! A runtime may want words of a kind of its own. And runtimes have run the operations of a call at
//! once: a write behind a wait of the same call then comes before what the wait is for. So once for
//! each device such a call is held at its wait, and its write looked for.

use std::time::{Duration, Instant};

use super::abilities::{StreamDevice, Trial};
use super::batch::Batch;
use super::page::{OnDevice, Pinned};
use super::queue::OwnStream;
use crate::device::{Batching, Between, Fault};
use peerlane_hal::{Error as _, ErrorKind};

/// How long each step may take.
const TIMEOUT: Duration = Duration::from_secs(2);
/// How long a write that does not wait has to show itself, once the stream has come to the call.
const SHOW: Duration = Duration::from_millis(2);

// Words of the page on the device.
/// Says that the stream has come to the call.
const MARK: usize = 0;
/// What the call waits for.
const GATE: usize = 1;
/// What it writes behind the wait.
const BEHIND: usize = 2;
const WORDS: usize = 3;

/// Whether one call may take several; asks the device once, if it has to be tried. The context is
/// current and this thread's captures are relaxed.
///
/// # Errors
/// Of kind `Unavailable`: streams do not wait for words.
pub(super) fn check<D: StreamDevice>(context: &D) -> Result<bool, D::Error> {
    let batching = context.batching();
    if batching == Batching::Trusted {
        return Ok(true);
    }
    check_waits(context)?;
    let (found, device) = (D::found(), context.device());
    Ok(batching == Batching::ToBeTried
        && found.or_try(Trial::Batches, device, || probe(context)).is_ok())
}

/// Refuses a device whose streams do not wait for words: an engine of another kind may do.
///
/// # Errors
/// Of kind `Unavailable`, with what to do where that is known.
pub fn probe_waits<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let _relaxed = context.enter_relaxed()?;
    context.check_words()?;
    if context.batching() == Batching::Trusted { Ok(()) } else { check_waits(context) }
}

fn check_waits<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    D::found().or_try(Trial::Words, context.device(), || wait_once(context))
}

/// A wait that passes at once.
fn wait_once<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let (stream, device) = (OwnStream::create(context)?, OnDevice::take(context)?);
    let mut batch = Batch::new(false);
    batch.write(device.address(GATE), 1);
    batch.wait(device.address(GATE), 1);
    let waited = batch
        .issue(context, stream.raw())
        .and_then(|()| stream.finish(context, TIMEOUT, "a wait for a word that is there"));
    if waited.is_ok() {
        device.leave(context);
    }
    waited.map_err(|error| match error.kind() {
        ErrorKind::DeviceLost => error,
        _ => Fault::Unavailable(format!(
            "streams of {} do not wait for words of its memory, which signals and waits need: {error}",
            context.label()
        ))
        .into(),
    })
}

/// What one trial needs.
struct Bench<D: StreamDevice> {
    held: OwnStream<D>,
    free: OwnStream<D>,
    device: OnDevice,
    page: Pinned,
}

fn probe<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let bench = Bench {
        held: OwnStream::create(context)?,
        free: OwnStream::urgent(context)?,
        device: OnDevice::take(context)?,
        page: Pinned::take(context)?,
    };
    bench.device.clear(context, &bench.held)?;
    bench.held.finish(context, TIMEOUT, "the clearing of a page")?;
    let held = bench.hold(context);
    let opened = bench.write(context, &bench.free, GATE);
    let drained = opened.and_then(|()| {
        bench.held.finish(context, TIMEOUT, "the probe of batched memory operations")
    });
    if let Err(error) = drained {
        // What still waits cannot be taken down, and uses the words.
        std::mem::forget(bench);
        return Err(error);
    }
    let seen = bench.look(context).map(|seen| seen[BEHIND]);
    let Bench { device, page, .. } = bench;
    device.leave(context);
    page.leave(context);
    match (held?, seen?) {
        (0, 1) => Ok(()),
        (before, after) => Err(Fault::Unavailable(format!(
            "memory operations of one call on {} do not run in order: a write behind a wait was \
             {before} while the wait held, wanted 0, and {after} behind it, wanted 1",
            context.label()
        ))
        .into()),
    }
}

impl<D: StreamDevice> Bench<D> {
    /// Puts the call onto the stream; what its write has done while the wait holds.
    fn hold(&self, context: &D) -> Result<u64, D::Error> {
        self.write(context, &self.held, MARK)?;
        let mut batch = Batch::new(true);
        batch.wait(self.device.address(GATE), 1);
        batch.write(self.device.address(BEHIND), 1);
        batch.issue(context, self.held.raw())?;
        let start = Instant::now();
        while self.look(context)?[MARK] == 0 {
            if start.elapsed() >= TIMEOUT {
                let what =
                    format!("a stream of {} did not come to a memory operation", context.label());
                return Err(Fault::Timeout { what, timeout: TIMEOUT }.into());
            }
        }
        std::thread::sleep(SHOW);
        Ok(self.look(context)?[BEHIND])
    }

    /// One operation by itself.
    fn write(&self, context: &D, stream: &OwnStream<D>, word: usize) -> Result<(), D::Error> {
        let mut batch = Batch::new(false);
        batch.write(self.device.address(word), 1);
        batch.issue(context, stream.raw())
    }

    fn look(&self, context: &D) -> Result<[u64; WORDS], D::Error> {
        let bytes = WORDS * size_of::<u64>();
        let (to, from) = (self.page.address(0), self.device.address(0));
        // SAFETY: words of two pages, which are never freed.
        unsafe { context.copy(self.free.raw(), to, from, bytes, Between::Host) }?;
        self.free.finish(context, TIMEOUT, "a look at words")?;
        Ok(std::array::from_fn(|word| self.page.load(word)))
    }
}
