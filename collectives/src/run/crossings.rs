//! Finds the flags whose writer and reader are in lanes of different tiers.
//!
//! A writer knows both lanes. A reader does not know the writer of an `arrived` flag. But a local lane signals only ranks of
//! its own node, so every flag that no rank of the reader's node signals comes over the network. The plans of the own node
//! are therefore enough.

use std::collections::BTreeMap;

use crate::layout::reader;
use crate::plan::{Flag, Plan, Step, Tier};

/// The tiers of the lanes that write and read the flags of one rank.
#[derive(Debug)]
pub(crate) struct Crossings {
    /// The tier of each lane, equal on all ranks.
    tiers: Box<[Tier]>,
    /// The writers' tiers of the flags that a rank of the own node writes.
    near: BTreeMap<Flag, Tier>,
}

impl Crossings {
    /// Finds the flags of `plan`. `mates` are the plans of the other ranks of the node, which are read only if there are network
    /// lanes.
    pub(crate) fn new<'p>(plan: &'p Plan, mates: impl IntoIterator<Item = &'p Plan>) -> Self {
        let tiers = plan.lanes.iter().map(|lane| lane.tier).collect();
        let mut near = BTreeMap::new();
        if is_tiered(plan) {
            for writer in mates.into_iter().chain([plan]) {
                note(writer, plan, &mut near);
            }
        }
        Self { tiers, near }
    }

    /// Returns whether `flag`, signalled from a lane of tier `from`, has its reader in another tier.
    pub(crate) fn signalled(&self, from: Tier, flag: Flag) -> bool {
        from != self.reader(flag)
    }

    /// Returns whether `flag`, which this rank waits for, has its writer in another tier.
    pub(crate) fn awaited(&self, flag: Flag) -> bool {
        let far = if self.tiers.contains(&Tier::Network) { Tier::Network } else { Tier::Local };
        self.near.get(&flag).copied().unwrap_or(far) != self.reader(flag)
    }

    fn reader(&self, flag: Flag) -> Tier {
        self.tiers[reader(flag).index()]
    }
}

/// Returns whether a plan has network lanes.
pub(crate) fn is_tiered(plan: &Plan) -> bool {
    plan.lanes.iter().any(|lane| lane.tier == Tier::Network)
}

/// Records what `writer` signals to `reader`.
fn note(writer: &Plan, reader: &Plan, near: &mut BTreeMap<Flag, Tier>) {
    for lane in writer.lane_ids() {
        let tier = writer.lanes[lane.index()].tier;
        // Entry and exit are among the steps of a rank only for itself.
        let closed = (writer.rank == reader.rank).then(|| writer.closed_lane(lane, |_| true));
        let steps = closed.as_ref().unwrap_or(&writer.lanes[lane.index()].steps);
        near.extend(steps.iter().filter_map(|step| match *step {
            Step::Signal { peer, flag } if peer == reader.rank => Some((flag, tier)),
            _ => None,
        }));
    }
}

#[cfg(test)]
mod tests {
    use peerlane_hal::Rank;

    use super::*;
    use crate::collective::Collective;
    use crate::plan::{Algorithm, Cell, FlagOrder, Lane, LaneId};

    const NETWORK: LaneId = LaneId(1);

    fn plan(rank: u32, home: Vec<Step>, network: Vec<Step>) -> Plan {
        Plan {
            collective: Collective::AllGather,
            algorithm: Algorithm::Direct,
            rank: Rank(rank),
            ranks: 3,
            chunks: 1,
            in_place: false,
            outputs: 1,
            flags: FlagOrder::Prompt,
            lanes: vec![
                Lane { tier: Tier::Local, steps: home },
                Lane { tier: Tier::Network, steps: network },
            ],
        }
    }

    fn arrived(shard: u32, lane: LaneId) -> Flag {
        Flag::Arrived { cell: Cell { shard: Rank(shard), chunk: 0 }, lane }
    }

    fn signal(peer: u32, flag: Flag) -> Step {
        Step::Signal { peer: Rank(peer), flag }
    }

    /// Ranks 0 and 1 share a node, rank 2 is alone.
    #[test]
    fn writer_and_reader_agree_on_where_a_flag_lies() {
        let (home, network) = (LaneId::HOME, NETWORK);
        let relayed = arrived(0, network);
        let ready = Flag::Ready { from: Rank(2), lane: network };
        let mine = plan(0, vec![signal(0, relayed)], vec![Step::Wait { flag: ready }]);
        let mate = plan(1, vec![signal(0, arrived(1, home))], vec![]);
        let crossings = Crossings::new(&mine, [&mate]);
        let cases = [
            ("a mate's arrival", arrived(1, home), Tier::Local, false),
            ("an arrival over the network", arrived(2, home), Tier::Network, true),
            ("a relay", relayed, Tier::Local, true),
            ("from network lane to network lane", ready, Tier::Network, false),
            ("go", Flag::Go { lane: network }, Tier::Local, true),
            ("sent", Flag::Sent { lane: network }, Tier::Network, true),
        ];
        for (what, flag, writer, crosses) in cases {
            assert_eq!(crossings.awaited(flag), crosses, "{what}, read");
            assert_eq!(crossings.signalled(writer, flag), crosses, "{what}, written");
        }
    }

    #[test]
    fn on_one_tier_nothing_crosses() {
        let mut mine = plan(0, vec![], vec![signal(0, arrived(0, LaneId::HOME))]);
        mine.lanes[1].tier = Tier::Local;
        let crossings = Crossings::new(&mine, []);
        for flag in [arrived(1, NETWORK), arrived(0, LaneId::HOME), Flag::Go { lane: NETWORK }] {
            assert!(!crossings.awaited(flag), "{flag:?}");
            assert!(!crossings.signalled(Tier::Local, flag), "{flag:?}");
        }
    }
}
