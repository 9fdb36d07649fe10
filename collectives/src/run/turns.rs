//! Outputs and flags that starts use in turn, and the flags of captured starts.
//!
//! With two outputs, start `e` uses the output and the set of flags number `e mod 2`. It writes to the output of the start
//! before the last one, which every rank that has entered the last start no longer uses, so no `ready` is needed.
//!
//! A graph replays constants, so a captured start has no epoch: it signals 1, waits for 1 and resets to 0. It has a set of
//! flags of its own, after the others.

use crate::window::{BufferId, Spot};

/// Alignment of outputs relative to the first one, in bytes.
const OUTPUT_ALIGN_BYTES: u64 = 4096;
/// The value that a captured start signals.
const CAPTURED_VALUE: u64 = 1;

/// Identifies a start for flags and outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// A start that runs now; its number, from 1.
    Eager(u64),
    /// A start that is recorded into a graph and runs at each replay.
    Captured,
}

impl Start {
    /// Returns the value of its flags.
    pub(crate) fn value(self) -> u64 {
        match self {
            Self::Eager(epoch) => epoch,
            Self::Captured => CAPTURED_VALUE,
        }
    }
}

/// The offsets of outputs and flags in regions that hold several of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turns {
    outputs: u64,
    output_stride_bytes: u64,
    flag_sets: u64,
    flag_stride_words: u64,
}

impl Turns {
    /// Returns `None` if the regions would be larger than any memory.
    pub(crate) fn new(
        outputs: u32,
        output_bytes: u64,
        flag_words: u64,
        capturable: bool,
    ) -> Option<Self> {
        let outputs = u64::from(outputs.max(1));
        let stride = match outputs {
            1 => output_bytes,
            _ => output_bytes.checked_next_multiple_of(OUTPUT_ALIGN_BYTES)?,
        };
        stride.checked_mul(outputs)?;
        let flag_sets = outputs + u64::from(capturable);
        flag_words.checked_mul(flag_sets)?.checked_mul(size_of::<u64>() as u64)?;
        Some(Self {
            outputs,
            output_stride_bytes: stride,
            flag_sets,
            flag_stride_words: flag_words,
        })
    }

    /// Returns the bytes of all outputs.
    pub(crate) fn output_bytes(&self) -> u64 {
        self.outputs * self.output_stride_bytes
    }

    /// Returns the length of a buffer of which one start uses `bytes` bytes.
    pub(crate) fn reach(&self, bytes: u64) -> u64 {
        (self.outputs - 1).saturating_mul(self.output_stride_bytes).saturating_add(bytes)
    }

    /// Returns the bytes of all flags.
    pub(crate) fn flag_bytes(&self) -> u64 {
        self.flag_sets * self.flag_stride_words * size_of::<u64>() as u64
    }

    /// Returns the offset of a start's output. Captured starts have one output.
    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        match start {
            Start::Eager(epoch) => epoch % self.outputs * self.output_stride_bytes,
            Start::Captured => 0,
        }
    }

    /// Returns the offset of a byte of a buffer in a start. Inputs are the same in all starts.
    pub(crate) fn offset(&self, spot: Spot, start: Start) -> u64 {
        match spot.buffer {
            BufferId::Output(_) => self.output_offset(start) + spot.offset,
            BufferId::Input(_) | BufferId::Flags | BufferId::Crossing => spot.offset,
        }
    }

    /// Returns the word of a flag in a start.
    pub(crate) fn flag_word(&self, word: u64, start: Start) -> u64 {
        let set = match start {
            Start::Eager(epoch) => epoch % self.outputs,
            Start::Captured => self.outputs,
        };
        set * self.flag_stride_words + word
    }
}

#[cfg(test)]
mod tests {
    use super::Start::{Captured, Eager};
    use super::*;

    #[test]
    fn one_output_is_always_the_same() {
        let turns = Turns::new(1, 1001, 24, false).unwrap();
        assert_eq!((turns.output_bytes(), turns.flag_bytes()), (1001, 192));
        for epoch in 0..4 {
            let start = Eager(epoch);
            assert_eq!((turns.output_offset(start), turns.flag_word(5, start)), (0, 5));
        }
    }

    #[test]
    fn two_outputs_take_turns_and_do_not_overlap() {
        let turns = Turns::new(2, 5000, 24, false).unwrap();
        assert_eq!((turns.output_bytes(), turns.flag_bytes()), (16384, 384));
        assert_eq!((turns.reach(5000), turns.reach(u64::MAX)), (13192, u64::MAX));
        let of = |epoch| (turns.output_offset(Eager(epoch)), turns.flag_word(5, Eager(epoch)));
        assert_eq!([of(1), of(2), of(3)], [(8192, 29), (0, 5), (8192, 29)]);
    }

    #[test]
    fn captured_starts_have_flags_of_their_own_and_the_same_output() {
        let turns = Turns::new(1, 1001, 24, true).unwrap();
        assert_eq!((turns.output_bytes(), turns.flag_bytes()), (1001, 384));
        assert_eq!((turns.output_offset(Captured), turns.flag_word(5, Captured)), (0, 29));
        assert_eq!((turns.flag_word(5, Eager(7)), Captured.value()), (5, 1));
    }

    #[test]
    fn sizes_that_overflow_are_none() {
        assert_eq!(Turns::new(2, u64::MAX, 8, false), None);
        assert_eq!(Turns::new(2, u64::MAX / 2, 8, false), None);
        assert_eq!(Turns::new(2, 8, u64::MAX / 8, false), None);
        assert_eq!(Turns::new(1, 8, u64::MAX / 8, true), None);
    }
}
