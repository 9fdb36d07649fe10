//! Defines the options for unequal blocks, lists and tensors, and computes the sizes of a sweep.

use std::fmt;
use std::str::FromStr;

use clap::Args;
use peerlane::Destination;

use crate::error::{Failure, Result};
use crate::goal::Goal;

/// The number of elements between two blocks of a list, which no rank may write.
pub(super) const GAP: usize = 3;
/// The number of output buffers over which a list is scattered.
const LIST_BUFFERS: usize = 2;

/// The options for unequal blocks, lists and several tensors.
#[derive(Args, Clone, Debug)]
pub(crate) struct ShapeOptions {
    /// Give the ranks blocks of different lengths, as a ratio with one number for each rank, such
    /// as 1:2:3:0; 0 gives a rank no block
    #[arg(long, value_name = "N:N:…")]
    pub(crate) blocks: Option<Ratio>,
    /// Gather into two buffers, in reverse order and with gaps, instead of one contiguous output
    #[arg(long, conflicts_with = "tensors")]
    pub(crate) list: bool,
    /// Gather N tensors in one operation, 1 to 1024, each with a part from every rank
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub(crate) tensors: Option<u32>,
}

/// The ratio of the block lengths, with one number for each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ratio(Vec<u32>);

impl ShapeOptions {
    /// Checks that the ratio has one number for each rank.
    pub(super) fn check(&self, ranks: usize) -> Result<()> {
        match &self.blocks {
            Some(ratio) if ratio.0.len() != ranks => Err(Failure::usage(format!(
                "--blocks {ratio} has {} numbers, expected {ranks}, one for each rank",
                ratio.0.len()
            ))
            .with_advice("give one number for each rank, or change --ranks")),
            _ => Ok(()),
        }
    }

    /// Returns the length of each rank's block in elements, which is `block_length` on average.
    ///
    /// If an output is a single block, as in a broadcast, each length is that of the whole output.
    /// Between pairs of ranks, the blocks differ by default: the numbers are 0:1:2 and so on.
    pub(super) fn lengths(&self, goal: Goal, block_length: u64, ranks: usize) -> Vec<u64> {
        let by_pair = || if ranks > 1 { (0..ranks as u32).collect() } else { vec![1] };
        let numbers = match &self.blocks {
            Some(Ratio(numbers)) => numbers.clone(),
            None if goal.is_by_pair => by_pair(),
            None => {
                let blocks = if goal.is_one_block() { ranks as u64 } else { 1 };
                return vec![block_length.saturating_mul(blocks); ranks];
            }
        };

        let sum: u128 = numbers.iter().map(|number| u128::from(*number)).sum();
        let total = u128::from(block_length) * ranks as u128;
        cuts(numbers.iter().map(|number| u128::from(*number)), sum, total)
    }

    /// Returns the number of elements that each rank contributes to each tensor, by tensor and then
    /// by rank.
    pub(super) fn pieces(
        &self,
        goal: Goal,
        block_length: u64,
        ranks: usize,
    ) -> Result<Vec<Vec<usize>>> {
        let tensors = self.tensors.unwrap_or(1);
        let of_rank = |length| {
            let ones = (0..tensors).map(|_| 1);
            cuts(ones, tensors.into(), u128::from(length))
        };
        let by_rank: Vec<_> =
            self.lengths(goal, block_length, ranks).into_iter().map(of_rank).collect();

        let piece = |length: u64| {
            usize::try_from(length).map_err(|_| {
                Failure::usage("--max-bytes exceeds the address space of this machine")
            })
        };

        // The lengths were computed rank by rank, but the result is sorted by tensor.
        let of_tensor =
            |tensor: usize| by_rank.iter().map(|of_rank| piece(of_rank[tensor])).collect();
        (0..tensors as usize).map(of_tensor).collect()
    }

    pub(super) fn output_buffers(&self, ranks: usize) -> usize {
        if self.list { ranks.min(LIST_BUFFERS) } else { 1 }
    }

    /// Describes blocks, list and tensors for the title, or returns `None` for equal blocks in one
    /// tensor.
    pub(super) fn text(&self) -> Option<String> {
        let blocks = self.blocks.as_ref().map(|ratio| format!("blocks {ratio}"));
        let list = self.list.then(|| "to a list".to_owned());
        let tensors = self.tensors.map(|tensors| format!("{tensors} tensors"));

        let words: Vec<_> = [blocks, list, tensors].into_iter().flatten().collect();
        (!words.is_empty()).then(|| words.join(", "))
    }
}

/// Returns the positions of the blocks of a list, in reverse rank order in two buffers with gaps.
pub(super) fn destinations(lengths: &[usize]) -> Vec<Destination> {
    let mut ends = [GAP; LIST_BUFFERS];
    let mut destinations = vec![Destination::default(); lengths.len()];

    for (rank, length) in lengths.iter().enumerate().rev() {
        let buffer = rank % LIST_BUFFERS;
        destinations[rank] = Destination { buffer, offset: ends[buffer] };
        ends[buffer] += length + GAP;
    }

    destinations
}

/// Cuts `whole` into pieces that are proportional to the weights and add up to `whole`.
fn cuts(weights: impl Iterator<Item = u128>, sum: u128, whole: u128) -> Vec<u64> {
    let mut before = 0;
    let cut = |weights: u128| u64::try_from(whole * weights / sum.max(1)).unwrap_or(u64::MAX);

    // The cuts are rounded and not the pieces, so that no element is lost between the pieces.
    weights
        .map(|weight| {
            let begin = cut(before);
            before += weight;
            cut(before) - begin
        })
        .collect()
}

impl FromStr for Ratio {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let numbers: Option<Vec<u32>> = text.split(':').map(|word| word.parse().ok()).collect();
        match numbers {
            Some(numbers) if numbers.iter().any(|number| *number > 0) => Ok(Self(numbers)),
            _ => {
                Err("expected one whole number for each rank, not all 0, such as 1:2:3:4"
                    .to_owned())
            }
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<_> = self.0.iter().map(u32::to_string).collect();
        f.write_str(&words.join(":"))
    }
}

/// The total sizes of a measurement, each a multiple of the one before, in blocks of whole
/// elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) ranks: usize,
    pub(crate) element_bytes: u64,
    pub(crate) min_bytes: u64,
    pub(crate) max_bytes: u64,
    pub(crate) factor: u64,
}

impl Sweep {
    /// Returns the length of a block at each size in elements, in increasing order.
    ///
    /// Sizes that round to the same block occur once.
    pub(crate) fn block_lengths(&self) -> Vec<u64> {
        let unit = self.element_bytes.saturating_mul(self.ranks as u64);
        let totals =
            std::iter::successors(Some(self.min_bytes), |total| total.checked_mul(self.factor));
        let mut lengths: Vec<u64> = totals
            .take_while(|total| *total <= self.max_bytes)
            .map(|total| total.div_ceil(unit))
            .collect();

        lengths.dedup();
        lengths
    }

    pub(crate) fn total_bytes(&self, block_length: u64) -> u64 {
        self.block_bytes(block_length).saturating_mul(self.ranks as u64)
    }

    pub(crate) fn block_bytes(&self, block_length: u64) -> u64 {
        block_length.saturating_mul(self.element_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    fn shape(line: &str) -> ShapeOptions {
        parse(line).unwrap().shape
    }

    #[test]
    fn a_ratio_divides_the_whole_total() {
        assert_eq!(shape("").lengths(Goal::default(), 7, 3), [7, 7, 7]);
        assert_eq!(shape("--blocks 1:2:3:4").lengths(Goal::default(), 25, 4), [10, 20, 30, 40]);
        for length in [0, 1, 7, 1000, u64::MAX / 8] {
            let lengths = shape("--blocks 1:0:5").lengths(Goal::default(), length, 3);
            assert_eq!((lengths.iter().sum::<u64>(), lengths[1]), (3 * length, 0));
        }
    }

    #[test]
    fn tensors_share_each_block() {
        let pieces = shape("--blocks 1:3 --tensors 3").pieces(Goal::default(), 10, 2).unwrap();
        assert_eq!(pieces, [[1, 5], [2, 5], [2, 5]]);
        assert_eq!(shape("").pieces(Goal::default(), 4, 2).unwrap(), [[4, 4]]);
    }

    #[test]
    fn the_destinations_of_a_list_have_gaps() {
        let destinations: Vec<_> = destinations(&[5, 0, 7])
            .into_iter()
            .map(|destination| (destination.buffer, destination.offset))
            .collect();
        assert_eq!(destinations, [(0, 13), (1, 3), (0, 3)]);
        assert_eq!(shape("--list").output_buffers(1), 1);
    }

    #[test]
    fn invalid_shapes_are_refused() {
        let error = |line: &str| parse(line).unwrap_err().lines().next().unwrap().to_owned();
        for line in ["--blocks 1:x", "--blocks 0:0", "--blocks 1,2"] {
            assert!(error(line).contains("such as 1:2:3:4"), "{line}");
        }
        assert!(error("--list --tensors 2").contains("cannot be used with"));
        assert!(error("--tensors 0").contains("0 is not in 1..=1024"));
        insta::assert_snapshot!(shape("--blocks 1:2:3").check(4).unwrap_err(), @"
        error: --blocks 1:2:3 has 3 numbers, expected 4, one for each rank
         help: give one number for each rank, or change --ranks
        ");
    }

    fn sweep(ranks: usize, element_bytes: u64, min_bytes: u64, max_bytes: u64) -> Sweep {
        Sweep { ranks, element_bytes, min_bytes, max_bytes, factor: 4 }
    }

    #[test]
    fn the_default_sweep_has_nine_sizes() {
        let sweep = sweep(4, 1, 1 << 10, 64 << 20);
        let lengths = sweep.block_lengths();
        assert_eq!(lengths.len(), 9);
        assert_eq!(sweep.total_bytes(lengths[0]), 1 << 10);
        assert_eq!(sweep.total_bytes(lengths[8]), 64 << 20);
    }

    #[test]
    fn a_total_that_does_not_divide_is_rounded_up_to_whole_elements() {
        for ranks in 1..=9 {
            for element_bytes in [1, 2, 4, 8] {
                for total in 1..200 {
                    let sweep = sweep(ranks, element_bytes, total, total);
                    let lengths = sweep.block_lengths();
                    assert_eq!(lengths.len(), 1);
                    let real = sweep.total_bytes(lengths[0]);
                    assert!((total..total + ranks as u64 * element_bytes).contains(&real));
                }
            }
        }
    }

    #[test]
    fn sizes_that_round_to_the_same_block_are_measured_once() {
        assert_eq!(sweep(4, 8, 1, 64).block_lengths(), [1, 2]);
    }

    #[test]
    fn the_largest_numbers_end_the_sweep() {
        assert_eq!(sweep(1, 1, 1 << 62, u64::MAX).block_lengths(), [1 << 62]);
        assert!(sweep(4096, 8, 1, u64::MAX).block_lengths().len() > 20);
    }
}
