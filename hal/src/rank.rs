//! Who takes part.

use std::fmt;

/// The number of one participant of a group, from 0; one rank drives one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub u32);

impl Rank {
    /// The rank as an index into a slice that holds one entry a rank.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The rank at `index` of such a slice.
    ///
    /// # Panics
    /// If `index` does not fit in 32 bits; no group is that large.
    pub fn at(index: usize) -> Self {
        Self(u32::try_from(index).expect("a group has fewer than 2^32 ranks"))
    }

    /// All ranks of a group of `ranks`, in order.
    pub fn all(ranks: usize) -> impl DoubleEndedIterator<Item = Self> + ExactSizeIterator + Clone {
        (0..ranks).map(Self::at)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
