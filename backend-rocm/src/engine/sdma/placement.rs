//! Which SDMA engines carry the copies along a link.
//!
//! Newer runtimes name the engines that serve a link best. Older ones tell only which are idle, all
//! of a kind alike; these are dealt out among the links, because two links that share an engine while
//! another one idles lose half of their rate. Without either, the engines are known by their numbers:
//! the plain ones come first, and those made for XGMI begin at [`XGMI_FIRST`].

use std::fmt;

/// The number of the first engine made for XGMI, whatever comes before it.
const XGMI_FIRST: u32 = 2;

/// Engines of one link where nobody says which they are: no link is known that more of them fill.
const SHARE_MAX: usize = 4;

/// The number of an SDMA engine of one GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct SdmaId(u8);

impl SdmaId {
    /// Engines that the runtime can name.
    pub(crate) const COUNT: usize = 16;

    pub(crate) const fn index(self) -> usize {
        self.0 as usize
    }

    /// The engine as the runtime names it.
    pub(crate) const fn bit(self) -> u32 {
        1 << self.0
    }
}

/// SDMA engines of one GPU, as the runtime gives them: a bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SdmaSet(u32);

impl SdmaSet {
    /// What the runtime has not defined is left out.
    pub(crate) const fn of_mask(mask: u32) -> Self {
        Self(mask & ((1 << SdmaId::COUNT) - 1))
    }

    /// The engines `from..from + count`.
    fn run(from: u32, count: u32) -> Self {
        let bits = |end: u32| (1_u64 << end.min(32)) - 1;
        let mask = bits(from.saturating_add(count)) & !bits(from);
        // Below 32 bits by the line above.
        Self::of_mask(mask as u32)
    }

    pub(crate) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    pub(crate) const fn len(self) -> usize {
        self.0.count_ones() as usize
    }

    const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    pub(crate) fn remove(&mut self, id: SdmaId) {
        self.0 &= !id.bit();
    }

    pub(crate) fn ids(self) -> impl Iterator<Item = SdmaId> {
        (0..SdmaId::COUNT as u8).map(SdmaId).filter(move |id| self.0 & id.bit() != 0)
    }

    /// The part of the one numbered `index` of `among`: disjoint where there are engines enough.
    fn share(self, index: usize, among: usize) -> Self {
        let width = (self.len() / among.max(1)).clamp(1, SHARE_MAX);
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

/// Where a copy leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// The same GPU.
    Own,
    /// A GPU of the same hive.
    Xgmi,
    /// Anything else.
    Pcie,
}

/// What is known of the engines for one direction of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Facts {
    pub(crate) reach: Reach,
    /// Whether the runtime takes a copy for an engine that the caller names.
    pub(crate) can_name: bool,
    /// The engines that it prefers for this link, if it says so.
    pub(crate) preferred: Option<SdmaSet>,
    /// Those that were idle when it was asked, if it says so.
    pub(crate) available: Option<SdmaSet>,
    /// How many engines the copying GPU has beside those for XGMI, and how many for XGMI.
    pub(crate) plain: u32,
    pub(crate) xgmi: u32,
    /// The number of this link among those that share the engines.
    pub(crate) index: usize,
    /// How many links share them.
    pub(crate) among: usize,
}

/// Who chose the engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChosenBy {
    /// The runtime: these serve the link best.
    Preferred,
    /// This crate, of those that the runtime called idle.
    Available,
    /// This crate, by number.
    Table,
    /// The runtime, at each copy and without saying which.
    Runtime,
}

/// The engines for one direction of a link; none of them where the runtime chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    pub(crate) set: SdmaSet,
    pub(crate) by: ChosenBy,
}

impl Placement {
    pub(crate) const RUNTIME: Self = Self { set: SdmaSet(0), by: ChosenBy::Runtime };

    pub(crate) fn of(facts: &Facts) -> Self {
        if !facts.can_name {
            return Self::RUNTIME;
        }
        let plain = SdmaSet::run(0, facts.plain);
        if facts.reach == Reach::Own && !plain.is_empty() {
            return Self { set: plain, by: ChosenBy::Table };
        }
        if let Some(set) = facts.preferred.filter(|set| !set.is_empty()) {
            return Self { set, by: ChosenBy::Preferred };
        }
        // A GPU without engines for XGMI uses the plain ones for every link.
        let kind = match facts.reach {
            Reach::Xgmi if facts.xgmi > 0 => SdmaSet::run(XGMI_FIRST, facts.xgmi),
            // The first plain engine is for copies from the host; some GPUs refuse any other there.
            _ if facts.plain > 1 => SdmaSet::run(1, facts.plain - 1),
            _ => plain,
        };
        let available = facts.available.unwrap_or_default().and(kind);
        let (pool, by) = match available.is_empty() {
            false => (available, ChosenBy::Available),
            true => (kind, ChosenBy::Table),
        };
        match pool.is_empty() {
            false => Self { set: pool.share(facts.index, facts.among), by },
            true => Self::RUNTIME,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let set = self.set;
        match self.by {
            ChosenBy::Preferred => write!(f, "SDMA {set} (preferred)"),
            ChosenBy::Available => write!(f, "SDMA {set} (of those idle)"),
            ChosenBy::Table => write!(f, "SDMA {set} (by number)"),
            ChosenBy::Runtime => f.write_str("SDMA of the runtime's choice"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const XGMI: Facts = Facts {
        reach: Reach::Xgmi,
        can_name: true,
        preferred: None,
        available: None,
        plain: 2,
        xgmi: 14,
        index: 0,
        among: 7,
    };

    fn chosen(facts: Facts) -> (Vec<usize>, ChosenBy) {
        let placement = Placement::of(&facts);
        (placement.set.ids().map(SdmaId::index).collect(), placement.by)
    }

    #[test]
    fn what_the_runtime_prefers_comes_first() {
        let mask = SdmaSet::of_mask;
        let facts = Facts { preferred: Some(mask(0x40)), available: Some(mask(0xfffc)), ..XGMI };
        assert_eq!(chosen(facts), (vec![6], ChosenBy::Preferred));
        let facts = Facts { preferred: Some(mask(0)), ..facts };
        assert_eq!(chosen(facts), (vec![2, 3], ChosenBy::Available), "it prefers none");
    }

    #[test]
    fn links_share_the_engines_without_meeting() {
        let mut all = Vec::new();
        for index in 0..7 {
            let (ids, by) = chosen(Facts { index, ..XGMI });
            assert_eq!((ids.len(), by), (2, ChosenBy::Table));
            all.extend(ids);
        }
        assert_eq!(all, (2..16).collect::<Vec<_>>());
        // More links than engines take turns, and one link alone has all.
        let few = Facts { xgmi: 3, ..XGMI };
        let turns: Vec<_> = (0..7).map(|index| chosen(Facts { index, ..few }).0).collect();
        assert_eq!(turns, [[2], [3], [4], [2], [3], [4], [2]].map(Vec::from));
        assert_eq!(chosen(Facts { among: 1, ..few }).0, [2, 3, 4]);
    }

    #[test]
    fn idle_engines_of_another_kind_do_not_count() {
        let plain = Some(SdmaSet::of_mask(0b11));
        assert_eq!(chosen(Facts { available: plain, among: 1, ..XGMI }).1, ChosenBy::Table);
        let pcie = Facts { reach: Reach::Pcie, available: Some(SdmaSet::of_mask(0xffff)), ..XGMI };
        assert_eq!(chosen(pcie), (vec![1], ChosenBy::Available));
        assert_eq!(chosen(Facts { plain: 1, ..pcie }).0, [0]);
    }

    #[test]
    fn own_copies_take_the_plain_engines() {
        let own = Facts { reach: Reach::Own, available: None, ..XGMI };
        assert_eq!(chosen(own), (vec![0, 1], ChosenBy::Table));
    }

    #[test]
    fn without_a_name_the_runtime_chooses() {
        assert_eq!(chosen(Facts { can_name: false, ..XGMI }), (vec![], ChosenBy::Runtime));
        let uncounted = Facts { plain: 0, xgmi: 0, ..XGMI };
        assert_eq!(chosen(uncounted), (vec![], ChosenBy::Runtime));
        assert_eq!(chosen(Facts { reach: Reach::Own, ..uncounted }), (vec![], ChosenBy::Runtime));
        let told = Facts { preferred: Some(SdmaSet::of_mask(8)), ..uncounted };
        assert_eq!(chosen(told), (vec![3], ChosenBy::Preferred));
        assert_eq!(Placement::RUNTIME.to_string(), "SDMA of the runtime's choice");
        let placement = Placement { set: SdmaSet::of_mask(0xc), by: ChosenBy::Available };
        assert_eq!(placement.to_string(), "SDMA 2+3 (of those idle)");
    }

    #[test]
    fn a_strange_mask_is_cut_and_strange_counts_end() {
        assert_eq!(SdmaSet::of_mask(u32::MAX).len(), SdmaId::COUNT);
        assert_eq!(SdmaSet::run(2, u32::MAX), SdmaSet::of_mask(0xfffc));
        assert_eq!(SdmaSet::run(40, 3), SdmaSet::default());
        assert!(SdmaSet::default().share(3, 4).is_empty());
    }
}
