//! Tests once for each device or pair of devices what a GPU driver really does.
//!
//! - Waits: a runtime may need a special kind of memory for words that streams wait for.
//! - Batches: runtimes have run the operations of one call concurrently, so that a write behind a wait of the
//!   same call came before the awaited value. The probe blocks such a call at its wait and looks for its write.
//! - Copies: a copy method that keeps compute units free has copied nothing and reported success. Where a
//!   backend has such a method, bytes are sent and compared: inside the device, and to each peer when it is
//!   first reached.
//! - Captures: drivers have recorded copies that moved nothing, and have run memory operations that should
//!   have been recorded. A small slice is recorded, replayed twice with different bytes, and compared.
//! - Signals: some drivers do not write to a peer's address from a stream.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::batches::{PendingCopies, WordBatch};
use super::resources::{DevicePage, Event, OwnStream, PinnedPage};
use super::{SignalBy, StreamDevice};
use crate::Fault;
use crate::device::{Batching, CopyKind, DevicePtr, ExecHandle, GraphHandle, StreamHandle};
use peerlane_hal::{Error as _, ErrorKind};

const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const COPY_BATCH_TIMEOUT: Duration = Duration::from_secs(10);
const WORD_BYTES: usize = size_of::<u64>();

/// A property of a device that is probed once per process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Probe {
    /// Whether the replay of a captured graph does what was captured.
    Captures,
    WordWaits,
    /// Whether a driver call with several word operations runs them in order.
    Batches,
    /// Whether a copy inside the device really writes its destination.
    LocalCopies,
}

/// A cache of probe results by device, which a backend keeps for the whole process.
#[derive(Debug)]
pub struct ProbeCache<E>(Mutex<Option<Known<E>>>);

type Known<E> = HashMap<(Probe, i32), Result<(), E>>;

impl<E> ProbeCache<E> {
    /// Creates an empty cache of probe results.
    pub const fn new() -> Self {
        Self(Mutex::new(None))
    }
}

impl<E> Default for ProbeCache<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E: Clone> ProbeCache<E> {
    pub(super) fn cached_or_probe(
        &self,
        property: Probe,
        device: i32,
        probe: impl FnOnce() -> Result<(), E>,
    ) -> Result<(), E> {
        let mut cache = self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        cache.get_or_insert_default().entry((property, device)).or_insert_with(probe).clone()
    }
}

const BATCH_TIMEOUT: Duration = Duration::from_secs(2);
/// The time after which a word write that has overtaken a blocked wait of the same driver call is visible.
const MISORDER_TIME: Duration = Duration::from_millis(2);

// Words of the device page for the probe of batches.
const BATCH_STARTED: usize = 0;
const BATCH_GATE: usize = 1;
const BATCH_WRITTEN: usize = 2;
const BATCH_WORDS: usize = 3;

/// Tests whether one driver call may take several word operations, if the driver does not guarantee it. The context is
/// current and this thread's captures are relaxed.
///
/// # Errors
/// Returns an error of kind `Unavailable` if streams do not wait for words.
pub(super) fn check_batches<D: StreamDevice>(context: &D) -> Result<bool, D::Error> {
    let batching = context.batching();
    if batching == Batching::Trusted {
        return Ok(true);
    }
    check_waits(context)?;
    let (cache, device) = (D::probe_cache(), context.device());
    Ok(batching == Batching::Probe
        && cache.cached_or_probe(Probe::Batches, device, || probe_batches(context)).is_ok())
}

/// Rejects a device whose streams cannot wait for words. An engine of another kind may work on it.
///
/// # Errors
/// Returns an error of kind `Unavailable` that says what to do where that is known.
pub fn probe_waits<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let _relaxed = context.enter_relaxed()?;
    context.check_words()?;
    if context.batching() == Batching::Trusted { Ok(()) } else { check_waits(context) }
}

fn check_waits<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    D::probe_cache().cached_or_probe(Probe::WordWaits, context.device(), || wait_once(context))
}

/// Enqueues a wait that is already satisfied, to test that streams can wait at all.
fn wait_once<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let (stream, device) = (OwnStream::create(context)?, DevicePage::take(context)?);
    let mut batch = WordBatch::new(false);
    batch.write(device.address(BATCH_GATE), 1);
    batch.wait(device.address(BATCH_GATE), 1);
    let waited = batch
        .issue(context, stream.raw())
        .and_then(|()| stream.finish(context, BATCH_TIMEOUT, "a wait that is already satisfied"));
    if waited.is_ok() {
        device.leave(context);
    }
    waited.map_err(|error| match error.kind() {
        ErrorKind::DeviceLost => error,
        _ => Fault::Unavailable(format!(
            "signals and waits cannot be used on {}: a test wait on a stream for a word of device \
             memory failed: {error}",
            context.label()
        ))
        .into(),
    })
}

struct BatchProbe<D: StreamDevice> {
    held: OwnStream<D>,
    free: OwnStream<D>,
    device: DevicePage,
    page: PinnedPage,
}

fn probe_batches<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    let probe = BatchProbe {
        held: OwnStream::create(context)?,
        free: OwnStream::urgent(context)?,
        device: DevicePage::take(context)?,
        page: PinnedPage::take(context)?,
    };
    probe.device.clear(context, &probe.held)?;
    probe.held.finish(context, BATCH_TIMEOUT, "clearing a page")?;
    let held = probe.run_held(context);
    let released = probe.open_gate(context);
    let drained = released.and_then(|()| {
        probe.held.finish(context, BATCH_TIMEOUT, "the test of batched memory operations")
    });
    if let Err(error) = drained {
        // A blocked stream cannot be destroyed, and it uses the words.
        std::mem::forget(probe);
        return Err(error);
    }
    let seen = probe.read_words(context).map(|seen| seen[BATCH_WRITTEN]);
    let BatchProbe { device, page, .. } = probe;
    device.leave(context);
    page.leave(context);
    match (held?, seen?) {
        (0, 1) => Ok(()),
        (before, after) => Err(Fault::Unavailable(format!(
            "batched memory operations on {} do not run in order: a word that is written to 1 \
             after a wait was {before} during the wait, expected 0, and {after} after the wait, \
             expected 1; update the driver",
            context.label()
        ))
        .into()),
    }
}

impl<D: StreamDevice> BatchProbe<D> {
    fn run_held(&self, context: &D) -> Result<u64, D::Error> {
        let mut batch = WordBatch::new(true);
        batch.write(self.device.address(BATCH_STARTED), 1);
        batch.wait(self.device.address(BATCH_GATE), 1);
        batch.write(self.device.address(BATCH_WRITTEN), 1);
        batch.issue(context, self.held.raw())?;
        let start = Instant::now();
        while self.read_words(context)?[BATCH_STARTED] == 0 {
            if start.elapsed() >= BATCH_TIMEOUT {
                let what =
                    format!("a stream of {} did not start a memory operation", context.label());
                return Err(Fault::Timeout { what, timeout: BATCH_TIMEOUT }.into());
            }
        }
        std::thread::sleep(MISORDER_TIME);
        Ok(self.read_words(context)?[BATCH_WRITTEN])
    }

    fn open_gate(&self, context: &D) -> Result<(), D::Error> {
        let mut batch = WordBatch::new(false);
        batch.write(self.device.address(BATCH_GATE), 1);
        batch.issue(context, self.free.raw())
    }

    fn read_words(&self, context: &D) -> Result<[u64; BATCH_WORDS], D::Error> {
        let bytes = BATCH_WORDS * size_of::<u64>();
        let (to, from) = (self.page.address(0), self.device.address(0));
        // SAFETY: words of two pages, which are never freed.
        unsafe { context.copy(self.free.raw(), to, from, bytes, CopyKind::Host) }?;
        self.free.finish(context, BATCH_TIMEOUT, "reading words")?;
        Ok(std::array::from_fn(|word| self.page.load(word)))
    }
}

const LOCAL_WORDS: usize = 509;
const LOCAL_TARGET: usize = 1024;

/// Tests copies inside the device if the driver may report success without copying. The context is current and this
/// thread's captures are relaxed.
///
/// # Errors
/// Returns an error of kind `Unavailable` if no method copies.
pub(super) fn check_local_copies<D: StreamDevice>(context: &D) -> Result<(), D::Error> {
    if !context.needs_probe(CopyKind::Local) {
        return Ok(());
    }
    D::probe_cache().cached_or_probe(Probe::LocalCopies, context.device(), || {
        // A method that is refused does not work either.
        let works = self_copy_works(context).unwrap_or(false);
        context.record_probe(CopyKind::Local, works);
        if works || self_copy_works(context)? {
            return Ok(());
        }
        Err(Fault::Unavailable(format!(
            "a test copy inside {} wrote wrong bytes to its destination; update the driver, or \
             check its log for errors",
            context.label()
        ))
        .into())
    })
}

fn self_copy_works<D: StreamDevice>(context: &D) -> Result<bool, D::Error> {
    let (device, page) = (DevicePage::take(context)?, PinnedPage::take(context)?);
    let stream = OwnStream::create(context)?;
    let sent = |word: usize| 0x5eed_c0de_0000_0001_u64.wrapping_mul(2 * word as u64 + 1);
    device.clear(context, &stream)?;
    for word in 0..LOCAL_WORDS {
        page.store(word, sent(word));
    }
    let copy = |to, from, bytes, copy_kind| {
        // SAFETY: words of the two pages, which are never freed.
        unsafe { context.copy(stream.raw(), to, from, bytes, copy_kind) }
    };
    let bytes = LOCAL_WORDS * WORD_BYTES;
    copy(device.address(0), page.address(0), bytes, CopyKind::Host)?;
    copy(device.address(LOCAL_TARGET), device.address(0), bytes, CopyKind::Local)?;
    let all = bytes + WORD_BYTES;
    copy(page.address(LOCAL_TARGET), device.address(LOCAL_TARGET), all, CopyKind::Host)?;
    stream.finish(context, PROBE_TIMEOUT, "the test of copies inside the device")?;
    let works = (0..LOCAL_WORDS).all(|word| page.load(LOCAL_TARGET + word) == sent(word))
        && page.load(LOCAL_TARGET + LOCAL_WORDS) == 0;
    device.leave(context);
    page.leave(context);
    Ok(works)
}

/// Tests copies to a peer if the driver may report success without copying. The word `target` of the peer is not used
/// meanwhile, and keeps the value that was sent.
///
/// # Errors
/// Returns an error of kind `Unavailable` if no method copies.
pub(super) fn check_peer_copies<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &PinnedPage,
    target: DevicePtr,
) -> Result<(), D::Error> {
    const SENT: [u64; 2] = [0x5EED_C0B1_E500_0001, 0x5EED_C0B1_E500_0002];
    if !context.needs_probe(CopyKind::Peer) {
        return Ok(());
    }
    let device = DevicePage::take(context)?;
    let arrives = |sent: u64| -> Result<bool, D::Error> {
        let copy = |to, from, copy_kind| {
            // SAFETY: words of the two pages, which are never freed, and the caller's word.
            unsafe { context.copy(stream.raw(), to, from, WORD_BYTES, copy_kind) }
        };
        page.store(0, sent);
        copy(device.address(0), page.address(0), CopyKind::Host)?;
        copy(target, device.address(0), CopyKind::Peer)?;
        copy(page.address(1), target, CopyKind::Host)?;
        stream.finish(context, PROBE_TIMEOUT, "the test of copies to a peer")?;
        Ok(page.load(1) == sent)
    };
    let works = arrives(SENT[0]).unwrap_or(false);
    context.record_probe(CopyKind::Peer, works);
    let works = works || arrives(SENT[1])?;
    device.leave(context);
    if works {
        return Ok(());
    }
    Err(Fault::Unavailable(format!(
        "a test copy from {} to the memory of a peer did not change that memory; check the peer \
         access between the devices",
        context.label()
    ))
    .into())
}

pub(super) fn probe_copy_batch<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &PinnedPage,
) -> bool {
    if !context.may_copy_together() {
        return false;
    }
    const SENT: [u64; 2] = [0x5eed_0001, 0x5eed_0002];
    let word = size_of::<u64>();
    let mut copies = PendingCopies::default();
    for (index, sent) in SENT.into_iter().enumerate() {
        page.store(index, sent);
        copies.push(page.address(2 + index), page.address(index), word, CopyKind::Host);
    }
    // SAFETY: words of the page, which is never freed.
    let issued = unsafe { copies.issue(context, stream.raw()) };
    let done =
        issued.and_then(|_| stream.finish(context, COPY_BATCH_TIMEOUT, "the test of copy batches"));
    let came = done.is_ok() && (0..2).all(|index| page.load(2 + index) == SENT[index]);
    (0..4).for_each(|word| page.store(word, 0));
    came
}

const GRAPH_BYTES: usize = 64;
const GRAPH_WORDS: usize = GRAPH_BYTES / size_of::<u64>();

// Words of the device page for the probe of captures.
const GRAPH_SOURCE: usize = 0;
const GRAPH_TARGET: usize = GRAPH_WORDS;
const GRAPH_FLAG: usize = 2 * GRAPH_WORDS;
/// The index of the word that a replayed graph writes last, which shows that word operations run at all.
///
/// The probe's flag cannot show it, since the flag ends with its initial value.
const GRAPH_MARK: usize = GRAPH_FLAG + 1;
const GRAPH_READ_WORDS: usize = GRAPH_WORDS + 2;

/// Tests that graphs can be captured and replayed on this device. The context is current and this thread's captures are
/// relaxed. With `together`, memory operations share calls.
///
/// # Errors
/// Returns an error of kind `Unavailable` if a replay does not do what was recorded.
pub(super) fn check_captures<D: StreamDevice>(context: &D, together: bool) -> Result<(), D::Error> {
    D::probe_cache()
        .cached_or_probe(Probe::Captures, context.device(), || probe_captures(context, together))
}

fn probe_captures<D: StreamDevice>(context: &D, together: bool) -> Result<(), D::Error> {
    let (device, page) = (DevicePage::take(context)?, PinnedPage::take(context)?);
    let (stream, aside) = (OwnStream::create(context)?, OwnStream::create(context)?);
    let graph = record(context, (&stream, &aside), &device, together)?;
    let once = |seed| replay(context, &stream, &graph, (&device, &page), seed);
    let replayed = once(0xA11_6A7).and_then(|first| Ok((first, once(0xB0B_CA7)?)));
    let (first, second) = match replayed {
        Ok(seen) => seen,
        Err(error) => {
            // The graph may still run, and to destroy it may wait for that.
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
            "captured graphs cannot be used on {}: a test replay gave a wrong result: {wrong}; do \
             not capture starts, or use another driver",
            context.label()
        ))
        .into()),
    }
}

/// Captures the graph that a test replays, with a copy on a second stream, a signal, the wait for the signal
/// with its reset, and a write that marks the end.
fn record<'a, D: StreamDevice>(
    context: &'a D,
    (stream, aside): (&OwnStream<D>, &OwnStream<D>),
    device: &DevicePage,
    together: bool,
) -> Result<Executable<'a, D>, D::Error> {
    let (fork, join) = (Event::create(context)?, Event::create(context)?);
    // SAFETY: the stream lives.
    unsafe { context.begin_capture(stream.raw()) }?;
    let recorded = (|| {
        fork.order(context, stream.raw(), aside.raw())?;
        let (to, from) = (device.address(GRAPH_TARGET), device.address(GRAPH_SOURCE));
        copy(context, to, from, GRAPH_BYTES, aside.raw(), CopyKind::Local)?;
        join.order(context, aside.raw(), stream.raw())?;
        let mut batch = WordBatch::new(together);
        batch.write_captured(device.address(GRAPH_FLAG), 1);
        batch.wait_captured(device.address(GRAPH_FLAG), 1);
        batch.write_captured(device.address(GRAPH_FLAG), 0);
        batch.write(device.address(GRAPH_MARK), 1);
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

fn replay<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    graph: &Executable<'_, D>,
    (device, page): (&DevicePage, &PinnedPage),
    seed: u64,
) -> Result<Option<String>, D::Error> {
    let sent = |word: usize| seed.wrapping_mul(2 * word as u64 + 1);
    for word in 0..GRAPH_WORDS {
        page.store(word, sent(word));
    }
    for word in GRAPH_WORDS..GRAPH_MARK + 1 {
        page.store(word, 0);
    }
    let all = (GRAPH_MARK + 1) * size_of::<u64>();
    copy(
        context,
        device.address(GRAPH_SOURCE),
        page.address(0),
        all,
        stream.raw(),
        CopyKind::Host,
    )?;
    // SAFETY: the graph was instantiated, and its memory is valid until the stream is finished.
    unsafe { context.launch(graph.raw, stream.raw()) }?;
    let seen = GRAPH_MARK + 1;
    let bytes = GRAPH_READ_WORDS * size_of::<u64>();
    copy(
        context,
        page.address(seen),
        device.address(GRAPH_TARGET),
        bytes,
        stream.raw(),
        CopyKind::Host,
    )?;
    stream.finish(context, PROBE_TIMEOUT, "the test of captured graphs")?;
    let wrong = (0..GRAPH_WORDS).find(|word| page.load(seen + word) != sent(*word));
    let (flag, mark) = (page.load(seen + GRAPH_WORDS), page.load(seen + GRAPH_WORDS + 1));
    Ok(match (wrong, flag, mark) {
        (Some(word), ..) => Some(format!(
            "word {word} of the copied bytes is {:#x}, expected {:#x}",
            page.load(seen + word),
            sent(word)
        )),
        (None, 0, 1) => None,
        (None, 0, mark) => {
            Some(format!("a word is {mark}, expected 1, the value that the graph writes"))
        }
        (None, flag, _) => Some(format!("a flag is {flag} after its reset, expected 0")),
    })
}

fn copy<D: StreamDevice>(
    context: &D,
    to: DevicePtr,
    from: DevicePtr,
    bytes: usize,
    stream: StreamHandle,
    copy_kind: CopyKind,
) -> Result<(), D::Error> {
    // SAFETY: words of the two pages, which are never freed.
    unsafe { context.copy(stream, to, from, bytes, copy_kind) }
}

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

/// The value that probes write to flags, whose halves differ so that a write of only 32 bits is detected.
const PROBE_VALUE: u64 = 0x5EED_F1A6_0DDB_A115;

/// Tests whether a stream write or a copy reaches the word `target` of a peer, by reading the word back. The word is 0
/// before and after, and is not used meanwhile.
///
/// # Errors
/// Returns an error of kind `Unavailable` if no method works, and the driver's error.
pub fn probe_signal<D: StreamDevice>(context: &D, target: DevicePtr) -> Result<SignalBy, D::Error> {
    let _relaxed = context.enter_relaxed()?;
    let stream = OwnStream::create(context)?;
    let page = PinnedPage::take(context)?;
    let mut by = SignalBy::StreamWrite;
    if !stream_write_arrives(context, &stream, &page, target)? {
        by = SignalBy::Copy;
        let copied = send_word(context, &stream, &page, target, PROBE_VALUE, by)
            .and_then(|()| read_word(context, &stream, &page, target))?;
        if copied != PROBE_VALUE {
            return Err(Fault::Unavailable(format!(
                "a test signal from {} to a peer did not arrive: wrote {PROBE_VALUE:#x}, read back \
                 {copied:#x}; check the peer access between the devices",
                context.label()
            ))
            .into());
        }
    }
    check_peer_copies(context, &stream, &page, target)?;
    send_word(context, &stream, &page, target, 0, by)?;
    stream.finish(context, PROBE_TIMEOUT, "the test of signals")?;
    page.leave(context);
    Ok(by)
}

/// Returns whether a stream write reaches a peer's word. It does not if the driver refuses it or loses it.
fn stream_write_arrives<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &PinnedPage,
    target: DevicePtr,
) -> Result<bool, D::Error> {
    match send_word(context, stream, page, target, PROBE_VALUE, SignalBy::StreamWrite) {
        Ok(()) => Ok(read_word(context, stream, page, target)? == PROBE_VALUE),
        Err(error) if D::is_write_refused(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

fn send_word<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &PinnedPage,
    target: DevicePtr,
    value: u64,
    by: SignalBy,
) -> Result<(), D::Error> {
    let mut batch = WordBatch::new(false);
    match by {
        SignalBy::StreamWrite => {
            batch.write(target, value);
            batch.issue(context, stream.raw())
        }
        SignalBy::Copy => {
            page.store(1, value);
            let from = page.address(1);
            // SAFETY: a word of the page, and the caller's word.
            unsafe { context.copy(stream.raw(), target, from, WORD_BYTES, CopyKind::Host) }?;
            // The caller may write the word of the page again.
            stream.finish(context, PROBE_TIMEOUT, "the test of signals")
        }
    }
}

fn read_word<D: StreamDevice>(
    context: &D,
    stream: &OwnStream<D>,
    page: &PinnedPage,
    target: DevicePtr,
) -> Result<u64, D::Error> {
    // SAFETY: the caller's word, and a word of the page.
    unsafe { context.copy(stream.raw(), page.address(0), target, WORD_BYTES, CopyKind::Host) }?;
    stream.finish(context, PROBE_TIMEOUT, "the test of signals")?;
    Ok(page.load(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_is_made_once_for_each_device() {
        static FOUND: ProbeCache<&str> = ProbeCache::new();
        assert_eq!(FOUND.cached_or_probe(Probe::Captures, 1, || Err("no")), Err("no"));
        assert_eq!(FOUND.cached_or_probe(Probe::Captures, 2, || Ok(())), Ok(()));
        assert_eq!(FOUND.cached_or_probe(Probe::Batches, 1, || Ok(())), Ok(()));
        assert_eq!(FOUND.cached_or_probe(Probe::Captures, 1, || panic!("it is known")), Err("no"));
    }
}
