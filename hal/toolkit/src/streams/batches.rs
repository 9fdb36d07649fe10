//! Collects stream memory operations and copies, to enqueue them with few driver calls.
//!
//! The memory operations of a batch run in order, and a write takes effect after everything before it in the
//! stream. Where a driver does not keep the order inside one call, each operation is a call. One call costs
//! about as much as one operation, so a batch stays open until something else goes onto the stream.
//!
//! One call for three copies to peers costs the host about as much as one copy, and the device starts them
//! without a gap (docs/perf/cuda-submission.md). Such a call has no order inside, so copies that touch the
//! same bytes do not share one. It cannot be captured.
//!
//! Some drivers do not write to a peer's address from a stream (CUDA 13.1 and newer: NVIDIA/nccl issue
//! 2052). There the stream writes the value of a signal to a word of its own and copies that word, eight
//! aligned bytes, in one piece.

use crate::Fault;
use crate::device::{
    CopyBatch, CopyCalls, CopyKind, DevicePtr, MemoryCalls, StreamHandle, WordCalls,
};

use super::resources::{DevicePage, PAGE_WORDS};

const WORD_BYTES: usize = size_of::<u64>();
/// The value from which 64-bit words are negative in the driver's signed comparison.
const UPPER_HALF: u64 = 1 << 63;
const OPS_A_COMMAND: usize = 8;

/// The flag bit that an abort sets to let all captured waits for the flag pass, also in later graph launches. A release
/// sets it; signals and resets write only the lower half of the word.
pub(super) const ABORTED: u64 = 1 << 32;
const HALF_BYTES: usize = size_of::<u32>();

#[derive(Debug)]
pub(super) struct WordBatch<D: WordCalls> {
    ops: Vec<D::WordOp>,
    shares_calls: bool,
}

impl<D: WordCalls> WordBatch<D> {
    pub(super) fn new(shares_calls: bool) -> Self {
        Self { ops: Vec::with_capacity(D::WORD_OPS_MAX), shares_calls }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    pub(super) fn room(&self) -> usize {
        D::WORD_OPS_MAX - self.ops.len()
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
    }

    pub(super) fn commands(&self) -> usize {
        commands(self.ops.len(), self.shares_calls)
    }

    pub(super) fn write(&mut self, address: DevicePtr, value: u64) {
        self.push(D::word_write(address, value));
    }

    /// Adds a wait until the 64-bit word is at least `value`, which takes one or two operations of the driver.
    pub(super) fn wait(&mut self, address: DevicePtr, value: u64) {
        wait_values(value).for_each(|value| self.push(D::word_wait(address, value)));
    }

    pub(super) fn write_captured(&mut self, address: DevicePtr, value: u64) {
        self.push(D::half_write(address, value as u32));
    }

    /// Adds a wait in a graph, which passes when the word has a bit of `value` or the bit [`ABORTED`].
    pub(super) fn wait_captured(&mut self, address: DevicePtr, value: u64) {
        self.push(D::bits_wait(address, value | ABORTED));
    }

    fn push(&mut self, op: D::WordOp) {
        debug_assert!(self.room() > 0, "a batch is put onto its stream before it overflows");
        self.ops.push(op);
    }

    pub(super) fn issue(&mut self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        let most = if self.shares_calls { D::WORD_OPS_MAX } else { 1 };
        let issued = self.ops.chunks_mut(most).try_for_each(|ops| {
            // SAFETY: the stream is the engine's, or the caller's who keeps it alive (`Stream::new`). The
            // addresses are words of regions or pages that are alive (`submit`).
            unsafe { context.put_words(stream, ops) }
        });
        self.ops.clear();
        issued
    }
}

fn commands(ops: usize, shares_calls: bool) -> usize {
    if shares_calls { 1 + ops / OPS_A_COMMAND } else { ops }
}

/// Returns the values to wait for one after the other, so that the word is at least `value` afterwards.
///
/// Drivers compare cyclically: a wait passes if the word is less than 2^63 ahead of the value. Small words
/// would be ahead of a value in the upper half of the range, so a wait for 2^63 comes first. A word that is
/// 2^63 or more beyond a value in the lower half does not pass; no counter reaches it.
fn wait_values(value: u64) -> impl Iterator<Item = u64> {
    let first = (value > UPPER_HALF).then_some(UPPER_HALF);
    first.into_iter().chain((value > 0).then_some(value))
}

#[derive(Debug, Default)]
pub(super) struct PendingCopies {
    to: Vec<DevicePtr>,
    from: Vec<DevicePtr>,
    bytes: Vec<usize>,
    copy_kind: Option<CopyKind>,
}

impl PendingCopies {
    pub(super) fn with_capacity(copies: usize) -> Self {
        Self {
            to: Vec::with_capacity(copies),
            from: Vec::with_capacity(copies),
            bytes: Vec::with_capacity(copies),
            copy_kind: None,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }

    pub(super) fn push(
        &mut self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        copy_kind: CopyKind,
    ) {
        self.copy_kind = Some(copy_kind);
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Returns whether a new copy and a pending one access the same bytes and at least one of them writes.
    pub(super) fn conflicts(&self, to: DevicePtr, from: DevicePtr, bytes: usize) -> bool {
        let meet = |one: DevicePtr, length: usize, other: DevicePtr| {
            // Spans of mapped regions do not overflow.
            one < other + bytes as u64 && other < one + length as u64
        };
        (0..self.to.len()).any(|index| {
            let length = self.bytes[index];
            let (earlier_to, earlier_from) = (self.to[index], self.from[index]);
            meet(earlier_to, length, to)
                || meet(earlier_to, length, from)
                || meet(earlier_from, length, to)
        })
    }

    /// Enqueues the pending copies on a stream, and returns their number.
    ///
    /// # Safety
    /// The spans stay valid as long as the copies run.
    pub(super) unsafe fn issue<D: CopyCalls>(
        &mut self,
        context: &D,
        stream: StreamHandle,
    ) -> Result<usize, D::Error> {
        let count = self.to.len();
        let issued = match (count, self.copy_kind) {
            (0, _) | (_, None) => Ok(()),
            (1, Some(copy_kind)) => {
                let (to, from, bytes) = (self.to[0], self.from[0], self.bytes[0]);
                // SAFETY: the caller's.
                unsafe { context.copy(stream, to, from, bytes, copy_kind) }
            }
            _ => {
                let copies =
                    CopyBatch { to: &mut self.to, from: &mut self.from, bytes: &mut self.bytes };
                // SAFETY: the caller's; `conflicts` was false for each.
                unsafe { context.copy_together(stream, copies) }
            }
        };
        self.clear();
        issued.map(|()| count)
    }
}

/// The number of device words for signal values is at least the number of writes in a batch, so that no word is
/// written twice in a batch: the copies go onto the stream behind the batch.
const RING_WORDS: usize = 255;
const CONSTANTS_MAX: usize = PAGE_WORDS - RING_WORDS;

#[derive(Debug)]
pub(super) struct SignalWords {
    page: DevicePage,
    next: usize,
    /// The values of captured signals, each in a device word of its own, because a replay copies the value that
    /// the word has then.
    constants: Vec<u64>,
    /// Copies that are not enqueued yet, each as source word, destination flag and length.
    pending_copies: Vec<(DevicePtr, DevicePtr, usize)>,
}

impl SignalWords {
    pub(super) fn new<D: WordCalls + MemoryCalls>(context: &D) -> Result<Self, D::Error> {
        const { assert!(D::WORD_OPS_MAX <= RING_WORDS, "a batch writes no word twice") };
        let page = DevicePage::take(context)?;
        Ok(Self {
            page,
            next: 0,
            constants: Vec::new(),
            pending_copies: Vec::with_capacity(RING_WORDS),
        })
    }

    /// Makes the memory page available to the next engine, unless captured graphs still use the page.
    pub(super) fn leave<D: MemoryCalls>(self, context: &D) {
        if self.constants.is_empty() {
            self.page.leave(context);
        }
    }

    pub(super) fn has_pending(&self) -> bool {
        !self.pending_copies.is_empty()
    }

    pub(super) fn clear_pending(&mut self) {
        self.pending_copies.clear();
    }

    /// Signals a peer by a write to a device word and a copy of that word to the peer's flag.
    ///
    /// Eager words are written and read in the order of one stream, and the next stream is ordered behind it
    /// (`Engine::submit`), so no word is written while its copy is pending. Replayed graphs have no such
    /// order; they get a word for each value, which never changes.
    ///
    /// # Errors
    /// Returns [`Fault::Argument`] if captured slices signal too many different values.
    pub(super) fn signal<D: WordCalls>(
        &mut self,
        batch: &mut WordBatch<D>,
        flag: DevicePtr,
        value: u64,
        captured: bool,
    ) -> Result<(), Fault> {
        let word = if captured { self.constant(value)? } else { self.next_word() };
        let from = self.page.address(word);
        batch.write(from, value);
        self.pending_copies.push((from, flag, if captured { HALF_BYTES } else { WORD_BYTES }));
        Ok(())
    }

    fn next_word(&mut self) -> usize {
        let word = self.next;
        self.next = (word + 1) % RING_WORDS;
        word
    }

    fn constant(&mut self, value: u64) -> Result<usize, Fault> {
        let found = self.constants.iter().position(|constant| *constant == value);
        let index = found.unwrap_or(self.constants.len());
        if index == CONSTANTS_MAX {
            return Err(Fault::Argument(format!(
                "a graph can signal at most {CONSTANTS_MAX} different values per engine; use only a few \
                 flag values, such as 0 and 1"
            )));
        }
        if found.is_none() {
            self.constants.push(value);
        }
        Ok(RING_WORDS + index)
    }

    pub(super) fn copy<D: CopyCalls>(
        &mut self,
        context: &D,
        stream: StreamHandle,
    ) -> Result<usize, D::Error> {
        let pending_copies = self.pending_copies.len();
        let copied = self.pending_copies.iter().try_for_each(|&(from, to, bytes)| {
            // SAFETY: the source is a word of the page, and the destination a flag of a region that is alive
            // (`submit`).
            unsafe { context.copy(stream, to, from, bytes, CopyKind::Flag) }
        });
        self.pending_copies.clear();
        copied.map(|()| pending_copies)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_compares_without_sign() {
        let holds = |value| wait_values(value).collect::<Vec<_>>();
        assert_eq!(holds(0), []);
        assert_eq!(holds(1), [1]);
        assert_eq!(holds(UPPER_HALF - 1), [UPPER_HALF - 1]);
        assert_eq!(holds(UPPER_HALF), [UPPER_HALF]);
        assert_eq!(holds(u64::MAX), [UPPER_HALF, u64::MAX]);
    }

    #[test]
    fn a_long_batch_counts_as_several_commands() {
        assert_eq!((commands(1, true), commands(16, true)), (1, 3));
        assert_eq!((commands(1, false), commands(16, false)), (1, 16));
    }

    #[test]
    fn copies_that_touch_the_same_bytes_are_told() {
        let mut copies = PendingCopies::default();
        copies.push(1000, 2000, 100, CopyKind::Peer);
        copies.push(3000, 2000, 100, CopyKind::Peer);
        assert!(!copies.conflicts(5000, 2050, 100), "two may read the same");
        assert!(!copies.conflicts(1100, 6000, 100), "neighbours");
        assert!(!copies.conflicts(900, 6000, 100), "neighbours");
        for (to, from) in [(1099, 6000), (901, 6000), (5000, 3050), (2099, 6000)] {
            assert!(copies.conflicts(to, from, 100), "to {to} from {from}");
        }
    }
}
