//! Outputs and flags that are used in turn, and the flags of captured starts.
//!
//! With two outputs a start needs no `ready`: it writes to the buffer that the start before the last
//! one filled, and whoever has entered the last start is done with that. Start `e` uses the buffer
//! and the set of flags number `e mod outputs`.
//!
//! A graph replays constants, so a captured start has no epoch: it signals 1, waits for 1 and resets
//! to 0. For that it has a set of flags of its own, behind the others.

use crate::window::{BufferId, Spot};

/// Offset of one output from the next is a multiple of it, so that all are aligned alike.
const OUTPUT_ALIGN_BYTES: u64 = 4096;
/// What a captured start signals.
const CAPTURED_VALUE: u64 = 1;

/// One start, as far as flags and outputs know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Runs now; the number, from 1.
    Eager(u64),
    /// Is recorded into a graph, and runs at each replay.
    Captured,
}

impl Start {
    /// What its flags carry.
    pub(crate) fn value(self) -> u64 {
        match self {
            Self::Eager(epoch) => epoch,
            Self::Captured => CAPTURED_VALUE,
        }
    }
}

/// Where the buffers of a start lie in regions that hold those of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turns {
    outputs: u64,
    output_stride_bytes: u64,
    flag_sets: u64,
    flag_stride_words: u64,
}

impl Turns {
    /// `None` if the regions would be larger than any memory.
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

    /// The bytes of all outputs.
    pub(crate) fn output_bytes(&self) -> u64 {
        self.outputs * self.output_stride_bytes
    }

    /// The bytes of all flags.
    pub(crate) fn flag_bytes(&self) -> u64 {
        self.flag_sets * self.flag_stride_words * size_of::<u64>() as u64
    }

    /// Where the output of a start begins. Captured starts have one output only.
    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        match start {
            Start::Eager(epoch) => epoch % self.outputs * self.output_stride_bytes,
            Start::Captured => 0,
        }
    }

    /// Where a byte of a buffer lies in a start. Inputs are the same in all.
    pub(crate) fn offset(&self, spot: Spot, start: Start) -> u64 {
        match spot.buffer {
            BufferId::Output(_) => self.output_offset(start) + spot.offset,
            BufferId::Input(_) | BufferId::Flags | BufferId::Crossing => spot.offset,
        }
    }

    /// The word of a flag in a start.
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
