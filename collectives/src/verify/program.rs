//! The closed lanes of all ranks in one list.

use peerlane_hal::Rank;

use super::fault::{Place, Position};
use crate::plan::{Cell, LaneId, Plan, Step, Tier};

/// The lanes of all ranks, rank by rank; a lane's number here names it in the whole verifier.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) ranks: u32,
    pub(super) parts: u32,
    pub(super) in_place: bool,
    /// How many outputs and sets of flags are used in turn.
    pub(super) outputs: u32,
    pub(super) lanes: Vec<ClosedLane>,
}

#[derive(Debug)]
pub(super) struct ClosedLane {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) tier: Tier,
    pub(super) steps: Vec<Step>,
    entry: usize,
    body: usize,
}

impl Program {
    /// Closes the lanes of plans that agree.
    pub(super) fn new(plans: &[Plan]) -> Self {
        let lanes = plans
            .iter()
            .flat_map(|plan| plan.lane_ids().map(|lane| ClosedLane::new(plan, lane)))
            .collect();
        let (parts, in_place, outputs) =
            plans.first().map_or((0, false, 1), |plan| (plan.parts, plan.in_place, plan.outputs));
        Self { ranks: Rank::at(plans.len()).0, parts, in_place, outputs, lanes }
    }

    /// Every step of every lane, with the lane's number and the step's index in it.
    pub(super) fn steps(&self) -> impl Iterator<Item = (usize, usize, Step)> {
        self.lanes.iter().enumerate().flat_map(|(number, lane)| {
            lane.steps.iter().enumerate().map(move |(at, &step)| (number, at, step))
        })
    }

    /// All cells of one output, in order.
    pub(super) fn cells(&self) -> impl Iterator<Item = Cell> + use<> {
        let &Self { ranks, parts, .. } = self;
        (0..ranks)
            .flat_map(move |shard| (0..parts).map(move |part| Cell { shard: Rank(shard), part }))
    }

    /// Whether a cell lies in the output of `rank` before anything is copied.
    pub(super) fn is_there_from_the_start(&self, rank: Rank, cell: Cell) -> bool {
        self.in_place && cell.shard == rank
    }

    /// Where a step stands.
    pub(super) fn place(&self, lane: usize, at: usize) -> Place {
        self.lanes[lane].place(at)
    }
}

impl ClosedLane {
    fn new(plan: &Plan, lane: LaneId) -> Self {
        let body = plan.lanes[lane.index()].steps.len();
        let others = || plan.lanes.iter().skip(1).filter(|lane| !lane.steps.is_empty());
        let entry = if lane == LaneId::HOME { others().count() } else { usize::from(body > 0) };
        let tier = plan.lanes[lane.index()].tier;
        let steps = plan.closed_lane(lane, |_| true);
        Self { rank: plan.rank, lane, tier, steps, entry, body }
    }

    fn place(&self, at: usize) -> Place {
        let position = match at.checked_sub(self.entry) {
            None => Position::Entry,
            Some(at) if at < self.body => Position::Step(at + 1),
            Some(_) => Position::Exit,
        };
        Place { rank: self.rank, lane: self.lane, position, step: self.steps[at] }
    }
}
