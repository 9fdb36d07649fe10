//! Whether captures can be trusted here.
//!
//! Drivers have recorded copies that moved nothing, and run memory operations while they should have
//! been recorded. So once for each device a small slice is recorded, replayed twice with different
//! bytes, and the bytes are compared.

use std::time::Duration;

use super::abilities::{StreamDevice, Trial};
use super::batch::Batch;
use super::page::{OnDevice, Pinned};
use super::queue::{Event, OwnStream};
use crate::device::{Between, DevicePtr, ExecHandle, Fault, GraphHandle, StreamHandle};

/// How long the probe may take.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes that each replay copies.
const BYTES: usize = 64;
const WORDS: usize = BYTES / size_of::<u64>();

// Places in the page on the device, in words.
const SOURCE: usize = 0;
const LANDING: usize = WORDS;
const FLAG: usize = 2 * WORDS;
/// Tells whether a replay does the memory operations at all; the flag ends as it began.
const MARK: usize = FLAG + 1;
/// How many words are looked at: the landing, then the flag, then the mark.
const SEEN: usize = WORDS + 2;

/// Whether captures can be trusted; asks the device once. The context is current and this thread's
/// captures are relaxed (`enter_relaxed`). `together` says whether memory operations may share a call.
pub(super) fn check<D: StreamDevice>(context: &D, together: bool) -> Result<(), D::Error> {
    D::found().or_try(Trial::Captures, context.device(), || probe(context, together))
}

fn probe<D: StreamDevice>(context: &D, together: bool) -> Result<(), D::Error> {
    let (device, page) = (OnDevice::take(context)?, Pinned::take(context)?);
    let (stream, aside) = (OwnStream::create(context)?, OwnStream::create(context)?);
    let graph = record(context, (&stream, &aside), &device, together)?;
    let once = |seed| replay(context, &stream, &graph, (&device, &page), seed);
    let replayed = once(0xA11_6A7).and_then(|first| Ok((first, once(0xB0B_CA7)?)));
    let (first, second) = match replayed {
        Ok(seen) => seen,
        Err(error) => {
            // It may still run, and to give it back may wait for that.
            std::mem::forget(graph);
            return Err(error);
        }
    };
    drop(graph);
    device.leave(context);
    page.leave(context);
    match first.or(second) {
        None => Ok(()),
        Some(wrong) => Err(Fault::Unavailable(format!(
            "a graph that was captured on {} does not do what was recorded: {wrong}; use starts \
             that are not captured, or another driver",
            context.label()
        ))
        .into()),
    }
}

/// A copy on a stream aside, then a signal, the wait for it and its reset, then the mark.
fn record<'a, D: StreamDevice>(
    context: &'a D,
    (stream, aside): (&OwnStream<D>, &OwnStream<D>),
    device: &OnDevice,
    together: bool,
) -> Result<Executable<'a, D>, D::Error> {
    let (fork, join) = (Event::create(context)?, Event::create(context)?);
    // SAFETY: the stream lives.
    unsafe { context.begin_capture(stream.raw()) }?;
    let recorded = (|| {
        fork.order(context, stream.raw(), aside.raw())?;
        let (to, from) = (device.address(LANDING), device.address(SOURCE));
        copy(context, to, from, BYTES, aside.raw(), Between::Own)?;
        join.order(context, aside.raw(), stream.raw())?;
        let mut batch = Batch::new(together);
        batch.write(device.address(FLAG), 1);
        batch.wait(device.address(FLAG), 1);
        batch.write(device.address(FLAG), 0);
        batch.write(device.address(MARK), 1);
        batch.issue(context, stream.raw())
    })();
    // SAFETY: the stream lives.
    let ended = unsafe { context.end_capture(stream.raw()) };
    let graph = ended.map(|raw| Graph { context, raw });
    recorded?;
    let graph = graph?;
    // SAFETY: the graph was just recorded.
    let raw = unsafe { context.instantiate(graph.raw) }?;
    Ok(Executable { graph, raw })
}

/// One replay with bytes of its own; what is wrong, if something is.
fn replay<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    graph: &Executable<'_, D>,
    (device, page): (&OnDevice, &Pinned),
    seed: u64,
) -> Result<Option<String>, D::Error> {
    let sent = |word: usize| seed.wrapping_mul(2 * word as u64 + 1);
    for word in 0..WORDS {
        page.store(word, sent(word));
    }
    for word in WORDS..MARK + 1 {
        page.store(word, 0);
    }
    let all = (MARK + 1) * size_of::<u64>();
    copy(context, device.address(SOURCE), page.address(0), all, stream.raw(), Between::Host)?;
    // SAFETY: the graph was instantiated; what it names lives until the stream is finished.
    unsafe { context.launch(graph.raw, stream.raw()) }?;
    let seen = MARK + 1;
    let bytes = SEEN * size_of::<u64>();
    copy(context, page.address(seen), device.address(LANDING), bytes, stream.raw(), Between::Host)?;
    stream.finish(context, TIMEOUT, "the probe of captures")?;
    let wrong = (0..WORDS).find(|word| page.load(seen + word) != sent(*word));
    let (flag, mark) = (page.load(seen + WORDS), page.load(seen + WORDS + 1));
    Ok(match (wrong, flag, mark) {
        (Some(word), ..) => Some(format!(
            "word {word} of a copy is {:#x}, wanted {:#x}",
            page.load(seen + word),
            sent(word)
        )),
        (None, 0, 1) => None,
        (None, 0, mark) => Some(format!("a word is {mark}, wanted 1, which it writes")),
        (None, flag, _) => Some(format!("a flag is {flag} after its reset, wanted 0")),
    })
}

fn copy<D: StreamDevice>(
    context: &D,
    to: DevicePtr,
    from: DevicePtr,
    bytes: usize,
    stream: StreamHandle,
    between: Between,
) -> Result<(), D::Error> {
    // SAFETY: places in the two pages.
    unsafe { context.copy(stream, to, from, bytes, between) }
}

/// What was recorded.
#[derive(Debug)]
struct Graph<'a, D: StreamDevice> {
    context: &'a D,
    raw: GraphHandle,
}

impl<D: StreamDevice> Drop for Graph<'_, D> {
    fn drop(&mut self) {
        // SAFETY: recorded in `record` and owned.
        unsafe { self.context.destroy_graph(self.raw) };
    }
}

/// What runs it.
#[derive(Debug)]
struct Executable<'a, D: StreamDevice> {
    graph: Graph<'a, D>,
    raw: ExecHandle,
}

impl<D: StreamDevice> Drop for Executable<'_, D> {
    fn drop(&mut self) {
        // SAFETY: instantiated in `record` and owned.
        unsafe { self.graph.context.destroy_exec(self.raw) };
    }
}
