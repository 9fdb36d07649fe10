//! Whose news a rank needs to come further, and so where it may sleep without a timer.
//!
//! A park hears of its own engine, and of the flags that its own fabric writes. A rank with several lanes
//! may sleep on one of them for as long as that covers all that the others wait for; otherwise it has to
//! look at them from time to time.

use crate::plan::Tier;

/// What one lane needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// Nothing: it can come further at once.
    pub(crate) ready: bool,
    /// News of its own engine.
    pub(crate) engine: bool,
    /// Flags, by the tier that writes them.
    pub(crate) flags: Flags,
}

/// Tiers whose lanes write awaited flags.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Flags {
    local: bool,
    network: bool,
}

impl Flags {
    pub(crate) fn add(&mut self, tier: Tier) {
        match tier {
            Tier::Local => self.local = true,
            Tier::Network => self.network = true,
        }
    }

    fn merge(&mut self, other: Self) {
        self.local |= other.local;
        self.network |= other.network;
    }

    /// Whether these are no others than those of `tier`.
    fn are_of(self, tier: Tier) -> bool {
        match tier {
            Tier::Local => !self.network,
            Tier::Network => !self.local,
        }
    }
}

/// Where a rank may sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bed {
    /// Nowhere: something can be done.
    None,
    /// On this lane, which hears of everything.
    Lane(usize),
    /// On any, but not for long.
    Nap,
}

impl Bed {
    /// For lanes of these tiers with these needs.
    pub(crate) fn of(lanes: impl Iterator<Item = (Tier, Needs)>) -> Self {
        let (mut flags, mut engine, mut engines) = (Flags::default(), None, 0);
        // Any lane of a tier hears of the flags that this writes.
        let mut ears: [Option<usize>; Tier::ALL.len()] = Default::default();
        for (index, (tier, needs)) in lanes.enumerate() {
            if needs.ready {
                return Self::None;
            }
            flags.merge(needs.flags);
            ears[tier as usize].get_or_insert(index);
            if needs.engine {
                (engine, engines) = (Some((index, tier)), engines + 1);
            }
        }
        let lane = match engine {
            Some((index, tier)) => Some(index).filter(|_| engines == 1 && flags.are_of(tier)),
            None => Tier::ALL
                .iter()
                .zip(ears)
                .find_map(|(tier, ear)| ear.filter(|_| flags.are_of(*tier))),
        };
        lane.map_or(Self::Nap, Self::Lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DONE: &str = "";

    /// `!` can come further, `e` needs its engine, `l` and `n` flags of that tier.
    fn bed<const N: usize>(lanes: [(Tier, &str); N]) -> Bed {
        let lanes = lanes.map(|(tier, needs)| {
            let mut flags = Flags::default();
            if needs.contains('l') {
                flags.add(Tier::Local);
            }
            if needs.contains('n') {
                flags.add(Tier::Network);
            }
            let (ready, engine) = (needs.contains('!'), needs.contains('e'));
            (tier, Needs { ready, engine, flags })
        });
        Bed::of(lanes.into_iter())
    }

    #[test]
    fn a_rank_sleeps_where_it_hears_of_all_that_it_needs() {
        use Tier::{Local, Network};
        let cases = [
            (bed([(Local, "l"), (Network, DONE)]), Bed::Lane(0), "a mate's flag"),
            (bed([(Local, "n"), (Network, DONE)]), Bed::Lane(1), "an arrival that crosses tiers"),
            (bed([(Local, "n"), (Network, "e")]), Bed::Lane(1), "an arrival and own puts"),
            (bed([(Local, "n"), (Network, "n")]), Bed::Lane(1), "two arrivals"),
            (bed([(Local, DONE), (Network, "e")]), Bed::Lane(1), "own puts"),
            (bed([(Local, "l"), (Network, "e")]), Bed::Nap, "a mate's flag and own puts"),
            (bed([(Local, "e"), (Network, "n")]), Bed::Nap, "own copies and an arrival"),
            (bed([(Local, "l"), (Network, "n")]), Bed::Nap, "flags of both tiers"),
            (bed([(Local, "l"), (Local, "l")]), Bed::Lane(0), "flags of one tier in two lanes"),
            (bed([(Local, DONE), (Local, "el")]), Bed::Lane(1), "an engine and flags of its tier"),
            (bed([(Local, "e"), (Local, "e")]), Bed::Nap, "two engines"),
            (bed([(Local, "n"), (Local, DONE)]), Bed::Nap, "flags that no lane hears of"),
            (bed([(Local, "n"), (Network, "!")]), Bed::None, "work"),
            (bed([(Local, "e"), (Local, "e"), (Network, "!")]), Bed::None, "two engines and work"),
        ];
        for (seen, wanted, what) in cases {
            assert_eq!(seen, wanted, "{what}");
        }
    }
}
