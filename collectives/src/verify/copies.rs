//! Checks that every chunk that a rank needs is copied to it exactly once.

use peerlane_hal::Rank;

use super::fault::Fault;
use super::flags::Flags;
use super::plan_set::{PlanSet, copied_cells};
use crate::plan::{Cell, LaneId, Step};

#[derive(Debug)]
pub(super) struct Copies {
    by_output: Vec<Vec<CellCopy>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CellCopy {
    pub(super) cell: Cell,
    pub(super) rank: Rank,
    pub(super) step: (usize, usize),
}

impl Copies {
    pub(super) fn of(&self, set: &PlanSet, rank: Rank, cell: Cell) -> Option<CellCopy> {
        let copies = self.of_output(set, rank);
        let index = copies.binary_search_by_key(&cell, |copy| copy.cell);
        index.ok().map(|index| copies[index])
    }

    pub(super) fn of_output(&self, set: &PlanSet, rank: Rank) -> &[CellCopy] {
        &self.by_output[set.symmetry.number(rank)]
    }
}

/// The [race check](super::races) proves that the copies are complete when the caller gets the output. A number in a
/// plan decides no allocation here, and the comparison ends at the first missing cell.
pub(super) fn check(set: &PlanSet) -> Result<Copies, Fault> {
    let symmetry = &set.symmetry;
    let mut by_output: Vec<Vec<CellCopy>> = vec![Vec::new(); set.lanes.len() / set.lanes_per_rank];
    for (lane, at, step) in set.steps() {
        let own_rank = set.lanes[lane].rank;
        let (target, cell) = match step {
            Step::Put { peer, cell, .. } => (peer, cell),
            Step::Get { cell, .. } => (own_rank, cell),
            Step::Signal { .. } | Step::Wait { .. } => continue,
        };
        let back = symmetry.rotation_back(target);
        let (cell, rank) = (symmetry.rotated_cell(back, cell), symmetry.rotated(back, own_rank));
        by_output[symmetry.number(target)].push(CellCopy { cell, rank, step: (lane, at) });
    }
    for ((rank, _), copies) in set.followed_ranks().zip(&mut by_output) {
        copies.sort_unstable();
        check_output(set, rank, copies)?;
    }
    Ok(Copies { by_output })
}

fn check_output(set: &PlanSet, rank: Rank, copies: &[CellCopy]) -> Result<(), Fault> {
    let location = |copy: &CellCopy| set.rotated_location(copy.rank, copy.step);
    if let Some(copy) = copies.iter().find(|copy| set.is_initial(rank, copy.cell)) {
        return Err(Fault::CopiedInPlace { location: location(copy) });
    }
    let twice = copies.windows(2).find(|pair| pair[0].cell == pair[1].cell);
    if let Some([first, second]) = twice {
        return Err(Fault::CopiedTwice { first: location(first), second: location(second) });
    }
    let is_required = |copy: &&CellCopy| set.collective.requires(copy.cell.block, rank);
    if let Some(copy) = copies.iter().find(|copy| !is_required(copy)) {
        return Err(Fault::NotRequired { location: location(copy), rank });
    }
    let &PlanSet { collective, ranks, chunks, in_place, .. } = set;
    let mut found = copies.iter().map(|copy| copy.cell);
    let mut required = copied_cells(collective, rank, ranks, chunks, in_place);
    match required.find(|&cell| found.next() != Some(cell)) {
        Some(cell) => Err(Fault::NeverCopied { rank, cell }),
        None => Ok(()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) at: usize,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct WaitRange {
    first: u32,
    end: u32,
}

impl WaitRange {
    pub(super) fn indices(self) -> impl Iterator<Item = usize> {
        self.first as usize..self.end as usize
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Getter {
    pub(super) rank: Rank,
    pub(super) lane: usize,
    pub(super) waits: WaitRange,
}

/// A signal tells a peer that the signalling lane has completed all puts to that peer and all gets from it. A signal to
/// the own rank publishes that the lane has completed everything, which for puts to other ranks means only that their
/// sources are free. A lane that passes the wait for such a signal knows what it publishes. So for everything that a
/// lane completes, the first signal after it to each possible reader names a wait, and a lane with one of these waits
/// in its past knows it.
#[derive(Debug)]
pub(super) struct Completions {
    waits: Vec<Wait>,
    copies: Vec<Vec<WaitRange>>,
    lane_ends: Vec<WaitRange>,
    joins_home: Vec<bool>,
    getters: Vec<Vec<Getter>>,
}

impl Completions {
    pub(super) fn new(set: &PlanSet, flags: &Flags) -> Self {
        let mut completions = Self {
            waits: Vec::new(),
            copies: Vec::with_capacity(set.lanes.len()),
            lane_ends: Vec::with_capacity(set.lanes.len()),
            joins_home: (0..set.lanes.len()).map(|lane| joins_home(set, flags, lane)).collect(),
            getters: vec![Vec::new(); set.lanes.len() / set.lanes_per_rank],
        };
        let mut next_waits = NextWaits { set, at: vec![None; set.all_lanes()] };
        for lane in 0..set.lanes.len() {
            next_waits.at.fill(None);
            completions.add_lane(set, flags, lane, &mut next_waits);
        }
        completions
    }

    /// The steps of a lane are visited in reverse order, so that the signals after a copy are known at the copy.
    fn add_lane(
        &mut self,
        set: &PlanSet,
        flags: &Flags,
        lane: usize,
        next_waits: &mut NextWaits<'_>,
    ) {
        let own_rank = set.lanes[lane].rank;
        let none = WaitRange { first: 0, end: 0 };
        let mut copies = vec![none; set.lanes[lane].steps.len()];
        let mut lane_end = None;
        for (at, &step) in set.lanes[lane].steps.iter().enumerate().rev() {
            let (peer, other) = match step {
                Step::Wait { .. } => continue,
                Step::Signal { peer, .. } => {
                    let (reader, wait) = flags.of_step(lane, at).wait;
                    next_waits.add_signal(peer, set.lanes[reader].lane, wait);
                    continue;
                }
                Step::Put { peer, .. } => (peer, peer),
                Step::Get { peer, .. } => (peer, own_rank),
            };
            if lane_end.is_none() {
                lane_end = Some(self.push(next_waits.of_ranks([own_rank, own_rank])));
            }
            let waits = self.push(next_waits.of_ranks([peer, other]));
            if matches!(step, Step::Get { .. }) {
                self.add_get(set, lane, peer, waits);
            }
            copies[at] = waits;
        }
        self.copies.push(copies);
        let lane_end =
            lane_end.unwrap_or_else(|| self.push(next_waits.of_ranks([own_rank, own_rank])));
        self.lane_ends.push(lane_end);
    }

    fn push(&mut self, waits: impl Iterator<Item = Wait>) -> WaitRange {
        let next = |waits: &[Wait]| u32::try_from(waits.len()).expect("fewer than 2^32 waits");
        let first = next(&self.waits);
        self.waits.extend(waits);
        WaitRange { first, end: next(&self.waits) }
    }

    fn add_get(&mut self, set: &PlanSet, lane: usize, peer: Rank, waits: WaitRange) {
        let symmetry = &set.symmetry;
        let rank = symmetry.rotated(symmetry.rotation_back(peer), set.lanes[lane].rank);
        let getters = &mut self.getters[symmetry.number(peer)];
        let mut of_lane = getters.iter().rev().take_while(|getter| getter.lane == lane);
        if of_lane.all(|getter| getter.rank != rank) {
            getters.push(Getter { rank, lane, waits });
        }
    }

    pub(super) fn of_copy(&self, (lane, at): (usize, usize)) -> WaitRange {
        self.copies[lane][at]
    }

    pub(super) fn of_lane_end(&self, lane: usize) -> WaitRange {
        self.lane_ends[lane]
    }

    pub(super) fn joins_home(&self, lane: usize) -> bool {
        self.joins_home[lane]
    }

    pub(super) fn getters(&self, set: &PlanSet, rank: Rank) -> &[Getter] {
        &self.getters[set.symmetry.number(rank)]
    }

    pub(super) fn waits(&self, range: WaitRange) -> impl Iterator<Item = Wait> + '_ {
        range.indices().map(|index| self.waits[index])
    }

    pub(super) fn wait(&self, index: usize) -> Wait {
        self.waits[index]
    }
}

fn joins_home(set: &PlanSet, flags: &Flags, lane: usize) -> bool {
    let closed = &set.lanes[lane];
    let Some((last, Step::Signal { peer, .. })) = closed.steps.iter().enumerate().next_back()
    else {
        return closed.lane == LaneId::HOME;
    };
    let (reader, _) = flags.of_step(lane, last).wait;
    closed.lane == LaneId::HOME || (*peer == closed.rank && set.lanes[reader].lane == LaneId::HOME)
}

struct NextWaits<'a> {
    set: &'a PlanSet,
    at: Vec<Option<u32>>,
}

impl NextWaits<'_> {
    fn add_signal(&mut self, rank: Rank, lane: LaneId, at: usize) {
        let next = &mut self.at[self.set.clock_index(rank, lane)];
        let at = u32::try_from(at).expect("fewer than 2^32 steps");
        *next = Some(next.map_or(at, |next| next.min(at)));
    }

    fn of_ranks(&self, [first, second]: [Rank; 2]) -> impl Iterator<Item = Wait> + '_ {
        let second = (second != first).then_some(second);
        [Some(first), second].into_iter().flatten().flat_map(move |rank| {
            let lanes = self.set.clock_index(rank, LaneId::HOME)..;
            lanes.take(self.set.lanes_per_rank).filter_map(move |index| {
                let (rank, lane) = self.set.lane_of_clock(index);
                self.at[index].map(|at| Wait { rank, lane, at: at as usize })
            })
        })
    }
}
