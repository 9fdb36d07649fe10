//! Checks that the plans of all ranks agree with each other and refer only to ranks, chunks and
//! flags that exist.

use std::fmt::Display;

use peerlane_hal::Rank;

use super::fault::{Fault, Location, Position};
use super::symmetry::Symmetry;
use crate::collective::Collective;
use crate::plan::{
    CHUNKS_MAX, Cell, Flag, INBOXES_MAX, LANES_MAX, LaneId, OUTPUTS_MAX, Plan, Source, Step, Tier,
};

/// Returns the cells that must be copied to the output of `rank`, in order.
///
/// In place, the rank's own block is in the output from the start and is not copied.
pub(super) fn copied_cells(
    collective: Collective,
    rank: Rank,
    ranks: u32,
    chunks: u32,
    in_place: bool,
) -> impl Iterator<Item = Cell> + Clone {
    // In place, the output of a reduction begins with contributions, and not with a result.
    let has_own = in_place && !collective.is_reduction();
    let providers = (0..ranks).map(Rank).filter(move |&block| collective.requires(block, rank));
    let copied = providers.filter(move |&block| !(has_own && block == rank));

    copied.flat_map(move |block| (0..chunks).map(move |chunk| Cell { block, chunk }))
}

/// Stores the lanes of the ranks to be checked, and the properties that all plans share.
///
/// These ranks are called followed, and represent all others. The verifier identifies a lane by its
/// index in `lanes`.
#[derive(Debug)]
pub(super) struct PlanSet {
    pub(super) collective: Collective,
    pub(super) ranks: u32,
    pub(super) chunks: u32,
    pub(super) in_place: bool,
    /// The number of outputs that starts use in turn.
    outputs: u32,
    /// The number of sets of flags, and of inboxes in a reduction, that starts use in turn.
    pub(super) flag_sets: u32,
    pub(super) lanes_per_rank: usize,
    pub(super) symmetry: Symmetry,
    pub(super) lanes: Vec<ClosedLane>,
}

/// The steps of one lane, including those added at its beginning and end.
#[derive(Debug)]
pub(super) struct ClosedLane {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) tier: Tier,
    pub(super) steps: Vec<Step>,
    entry_steps: usize,
    plan_steps: usize,
}

impl PlanSet {
    /// Creates a set from the plans of the ranks that represent all others in `symmetry`.
    pub(super) fn new(plans: &[Plan], symmetry: Symmetry) -> Self {
        let lanes = plans
            .iter()
            .flat_map(|plan| plan.lane_ids().map(|lane| ClosedLane::new(plan, lane)))
            .collect();

        // The callers have checked that there is a plan, so the defaults only avoid a panic.
        let first = plans.first();
        Self {
            collective: first.map_or(Collective::AllGather, |plan| plan.collective),
            ranks: Rank::at(symmetry.ranks()).0,
            chunks: first.map_or(0, |plan| plan.chunks),
            in_place: first.is_some_and(|plan| plan.in_place),
            outputs: first.map_or(1, |plan| plan.outputs),
            flag_sets: first.map_or(1, Plan::flag_sets),
            lanes_per_rank: first.map_or(1, |plan| plan.lanes.len()),
            symmetry,
            lanes,
        }
    }

    /// Returns each rank whose lanes are in the set, with the index of its lane 0 in `lanes`.
    pub(super) fn followed_ranks(&self) -> impl Iterator<Item = (Rank, usize)> + '_ {
        let homes = (0..self.lanes.len()).step_by(self.lanes_per_rank);
        homes.map(|home| (self.lanes[home].rank, home))
    }

    /// Returns the index in `lanes` of the lane that is, or represents, `lane` of `rank`.
    pub(super) fn followed_lane(&self, rank: Rank, lane: LaneId) -> usize {
        self.symmetry.representative_index(rank) * self.lanes_per_rank + lane.index()
    }

    /// Returns the number of lanes of all ranks, which is the number of entries of a vector clock.
    pub(super) fn all_lanes(&self) -> usize {
        self.ranks as usize * self.lanes_per_rank
    }

    /// Returns the index of the entry for `lane` of `rank` in a vector clock.
    ///
    /// Every rank has its own entries, even if another rank represents it.
    pub(super) fn clock_index(&self, rank: Rank, lane: LaneId) -> usize {
        rank.index() * self.lanes_per_rank + lane.index()
    }

    /// Returns the rank and the lane whose entry in a vector clock has this `index`.
    pub(super) fn lane_of_clock(&self, index: usize) -> (Rank, LaneId) {
        let rank = Rank::at(index / self.lanes_per_rank);
        let lane = LaneId(Rank::at(index % self.lanes_per_rank).0);
        (rank, lane)
    }

    /// Returns all steps of the set, each with its lane index and its index in the lane.
    pub(super) fn steps(&self) -> impl Iterator<Item = (usize, usize, Step)> {
        self.lanes.iter().enumerate().flat_map(|(number, lane)| {
            lane.steps.iter().enumerate().map(move |(at, &step)| (number, at, step))
        })
    }

    /// Returns how many starts before the wait at step `at` its signal comes, or 0 for other steps.
    pub(super) fn lag(&self, lane: usize, at: usize) -> i64 {
        self.lanes[lane].lag(at).into()
    }

    /// Returns how many starts before the start of `step` the target of the step must have entered,
    /// so that it no longer uses the memory that the step writes to.
    ///
    /// The target uses that memory from the last start that wrote to it until it enters the start
    /// after that one.
    pub(super) fn age_of_target(&self, step: &Step) -> u32 {
        // A contribution goes to an inbox, and every set of flags has one. Everything else goes to
        // an output.
        let buffers = if step.contributes(self.collective) { self.flag_sets } else { self.outputs };
        buffers - 1
    }

    /// Returns whether the output of `rank` already holds `cell` at the beginning of a start.
    pub(super) fn is_initial(&self, rank: Rank, cell: Cell) -> bool {
        self.in_place && cell.block == rank && !self.collective.is_reduction()
    }

    pub(super) fn location(&self, lane: usize, at: usize) -> Location {
        self.lanes[lane].location(at)
    }

    /// Returns the location in the plan of `rank` that step `at` of `lane` represents.
    pub(super) fn rotated_location(&self, rank: Rank, (lane, at): (usize, usize)) -> Location {
        let location = self.location(lane, at);
        let step = self.symmetry.rotated_step(self.symmetry.rotation_of(rank), location.step);
        Location { rank, step, ..location }
    }
}

impl ClosedLane {
    fn new(plan: &Plan, lane: LaneId) -> Self {
        let plan_steps = plan.lanes[lane.index()].steps.len();
        let others = plan.lanes.iter().skip(1).filter(|other| !other.steps.is_empty());
        // Lane 0 begins with a signal to each other lane that has steps, and such a lane with one
        // wait.
        let entry_steps =
            if lane == LaneId::HOME { others.count() } else { usize::from(plan_steps > 0) };

        let tier = plan.lanes[lane.index()].tier;
        let steps = plan.closed_lane(lane, |_| true);
        Self { rank: plan.rank, lane, tier, steps, entry_steps, plan_steps }
    }

    pub(super) fn lag(&self, at: usize) -> u32 {
        match self.steps[at] {
            Step::Wait { flag } => flag.lag(),
            _ => 0,
        }
    }

    fn location(&self, at: usize) -> Location {
        let position = match at.checked_sub(self.entry_steps) {
            None => Position::Entry,
            Some(index) if index < self.plan_steps => Position::Step(index + 1),
            Some(_) => Position::Exit,
        };

        Location { rank: self.rank, lane: self.lane, position, step: self.steps[at] }
    }
}

/// Checks that plans agree and refer only to existing ranks, chunks, flags and lanes, and returns
/// the first plan.
///
/// `plans` represent the plans of `ranks` ranks. `owners` has the rank of each plan, in the same
/// order.
pub(super) fn check<'a>(
    plans: &'a [Plan],
    ranks: usize,
    owners: &[Rank],
) -> Result<&'a Plan, Fault> {
    let first = plans.first().ok_or(Fault::NoPlan)?;
    for (index, (plan, owner)) in plans.iter().zip(owners).enumerate() {
        check_equal(index, "ranks", &u64::from(plan.ranks), &(ranks as u64))?;
        check_equal(index, "rank", &plan.rank, owner)?;
        check_equal(index, "collective", &plan.collective, &first.collective)?;
        check_equal(index, "algorithm", &plan.algorithm, &first.algorithm)?;
        check_equal(index, "chunks", &plan.chunks, &first.chunks)?;
        check_equal(index, "in_place", &plan.in_place, &first.in_place)?;
        check_equal(index, "outputs", &plan.outputs, &first.outputs)?;
        check_equal(index, "inboxes", &plan.inboxes, &first.inboxes)?;
        check_equal(index, "flags", &plan.flags, &first.flags)?;
    }

    // Lane 0 is accessed below, so a plan without lanes is refused first.
    plans.iter().try_for_each(check_sizes)?;

    for (index, plan) in plans.iter().enumerate() {
        check_equal(index, "number of lanes", &plan.lanes.len(), &first.lanes.len())?;
        check_equal(index, "tier of lane 0", &plan.lanes[0].tier, &Tier::Local)?;

        for (lane, (found, expected)) in plan.lanes.iter().zip(&first.lanes).enumerate() {
            // The name of the field is formatted only for an error.
            if found.tier != expected.tier {
                let field = format!("tier of lane {lane}");
                check_equal(index, &field, &found.tier, &expected.tier)?;
            }
        }
    }

    plans.iter().try_for_each(check_steps)?;

    Ok(first)
}

fn check_equal<T: PartialEq + Display>(
    index: usize,
    field: &str,
    found: &T,
    expected: &T,
) -> Result<(), Fault> {
    if found == expected {
        return Ok(());
    }

    Err(Fault::Disagrees {
        index,
        field: field.to_owned(),
        found: found.to_string(),
        expected: expected.to_string(),
    })
}

/// Checks that a plan's numbers of chunks, outputs, inboxes and lanes are in bounds, and that its
/// root exists.
fn check_sizes(plan: &Plan) -> Result<(), Fault> {
    let &Plan { collective, rank, chunks, in_place, outputs, inboxes, .. } = plan;

    if !(1..=CHUNKS_MAX).contains(&chunks) {
        return Err(Fault::Chunks { rank, chunks });
    }

    // In place, one buffer of the caller is both the input and the output.
    if !(1..=OUTPUTS_MAX).contains(&outputs) || (in_place && outputs > 1) {
        return Err(Fault::Outputs { rank, outputs });
    }

    let inboxes_max = if collective.is_reduction() { INBOXES_MAX } else { 1 };
    if !(1..=inboxes_max).contains(&inboxes) {
        return Err(Fault::Inboxes { rank, inboxes });
    }

    if let Err(text) = collective.check(plan.ranks as usize, in_place) {
        return Err(Fault::Collective { rank, text });
    }

    if plan.lanes.is_empty() {
        return Err(Fault::NoLane { rank });
    }
    if plan.lanes.len() > LANES_MAX {
        return Err(Fault::Lanes { rank, lanes: plan.lanes.len() });
    }

    Ok(())
}

fn check_steps(plan: &Plan) -> Result<(), Fault> {
    for (id, lane) in plan.lane_ids().zip(&plan.lanes) {
        for (at, &step) in lane.steps.iter().enumerate() {
            let position = Position::Step(at + 1);
            let location = Location { rank: plan.rank, lane: id, position, step };
            StepCheck { plan, location }.check()?;
        }
    }

    Ok(())
}

/// Checks that a step refers only to ranks, cells, flags and lanes that exist in its plan.
struct StepCheck<'a> {
    plan: &'a Plan,
    location: Location,
}

impl StepCheck<'_> {
    /// Checks the ranks, cells and flags of the step, and that its rank may execute such a step.
    fn check(&self) -> Result<(), Fault> {
        let own_rank = self.location.rank;
        match self.location.step {
            Step::Put { peer, cell, from } => self.check_copy(peer, cell, from, own_rank),
            Step::Get { from: Source::Input, .. } if self.plan.collective.is_reduction() => {
                Err(Fault::ContributionByGet { location: self.location })
            }
            Step::Get { peer, cell, from } => self.check_copy(peer, cell, from, peer),
            Step::Reduce { cell, from } => {
                self.check_rank(from)?;
                self.check_cell(cell)?;

                let collective = self.plan.collective;
                let reduces = collective.reduces(own_rank);
                self.check_exists(reduces && cell.block == own_rank, || {
                    let expected = match reduces {
                        true => format!("a cell of block {own_rank}"),
                        false => format!("no addition on rank {own_rank}"),
                    };
                    (format!("cell {cell} to reduce"), expected)
                })?;

                self.check_exists(collective.contributes(from, own_rank), || {
                    let name = collective.with_article();
                    let expected = format!("a rank that contributes to block {own_rank} in {name}");
                    (format!("contribution of rank {from}"), expected)
                })
            }
            Step::Signal { peer, flag } => {
                self.check_rank(peer)?;
                // A rank knows its own last start without a flag. The race check relies on this: it
                // takes every flag between lanes of one rank as one of the present start.
                self.check_exists(flag.lag() == 0 || peer != own_rank, || {
                    let expected = "another reader, because a rank knows its own last start";
                    (format!("flag {flag} of rank {peer}"), expected.to_owned())
                })?;
                self.check_flag(peer, flag)
            }
            Step::Wait { flag } => self.check_flag(own_rank, flag),
        }
    }

    /// Checks the fields of a put to or get from `peer` that reads `cell` in memory of `owner`.
    fn check_copy(&self, peer: Rank, cell: Cell, from: Source, owner: Rank) -> Result<(), Fault> {
        self.check_rank(peer)?;
        self.check_cell(cell)?;
        self.check_source(from)?;

        // An input has only the block of its owner, and an output can have any block.
        self.check_exists(from == Source::Output || cell.block == owner, || {
            (format!("cell {cell} of the input"), format!("a cell of block {owner}"))
        })
    }

    fn check_rank(&self, rank: Rank) -> Result<(), Fault> {
        let ranks = self.plan.ranks as usize;
        self.check_exists(rank.index() < ranks, || {
            (format!("rank {rank}"), format!("a rank below {ranks}"))
        })
    }

    fn check_cell(&self, cell: Cell) -> Result<(), Fault> {
        self.check_rank(cell.block)?;
        let chunks = self.plan.chunks;
        self.check_exists(cell.chunk < chunks, || {
            (format!("chunk {}", cell.chunk), format!("a chunk below {chunks}"))
        })
    }

    fn check_source(&self, from: Source) -> Result<(), Fault> {
        let location = self.location;
        let collective = self.plan.collective;
        match from {
            Source::Output if !collective.has_equal_outputs() => {
                Err(Fault::UnequalOutputs { location, collective })
            }
            _ => Ok(()),
        }
    }

    /// Checks that plans may use `flag`, and that its rank, cell and lane exist.
    fn check_flag(&self, reader: Rank, flag: Flag) -> Result<(), Fault> {
        // Inboxes in turn would be enough, but no schedule makes such plans.
        self.check_exists(flag.lag() == 0 || self.plan.flag_sets() > 1, || {
            let expected = "another flag, because neither outputs nor inboxes are used in turn";
            (format!("flag {flag}"), expected.to_owned())
        })?;

        match flag {
            Flag::Ready { from: rank, lane }
            | Flag::Free { from: rank, lane }
            | Flag::Taken { by: rank, lane } => {
                self.check_rank(rank)?;
                self.check_lane(reader, lane)
            }
            Flag::Arrived { cell, lane } | Flag::Contributed { cell, lane } => {
                // Only the flags of a reduction have words for contributions.
                let is_known =
                    matches!(flag, Flag::Arrived { .. }) || self.plan.collective.is_reduction();
                self.check_exists(is_known, || {
                    let name = self.plan.collective.with_article();
                    (format!("flag {flag} in {name}"), "a flag of a copy".to_owned())
                })?;

                self.check_cell(cell)?;
                self.check_lane(reader, lane)
            }
            Flag::Go { .. } | Flag::Sent { .. } => Err(Fault::Reserved { location: self.location }),
        }
    }

    fn check_lane(&self, rank: Rank, lane: LaneId) -> Result<(), Fault> {
        let lanes = self.plan.lanes.len();
        self.check_exists(lane.index() < lanes, || {
            (format!("lane {lane} of rank {rank}"), format!("a lane below {lanes}"))
        })
    }

    fn check_exists(
        &self,
        exists: bool,
        describe: impl FnOnce() -> (String, String),
    ) -> Result<(), Fault> {
        if exists {
            return Ok(());
        }

        let (what, expected) = describe();
        Err(Fault::Unknown { location: self.location, what, expected })
    }
}
