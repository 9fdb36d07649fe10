//! Right plans of several forms, for tests: more forms than the crate has algorithms, so that
//! forwarding and several lanes are met too.

use peerlane_collectives::allgather;
use peerlane_collectives::plan::{
    Algorithm, Cell, Flag, FlagOrder, Lane, LaneId, Plan, Source, Step,
};
use peerlane_collectives::topology::Topology;
use peerlane_hal::Rank;

/// The form of a set of plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// The crate's own: one lane that pushes to all.
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
}

impl Shape {
    pub(crate) const ALL: [Self; 7] = [
        Self::Direct,
        Self::Ring,
        Self::InTurn,
        Self::Batched,
        Self::BatchedInTurn,
        Self::Aside,
        Self::Away,
    ];

    /// How many outputs its plans use in turn.
    pub(crate) fn outputs(self) -> u32 {
        if matches!(self, Self::InTurn | Self::BatchedInTurn) { 2 } else { 1 }
    }

    /// The plans of all ranks.
    pub(crate) fn plans(self, ranks: u32, parts: u32, in_place: bool) -> Vec<Plan> {
        let topology = Topology::flat(ranks as usize).unwrap();
        let outputs = self.outputs();
        let flags = match self {
            Self::Batched | Self::BatchedInTurn => FlagOrder::Batched,
            _ => FlagOrder::Prompt,
        };
        let in_place = in_place && outputs == 1;
        let shape = allgather::Shape { parts, in_place, outputs, flags, tiers: false };
        let plans = allgather::plans(Algorithm::Direct, &topology, shape);
        let mut plans = plans.unwrap();
        for plan in &mut plans {
            match self {
                Self::Direct | Self::InTurn | Self::Batched | Self::BatchedInTurn => {}
                Self::Ring => plan.lanes = vec![Lane { steps: ring(plan), ..Lane::default() }],
                Self::Aside => split(plan, is_own_copy),
                Self::Away => split(plan, is_push),
            }
        }
        plans
    }
}

/// Moves the steps that `aside` picks into a lane 1.
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

fn ring(plan: &Plan) -> Vec<Step> {
    let &Plan { rank, ranks, parts, in_place, .. } = plan;
    let turned = |by: u32| Rank((rank.0 + by) % ranks);
    let (next, previous) = (turned(1), turned(ranks - 1));
    let cells = |shard| (0..parts).map(move |part| Cell { shard, part });
    let mut steps = Vec::new();
    if !in_place {
        steps.extend(cells(rank).map(|cell| Step::Put { peer: rank, cell, from: Source::Input }));
    }
    if ranks == 1 {
        return steps;
    }
    let lane = LaneId::HOME;
    steps.insert(0, Step::Signal { peer: previous, flag: Flag::Ready { from: rank, lane } });
    steps.push(Step::Wait { flag: Flag::Ready { from: next, lane } });
    for hop in 0..ranks - 1 {
        let from = if hop == 0 { Source::Input } else { Source::Output };
        for cell in cells(turned(ranks - hop)) {
            let flag = Flag::Arrived { cell, lane };
            if hop > 0 {
                steps.push(Step::Wait { flag });
            }
            steps.extend([Step::Put { peer: next, cell, from }, Step::Signal { peer: next, flag }]);
        }
    }
    steps.extend(cells(next).map(|cell| Step::Wait { flag: Flag::Arrived { cell, lane } }));
    steps
}
