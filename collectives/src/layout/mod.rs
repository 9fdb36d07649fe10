//! Where the cells of a plan lie in bytes, and where its flags lie in words.
//!
//! The output is the shards in rank order without a gap. Strides, list outputs and several tensors
//! are left out on purpose: they are other layouts under the same plans.

use peerlane_hal::{ErrorKind, Rank};

use crate::error::Error;
use crate::plan::Cell;

mod flags;

pub(crate) use flags::reader;
pub use flags::{FLAG_WORDS, FlagLayout};

/// Parts begin at multiples of this many bytes from the start of their shard: no two parts share a
/// cache line where the shard itself is aligned to one.
pub const PART_ALIGN_BYTES: u64 = 64;

/// The byte ranges of all cells of one all-gather; shards may have unlike lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    shard_bytes: Vec<u64>,
    shard_offsets: Vec<u64>,
    total_bytes: u64,
    parts: u32,
}

/// Where one cell lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellSpan {
    /// Bytes from the start of the owner's input.
    pub input_offset: u64,
    /// Bytes from the start of every rank's output.
    pub output_offset: u64,
    /// The length in bytes; 0 where the shard has fewer bytes than it takes to fill every part.
    pub bytes: u64,
}

impl Layout {
    /// Shards of `shard_bytes` bytes in rank order, each in `parts` parts.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no shard, `parts` is 0, or the
    /// output is longer than 2^64 - 1 bytes.
    pub fn new(shard_bytes: &[u64], parts: u32) -> Result<Self, Error> {
        let invalid = |text: String| Err(Error::new(ErrorKind::InvalidArgument, text));
        if shard_bytes.is_empty() {
            return invalid("shard_bytes is empty, expected one length for every rank".into());
        }
        if parts == 0 {
            return invalid("parts is 0, expected at least 1".into());
        }
        let mut shard_offsets = Vec::with_capacity(shard_bytes.len());
        let mut total_bytes = 0u64;
        for (rank, &bytes) in Rank::all(shard_bytes.len()).zip(shard_bytes) {
            shard_offsets.push(total_bytes);
            let Some(sum) = total_bytes.checked_add(bytes) else {
                return invalid(format!(
                    "shard_bytes of rank {rank} is {bytes}, behind {total_bytes} bytes of the ranks \
                     before it; expected a sum of at most {}",
                    u64::MAX
                ));
            };
            total_bytes = sum;
        }
        Ok(Self { shard_bytes: shard_bytes.to_vec(), shard_offsets, total_bytes, parts })
    }

    /// How many ranks there are, at least 1.
    pub fn ranks(&self) -> usize {
        self.shard_bytes.len()
    }

    /// How many parts each shard has, at least 1.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// The length of every rank's output.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// The length of the shard of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn shard_bytes(&self, rank: Rank) -> u64 {
        self.shard_bytes[rank.index()]
    }

    /// Where the shard of `rank` begins in every rank's output, in bytes.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn shard_offset(&self, rank: Rank) -> u64 {
        self.shard_offsets[rank.index()]
    }

    /// Where `cell` lies. The cells of a shard tile it, in part order; their lengths differ by at
    /// most [`PART_ALIGN_BYTES`], but for the last, which may be up to that much shorter still.
    ///
    /// # Panics
    /// If there is no such shard or part.
    pub fn cell(&self, cell: Cell) -> CellSpan {
        assert!(cell.part < self.parts, "cell {cell} is not one of {} parts", self.parts);
        let shard_bytes = self.shard_bytes(cell.shard);
        let input_offset = self.part_offset(shard_bytes, cell.part);
        CellSpan {
            input_offset,
            output_offset: self.shard_offset(cell.shard) + input_offset,
            bytes: self.part_offset(shard_bytes, cell.part + 1) - input_offset,
        }
    }

    fn part_offset(&self, shard_bytes: u64, part: u32) -> u64 {
        if part == self.parts {
            return shard_bytes;
        }
        let units = u128::from(shard_bytes.div_ceil(PART_ALIGN_BYTES));
        let before = units * u128::from(part) / u128::from(self.parts);
        u64::try_from(before).expect("fewer units than the shard has") * PART_ALIGN_BYTES
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn check_tiling(layout: &Layout, context: &str) {
        let mut output_end = 0;
        for shard in Rank::all(layout.ranks()) {
            let mut input_end = 0;
            for part in 0..layout.parts() {
                let span = layout.cell(Cell { shard, part });
                let place = (span.input_offset, span.output_offset);
                assert_eq!(place, (input_end, output_end), "{context}, cell {shard}.{part}");
                if span.input_offset < layout.shard_bytes(shard) {
                    assert_eq!(
                        span.input_offset % PART_ALIGN_BYTES,
                        0,
                        "{context}, {shard}.{part}"
                    );
                }
                input_end += span.bytes;
                output_end += span.bytes;
            }
            assert_eq!(input_end, layout.shard_bytes(shard), "{context}, shard {shard}");
        }
        assert_eq!(output_end, layout.total_bytes(), "{context}");
    }

    #[test]
    fn cells_tile_the_output_exactly() {
        for seed in 0..500 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let ranks = rng.usize(1..=9);
            let parts = rng.u32(1..=17);
            let around = [0, 1, 3, 63, 64, 65, 4095, 4096, 4097, 1 << 33];
            let shard_bytes: Vec<u64> = (0..ranks)
                .map(|_| if rng.bool() { *rng.choice(&around).unwrap() } else { rng.u64(..10_000) })
                .collect();
            let layout = Layout::new(&shard_bytes, parts).unwrap();
            check_tiling(&layout, &format!("seed {seed}, shards {shard_bytes:?}, {parts} parts"));
        }
    }

    #[test]
    fn the_largest_shard_and_the_most_parts_do_not_overflow() {
        let layout = Layout::new(&[u64::MAX], u32::MAX).unwrap();
        let last = layout.cell(Cell { shard: Rank(0), part: u32::MAX - 1 });
        assert_eq!(last.input_offset + last.bytes, u64::MAX);
    }

    #[test]
    fn parts_are_even_to_one_unit() {
        let layout = Layout::new(&[10 * 64], 4).unwrap();
        let bytes = |part| layout.cell(Cell { shard: Rank(0), part }).bytes;
        assert_eq!([bytes(0), bytes(1), bytes(2), bytes(3)], [128, 192, 128, 192]);
    }

    #[test]
    fn impossible_layouts_are_named() {
        let text = |shard_bytes: &[u64], parts| {
            let error = Layout::new(shard_bytes, parts).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_snapshot!(text(&[], 1), @"shard_bytes is empty, expected one length for every rank");
        assert_snapshot!(text(&[8], 0), @"parts is 0, expected at least 1");
        assert_snapshot!(text(&[1, u64::MAX], 1), @"shard_bytes of rank 1 is 18446744073709551615, behind 1 bytes of the ranks before it; expected a sum of at most 18446744073709551615");
    }
}
