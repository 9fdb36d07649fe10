//! The closed lanes of all ranks, or of those that stand for the others, in one list.

use peerlane_hal::Rank;

use super::fault::{Place, Position};
use super::symmetry::Symmetry;
use crate::collective::Collective;
use crate::plan::{Cell, LaneId, Plan, Step, Tier};

/// The lanes that are followed, representative by representative; a lane's number here names it in
/// the whole verifier.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) collective: Collective,
    pub(super) ranks: u32,
    pub(super) chunks: u32,
    pub(super) in_place: bool,
    /// How many outputs and sets of flags are used in turn.
    pub(super) outputs: u32,
    /// How many lanes each rank has.
    pub(super) width: usize,
    pub(super) symmetry: Symmetry,
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
    /// Closes the lanes of plans that agree: those of the representatives, in order.
    pub(super) fn new(plans: &[Plan], symmetry: Symmetry) -> Self {
        let lanes = plans
            .iter()
            .flat_map(|plan| plan.lane_ids().map(|lane| ClosedLane::new(plan, lane)))
            .collect();
        let first = plans.first();
        Self {
            collective: first.map_or(Collective::AllGather, |plan| plan.collective),
            ranks: Rank::at(symmetry.ranks()).0,
            chunks: first.map_or(0, |plan| plan.chunks),
            in_place: first.is_some_and(|plan| plan.in_place),
            outputs: first.map_or(1, |plan| plan.outputs),
            width: first.map_or(1, |plan| plan.lanes.len()),
            symmetry,
            lanes,
        }
    }

    /// The ranks that are followed, with the number of their home lane.
    pub(super) fn homes(&self) -> impl Iterator<Item = (Rank, usize)> + '_ {
        (0..self.lanes.len()).step_by(self.width).map(|home| (self.lanes[home].rank, home))
    }

    /// The number of the lane that stands for `lane` of `rank`.
    pub(super) fn lane(&self, rank: Rank, lane: LaneId) -> usize {
        self.symmetry.number(rank) * self.width + lane.index()
    }

    /// Numbers all lanes of all ranks.
    pub(super) fn column(&self, rank: Rank, lane: LaneId) -> usize {
        rank.index() * self.width + lane.index()
    }

    /// The lane with the number of [`column`](Self::column).
    pub(super) fn lane_of_column(&self, column: usize) -> (Rank, LaneId) {
        (Rank::at(column / self.width), LaneId(Rank::at(column % self.width).0))
    }

    /// Every step of every lane, with the lane's number and the step's index in it.
    pub(super) fn steps(&self) -> impl Iterator<Item = (usize, usize, Step)> {
        self.lanes.iter().enumerate().flat_map(|(number, lane)| {
            lane.steps.iter().enumerate().map(move |(at, &step)| (number, at, step))
        })
    }

    /// Whether a cell lies in the output of `rank` before anything is copied.
    pub(super) fn is_there_from_the_start(&self, rank: Rank, cell: Cell) -> bool {
        self.in_place && cell.shard == rank
    }

    /// Where a step of a followed lane stands.
    pub(super) fn place(&self, lane: usize, at: usize) -> Place {
        self.lanes[lane].place(at)
    }

    /// Where the same step stands in the lane of a rank for which the followed lane stands.
    pub(super) fn turned_place(&self, rank: Rank, (lane, at): (usize, usize)) -> Place {
        let place = self.place(lane, at);
        let step = self.symmetry.turned_step(self.symmetry.turn_of(rank), place.step);
        Place { rank, step, ..place }
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
