//! Runs ranks as threads with a stream each, and creates work for streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::{Group, GroupOptions, MemoryRange};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;
use peerlane_tests::middleware::{Stream, StreamLayer, Wrapped};

/// Far above what any test here waits for.
pub(crate) const LONG: Duration = Duration::from_secs(20);
/// What is waited for on purpose.
pub(crate) const SHORT: Duration = Duration::from_millis(1500);
/// Nobody is held up longer than this beyond a timeout, or after the loss of a rank.
pub(crate) const GRACE: Duration = Duration::from_millis(500);
pub(crate) const BLOCK_BYTES: usize = 100;

/// Waits until everything on the stream is done, which must take less than `limit` apart from waits
/// for a processor.
#[track_caller]
pub(crate) fn assert_idle_within(stream: &Stream, limit: Duration) {
    let watch = Stopwatch::start();
    assert!(stream.is_idle_within(LONG), "the stream is blocked");
    watch.assert_within(limit);
}

/// Waits until the group has ended.
///
/// It sleeps between looks: a thread that only yields waits for a processor, and stopwatches of
/// other ranks subtract that.
#[track_caller]
pub(crate) fn await_end(group: &Group) {
    let begin = Instant::now();
    while group.abort_record().is_none() {
        assert!(begin.elapsed() < LONG, "the group has not ended");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs `body` as each rank of an open group.
pub(crate) fn in_group<R: Send>(
    ranks: usize,
    timeout: Duration,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    in_group_with(StreamLayer::default(), ranks, timeout, body)
}

pub(crate) fn in_group_with<R: Send>(
    layer: StreamLayer,
    ranks: usize,
    timeout: Duration,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let handles = in_process::group(ranks).expect("a group of threads");
    std::thread::scope(|scope| {
        let body = &body;
        let rank = |bootstrap: in_process::InProcessBootstrap| {
            let fabric = host::Fabric::open(bootstrap.rank(), ranks).expect("a fabric");
            let options = GroupOptions::default().timeout(timeout);
            let group = options.open(bootstrap, Wrapped::new(fabric, layer));
            body(group.expect("the group opens"))
        };
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(move || rank(handle))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

/// A stream of no backend here.
#[derive(Clone)]
pub(crate) struct Foreign;

impl peerlane_hal::Stream for Foreign {}

/// Bytes that work on a stream touches.
#[derive(Clone, Copy)]
struct Span {
    base: *mut u8,
    bytes: usize,
}

// SAFETY: the tests order whoever touches the bytes, and keep the operation until all is done.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    fn of(place: MemoryRange) -> Self {
        Self { base: place.base.as_ptr(), bytes: usize::try_from(place.bytes).unwrap() }
    }

    fn fill(self, byte: u8) {
        // SAFETY: a place lies inside its region, and nobody else touches it now.
        unsafe { self.base.write_bytes(byte, self.bytes) };
    }

    fn holds(self, wanted: &[u8]) -> bool {
        // SAFETY: as for `fill`.
        let seen = unsafe { std::slice::from_raw_parts(self.base, self.bytes) };
        seen == wanted
    }
}

/// What `rank` contributes in round `round`.
pub(crate) fn byte(rank: usize, round: u64) -> u8 {
    (round * 31 + rank as u64 * 7 + 1) as u8
}

/// What a round gathers.
pub(crate) fn gathered(ranks: usize, round: u64) -> Vec<u8> {
    (0..ranks).flat_map(|rank| [byte(rank, round); BLOCK_BYTES]).collect()
}

/// Rounds of one rank, filled and looked at on its stream; also by graphs, which know no number.
#[derive(Clone, Default)]
pub(crate) struct Rounds {
    now: Arc<AtomicU64>,
    right: Arc<AtomicU64>,
}

impl Rounds {
    /// The stream begins the next round and fills the own block.
    pub(crate) fn fill(&self, stream: &Stream, rank: usize, input: MemoryRange) {
        let (now, input) = (Arc::clone(&self.now), Span::of(input));
        stream.run(move || {
            let span = input;
            span.fill(byte(rank, now.fetch_add(1, Ordering::SeqCst) + 1));
        });
    }

    /// The stream fills memory with a byte.
    pub(crate) fn put(stream: &Stream, byte: u8, to: MemoryRange) {
        let to = Span::of(to);
        stream.run(move || {
            let span = to;
            span.fill(byte);
        });
    }

    /// The stream compares the output with what this round gathers, and then spoils it.
    pub(crate) fn look(&self, stream: &Stream, ranks: usize, output: MemoryRange) {
        let (now, right) = (Arc::clone(&self.now), Arc::clone(&self.right));
        let output = Span::of(output);
        stream.run(move || {
            let span = output;
            let is_right = span.holds(&gathered(ranks, now.load(Ordering::SeqCst)));
            right.fetch_add(u64::from(is_right), Ordering::SeqCst);
            span.fill(0xEE);
        });
    }

    /// The stream compares an output with `expected`, and then spoils it.
    pub(crate) fn look_for(&self, stream: &Stream, expected: Vec<u8>, output: MemoryRange) {
        let right = Arc::clone(&self.right);
        let output = Span::of(output);
        stream.run(move || {
            let span = output;
            right.fetch_add(u64::from(span.holds(&expected)), Ordering::SeqCst);
            span.fill(0xEE);
        });
    }

    /// How many rounds were right.
    pub(crate) fn right(&self) -> u64 {
        self.right.load(Ordering::SeqCst)
    }
}

/// Holds a stream, or ranks, until it is opened.
#[derive(Clone, Default)]
pub(crate) struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub(crate) fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub(crate) fn wait(&self) {
        let (open, changed) = &*self.0;
        let waited = changed.wait_timeout_while(open.lock().unwrap(), LONG, |open| !*open);
        assert!(!waited.unwrap().1.timed_out(), "nobody opened the gate");
    }

    /// The stream waits for it.
    pub(crate) fn hold(&self, stream: &Stream) {
        let gate = self.clone();
        stream.run(move || gate.wait());
    }
}

/// A pause of the stream.
pub(crate) fn pause(stream: &Stream, length: Duration) {
    stream.run(move || std::thread::sleep(length));
}
