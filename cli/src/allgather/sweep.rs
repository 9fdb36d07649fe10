//! The sizes of a run.

/// Totals from the smallest to the largest, each a factor above the last, in whole equal shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sweep {
    pub(crate) ranks: usize,
    pub(crate) element_bytes: u64,
    pub(crate) min_bytes: u64,
    pub(crate) max_bytes: u64,
    pub(crate) factor: u64,
}

impl Sweep {
    /// The shard of each size in elements, growing. Sizes that round to the same shard are one.
    pub(crate) fn shard_lengths(&self) -> Vec<u64> {
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

    /// The real total of a shard of so many elements, in bytes.
    pub(crate) fn total_bytes(&self, shard_length: u64) -> u64 {
        self.shard_bytes(shard_length).saturating_mul(self.ranks as u64)
    }

    /// The shard of so many elements, in bytes.
    pub(crate) fn shard_bytes(&self, shard_length: u64) -> u64 {
        shard_length.saturating_mul(self.element_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sweep(ranks: usize, element_bytes: u64, min_bytes: u64, max_bytes: u64) -> Sweep {
        Sweep { ranks, element_bytes, min_bytes, max_bytes, factor: 4 }
    }

    #[test]
    fn the_default_sweep_has_nine_sizes() {
        let sweep = sweep(4, 1, 1 << 10, 64 << 20);
        let lengths = sweep.shard_lengths();
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
                    let lengths = sweep.shard_lengths();
                    assert_eq!(lengths.len(), 1);
                    let real = sweep.total_bytes(lengths[0]);
                    assert!((total..total + ranks as u64 * element_bytes).contains(&real));
                }
            }
        }
    }

    #[test]
    fn sizes_that_round_to_the_same_shard_are_measured_once() {
        assert_eq!(sweep(4, 8, 1, 64).shard_lengths(), [1, 2]);
    }

    #[test]
    fn the_largest_numbers_end_the_sweep() {
        assert_eq!(sweep(1, 1, 1 << 62, u64::MAX).shard_lengths(), [1 << 62]);
        assert!(sweep(4096, 8, 1, u64::MAX).shard_lengths().len() > 20);
    }
}
