//! Whether captures can be trusted here.
//!
//! Drivers have recorded copies that moved nothing, and run memory operations while they should have
//! been recorded. So once for each device a small slice is recorded, replayed twice with different
//! bytes, and the bytes are compared.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use super::batch::Batch;
use super::page::{OnDevice, Pinned};
use super::queue::{Event, OwnStream};
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdevice, CUdeviceptr, CUgraph, CUgraphExec, CUstream};

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

/// What was found out, by device.
static FOUND: Mutex<Option<HashMap<CUdevice, Result<(), Error>>>> = Mutex::new(None);

/// Whether captures can be trusted; asks the device once. The context is current and this thread's
/// captures are relaxed ([`Context::enter_relaxed`]).
pub(super) fn check(context: &Context) -> Result<(), Error> {
    let mut found = FOUND.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let found = found.get_or_insert_default();
    found.entry(context.device).or_insert_with(|| probe(context)).clone()
}

fn probe(context: &Context) -> Result<(), Error> {
    let (device, page) = (OnDevice::take(context)?, Pinned::take(context)?);
    let (stream, aside) = (OwnStream::create(context)?, OwnStream::create(context)?);
    let graph = record(context, &stream, &aside, &device)?;
    let first = replay(context, &stream, &graph, (&device, &page), 0xA11_6A7)?;
    let second = replay(context, &stream, &graph, (&device, &page), 0xB0B_CA7)?;
    drop(graph);
    device.leave(context);
    page.leave(context);
    match first.or(second) {
        None => Ok(()),
        Some(wrong) => Err(Error::unavailable(format!(
            "a graph that was captured on {} does not do what was recorded: {wrong}; use starts \
             that are not captured, or another driver",
            context.label()
        ))),
    }
}

/// A copy on a stream aside, then a signal, the wait for it and its reset, then the mark.
fn record<'a>(
    context: &'a Context,
    stream: &OwnStream,
    aside: &OwnStream,
    device: &OnDevice,
) -> Result<Graph<'a>, Error> {
    let driver = context.driver;
    let (fork, join) = (Event::create(context)?, Event::create(context)?);
    let mode = sys::STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream lives.
    let code = unsafe { (driver.stream_begin_capture)(stream.raw(), mode) };
    context.check("cuStreamBeginCapture", code)?;
    let recorded = (|| {
        fork.order(context, stream.raw(), aside.raw())?;
        copy(context, device.address(LANDING), device.address(SOURCE), BYTES, aside.raw())?;
        join.order(context, aside.raw(), stream.raw())?;
        let mut batch = Batch::new();
        batch.write(device.address(FLAG), 1);
        batch.wait(device.address(FLAG), 1);
        batch.write(device.address(FLAG), 0);
        batch.write(device.address(MARK), 1);
        batch.issue(context, stream.raw())
    })();
    let mut graph = std::ptr::null_mut();
    // SAFETY: the stream lives; the result is stored in a local.
    let code = unsafe { (driver.stream_end_capture)(stream.raw(), &raw mut graph) };
    let ended = context.check("cuStreamEndCapture", code);
    let mut graph = Graph { context, graph, executable: std::ptr::null_mut() };
    recorded.and(ended)?;
    // SAFETY: the graph was just recorded; the result is stored in `graph`.
    let code = unsafe { (driver.graph_instantiate)(&raw mut graph.executable, graph.graph, 0) };
    context.check("cuGraphInstantiateWithFlags", code)?;
    Ok(graph)
}

/// One replay with bytes of its own; what is wrong, if something is.
fn replay(
    context: &Context,
    stream: &OwnStream,
    graph: &Graph<'_>,
    (device, page): (&OnDevice, &Pinned),
    seed: u64,
) -> Result<Option<String>, Error> {
    let sent = |word: usize| seed.wrapping_mul(2 * word as u64 + 1);
    for word in 0..WORDS {
        page.store(word, sent(word));
    }
    for word in WORDS..MARK + 1 {
        page.store(word, 0);
    }
    let all = (MARK + 1) * size_of::<u64>();
    copy(context, device.address(SOURCE), page.address(0), all, stream.raw())?;
    // SAFETY: the graph was instantiated; what it names lives until the stream is finished.
    let code = unsafe { (context.driver.graph_launch)(graph.executable, stream.raw()) };
    context.check("cuGraphLaunch", code)?;
    let seen = MARK + 1;
    let bytes = SEEN * size_of::<u64>();
    copy(context, page.address(seen), device.address(LANDING), bytes, stream.raw())?;
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

fn copy(
    context: &Context,
    to: CUdeviceptr,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
) -> Result<(), Error> {
    // SAFETY: places in the two pages.
    let code = unsafe { (context.driver.memcpy_async)(to, from, bytes, stream) };
    context.check("cuMemcpyAsync", code)
}

/// A graph and what runs it.
#[derive(Debug)]
struct Graph<'a> {
    context: &'a Context,
    graph: CUgraph,
    executable: CUgraphExec,
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        if !self.executable.is_null() {
            // SAFETY: instantiated in `record` and owned.
            let _ = unsafe { (self.context.driver.graph_exec_destroy)(self.executable) };
        }
        if !self.graph.is_null() {
            // SAFETY: recorded in `record` and owned.
            let _ = unsafe { (self.context.driver.graph_destroy)(self.graph) };
        }
    }
}
