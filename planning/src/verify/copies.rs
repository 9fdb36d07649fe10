//! Checks that every chunk that a rank needs is copied to it exactly once, and that contributions
//! are added in order.

use peerlane_hal::Rank;

use super::fault::{Fault, Location};
use super::flags::Flags;
use super::plan_set::{PlanSet, copied_cells};
use crate::plan::{Cell, LaneId, Step};

/// Maps each cell of an output or inbox to the step that copies the cell there.
///
/// Only the outputs and inboxes of followed ranks have entries.
///
/// The copies of a buffer are sorted by cell.
#[derive(Debug)]
pub(super) struct Copies {
    by_output: Vec<Vec<CellCopy>>,
    by_inbox: Vec<Vec<CellCopy>>,
    /// For each followed rank, whether its output depends on the input of every other rank.
    hears_from_everyone: Vec<bool>,
}

/// Identifies the step that copies `cell` into an output or an inbox, and the rank that executes
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct CellCopy {
    pub(super) cell: Cell,
    pub(super) rank: Rank,
    pub(super) step: (usize, usize),
}

impl Copies {
    /// Returns the step that copies `cell` into the output of `rank`, or `None` if no step does.
    pub(super) fn copy_of_cell(&self, set: &PlanSet, rank: Rank, cell: Cell) -> Option<CellCopy> {
        Self::find(self.copies_of_output(set, rank), cell)
    }

    /// Returns the step that puts the contribution `cell` into the inbox of `rank`, or `None` if no
    /// step does.
    pub(super) fn copy_of_contribution(
        &self,
        set: &PlanSet,
        rank: Rank,
        cell: Cell,
    ) -> Option<CellCopy> {
        Self::find(&self.by_inbox[set.symmetry.representative_index(rank)], cell)
    }

    fn find(copies: &[CellCopy], cell: Cell) -> Option<CellCopy> {
        let index = copies.binary_search_by_key(&cell, |copy| copy.cell);
        index.ok().map(|index| copies[index])
    }

    /// Returns whether the output of `rank` depends on the input of every other rank.
    pub(super) fn hears_from_everyone(&self, set: &PlanSet, rank: Rank) -> bool {
        self.hears_from_everyone[set.symmetry.representative_index(rank)]
    }

    /// Returns the steps that copy cells into the output of `rank`, sorted by cell.
    pub(super) fn copies_of_output(&self, set: &PlanSet, rank: Rank) -> &[CellCopy] {
        &self.by_output[set.symmetry.representative_index(rank)]
    }
}

/// Checks that every output and inbox gets each required cell exactly once, and returns the copies.
///
/// The [race check](super::races) proves that the copies are complete when the caller gets the
/// output.
///
/// No allocation depends on a number in a plan, such as that of its chunks, and the comparison ends
/// at the first missing cell. So a plan from a file cannot exhaust the memory.
pub(super) fn check(set: &PlanSet) -> Result<Copies, Fault> {
    let none = vec![Vec::new(); set.lanes.len() / set.lanes_per_rank];
    let mut by_output = none.clone();
    let mut by_inbox = none;
    let symmetry = &set.symmetry;
    for (lane, at, step) in set.steps() {
        let own_rank = set.lanes[lane].rank;
        let (target, cell) = match step {
            Step::Put { peer, cell, .. } => (peer, cell),
            Step::Get { cell, .. } => (own_rank, cell),
            Step::Reduce { .. } | Step::Signal { .. } | Step::Wait { .. } => continue,
        };

        // Each step stands for the steps of its whole orbit. The rotation turns the target into the
        // followed rank of its orbit, which has the list of copies.
        let back = symmetry.rotation_back(target);
        let copy = CellCopy {
            cell: symmetry.rotated_cell(back, cell),
            rank: symmetry.rotated(back, own_rank),
            step: (lane, at),
        };

        let contributes = step.contributes(set.collective);
        let copies = if contributes { &mut by_inbox } else { &mut by_output };
        copies[symmetry.representative_index(target)].push(copy);
    }

    for ((rank, _), copies) in set.followed_ranks().zip(&mut by_inbox) {
        copies.sort_unstable();

        // A rank reads its own contribution from its input, so no step puts it into the inbox.
        let collective = set.collective;
        let chunks = set.chunks;
        let contributors = (0..set.ranks)
            .map(Rank)
            .filter(move |&from| from != rank && collective.contributes(from, rank));
        let contributions =
            contributors.flat_map(move |block| (0..chunks).map(move |chunk| Cell { block, chunk }));
        check_cells(set, rank, copies, contributions)?;
    }

    // The last addition to a cell counts as its copy, so the outputs are checked only after it has
    // been appended to `by_output`.
    for Addition { rank, cell, step, .. } in check_additions(set, additions(set))? {
        // Only additions of followed ranks are there, which represent themselves.
        by_output[symmetry.representative_index(rank)].push(CellCopy { cell, rank, step });
    }
    for ((rank, _), copies) in set.followed_ranks().zip(&mut by_output) {
        copies.sort_unstable();
        check_output(set, rank, copies)?;
    }

    let hears_from_everyone = hears_from_everyone(set, &by_output);
    Ok(Copies { by_output, by_inbox, hears_from_everyone })
}

/// Returns, for each followed rank, whether its output depends on the input of every other rank.
///
/// This is derived from the steps, and not from what the collective says: only a put or a get from
/// the input of a rank brings in the block of that rank, only an addition brings in a contribution,
/// and `by_output` has the copies and last additions that are there.
fn hears_from_everyone(set: &PlanSet, by_output: &[Vec<CellCopy>]) -> Vec<bool> {
    let ranks = set.ranks as usize;

    // How many ranks the sum of each followed rank depends on.
    let mut contributors = vec![0; by_output.len()];
    for (_, _, step) in set.steps() {
        if let Step::Reduce { cell: Cell { block, chunk: 0 }, .. } = step {
            contributors[set.symmetry.representative_index(block)] += 1;
        }
    }

    let hears = |((rank, _), copies): ((Rank, usize), &Vec<CellCopy>)| {
        if set.collective.is_reduction() {
            let of_all = |copy: &CellCopy| {
                contributors[set.symmetry.representative_index(copy.cell.block)] == ranks
            };
            return copies.iter().any(of_all);
        }

        // The copies are sorted by cell, so those of one block are neighbors.
        let mut blocks: Vec<Rank> = copies.iter().map(|copy| copy.cell.block).collect();
        blocks.dedup();
        let others = blocks.iter().filter(|&&block| block != rank).count();
        others + 1 == ranks
    };
    set.followed_ranks().zip(by_output).map(hears).collect()
}

/// Identifies the step of `rank` that adds the contribution of rank `from` to `cell`.
///
/// The order of the fields makes all additions to a cell neighbors after sorting, in the order in
/// which a lane executes them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Addition {
    rank: Rank,
    cell: Cell,
    step: (usize, usize),
    from: Rank,
}

/// Returns all additions in the lanes of the set.
pub(super) fn additions(set: &PlanSet) -> Vec<Addition> {
    let addition = |(lane, at, step): (usize, usize, Step)| match step {
        Step::Reduce { cell, from } => {
            Some(Addition { rank: set.lanes[lane].rank, cell, step: (lane, at), from })
        }
        Step::Put { .. } | Step::Get { .. } | Step::Signal { .. } | Step::Wait { .. } => None,
    };
    set.steps().filter_map(addition).collect()
}

/// Checks that each reduced cell receives the contributions that the collective states, each once,
/// in the stated order and in a single lane.
///
/// Returns the last addition to each cell, which completes the cell.
pub(super) fn check_additions(
    set: &PlanSet,
    mut sums: Vec<Addition>,
) -> Result<Vec<Addition>, Fault> {
    let location = |sum: &Addition| set.location(sum.step.0, sum.step.1);
    sums.sort_unstable();

    let mut last_additions = Vec::new();
    for (rank, _) in set.followed_ranks().filter(|(rank, _)| set.collective.reduces(*rank)) {
        for chunk in 0..set.chunks {
            let cell = Cell { block: rank, chunk };
            let of_rank_and_cell = |sum: &Addition| (sum.rank, sum.cell).cmp(&(rank, cell));
            let first = sums.partition_point(|sum| of_rank_and_cell(sum).is_lt());
            let end = sums.partition_point(|sum| of_rank_and_cell(sum).is_le());
            let of_cell = &sums[first..end];

            last_additions.extend(of_cell.last());

            // Additions are sorted by lane first, so they are in one lane if the first and the last
            // one are.
            let lane = |sum: Option<&Addition>| sum.map(|sum| sum.step.0);
            let is_in_one_lane = lane(of_cell.first()) == lane(of_cell.last());
            let order = set.collective.additions(rank, set.ranks, set.in_place);
            if is_in_one_lane && of_cell.iter().map(|sum| sum.from).eq(order.clone()) {
                continue;
            }

            // The check of the plan set has refused contributions that the collective does not
            // state, so these are all there are if none is missing or twice there.
            check_once(of_cell, location)?;
            for (position, from) in order.enumerate() {
                let Some(index) = of_cell.iter().position(|sum| sum.from == from) else {
                    return Err(Fault::NeverReduced { rank, cell, from });
                };

                // All contributions before this one were found at their positions.
                if index != position {
                    let late = location(&of_cell[index]);
                    return Err(match set.in_place && from == rank {
                        // The first addition has overwritten the contribution that this one reads.
                        true => Fault::Overwritten { location: late },
                        false => {
                            let early = location(&of_cell[position]);
                            Fault::ReducedOutOfOrder { location: early, expected: from }
                        }
                    });
                }
            }
        }
    }

    Ok(last_additions)
}

/// Checks that all additions to a cell are in one lane, and that each contribution is added once.
fn check_once(of_cell: &[Addition], location: impl Fn(&Addition) -> Location) -> Result<(), Fault> {
    let mut by_contribution = of_cell.to_vec();
    by_contribution.sort_unstable_by_key(|sum| (sum.from, sum.step));
    for pair in by_contribution.windows(2) {
        let [first, second] = [location(&pair[0]), location(&pair[1])];
        if pair[0].from == pair[1].from {
            return Err(Fault::ReducedTwice { first, second });
        }

        // One lane executes its steps in order, which makes the order of additions and so the
        // rounding of a sum the same in every run.
        if pair[0].step.0 != pair[1].step.0 {
            return Err(Fault::ReducedApart { first, second });
        }
    }

    Ok(())
}

/// Checks that the copies into the output of `rank` are exactly those that the collective requires.
fn check_output(set: &PlanSet, rank: Rank, copies: &[CellCopy]) -> Result<(), Fault> {
    let location = |copy: &CellCopy| set.rotated_location(copy.rank, copy.step);
    if let Some(copy) = copies.iter().find(|copy| set.is_initial(rank, copy.cell)) {
        return Err(Fault::CopiedInPlace { location: location(copy) });
    }

    let &PlanSet { collective, ranks, chunks, in_place, .. } = set;
    let required = copied_cells(collective, rank, ranks, chunks, in_place);
    check_cells(set, rank, copies, required)
}

/// Checks that `copies` contains every cell of `required` once, and no other cell.
///
/// `copies` and `required` are sorted by cell.
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
        // Missing cells are skipped here and reported only if no copy is superfluous.
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

/// Identifies a wait step by its rank, its lane and its index in the lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wait {
    pub(super) rank: Rank,
    pub(super) lane: LaneId,
    pub(super) at: usize,
}

/// A range of indices into the list of waits of [`Completions`].
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

/// A lane that gets data from a given rank, and the waits that each prove its last get complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Getter {
    pub(super) rank: Rank,
    pub(super) lane: usize,
    pub(super) waits: WaitRange,
}

/// Stores, for each copy step, the waits that each prove the copy complete once they have passed.
///
/// A signal tells a peer that the signalling lane has completed all puts to that peer and all gets
/// from it. A signal to the own rank publishes that the lane has completed everything, which for
/// puts to other ranks means only that their sources are free. A lane that passes the wait for such
/// a signal knows what it publishes. So for everything that a lane completes, the first signal
/// after it to each possible reader names a wait, and a lane with one of these waits in its past
/// knows it.
#[derive(Debug)]
pub(super) struct Completions {
    /// The waits of every [`WaitRange`], one range after the other.
    waits: Vec<Wait>,
    /// For each step of each lane, the waits that prove the step's copy complete; empty if it
    /// copies nothing.
    copies: Vec<Vec<WaitRange>>,
    /// For each lane, the waits that prove to its rank that all copies of the lane have read their
    /// sources.
    lane_ends: Vec<WaitRange>,
    /// For each lane, whether its rank waits for the end of the lane before it ends the operation.
    joins_home: Vec<bool>,
    /// For each followed rank, the lanes that get data from this rank.
    getters: Vec<Vec<Getter>>,
}

impl Completions {
    /// Computes the waits that prove each copy of the plans complete.
    pub(super) fn new(set: &PlanSet, flags: &Flags) -> Self {
        let mut completions = Self {
            waits: Vec::new(),
            copies: Vec::with_capacity(set.lanes.len()),
            lane_ends: Vec::with_capacity(set.lanes.len()),
            joins_home: (0..set.lanes.len()).map(|lane| joins_home(set, flags, lane)).collect(),
            getters: vec![Vec::new(); set.lanes.len() / set.lanes_per_rank],
        };

        // All lanes share one buffer, because it is large: it has an entry for every lane of every
        // rank.
        let mut next_waits = NextWaits { set, at: vec![None; set.all_lanes()] };
        for lane in 0..set.lanes.len() {
            next_waits.at.fill(None);
            completions.add_lane(set, flags, lane, &mut next_waits);
        }

        completions
    }

    /// Appends the waits that prove the copies of `lane` complete.
    ///
    /// The steps of a lane are visited in reverse order, so that the signals after a copy are known
    /// at the copy.
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

        // At any step, `next_waits` knows the signals after it.
        for (at, &step) in set.lanes[lane].steps.iter().enumerate().rev() {
            let (peer, other) = match step {
                Step::Wait { .. } => continue,
                Step::Signal { peer, .. } => {
                    let (reader, wait) = flags.of_step(lane, at).wait;
                    next_waits.add_signal(peer, set.lanes[reader].lane, wait);
                    continue;
                }
                // A signal to the own rank does not say that a put to another rank has arrived.
                Step::Put { peer, .. } => (peer, peer),
                Step::Get { peer, .. } => (peer, own_rank),
                Step::Reduce { .. } => (own_rank, own_rank),
            };

            // The first step that gets here is the last copy of the lane. The signals after it to
            // the own rank say that the lane reads no source any more.
            if lane_end.is_none() {
                lane_end = Some(self.push(next_waits.of_ranks([own_rank, own_rank])));
            }

            let waits = self.push(next_waits.of_ranks([peer, other]));
            copies[at] = waits;
            if matches!(step, Step::Get { .. }) {
                self.add_get(set, lane, peer, waits);
            }
        }
        self.copies.push(copies);

        // A lane without copies never reads a source, so any signal to the own rank will do.
        let waits =
            lane_end.unwrap_or_else(|| self.push(next_waits.of_ranks([own_rank, own_rank])));
        self.lane_ends.push(waits);
    }

    fn push(&mut self, waits: impl Iterator<Item = Wait>) -> WaitRange {
        let next = |waits: &[Wait]| u32::try_from(waits.len()).expect("fewer than 2^32 waits");
        let first = next(&self.waits);
        self.waits.extend(waits);
        WaitRange { first, end: next(&self.waits) }
    }

    /// Stores the waits that prove a get from `peer` complete, unless `lane` has a later get from
    /// `peer`.
    fn add_get(&mut self, set: &PlanSet, lane: usize, peer: Rank, waits: WaitRange) {
        let symmetry = &set.symmetry;
        let rank = symmetry.rotated(symmetry.rotation_back(peer), set.lanes[lane].rank);

        // Lanes are visited one after the other, so the entries of this lane are the last ones.
        let getters = &mut self.getters[symmetry.representative_index(peer)];
        let mut of_lane = getters.iter().rev().take_while(|getter| getter.lane == lane);
        if of_lane.all(|getter| getter.rank != rank) {
            getters.push(Getter { rank, lane, waits });
        }
    }

    /// Returns the waits that prove the copy at step `at` of `lane` complete.
    pub(super) fn of_copy(&self, (lane, at): (usize, usize)) -> WaitRange {
        self.copies[lane][at]
    }

    /// Returns the waits that prove to the rank of `lane` that the lane's copies have read their
    /// sources.
    pub(super) fn of_lane_end(&self, lane: usize) -> WaitRange {
        self.lane_ends[lane]
    }

    /// Returns whether the rank of `lane` waits for the end of this lane before it ends the
    /// operation.
    pub(super) fn joins_home(&self, lane: usize) -> bool {
        self.joins_home[lane]
    }

    /// Returns the lanes that get data from `rank`.
    pub(super) fn getters(&self, set: &PlanSet, rank: Rank) -> &[Getter] {
        &self.getters[set.symmetry.representative_index(rank)]
    }

    pub(super) fn waits(&self, range: WaitRange) -> impl Iterator<Item = Wait> + '_ {
        range.indices().map(|index| self.waits[index])
    }

    pub(super) fn wait(&self, index: usize) -> Wait {
        self.waits[index]
    }
}

/// Returns whether `lane` is lane 0 or ends with a signal to lane 0 of its rank.
fn joins_home(set: &PlanSet, flags: &Flags, lane: usize) -> bool {
    let closed = &set.lanes[lane];
    let Some((last, Step::Signal { peer, .. })) = closed.steps.iter().enumerate().next_back()
    else {
        return closed.lane == LaneId::HOME;
    };

    // Every signalled flag has a wait, so lane 0 cannot end before the signal.
    let (reader, _) = flags.of_step(lane, last).wait;
    closed.lane == LaneId::HOME || (*peer == closed.rank && set.lanes[reader].lane == LaneId::HOME)
}

/// Tracks the earliest wait in each lane for any of the signals visited so far.
///
/// The steps of the signalling lane are visited in reverse order, so these signals come after the
/// present step.
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

    /// Returns the stored waits in all lanes of `first` and `second`, which may be the same rank.
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
