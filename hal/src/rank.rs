//! Defines ranks, the numbers of the participants of a group.

use std::fmt;

/// The number of a participant in its group, counted from 0. Each rank drives one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// Returns the rank as an index into a slice that has one entry per rank.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// Returns the rank for an index into a slice that has one entry per rank.
    ///
    /// # Panics
    /// If `index` does not fit in 32 bits; no group is that large.
    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("a group has fewer than 2^32 ranks"))
    }

    /// Returns the ranks of a group with `ranks` members, in ascending order.
    pub fn all(ranks: usize) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
        (0..ranks).map(Self::at)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
