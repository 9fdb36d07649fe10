//! Submits work to a stream around starts: fills the input and checks the output, also in graphs,
//! which do not know the number of the round.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_collectives::group::MemoryRange;
use peerlane_tests::middleware::Stream;

use crate::scenario::block;

/// The rounds of one rank.
pub(crate) struct Rounds {
    rank: usize,
    ranks: usize,
    bytes: usize,
    now: Arc<AtomicU64>,
    right: Arc<AtomicU64>,
}

/// Where bytes of a region begin.
#[derive(Clone, Copy)]
struct Base(*mut u8);

// SAFETY: the stream and the starts on it take turns at the bytes, and the operation outlives both.
unsafe impl Send for Base {}
// SAFETY: as above.
unsafe impl Sync for Base {}

impl Base {
    fn of(place: MemoryRange) -> Self {
        Self(place.base.as_ptr())
    }

    /// # Safety
    /// So many bytes of a region lie there, and nobody else touches them now.
    unsafe fn bytes<'b>(self, count: usize) -> &'b mut [u8] {
        // SAFETY: the caller's.
        unsafe { std::slice::from_raw_parts_mut(self.0, count) }
    }
}

impl Rounds {
    pub(crate) fn new(rank: usize, ranks: usize, bytes: usize) -> Self {
        Self { rank, ranks, bytes, now: Arc::default(), right: Arc::default() }
    }

    /// The stream begins the next round and fills the own block.
    pub(crate) fn fill(&self, stream: &Stream, input: MemoryRange) {
        let (now, input) = (Arc::clone(&self.now), Base::of(input));
        let (rank, bytes) = (self.rank, self.bytes);
        stream.run(move || {
            let input = input;
            let round = now.fetch_add(1, Ordering::SeqCst) + 1;
            // SAFETY: the block has as many bytes; the start before is over on this stream.
            unsafe { input.bytes(bytes) }.copy_from_slice(&block(rank, round, bytes));
        });
    }

    /// The stream compares the output with what this round gathers, and then spoils it.
    pub(crate) fn look(&self, stream: &Stream, output: MemoryRange) {
        let (now, right) = (Arc::clone(&self.now), Arc::clone(&self.right));
        let (output, ranks, bytes) = (Base::of(output), self.ranks, self.bytes);
        stream.run(move || {
            let output = output;
            let round = now.load(Ordering::SeqCst);
            // SAFETY: the output has all blocks; the start is over on this stream.
            let seen = unsafe { output.bytes(ranks * bytes) };
            let mut blocks = seen.chunks(bytes).enumerate();
            let is_right = blocks.all(|(rank, seen)| seen == block(rank, round, bytes));
            right.fetch_add(u64::from(is_right), Ordering::SeqCst);
            seen.fill(0xEE);
        });
    }

    /// How many rounds were right.
    pub(crate) fn right(&self) -> u64 {
        self.right.load(Ordering::SeqCst)
    }
}
