//! Neighbouring signals, waits and resets as one batched memory operation.
//!
//! The operations of a batch run in order, and a write takes effect after everything before it in
//! the stream; where a driver mixes up those of one call, each is a call of its own. Where one call
//! costs about as much as one operation of its own (facts of the measurement pages), it pays that a
//! batch stays open until something else has to go onto the stream.

use crate::device::{DevicePtr, StreamHandle, WordCalls};

/// From here on, a value is below 0 in the driver's comparison.
const UPPER_HALF: u64 = 1 << 63;
/// Memory operations that fit where one command of another kind does, if one call takes them.
const OPS_A_COMMAND: usize = 8;

/// Memory operations that go onto a stream together.
#[derive(Debug)]
pub(super) struct Batch<D: WordCalls> {
    ops: Vec<D::WordOp>,
    /// Whether one call takes them all.
    together: bool,
}

impl<D: WordCalls> Batch<D> {
    pub(super) fn new(together: bool) -> Self {
        Self { ops: Vec::with_capacity(D::WORD_OPS_MAX), together }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// How many more fit.
    pub(super) fn room(&self) -> usize {
        D::WORD_OPS_MAX - self.ops.len()
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
    }

    /// How much of a stream's queue it takes.
    pub(super) fn commands(&self) -> usize {
        commands(self.ops.len(), self.together)
    }

    pub(super) fn write(&mut self, address: DevicePtr, value: u64) {
        self.push(D::word_write(address, value));
    }

    /// Waits until the word is at least `value`; at most two operations.
    pub(super) fn wait(&mut self, address: DevicePtr, value: u64) {
        holds(value).for_each(|value| self.push(D::word_wait(address, value)));
    }

    fn push(&mut self, op: D::WordOp) {
        debug_assert!(self.room() > 0, "a batch is put onto its stream before it overflows");
        self.ops.push(op);
    }

    /// Puts the batch onto a stream and empties it; nothing if it is empty.
    pub(super) fn issue(&mut self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        let most = if self.together { D::WORD_OPS_MAX } else { 1 };
        let issued = self.ops.chunks_mut(most).try_for_each(|ops| {
            // SAFETY: the stream is the engine's or the caller's, who says that it lives; the
            // addresses are words of regions or pages that live (`submit`).
            unsafe { context.put_words(stream, ops) }
        });
        self.ops.clear();
        issued
    }
}

fn commands(ops: usize, together: bool) -> usize {
    if together { 1 + ops / OPS_A_COMMAND } else { ops }
}

/// The waits that hold until a word is at least `value`.
///
/// Drivers compare cyclically: a wait passes if the word is less than 2^63 ahead of the value. Of a
/// value in the upper half, small words would therefore be ahead; they are held first. A word that is
/// 2^63 or more beyond a value in the lower half does not pass: nobody counts so far.
fn holds(value: u64) -> impl Iterator<Item = u64> {
    let first = (value > UPPER_HALF).then_some(UPPER_HALF);
    first.into_iter().chain((value > 0).then_some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_compares_without_sign() {
        let holds = |value| holds(value).collect::<Vec<_>>();
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
}
