//! Checks that every chunk that a rank needs is copied to it exactly once.

use peerlane_hal::Rank;

use super::fault::Fault;
use super::flags::Flags;
use super::plan_set::{PlanSet, copied_cells};
use crate::plan::{Cell, LaneId, Step};

#[derive(Debug)]
pub(super) struct Copies {
    by_output: Vec<Vec<CellCopy>>,
    by_inbox: Vec<Vec<CellCopy>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CellCopy {
    pub(super) cell: Cell,
    pub(super) rank: Rank,
    pub(super) step: (usize, usize),
}

impl Copies {
    pub(super) fn of(&self, set: &PlanSet, rank: Rank, cell: Cell) -> Option<CellCopy> {
        Self::find(self.of_output(set, rank), cell)
    }

    /// Returns the copy of a contribution to the block that `rank` reduces.
    pub(super) fn of_contribution(
        &self,
        set: &PlanSet,
        rank: Rank,
        cell: Cell,
    ) -> Option<CellCopy> {
        Self::find(&self.by_inbox[set.symmetry.number(rank)], cell)
    }

    fn find(copies: &[CellCopy], cell: Cell) -> Option<CellCopy> {
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
    let none = vec![Vec::new(); set.lanes.len() / set.lanes_per_rank];
    let (mut by_output, mut by_inbox, mut sums) = (none.clone(), none, Vec::new());
    for (lane, at, step) in set.steps() {
        let own_rank = set.lanes[lane].rank;
        let (target, cell) = match step {
            Step::Put { peer, cell, .. } => (peer, cell),
            Step::Get { cell, .. } => (own_rank, cell),
            Step::Reduce { cell, from } => {
                sums.push(Addition { rank: own_rank, cell, from, step: (lane, at) });
                continue;
            }
            Step::Signal { .. } | Step::Wait { .. } => continue,
        };
        let contributes = step.contributes(set.collective);
        let copies = if contributes { &mut by_inbox } else { &mut by_output };
        let back = symmetry.rotation_back(target);
        let (cell, rank) = (symmetry.rotated_cell(back, cell), symmetry.rotated(back, own_rank));
        copies[symmetry.number(target)].push(CellCopy { cell, rank, step: (lane, at) });
    }
    for ((rank, _), copies) in set.followed_ranks().zip(&mut by_inbox) {
        copies.sort_unstable();
        let reduces = set.collective.reduces(rank);
        let contributions = cells(set.ranks, set.chunks);
        let contributions = contributions.filter(move |cell| reduces && cell.block != rank);
        check_cells(set, rank, copies, contributions)?;
    }
    check_additions(set, sums, &mut by_output)?;
    for ((rank, _), copies) in set.followed_ranks().zip(&mut by_output) {
        copies.sort_unstable();
        check_output(set, rank, copies)?;
    }
    Ok(Copies { by_output, by_inbox })
}

fn cells(ranks: u32, chunks: u32) -> impl Iterator<Item = Cell> + Clone {
    let blocks = (0..ranks).map(Rank);
    blocks.flat_map(move |block| (0..chunks).map(move |chunk| Cell { block, chunk }))
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Addition {
    rank: Rank,
    cell: Cell,
    from: Rank,
    step: (usize, usize),
}

/// Checks that the contribution of every rank is added once to each cell, in one lane. The last addition counts as the copy of
/// the cell to the output.
fn check_additions(
    set: &PlanSet,
    mut sums: Vec<Addition>,
    by_output: &mut [Vec<CellCopy>],
) -> Result<(), Fault> {
    sums.sort_unstable();
    let location = |sum: &Addition| set.location(sum.step.0, sum.step.1);
    for pair in sums.windows(2) {
        let [first, second] = [&pair[0], &pair[1]];
        if (first.rank, first.cell) != (second.rank, second.cell) {
            continue;
        }
        let (first_at, second_at) = (location(first), location(second));
        if first.from == second.from {
            return Err(Fault::ReducedTwice { first: first_at, second: second_at });
        }
        if first.step.0 != second.step.0 {
            return Err(Fault::ReducedApart { first: first_at, second: second_at });
        }
    }
    let mut found = sums.iter().peekable();
    for (rank, _) in set.followed_ranks().filter(|(rank, _)| set.collective.reduces(*rank)) {
        for chunk in 0..set.chunks {
            let cell = Cell { block: rank, chunk };
            let (mut first, mut own, mut last) = (None, None, None);
            for from in (0..set.ranks).map(Rank) {
                let sum = found.next_if(|sum| (sum.rank, sum.cell, sum.from) == (rank, cell, from));
                let sum = sum.ok_or(Fault::NeverReduced { rank, cell, from })?;
                let is_first = first.is_none_or(|first| sum.step < first);
                first = if is_first { Some(sum.step) } else { first };
                own = if from == rank { Some(sum) } else { own };
                last = last.max(Some(sum.step));
            }
            if let Some(own) = own.filter(|own| set.in_place && Some(own.step) != first) {
                return Err(Fault::Overwritten { location: location(own) });
            }
            let back = set.symmetry.rotation_back(rank);
            let copy = CellCopy {
                cell: set.symmetry.rotated_cell(back, cell),
                rank: set.symmetry.rotated(back, rank),
                step: last.expect("there is a rank"),
            };
            by_output[set.symmetry.number(rank)].push(copy);
        }
    }
    Ok(())
}

fn check_output(set: &PlanSet, rank: Rank, copies: &[CellCopy]) -> Result<(), Fault> {
    let location = |copy: &CellCopy| set.rotated_location(copy.rank, copy.step);
    if let Some(copy) = copies.iter().find(|copy| set.is_initial(rank, copy.cell)) {
        return Err(Fault::CopiedInPlace { location: location(copy) });
    }
    let &PlanSet { collective, ranks, chunks, in_place, .. } = set;
    let required = copied_cells(collective, rank, ranks, chunks, in_place);
    check_cells(set, rank, copies, required)
}

/// `required` are the cells that must be copied to the buffer, in order.
fn check_cells(
    set: &PlanSet,
    rank: Rank,
    copies: &[CellCopy],
    mut required: impl Iterator<Item = Cell> + Clone,
) -> Result<(), Fault> {
    let location = |copy: &CellCopy| set.rotated_location(copy.rank, copy.step);
    let twice = copies.windows(2).find(|pair| pair[0].cell == pair[1].cell);
    if let Some([first, second]) = twice {
        return Err(Fault::CopiedTwice { first: location(first), second: location(second) });
    }
    let mut wanted = required.clone().peekable();
    for copy in copies {
        while wanted.next_if(|cell| *cell < copy.cell).is_some() {}
        if wanted.peek() != Some(&copy.cell) {
            return Err(Fault::NotRequired { location: location(copy), rank });
        }
    }
    let mut found = copies.iter().map(|copy| copy.cell);
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
                Step::Reduce { .. } => (own_rank, own_rank),
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
