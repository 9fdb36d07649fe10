//! Outputs and flags that are used in turn.
//!
//! With two outputs a start needs no `ready`: it writes to the buffer that the start before the last
//! one filled, and whoever has entered the last start is done with that. Start `e` uses the buffer
//! and the set of flags number `e mod outputs`.

/// Offset of one output from the next is a multiple of it, so that all are aligned alike.
const OUTPUT_ALIGN_BYTES: u64 = 4096;

/// Where the buffers of a start lie in regions that hold those of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Turns {
    outputs: u64,
    output_stride_bytes: u64,
    flag_stride_words: u64,
}

impl Turns {
    /// `None` if the regions would be larger than any memory.
    pub(crate) fn new(outputs: u32, output_bytes: u64, flag_words: u64) -> Option<Self> {
        let outputs = u64::from(outputs.max(1));
        let stride = match outputs {
            1 => output_bytes,
            _ => output_bytes.checked_next_multiple_of(OUTPUT_ALIGN_BYTES)?,
        };
        stride.checked_mul(outputs)?;
        flag_words.checked_mul(outputs)?.checked_mul(size_of::<u64>() as u64)?;
        Some(Self { outputs, output_stride_bytes: stride, flag_stride_words: flag_words })
    }

    /// The bytes of all outputs.
    pub(crate) fn output_bytes(&self) -> u64 {
        self.outputs * self.output_stride_bytes
    }

    /// The bytes of all flags.
    pub(crate) fn flag_bytes(&self) -> u64 {
        self.outputs * self.flag_stride_words * size_of::<u64>() as u64
    }

    /// Where the output of start `epoch` begins.
    pub(crate) fn output_offset(&self, epoch: u64) -> u64 {
        epoch % self.outputs * self.output_stride_bytes
    }

    /// The word of a flag in start `epoch`.
    pub(crate) fn flag_word(&self, word: u64, epoch: u64) -> u64 {
        epoch % self.outputs * self.flag_stride_words + word
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_output_is_always_the_same() {
        let turns = Turns::new(1, 1001, 24).unwrap();
        assert_eq!((turns.output_bytes(), turns.flag_bytes()), (1001, 192));
        for epoch in 0..4 {
            assert_eq!((turns.output_offset(epoch), turns.flag_word(5, epoch)), (0, 5));
        }
    }

    #[test]
    fn two_outputs_take_turns_and_do_not_overlap() {
        let turns = Turns::new(2, 5000, 24).unwrap();
        assert_eq!((turns.output_bytes(), turns.flag_bytes()), (16384, 384));
        let of = |epoch| (turns.output_offset(epoch), turns.flag_word(5, epoch));
        assert_eq!([of(1), of(2), of(3)], [(8192, 29), (0, 5), (8192, 29)]);
    }

    #[test]
    fn sizes_that_overflow_are_none() {
        assert_eq!(Turns::new(2, u64::MAX, 8), None);
        assert_eq!(Turns::new(2, u64::MAX / 2, 8), None);
        assert_eq!(Turns::new(2, 8, u64::MAX / 8), None);
    }
}
