//! Releases blocked flag waits after an abort, and drops an engine without blocking for long.
//!
//! The host, where it can access the flag, or a dedicated stream writes to each awaited flag the value that
//! its wait expects. Nothing on the device is lost, and everything behind the wait runs. For captured waits it
//! sets [`ABORTED`](super::batches::ABORTED), so that all replays pass. One round may not be enough: a late signal
//! of a peer undoes it. Callers therefore repeat it until the engine is drained.
//!
//! If the stream is stuck behind blocked streams of its context, a stream of a second context takes its place
//! (docs/adr/0018-release-in-one-round.md).
//!
//! A dropped engine releases its queued waits first. Work that is still incomplete then cannot be destroyed;
//! it is left to the driver, which frees it with the process.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::{Error as _, ErrorKind};

use super::batches::WordBatch;
use super::capture::Captures;
use super::fused::Fused;
use super::pending::{Awaited, Pending};
use super::resources::{OwnStream, PinnedPage};
use super::{Engine, Hardware, StreamDevice};

const ROUND_WORD: usize = 8;
/// The largest number of rounds of flag writes that are enqueued on a stream at a time. A device that other processes
/// share switches to them when it has no work.
const ROUNDS_MAX: u64 = 2;
/// Flag values from here on do not satisfy waits for small values, because the driver compares cyclically.
const UPPER_HALF: u64 = 1 << 63;

/// If the writes of awaited flags take longer than this, their stream counts as stuck behind blocked streams.
const STUCK_TIME: Duration = Duration::from_millis(100);

/// Ends the flag waits of an aborted engine by writing the awaited values to the flags.
#[derive(Debug)]
pub(super) struct Releaser<D: StreamDevice> {
    stream: OwnStream<D>,
    /// A stream of a second context, opened when streams of the first may be blocked. It is dropped before its context.
    second: Option<(OwnStream<D>, Arc<D>)>,
    /// Whether opening the second context has failed, so that it is not tried again.
    second_fails: bool,
    batch: WordBatch<D>,
    targets: Vec<Awaited>,
    rounds: [u64; 2],
    written_at: Instant,
    host_rounds: u64,
}

impl<D: StreamDevice> Releaser<D> {
    pub(super) fn new(context: &D, together: bool) -> Result<Self, D::Error> {
        Ok(Self {
            stream: OwnStream::urgent(context)?,
            second: None,
            second_fails: false,
            batch: WordBatch::new(together),
            targets: Vec::new(),
            rounds: [0; 2],
            written_at: Instant::now(),
            host_rounds: 0,
        })
    }

    pub(super) fn is_written(&self, page: &PinnedPage) -> bool {
        (0..2).all(|stream| page.load(ROUND_WORD + stream) == self.rounds[stream])
    }

    /// Writes the largest awaited value to each flag that the host can access, and returns whether other flags remain.
    ///
    /// No call of the driver is made, and no stream can hold this up.
    pub(super) fn write_from_host(&mut self, captures: &Captures<D>, pending: &Pending) -> bool {
        let awaited = pending.awaited().chain(captures.awaited());
        self.targets.clear();
        self.targets.extend(awaited.clone().filter(|target| target.host.is_some()));
        keep_largest(&mut self.targets, self.host_rounds % 2 == 1);
        self.host_rounds += 1;
        for target in &self.targets {
            let Some(host) = target.host else { continue };
            // SAFETY: a word of a region of flags, aligned and mapped here (`EngineRegion::host_address`). An
            // incomplete wait names it, so it is alive (`submit`). Of graphs, only the flags of running ones
            // are passed.
            let word = unsafe { AtomicU64::from_ptr(host as *mut u64) };
            word.store(target.value, Ordering::Release);
        }
        awaited.into_iter().any(|target| target.host.is_none())
    }

    /// Enqueues writes of the largest awaited values to the flags that only the device can access. A round is put onto
    /// a stream only if there is room, so that rounds do not accumulate on a device that makes no progress.
    ///
    /// The streams of a context share few hardware queues, and a blocked stream blocks its queue. If a round is stuck or a graph
    /// waits, rounds go onto a stream of a second context.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub(super) fn write_from_stream(
        &mut self,
        context: &D,
        page: &PinnedPage,
        captures: &Captures<D>,
        pending: &Pending,
    ) -> Result<(), D::Error> {
        let awaited = pending.awaited().chain(captures.awaited());
        self.targets.clear();
        self.targets.extend(awaited.filter(|target| target.host.is_none()));
        if self.targets.is_empty() {
            return Ok(());
        }
        let is_stuck =
            page.load(ROUND_WORD) != self.rounds[0] && self.written_at.elapsed() >= STUCK_TIME;
        // While a launch of a further graph blocks its caller, calls of this context can block, too.
        let is_needed = is_stuck || captures.is_waiting();
        if is_needed && self.second.is_none() && !self.second_fails {
            self.open_second(context);
        }
        let (index, second) = match &self.second {
            Some((_, second)) => (1, Some(Arc::clone(second))),
            None => (0, None),
        };
        if self.rounds[index] - page.load(ROUND_WORD + index) >= ROUNDS_MAX {
            return Ok(());
        }
        let context = second.as_deref().unwrap_or(context);
        let _relaxed = context.enter_relaxed()?;
        self.written_at = Instant::now();
        self.write_round(context, page, index)
    }

    /// Opens a second context of the device, whose streams are not blocked by those of the first. Without it, for
    /// example because the device has no memory left, a release takes until another stream ends.
    fn open_second(&mut self, context: &D) {
        let opened = context.second_context().and_then(|second| {
            let Some(second) = second else { return Ok(None) };
            let relaxed = second.enter_relaxed()?;
            let stream = OwnStream::create(&*second)?;
            drop(relaxed);
            Ok(Some((stream, second)))
        });
        self.second = opened.unwrap_or(None);
        self.second_fails = self.second.is_none();
    }

    fn write_round(
        &mut self,
        context: &D,
        page: &PinnedPage,
        index: usize,
    ) -> Result<(), D::Error> {
        keep_largest(&mut self.targets, self.rounds[index] % 2 == 1);
        let stream = match (index, &self.second) {
            (1, Some((stream, _))) => stream.raw(),
            _ => self.stream.raw(),
        };
        self.batch.clear();
        for target in &self.targets {
            if self.batch.room() == 1 {
                self.batch.issue(context, stream)?;
            }
            self.batch.write(target.flag, target.value);
        }
        self.rounds[index] += 1;
        self.batch.write(page.address(ROUND_WORD + index), self.rounds[index]);
        self.batch.issue(context, stream)
    }
}

fn keep_largest(targets: &mut Vec<Awaited>, upper: bool) {
    targets.sort_unstable_by_key(|target| {
        let other_half = (target.value >= UPPER_HALF) != upper;
        (target.flag, other_half, std::cmp::Reverse(target.value))
    });
    targets.dedup_by_key(|target| target.flag);
}

const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Graphs count as complete after this time without a waiting graph, because no graph waits between two runs of
/// an operation.
const QUIET_TIME: Duration = Duration::from_millis(10);
const ROUND_INTERVAL: Duration = Duration::from_micros(50);

impl<D: StreamDevice> Drop for Engine<D> {
    fn drop(&mut self) {
        let lost = self.state.check().is_err_and(|error| error.kind() == ErrorKind::DeviceLost);
        if lost || !self.drain() {
            return;
        }
        let context = Arc::clone(&self.context);
        let Ok(_relaxed) = context.enter_relaxed() else { return };
        // SAFETY: the engine is being dropped, and its hardware is not used afterwards.
        unsafe { ManuallyDrop::take(&mut self.hardware) }.close(&context);
    }
}

impl<D: StreamDevice> Engine<D> {
    fn drain(&mut self) -> bool {
        let start = Instant::now();
        let mut released = false;
        let mut busy_at = start;
        loop {
            if self.settle().is_err() {
                return false;
            }
            let Hardware { release, page, captures, .. } = &*self.hardware;
            let quiet = !captures.is_used() || busy_at.elapsed() >= QUIET_TIME;
            match self.is_idle().map(|idle| idle && released) {
                Some(true) if quiet && release.is_written(page) => return true,
                Some(true) => {}
                Some(false) if self.release_round().is_ok() => {
                    released = true;
                    busy_at = Instant::now();
                }
                _ => return false,
            }
            if start.elapsed() >= DRAIN_TIMEOUT {
                return false;
            }
            std::thread::sleep(ROUND_INTERVAL);
        }
    }

    /// Returns whether all work of the engine is complete, apart from the writes of a release. Returns `None` if the
    /// driver reports an error.
    fn is_idle(&self) -> Option<bool> {
        let Hardware { captures, sides, main, fused, .. } = &*self.hardware;
        if captures.is_waiting() || fused.as_ref().is_some_and(Fused::is_running) {
            return Some(false);
        }
        if self.state.check().is_ok() {
            return Some(self.pending.is_empty());
        }
        // A slice that failed half-way has no ticket, so its streams are queried. Nothing can be known of a
        // slice on the caller's stream.
        let _relaxed = self.context.enter_relaxed().ok()?;
        let mut streams = sides.iter().map(|side| side.stream()).chain([main]);
        streams.try_fold(true, |all, it| Some(all & it.is_idle(&self.context).ok()?))
    }
}

impl<D: StreamDevice> Hardware<D> {
    /// Frees the driver's resources, or gives them to the next engine. All work is complete and the context is current.
    fn close(self, context: &Arc<D>) {
        let Self { captures, words, bounces, page, .. } = self;
        page.leave(&**context);
        // Graphs outlive the engine and still write to its words.
        if !captures.is_used() {
            bounces.into_iter().flatten().for_each(|bounce| bounce.free(context));
            captures.leave(&**context);
            if let Some(words) = words {
                words.leave(&**context);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_flag_gets_the_largest_value_of_one_half_by_turns() {
        let all = [(16, 3), (8, 1), (8, u64::MAX), (8, 4), (8, UPPER_HALF), (24, u64::MAX - 1)];
        let picked = |upper| {
            let mut targets: Vec<_> =
                all.iter().map(|&(flag, value)| Awaited { flag, host: None, value }).collect();
            keep_largest(&mut targets, upper);
            targets.iter().map(|target| (target.flag, target.value)).collect::<Vec<_>>()
        };
        assert_eq!(picked(false), [(8, 4), (16, 3), (24, u64::MAX - 1)]);
        assert_eq!(picked(true), [(8, u64::MAX), (16, 3), (24, u64::MAX - 1)]);
    }
}
