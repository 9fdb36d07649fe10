//! Numbers the SDMA engines of a GPU, and forms sets of them.

use std::fmt;

/// The largest number of SDMA engines that one link gets if the runtime recommends none. No known link needs more.
const SHARE_MAX: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SdmaId(u8);

impl SdmaId {
    /// The number of SDMA engines that the runtime can distinguish.
    pub(crate) const COUNT: usize = 16;

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    pub(crate) const fn bit(self) -> u32 {
        1 << self.0
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SdmaSet(u32);

impl SdmaSet {
    pub(super) const EMPTY: Self = Self(0);

    /// Ignores mask bits for which the HSA runtime defines no SDMA engine.
    pub(crate) const fn from_mask(mask: u32) -> Self {
        Self(mask & ((1 << SdmaId::COUNT) - 1))
    }

    pub(super) fn range(first: u32, count: u32) -> Self {
        let bits = |end: u32| (1_u64 << end.min(32)) - 1;
        let mask = bits(first.saturating_add(count)) & !bits(first);
        // `bits` sets at most 32 bits.
        Self::from_mask(mask as u32)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    pub(super) const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn remove(&mut self, id: SdmaId) {
        self.0 &= !id.bit();
    }

    pub(crate) fn ids(self) -> impl Iterator<Item = SdmaId> {
        (0..SdmaId::COUNT as u8).map(SdmaId).filter(move |id| self.0 & id.bit() != 0)
    }

    /// Divides the SDMA engines among `links` links, into disjoint shares if there are enough engines.
    pub(super) fn share(self, index: usize, links: usize) -> Self {
        let width = (self.len() / links.max(1)).clamp(1, SHARE_MAX);
        let first = (index * width) % self.len().max(1);
        Self(self.ids().skip(first).take(width).fold(0, |mask, id| mask | id.bit()))
    }
}

impl fmt::Display for SdmaSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, id) in self.ids().enumerate() {
            write!(f, "{}{}", if index == 0 { "" } else { "+" }, id.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_counts_are_bounded() {
        assert_eq!(SdmaSet::from_mask(u32::MAX).len(), SdmaId::COUNT);
        assert_eq!(SdmaSet::range(2, u32::MAX), SdmaSet::from_mask(0xfffc));
        assert_eq!(SdmaSet::range(40, 3), SdmaSet::default());
        assert!(SdmaSet::default().share(3, 4).is_empty());
    }
}
