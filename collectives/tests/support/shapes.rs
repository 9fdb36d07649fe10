//! Right plans of several forms, for tests: every algorithm of the crate, and direct plans with other
//! lanes than it gives them.

use peerlane_collectives::plan::{Algorithm, Flag, FlagOrder, Lane, LaneId, Plan, Step};
use peerlane_collectives::schedule;
use peerlane_collectives::topology::Topology;

/// The form of a set of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// One lane that pushes to all.
    Direct,
    /// One lane that forwards to the next rank.
    Ring,
    /// Direct, with two outputs in turn, so without `ready`; never in place.
    InTurn,
    /// Direct, with batched flags.
    Batched,
    /// Both; only arrivals are left of the flags.
    BatchedInTurn,
    /// Direct, with the own shard copied in lane 1.
    Aside,
    /// Direct, with the pushes in lane 1.
    Away,
    /// An algorithm on one node.
    Flat(Algorithm),
    /// An algorithm on uneven nodes that one fabric reaches.
    Nodes(Algorithm),
    /// An algorithm on uneven nodes with a network between them.
    Tiers(Algorithm),
    /// The same with two outputs in turn and batched flags.
    TiersInTurn(Algorithm),
}

impl Shape {
    pub(crate) const ALL: [Self; 24] = [
        Self::Direct,
        Self::Ring,
        Self::InTurn,
        Self::Batched,
        Self::BatchedInTurn,
        Self::Aside,
        Self::Away,
        Self::Flat(Algorithm::Pull),
        Self::Flat(Algorithm::DoubleRing),
        Self::Nodes(Algorithm::Ring),
        Self::Nodes(Algorithm::Hierarchical),
        Self::Nodes(Algorithm::HierarchicalRing),
        Self::Tiers(Algorithm::Direct),
        Self::Tiers(Algorithm::Pull),
        Self::Tiers(Algorithm::Ring),
        Self::Tiers(Algorithm::DoubleRing),
        Self::Tiers(Algorithm::Hierarchical),
        Self::Tiers(Algorithm::HierarchicalRing),
        Self::TiersInTurn(Algorithm::Direct),
        Self::TiersInTurn(Algorithm::Pull),
        Self::TiersInTurn(Algorithm::Ring),
        Self::TiersInTurn(Algorithm::DoubleRing),
        Self::TiersInTurn(Algorithm::Hierarchical),
        Self::TiersInTurn(Algorithm::HierarchicalRing),
    ];

    /// How many outputs its plans use in turn.
    pub(crate) fn outputs(self) -> u32 {
        match self {
            Self::InTurn | Self::BatchedInTurn | Self::TiersInTurn(_) => 2,
            _ => 1,
        }
    }

    /// The plans of all ranks.
    pub(crate) fn plans(self, ranks: u32, chunks: u32, in_place: bool) -> Vec<Plan> {
        let outputs = self.outputs();
        let flags = match self {
            Self::Batched | Self::BatchedInTurn | Self::TiersInTurn(_) => FlagOrder::Batched,
            _ => FlagOrder::Prompt,
        };
        let in_place = in_place && outputs == 1;
        let tiers = matches!(self, Self::Tiers(_) | Self::TiersInTurn(_));
        let shape = schedule::Shape {
            chunks,
            in_place,
            outputs,
            flags,
            tiers,
            ..schedule::Shape::default()
        };
        let mut plans = schedule::plans(self.algorithm(), &self.topology(ranks), shape).unwrap();
        for plan in &mut plans {
            match self {
                Self::Aside => split(plan, is_own_copy),
                Self::Away => split(plan, is_push),
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
            | Self::TiersInTurn(algorithm) => algorithm,
            _ => Algorithm::Direct,
        }
    }

    /// One node, or nodes of 2, 1, 3, 2, 1, 3, … ranks.
    fn topology(self, ranks: u32) -> Topology {
        match self {
            Self::Nodes(_) | Self::Tiers(_) | Self::TiersInTurn(_) => {
                let node = |rank: u32| rank / 6 * 3 + [0, 0, 1, 2, 2, 2][rank as usize % 6];
                Topology::of_nodes(&(0..ranks).map(node).collect::<Vec<_>>()).unwrap()
            }
            _ => Topology::flat(ranks as usize).unwrap(),
        }
    }
}

/// Moves the steps that `aside` picks into a lane 1, and names it in the flags for which it waits now:
/// of pushes, `ready`. Arrivals are waited for at home in any case.
fn split(plan: &mut Plan, aside: impl Fn(&Plan, &Step) -> bool) {
    let steps = std::mem::take(&mut plan.lanes[0].steps);
    let (moved, home): (Vec<Step>, Vec<Step>) = steps.iter().partition(|step| aside(plan, step));
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

fn is_own_copy(plan: &Plan, step: &Step) -> bool {
    matches!(step, Step::Put { peer, .. } if *peer == plan.rank)
}

fn is_push(plan: &Plan, step: &Step) -> bool {
    match step {
        Step::Put { peer, .. } | Step::Get { peer, .. } => *peer != plan.rank,
        Step::Signal { flag, .. } => matches!(flag, Flag::Arrived { .. }),
        Step::Wait { flag } => matches!(flag, Flag::Ready { .. }),
    }
}
