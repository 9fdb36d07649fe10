//! Correct plans for tests: those of every algorithm, and direct plans with other lanes.

use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, Flag, FlagOrder, Lane, LaneId, Plan, Step};
use peerlane_planning::schedule;
use peerlane_planning::topology::Topology;

/// Selects a set of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// One lane that puts to all peers.
    Direct,
    /// One lane that forwards to the next rank.
    Ring,
    /// Direct with two outputs in turn, so without `ready`; never in place.
    InTurn,
    /// Direct, with batched flags.
    Batched,
    /// Both, so the only flags are arrivals.
    BatchedInTurn,
    /// Direct, with the self copy in lane 1.
    SelfCopyLane,
    /// Direct, with the puts to peers in lane 1.
    PutLane,
    /// An algorithm on one node.
    Flat(Algorithm),
    /// An algorithm on uneven nodes that one fabric reaches.
    Nodes(Algorithm),
    /// An algorithm on uneven nodes with a network between them.
    Tiers(Algorithm),
    /// An algorithm on such nodes, with two outputs in turn and batched flags.
    TiersInTurn(Algorithm),
    /// A collective on one node; the root is the last rank.
    Goal(Collective, Algorithm),
    /// A collective on one node with two outputs in turn, which needs `free` flags; the root is the last rank.
    GoalInTurn(Collective, Algorithm),
    /// A reduction on one node with two inboxes in turn; the root is the last rank.
    Inboxes(Collective, FlagOrder),
    /// A reduction on uneven nodes with a network between them and two inboxes in turn; the root is the last rank.
    InboxesOfTiers(Collective),
    /// A collective on uneven nodes, whose ranks first wait for what comes over the network, with two inboxes in turn in a
    /// reduction.
    NetworkFirst(Collective, Algorithm),
    /// A collective on uneven nodes with a network between them; the root is the last rank.
    GoalOfTiers(Collective, Algorithm),
}

pub(crate) const GATHER: Collective = Collective::Gather { root: Rank(0) };
pub(crate) const BROADCAST: Collective = Collective::Broadcast { root: Rank(0) };
pub(crate) const SCATTER: Collective = Collective::Scatter { root: Rank(0) };
pub(crate) const REDUCE: Collective = Collective::Reduce { root: Rank(0) };

impl Form {
    pub(crate) const ALL: [Self; 76] = [
        Self::Direct,
        Self::Ring,
        Self::InTurn,
        Self::Batched,
        Self::BatchedInTurn,
        Self::SelfCopyLane,
        Self::PutLane,
        Self::Flat(Algorithm::Pull),
        Self::Flat(Algorithm::DoubleRing),
        Self::Flat(Algorithm::RecursiveDoubling),
        Self::Flat(Algorithm::GetRing),
        Self::Nodes(Algorithm::Ring),
        Self::Nodes(Algorithm::Hierarchical),
        Self::Nodes(Algorithm::HierarchicalRing),
        Self::Tiers(Algorithm::Direct),
        Self::Tiers(Algorithm::Pull),
        Self::Tiers(Algorithm::Ring),
        Self::Tiers(Algorithm::DoubleRing),
        Self::Tiers(Algorithm::Hierarchical),
        Self::Tiers(Algorithm::HierarchicalRing),
        Self::Tiers(Algorithm::RecursiveDoubling),
        Self::TiersInTurn(Algorithm::Direct),
        Self::TiersInTurn(Algorithm::Pull),
        Self::TiersInTurn(Algorithm::Ring),
        Self::TiersInTurn(Algorithm::DoubleRing),
        Self::TiersInTurn(Algorithm::Hierarchical),
        Self::TiersInTurn(Algorithm::HierarchicalRing),
        Self::TiersInTurn(Algorithm::RecursiveDoubling),
        Self::NetworkFirst(Collective::AllGather, Algorithm::Hierarchical),
        Self::NetworkFirst(Collective::AllGather, Algorithm::HierarchicalRing),
        Self::NetworkFirst(Collective::AllToAll, Algorithm::Direct),
        Self::NetworkFirst(Collective::ReduceScatter, Algorithm::Direct),
        Self::NetworkFirst(Collective::AllReduce, Algorithm::Direct),
        Self::NetworkFirst(REDUCE, Algorithm::Direct),
        Self::NetworkFirst(Collective::Scan, Algorithm::Direct),
        Self::Goal(GATHER, Algorithm::Direct),
        Self::Goal(SCATTER, Algorithm::Direct),
        Self::Goal(GATHER, Algorithm::Pull),
        Self::Goal(SCATTER, Algorithm::Pull),
        Self::GoalInTurn(GATHER, Algorithm::Direct),
        Self::GoalInTurn(SCATTER, Algorithm::Direct),
        Self::GoalInTurn(BROADCAST, Algorithm::Direct),
        Self::GoalInTurn(BROADCAST, Algorithm::Ring),
        Self::Goal(BROADCAST, Algorithm::ScatterAllGather),
        Self::GoalInTurn(BROADCAST, Algorithm::ScatterAllGather),
        Self::Goal(BROADCAST, Algorithm::GetRing),
        Self::GoalInTurn(BROADCAST, Algorithm::GetRing),
        Self::Goal(Collective::AllToAll, Algorithm::Direct),
        Self::Goal(Collective::AllToAll, Algorithm::Pull),
        Self::GoalInTurn(Collective::AllToAll, Algorithm::Direct),
        Self::Goal(BROADCAST, Algorithm::Pull),
        Self::GoalOfTiers(GATHER, Algorithm::Direct),
        Self::GoalOfTiers(SCATTER, Algorithm::Direct),
        Self::Goal(Collective::ReduceScatter, Algorithm::Direct),
        Self::Goal(Collective::AllReduce, Algorithm::Direct),
        Self::Goal(REDUCE, Algorithm::Direct),
        Self::GoalInTurn(Collective::ReduceScatter, Algorithm::Direct),
        Self::GoalInTurn(Collective::AllReduce, Algorithm::Direct),
        Self::GoalInTurn(REDUCE, Algorithm::Direct),
        Self::GoalOfTiers(Collective::ReduceScatter, Algorithm::Direct),
        Self::GoalOfTiers(Collective::AllReduce, Algorithm::Direct),
        Self::Goal(Collective::Scan, Algorithm::Direct),
        Self::Goal(Collective::Exscan, Algorithm::Direct),
        Self::GoalInTurn(Collective::Scan, Algorithm::Direct),
        Self::GoalInTurn(Collective::Exscan, Algorithm::Direct),
        Self::GoalOfTiers(Collective::Scan, Algorithm::Direct),
        Self::Inboxes(Collective::ReduceScatter, FlagOrder::Prompt),
        Self::Inboxes(Collective::ReduceScatter, FlagOrder::Batched),
        Self::Inboxes(Collective::AllReduce, FlagOrder::Prompt),
        Self::Inboxes(Collective::AllReduce, FlagOrder::Batched),
        Self::Inboxes(REDUCE, FlagOrder::Batched),
        Self::Inboxes(Collective::Scan, FlagOrder::Prompt),
        Self::Inboxes(Collective::Exscan, FlagOrder::Batched),
        Self::InboxesOfTiers(Collective::ReduceScatter),
        Self::InboxesOfTiers(Collective::AllReduce),
        Self::InboxesOfTiers(Collective::Scan),
    ];

    /// Returns the number of outputs that the plans use in turn.
    pub(crate) fn outputs(self) -> u32 {
        match self {
            Self::InTurn | Self::BatchedInTurn | Self::TiersInTurn(_) | Self::GoalInTurn(..) => 2,
            _ => 1,
        }
    }

    /// Returns the number of inboxes that the plans use in turn.
    pub(crate) fn inboxes(self) -> u32 {
        match self {
            Self::Inboxes(..) | Self::InboxesOfTiers(_) => 2,
            Self::NetworkFirst(goal, _) if goal.is_reduction() => 2,
            _ => 1,
        }
    }

    /// Returns the plans of all ranks.
    ///
    /// Recursive doubling has plans for the next power of two of ranks.
    pub(crate) fn plans(self, ranks: u32, chunks: u32, in_place: bool) -> Vec<Plan> {
        let is_power = self.algorithm() == Algorithm::RecursiveDoubling;
        let ranks = if is_power { ranks.next_power_of_two() } else { ranks };
        let (outputs, inboxes) = (self.outputs(), self.inboxes());
        let flags = match self {
            Self::Inboxes(_, flags) => flags,
            Self::Batched | Self::BatchedInTurn | Self::TiersInTurn(_) => FlagOrder::Batched,
            Self::NetworkFirst(..) => FlagOrder::NetworkFirst,
            _ => FlagOrder::Prompt,
        };
        let collective = match self {
            Self::Goal(goal, _)
            | Self::GoalInTurn(goal, _)
            | Self::GoalOfTiers(goal, _)
            | Self::NetworkFirst(goal, _)
            | Self::Inboxes(goal, _)
            | Self::InboxesOfTiers(goal) => goal.with_root(Rank(ranks - 1)),
            _ => Collective::AllGather,
        };
        let in_place = in_place && outputs == 1 && collective.runs_in_place();
        let tiers = self.is_tiered();
        let shape =
            schedule::Shape { chunks, in_place, outputs, inboxes, flags, tiers, collective };
        let mut plans = schedule::plans(self.algorithm(), &self.topology(ranks), shape).unwrap();
        for plan in &mut plans {
            match self {
                Self::SelfCopyLane => split(plan, is_self_copy),
                Self::PutLane => split(plan, is_put_to_peer),
                _ => {}
            }
        }
        plans
    }

    fn algorithm(self) -> Algorithm {
        match self {
            Self::Ring => Algorithm::Ring,
            Self::Flat(algorithm)
            | Self::Nodes(algorithm)
            | Self::Tiers(algorithm)
            | Self::TiersInTurn(algorithm)
            | Self::Goal(_, algorithm)
            | Self::GoalInTurn(_, algorithm)
            | Self::NetworkFirst(_, algorithm)
            | Self::GoalOfTiers(_, algorithm) => algorithm,
            _ => Algorithm::Direct,
        }
    }

    fn is_tiered(self) -> bool {
        matches!(
            self,
            Self::Tiers(_)
                | Self::TiersInTurn(_)
                | Self::NetworkFirst(..)
                | Self::GoalOfTiers(..)
                | Self::InboxesOfTiers(_)
        )
    }

    /// Returns one node, or nodes of 2, 1, 3, 2, 1, 3, … ranks, or of 2 for recursive doubling.
    fn topology(self, ranks: u32) -> Topology {
        match self {
            Self::Tiers(Algorithm::RecursiveDoubling)
            | Self::TiersInTurn(Algorithm::RecursiveDoubling) => {
                let nodes: Vec<u32> = (0..ranks).map(|rank| rank / 2).collect();
                Topology::of_nodes(&nodes).unwrap()
            }
            _ if self.is_tiered() || matches!(self, Self::Nodes(_)) => {
                let node = |rank: u32| rank / 6 * 3 + [0, 0, 1, 2, 2, 2][rank as usize % 6];
                Topology::of_nodes(&(0..ranks).map(node).collect::<Vec<_>>()).unwrap()
            }
            _ => Topology::flat(ranks as usize).unwrap(),
        }
    }
}

/// Moves the steps that `picks` accepts into lane 1, and names that lane in the `ready` flags for which it waits.
///
/// Waits for arrivals stay in lane 0.
fn split(plan: &mut Plan, picks: impl Fn(&Plan, &Step) -> bool) {
    let steps = std::mem::take(&mut plan.lanes[0].steps);
    let (moved, home): (Vec<Step>, Vec<Step>) = steps.iter().partition(|step| picks(plan, step));
    let lane = LaneId(u32::from(moved.iter().any(|step| matches!(step, Step::Wait { .. }))));
    let name_lane = |step: Step| match step {
        Step::Signal { peer, flag: Flag::Ready { from, .. } } => {
            Step::Signal { peer, flag: Flag::Ready { from, lane } }
        }
        Step::Wait { flag: Flag::Ready { from, .. } } => {
            Step::Wait { flag: Flag::Ready { from, lane } }
        }
        other => other,
    };
    plan.lanes = [home, moved]
        .into_iter()
        .map(|steps| Lane { steps: steps.into_iter().map(name_lane).collect(), ..Lane::default() })
        .collect();
}

fn is_self_copy(plan: &Plan, step: &Step) -> bool {
    matches!(step, Step::Put { peer, .. } if *peer == plan.rank)
}

fn is_put_to_peer(plan: &Plan, step: &Step) -> bool {
    match step {
        Step::Put { peer, .. } | Step::Get { peer, .. } => *peer != plan.rank,
        Step::Reduce { .. } => false,
        Step::Signal { flag, .. } => matches!(flag, Flag::Arrived { .. }),
        Step::Wait { flag } => matches!(flag, Flag::Ready { .. }),
    }
}

/// Replaces the one occurrence of `from` in the text of `plan`.
pub(crate) fn edit(plan: &mut Plan, from: &str, to: &str) {
    let text = plan.to_string();
    assert_eq!(text.matches(from).count(), 1, "{from:?} must occur once in\n{text}");
    *plan = text.replace(from, to).parse().unwrap();
}
