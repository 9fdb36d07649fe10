//! Assigns a memory word to each flag by which ranks signal each other.

use peerlane_hal::Rank;

use crate::collective::Collective;
use crate::plan::{Cell, Flag, LaneId};

/// The least number of 64-bit words that a flag occupies, which fill one cache line.
///
/// Writers of different flags then do not disturb each other.
pub const FLAG_WORDS: u64 = 8;

/// Assigns a word of one rank's flag memory to each flag that the rank waits for.
///
/// Peers signal by these flags that data has arrived or may be written. The number of a flag does
/// not depend on the reader's number of lanes, so a writer need not know it. Sums saturate at a
/// size whose allocation fails with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FlagLayout {
    ranks: u64,
    chunks: u64,
    lanes: u64,
    /// Whether there is also a flag for each contribution to a reduction.
    contributions: bool,
    /// The number of words of a flag.
    words: u64,
}

impl FlagLayout {
    /// Creates the layout of one rank's flags for a plan with this number of ranks, chunks and
    /// lanes.
    pub fn new(ranks: usize, chunks: u32, lanes: usize) -> Self {
        Self {
            ranks: ranks as u64,
            chunks: chunks.into(),
            lanes: lanes as u64,
            contributions: false,
            words: FLAG_WORDS,
        }
    }

    /// Has each flag consist of a word for each of so many blocks of threads.
    #[must_use]
    pub fn for_blocks(self, blocks: u32) -> Self {
        // Whole cache lines.
        Self { words: u64::from(blocks.max(1)).next_multiple_of(FLAG_WORDS), ..self }
    }

    /// Adds flags for the contributions of all ranks if `collective` is a reduction.
    #[must_use]
    pub fn for_collective(self, collective: Collective) -> Self {
        Self { contributions: collective.is_reduction(), ..self }
    }

    /// Returns the smallest layout that has room for the flags of `self` and of `other`.
    #[doc(hidden)]
    pub fn max(self, other: Self) -> Self {
        Self {
            ranks: self.ranks.max(other.ranks),
            chunks: self.chunks.max(other.chunks),
            lanes: self.lanes.max(other.lanes),
            contributions: self.contributions || other.contributions,
            words: self.words.max(other.words),
        }
    }

    /// Returns the index of the 64-bit word of `flag` in the flag memory of the rank that waits for
    /// it.
    ///
    /// The flag must belong to a verified plan of these sizes; otherwise the word has no meaning.
    pub fn word(&self, flag: Flag) -> u64 {
        // The lines of a lane are in this order: arrivals by cell, `ready`, `taken` and `free` by
        // rank, `go`, `sent`, and contributions by cell.
        let arrivals = self.ranks.saturating_mul(self.chunks);
        let of_rank =
            |group: u64, rank: Rank| self.ranks.saturating_mul(group).saturating_add(rank.0.into());
        let of_cell = |cell: Cell| {
            u64::from(cell.block.0).saturating_mul(self.chunks).saturating_add(cell.chunk.into())
        };

        // After the three groups by rank, ranks 0 to 2 of a fourth group would be the lines of
        // `go`, `sent` and the first contribution.
        let line = match flag {
            Flag::Arrived { cell, .. } => of_cell(cell),
            Flag::Ready { from, .. } => arrivals.saturating_add(of_rank(0, from)),
            Flag::Taken { by, .. } => arrivals.saturating_add(of_rank(1, by)),
            Flag::Free { from, .. } => arrivals.saturating_add(of_rank(2, from)),
            Flag::Go { .. } => arrivals.saturating_add(of_rank(3, Rank(0))),
            Flag::Sent { .. } => arrivals.saturating_add(of_rank(3, Rank(1))),
            Flag::Contributed { cell, .. } => {
                arrivals.saturating_add(of_rank(3, Rank(2))).saturating_add(of_cell(cell))
            }
        };

        let lane = named_lane(flag);
        self.first_line(lane.0.into()).saturating_add(line).saturating_mul(self.words)
    }

    /// Returns the length of the memory for all flags of the rank, in 64-bit words.
    pub fn words(&self) -> u64 {
        self.first_line(self.lanes).saturating_mul(self.words)
    }

    /// Returns the number of cache lines that the flags of all lanes before `lane` occupy.
    fn first_line(&self, lane: u64) -> u64 {
        let flags_per_cell = 1 + u64::from(self.contributions);
        let cell_lines_per_rank = self.chunks.saturating_mul(flags_per_cell);

        // Each rank has a `ready`, a `taken` and a `free`, and the lane has a `go` and a `sent`.
        let rank_lines = self.ranks.saturating_mul(cell_lines_per_rank.saturating_add(3));
        let lines_per_lane = rank_lines.saturating_add(2);
        lane.saturating_mul(lines_per_lane)
    }
}

/// Returns the lane in which a rank waits for `flag`.
#[doc(hidden)]
pub fn reader(flag: Flag) -> LaneId {
    match flag {
        Flag::Sent { .. } => LaneId::HOME,
        flag => named_lane(flag),
    }
}

/// Returns the lane number that is stored in `flag`.
///
/// A [`Flag::Sent`] contains the lane that signals it, and every other flag the lane that waits.
fn named_lane(flag: Flag) -> LaneId {
    let (Flag::Arrived { lane, .. }
    | Flag::Contributed { lane, .. }
    | Flag::Ready { lane, .. }
    | Flag::Free { lane, .. }
    | Flag::Taken { lane, .. }
    | Flag::Go { lane }
    | Flag::Sent { lane }) = flag;
    lane
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn all_flags(ranks: u32, chunks: u32, lanes: u32, reduces: bool) -> Vec<Flag> {
        let mut flags = Vec::new();
        for lane in (0..lanes).map(LaneId) {
            for rank in (0..ranks).map(Rank) {
                let cells = (0..chunks).map(|chunk| Cell { block: rank, chunk });
                flags.extend(cells.clone().map(|cell| Flag::Arrived { cell, lane }));
                let contributed = cells.map(|cell| Flag::Contributed { cell, lane });
                flags.extend(contributed.filter(|_| reduces));
                flags.extend([
                    Flag::Ready { from: rank, lane },
                    Flag::Free { from: rank, lane },
                    Flag::Taken { by: rank, lane },
                ]);
            }
            flags.extend([Flag::Go { lane }, Flag::Sent { lane }]);
        }
        flags
    }

    #[test]
    fn every_flag_has_a_cache_line_of_its_own() {
        for (ranks, chunks, lanes) in [(1, 1, 1), (2, 1, 1), (3, 2, 2), (9, 5, 3)] {
            for collective in [Collective::AllGather, Collective::AllReduce] {
                let layout = FlagLayout::new(ranks as usize, chunks, lanes as usize);
                let layout = layout.for_collective(collective);
                let flags = all_flags(ranks, chunks, lanes, collective.is_reduction());
                let words: BTreeSet<u64> = flags.iter().map(|&flag| layout.word(flag)).collect();
                assert_eq!(words.len(), flags.len(), "{layout:?}");
                assert!(words.iter().all(|word| word % FLAG_WORDS == 0), "{layout:?}");
                assert_eq!(words.last().unwrap() + FLAG_WORDS, layout.words(), "{layout:?}");
            }
        }
    }

    #[test]
    fn a_writer_need_not_know_the_lanes_of_the_reader() {
        let (few, many) = (FlagLayout::new(4, 3, 1), FlagLayout::new(4, 3, 8));
        for flag in all_flags(4, 3, 1, false) {
            assert_eq!(few.word(flag), many.word(flag), "{flag:?}");
        }
    }

    #[test]
    fn impossible_sizes_saturate() {
        assert_eq!(FlagLayout::new(usize::MAX, u32::MAX, usize::MAX).words(), u64::MAX);
    }
}
