//! Checks that no rank reads data before it has arrived, or overwrites data that is still in use.
//!
//! A lane learns only by its own waits: a wait tells it what the signal published. Every wait
//! passes, because [no cycle of waits exists](super::flags::check_deadlock). So what a lane knows
//! at a step does not depend on the order in which lanes run: it is what happens before the step,
//! along lanes and from each signal to its wait.
//!
//! Flags can tell a lane only facts of the start in which they are signalled, and all starts are
//! alike. So it is enough to examine one start, after as many starts as there are sets of flags: a
//! flag was last used that many starts ago, and so was an inbox; an output was last used as many
//! starts ago as there are outputs, which are not more. Earlier starts know less of previous
//! starts, but find flags, inboxes and outputs unused.
//!
//! A rank is followed with all its lanes. From each signal of another rank it keeps how far the
//! writer's lane had come, and the writer's other lanes as far as that lane knew. That nearly
//! always decides, and costs the same for any number of ranks. If it does not, a [complete
//! search](super::happens_before::HappensBefore) does, so no correct plan is refused.

use std::collections::HashMap;

use peerlane_hal::Rank;

use super::copies::{CellCopy, Completions, Copies, Wait, WaitRange};
use super::fault::{Fault, Location};
use super::flags::Flags;
use super::happens_before::{Event, HappensBefore, VectorClocks};
use super::plan_set::PlanSet;
use crate::plan::{Cell, LaneId, Source, Step};

/// Checks that no step of a followed rank uses memory or signals a flag too early.
pub(super) fn check(set: &PlanSet, flags: &Flags, copies: &Copies) -> Result<(), Fault> {
    let mut check = RaceCheck {
        set,
        flags,
        copies,
        completions: Completions::new(set, flags),
        sibling_times: sibling_times(set, flags),
        happens_before: HappensBefore::new(set, flags),
        clocks: VectorClocks::new(set.lanes_per_rank, set.all_lanes()),
        later: None,
    };

    set.followed_ranks().try_for_each(|(rank, home)| check.check_rank(rank, home))?;

    check.later.map_or(Ok(()), |(_, fault)| Err(fault))
}

/// Simulates one rank at a time, tracks in vector clocks what its lanes know, and checks its steps.
struct RaceCheck<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
    copies: &'a Copies,
    completions: Completions,
    /// For each signal, the progress of its rank's other lanes that the signalling lane knows of.
    sibling_times: SiblingTimes,
    happens_before: HappensBefore<'a>,
    clocks: VectorClocks,
    /// The fault that shows in the earliest start after start 1, with the number of this start.
    later: Option<(u32, Fault)>,
}

/// States that a lane has reached a step, in the examined start or in an earlier one.
#[derive(Clone, Copy)]
struct Fact {
    rank: Rank,
    lane: LaneId,
    /// The index of the step in the lane, or the number of its steps if the lane has ended.
    at: usize,
    /// The number of starts from the start of the fact to the examined start.
    age: u32,
}

impl Fact {
    /// Returns the fact that `rank` has entered the operation, `age` starts before the examined
    /// start.
    fn entered(rank: Rank, age: u32) -> Self {
        Self { rank, lane: LaneId::HOME, at: 0, age }
    }

    /// Returns the fact that a lane has passed a wait, `age` starts before the examined start.
    fn passed(Wait { rank, lane, at }: Wait, age: u32) -> Self {
        Self { rank, lane, at: at + 1, age }
    }
}

/// The position of the step that is being checked.
#[derive(Clone, Copy)]
struct Current {
    rank: Rank,
    /// The index of lane 0 of the rank in the plan set.
    home: usize,
    /// The index of the step's lane, counted from `home`.
    lane: usize,
    at: usize,
}

impl Current {
    fn location(&self, set: &PlanSet) -> Location {
        set.location(self.home + self.lane, self.at)
    }
}

impl RaceCheck<'_> {
    fn last_start(&self) -> i64 {
        self.set.flag_sets.into()
    }

    /// Simulates the lanes of `rank` over all starts, and checks the steps of the last start.
    fn check_rank(&mut self, rank: Rank, home: usize) -> Result<(), Fault> {
        let set = self.set;
        let flags = self.flags;
        self.clocks.clear();
        for start in 0..=self.last_start() {
            run_start(set, flags, home, |Visit { lane, at, kind }| {
                self.visit(Current { rank, home, lane, at }, start, kind)
            })?;

            // The time after the last step of lane 0 says that the rank has ended the start.
            let steps = set.lanes[home].steps.len();
            let entry = set.clock_index(rank, LaneId::HOME);
            self.clocks.advance(0, entry, self.happens_before.time(start, steps));
        }

        self.check_end(Current { rank, home, lane: 0, at: set.lanes[home].steps.len() })
    }

    /// Updates the vector clock of a lane at one step, and checks the step in the last start.
    ///
    /// Returns a snapshot of the clock after the step.
    fn visit(&mut self, current: Current, start: i64, kind: VisitKind) -> Result<usize, Fault> {
        let Current { rank, lane, at, .. } = current;
        let entry = self.set.clock_index(rank, LaneId(Rank::at(lane).0));
        self.clocks.advance(lane, entry, self.happens_before.time(start, at));

        // The starts before the last only show what lanes know of earlier starts.
        if start == self.last_start() {
            self.check_step(current)?;
        }

        match kind {
            VisitKind::Copy | VisitKind::Signal => {}
            VisitKind::RemoteWait => self.merge_remote(current, start),
            VisitKind::LocalWait { writer, snapshot } => {
                self.clocks.merge(lane, writer, snapshot);
            }
        }

        Ok(self.clocks.snapshot(lane))
    }

    /// Updates the clock of a waiting lane by what the signal of another rank proves.
    ///
    /// The signal tells how far its lane had come, and the other lanes of its rank as far as it
    /// knew.
    fn merge_remote(&mut self, Current { home, lane, at, .. }: Current, start: i64) {
        let flag_use = self.flags.of_step(home + lane, at);
        let (writer, signal) = flag_use.signal;

        let signal_start = start - self.set.lag(home + lane, at);
        if signal_start < 0 {
            // There is no start before the first one, which finds flags and buffers unused.
            return;
        }

        let entry = self.set.clock_index(flag_use.writer, self.set.lanes[writer].lane);
        self.clocks.advance(lane, entry, self.happens_before.time(signal_start, signal));

        let lanes = self.set.lanes_per_rank;
        if let Some(times) = self.sibling_times.get(writer) {
            let first = self.set.clock_index(flag_use.writer, LaneId::HOME);
            // The times of siblings are relative to the beginning of the start.
            for (sibling, relative) in times[signal * lanes..][..lanes].iter().enumerate() {
                let time = self.happens_before.time(signal_start, 0) + relative;
                self.clocks.advance(lane, first + sibling, time);
            }
        }
    }

    /// Returns whether `fact` happens before the current step.
    fn knows(&mut self, current: Current, fact: Fact) -> bool {
        self.is_implied(current, fact) || self.is_found(current, fact)
    }

    /// Returns the logical time of `fact` in its lane.
    fn time(&self, fact: Fact) -> i64 {
        self.happens_before.time(self.last_start() - i64::from(fact.age), fact.at)
    }

    /// Returns whether the vector clock covers `fact` directly, or through a later entry of the
    /// same rank or of the current rank.
    fn is_implied(&self, current: Current, fact: Fact) -> bool {
        let entry = self.set.clock_index(fact.rank, fact.lane);
        if self.clocks.time(current.lane, entry) >= self.time(fact) {
            return true;
        }

        // A fact can only be implied by an entry into a later start, and the examined start is the
        // last that any rank has entered.
        let Some(age) = fact.age.checked_sub(1) else { return false };

        // A rank that has entered the next start has ended lane 0, and with it the lanes that join
        // lane 0.
        if fact.at > 0 || fact.lane != LaneId::HOME {
            let lane = self.set.followed_lane(fact.rank, fact.lane);
            let joins_home = self.completions.joins_home(lane);
            return joins_home && self.is_implied(current, Fact::entered(fact.rank, age));
        }

        // What is left is the entry of a rank into the start of the fact. Without data of every
        // rank, the current rank cannot conclude anything. The root of a broadcast, for example,
        // gets no data from others.
        if !self.copies.hears_from_everyone(self.set, current.rank) {
            return false;
        }

        // If it has entered the next start, that data has arrived. The data comes from the inputs
        // of all ranks, from copy to copy, so all ranks had entered the start of the fact. (A cell
        // that does not come from an input is a fault of the first start, which is reported
        // whatever is concluded here.)
        let own = self.set.clock_index(current.rank, LaneId::HOME);
        self.clocks.time(current.lane, own) >= self.time(Fact::entered(current.rank, age))
    }

    /// Returns whether a complete search finds a happens-before path from `fact` to the current
    /// step.
    fn is_found(&mut self, current: Current, fact: Fact) -> bool {
        let lane = self.set.lanes[current.home + current.lane].lane;
        let now = self.happens_before.time(self.last_start(), current.at);
        let later = Event { rank: current.rank, lane, time: now };
        let time = self.time(fact);
        let earlier = Event { rank: fact.rank, lane: fact.lane, time };

        let is_found = self.happens_before.precedes(earlier, later);
        if is_found {
            // The next question about the lane of this fact may then need no search.
            let entry = self.set.clock_index(fact.rank, fact.lane);
            self.clocks.advance(current.lane, entry, time);
        }

        is_found
    }

    /// Returns whether any of `waits` happens before the current step.
    ///
    /// The waits are stored for a followed rank, and `owner` is the rank that it represents.
    fn knows_any(&mut self, current: Current, owner: Rank, waits: WaitRange) -> bool {
        let symmetry = &self.set.symmetry;
        let rotation = symmetry.rotation_of(owner);
        let fact = |wait: Wait| {
            Fact::passed(Wait { rank: symmetry.rotated(rotation, wait.rank), ..wait }, 0)
        };

        // The search is expensive, so the clock is asked for every wait first.
        self.completions.waits(waits).any(|wait| self.is_implied(current, fact(wait)))
            || waits.indices().any(|wait| self.is_found(current, fact(self.completions.wait(wait))))
    }

    /// Returns whether `cell` has arrived in the output of `rank` before the current step.
    fn knows_copied(&mut self, current: Current, rank: Rank, cell: Cell) -> bool {
        self.knows_arrived(current, rank, cell, Copies::copy_of_cell)
    }

    /// Returns whether the copy of `cell` that `find` selects is complete before the current step.
    fn knows_arrived(
        &mut self,
        current: Current,
        rank: Rank,
        cell: Cell,
        find: impl Fn(&Copies, &PlanSet, Rank, Cell) -> Option<CellCopy>,
    ) -> bool {
        let symmetry = &self.set.symmetry;
        let back = symmetry.rotation_back(rank);
        let representative = symmetry.rotated(back, rank);
        let rotated_cell = symmetry.rotated_cell(back, cell);
        let Some(copy) = find(self.copies, self.set, representative, rotated_cell) else {
            return false;
        };

        // A step behind the additions in the same lane reads the result without a wait.
        let (lane, at) = copy.step;
        let is_sum = matches!(self.set.lanes[lane].steps[at], Step::Reduce { .. });
        let is_own = rank == current.rank && lane == current.home + current.lane;
        if is_sum && is_own && at < current.at {
            return true;
        }

        let owner = symmetry.rotated(symmetry.rotation_of(rank), copy.rank);
        let waits = self.completions.of_copy(copy.step);
        self.knows_any(current, owner, waits)
    }

    /// Checks that the current step neither uses memory nor signals a flag too early.
    fn check_step(&mut self, current: Current) -> Result<(), Fault> {
        let own_rank = current.rank;
        match current.location(self.set).step {
            Step::Put { peer, cell, from } => {
                self.check_copy(current, (own_rank, from), peer, cell)
            }
            Step::Get { peer, cell, from } => {
                self.check_copy(current, (peer, from), own_rank, cell)
            }
            Step::Reduce { cell, from } => self.check_reduce(current, cell, from),
            Step::Signal { peer, .. } => self.check_signal(current, peer),
            Step::Wait { .. } => Ok(()),
        }
    }

    /// Checks that the source of a copy has arrived and that its target may be overwritten.
    fn check_copy(
        &mut self,
        current: Current,
        (source, from): (Rank, Source),
        target: Rank,
        cell: Cell,
    ) -> Result<(), Fault> {
        let is_initial = from == Source::Input || self.set.is_initial(source, cell);
        let has_arrived = if is_initial {
            self.knows(current, Fact::entered(source, 0))
        } else {
            self.knows_copied(current, source, cell)
        };
        // A fact of the same start is missing in every start, so the first one is reported.
        if !has_arrived {
            return Err(Fault::ReadEarly { location: current.location(self.set), start: 1 });
        }

        if let Some(start) = self.start_in_use(current, target) {
            let location = current.location(self.set);
            return self.refuse(start, Fault::PeerInUse { location, peer: target, start });
        }

        // In place, a result overwrites a contribution of the target, which must have been read.
        let contribution = Cell { block: target, chunk: cell.chunk };
        let overwrites = self.set.in_place && self.set.collective.is_reduction();
        if overwrites
            && from == Source::Output
            && !self.knows_arrived(current, cell.block, contribution, Copies::copy_of_contribution)
        {
            let location = current.location(self.set);
            return Err(Fault::PeerInUse { location, peer: target, start: 1 });
        }

        Ok(())
    }

    /// Checks that the contribution that a step adds has arrived, and that the output may be
    /// overwritten.
    fn check_reduce(&mut self, current: Current, cell: Cell, from: Rank) -> Result<(), Fault> {
        let own_rank = current.rank;
        let contribution = Cell { block: from, chunk: cell.chunk };
        let has_arrived = match from == own_rank {
            true => self.knows(current, Fact::entered(own_rank, 0)),
            false => {
                self.knows_arrived(current, own_rank, contribution, Copies::copy_of_contribution)
            }
        };
        if !has_arrived {
            return Err(Fault::ReadEarly { location: current.location(self.set), start: 1 });
        }

        if let Some(start) = self.start_in_use(current, own_rank) {
            let location = current.location(self.set);
            return self.refuse(start, Fault::PeerInUse { location, peer: own_rank, start });
        }

        Ok(())
    }

    /// Returns the first start in which the current step could overwrite an output or an inbox that
    /// `target` still uses.
    ///
    /// With several outputs, a start writes to the output of `outputs` starts ago. The caller of
    /// the target had it until it entered the start after that one. A contribution goes to the
    /// inbox that was last used as many starts ago as there are inboxes. The target had added what
    /// was in it before it entered the start after that one.
    fn start_in_use(&mut self, current: Current, target: Rank) -> Option<u32> {
        let age = self.set.age_of_target(&current.location(self.set).step);
        (!self.knows(current, Fact::entered(target, age))).then_some(age + 1)
    }

    /// Returns `fault` as an error if `start` is 1, and otherwise stores the fault if it is the
    /// earliest.
    fn refuse(&mut self, start: u32, fault: Fault) -> Result<(), Fault> {
        // A fault of start 1 ends the check, so it takes precedence over stored faults.
        if start == 1 {
            return Err(fault);
        }

        if self.later.as_ref().is_none_or(|&(first, _)| start < first) {
            self.later = Some((start, fault));
        }

        Ok(())
    }

    /// Checks that the reader of the signalled flag has passed its wait for the previous signal.
    fn check_signal(&mut self, current: Current, peer: Rank) -> Result<(), Fault> {
        let (reader, at) = self.flags.of_step(current.home + current.lane, current.at).wait;
        let wait = Wait { rank: peer, lane: self.set.lanes[reader].lane, at };

        // The flag was last signalled `flag_sets` starts ago, and that signal is awaited `lag`
        // starts later.
        let lag = self.set.lanes[reader].lag(at);
        let age = self.set.flag_sets.saturating_sub(lag);
        if self.knows(current, Fact::passed(wait, age)) {
            return Ok(());
        }

        let location = current.location(self.set);
        let start = age + 1;
        self.refuse(start, Fault::NotConsumed { location, start })
    }

    /// Checks that, when lane 0 ends, no lane reads sources any more and the output is complete.
    fn check_end(&mut self, current: Current) -> Result<(), Fault> {
        let Current { rank, home, .. } = current;
        let set = self.set;
        // What the end of a start lacks, the end of every start lacks.
        let start = 1;

        for number in home + 1..home + set.lanes_per_rank {
            let waits = self.completions.of_lane_end(number);
            if !set.lanes[number].steps.is_empty() && !self.knows_any(current, rank, waits) {
                let lane = set.lanes[number].lane;
                return Err(Fault::SourceInUse { rank, lane, start });
            }
        }

        // The list is copied, because `knows_any` changes `self`.
        for getter in self.completions.getters(set, rank).to_vec() {
            let lane = set.lanes[getter.lane].lane;
            let is_own = getter.rank == rank && lane == LaneId::HOME;
            if !is_own && !self.knows_any(current, getter.rank, getter.waits) {
                return Err(Fault::PeerReads { rank, peer: getter.rank, lane, start });
            }
        }

        let copies = self.copies;
        for copy in copies.copies_of_output(set, rank) {
            let cell = copy.cell;
            let lane = set.lanes[copy.step.0].lane;
            // Copies of lane 0 itself are complete when it has ended.
            let is_own = copy.rank == rank && lane == LaneId::HOME;
            if !is_own && !self.knows_copied(current, rank, cell) {
                return Err(Fault::NotArrived { rank, cell, start });
            }
        }

        Ok(())
    }
}

/// For each step of each lane, the logical times that the lanes of its rank are known to have
/// reached.
type SiblingTimes = Vec<Vec<i64>>;

/// Returns, for each signal, how far the signalling lane knows its rank's lanes to have come.
///
/// The times are relative to the start of the signal. They are empty if a rank has only one lane.
fn sibling_times(set: &PlanSet, flags: &Flags) -> SiblingTimes {
    let lanes = set.lanes_per_rank;
    if lanes == 1 {
        return SiblingTimes::new();
    }

    let mut sibling_times: SiblingTimes =
        set.lanes.iter().map(|lane| vec![0; lane.steps.len() * lanes]).collect();

    let happens_before = HappensBefore::new(set, flags);
    let mut clocks = VectorClocks::new(lanes, lanes);
    for (_, home) in set.followed_ranks() {
        clocks.clear();
        for start in 0..=i64::from(set.flag_sets) {
            let start_time = happens_before.time(start, 0);
            run_start(set, flags, home, |Visit { lane, at, kind }| {
                match kind {
                    VisitKind::Copy | VisitKind::RemoteWait => {}
                    VisitKind::LocalWait { writer, snapshot } => {
                        clocks.merge(lane, writer, snapshot);
                    }
                    VisitKind::Signal => {
                        clocks.advance(lane, lane, happens_before.time(start, at));
                        // Each start overwrites the times of the start before, and only the last
                        // start knows all facts.
                        let times = &mut sibling_times[home + lane][at * lanes..][..lanes];
                        for (sibling, time) in times.iter_mut().enumerate() {
                            *time = clocks.time(lane, sibling) - start_time;
                        }
                    }
                }
                Ok(clocks.snapshot(lane))
            })
            .expect("this visit returns no fault");
        }
    }

    sibling_times
}

/// Identifies a step that [`run_start`] simulates.
struct Visit {
    lane: usize,
    at: usize,
    kind: VisitKind,
}

/// The kind of a simulated step, which decides how the clock of its lane changes.
enum VisitKind {
    Copy,
    Signal,
    /// A wait for a signal of another rank.
    RemoteWait,
    /// A wait for a signal of the same rank, with a snapshot of the signalling lane's clock.
    LocalWait {
        writer: usize,
        snapshot: usize,
    },
}

/// Simulates one run of all lanes of a rank, and calls `visit` for each step, in one order that the
/// dependencies allow.
///
/// `visit` returns a snapshot of the clock of the lane after the step. Waits for signals of other
/// ranks pass at once, because no deadlock was found.
fn run_start(
    set: &PlanSet,
    flags: &Flags,
    home: usize,
    mut visit: impl FnMut(Visit) -> Result<usize, Fault>,
) -> Result<(), Fault> {
    let rank = set.lanes[home].rank;
    let mut next_steps = vec![0; set.lanes_per_rank];
    let mut snapshots: HashMap<(usize, usize), usize> = HashMap::new();
    let mut progressed = true;

    while progressed {
        progressed = false;
        for (lane, next) in next_steps.iter_mut().enumerate() {
            let number = home + lane;
            // A lane runs until it waits for a signal of its own rank that has not been visited.
            while let Some(step) = set.lanes[number].steps.get(*next) {
                let at = *next;
                let kind = match step {
                    Step::Put { .. } | Step::Get { .. } | Step::Reduce { .. } => VisitKind::Copy,
                    Step::Signal { .. } => VisitKind::Signal,
                    Step::Wait { .. } => {
                        let flag_use = flags.of_step(number, at);
                        if flag_use.writer != rank {
                            VisitKind::RemoteWait
                        } else if let Some(&snapshot) = snapshots.get(&flag_use.signal) {
                            VisitKind::LocalWait { writer: flag_use.signal.0 - home, snapshot }
                        } else {
                            break;
                        }
                    }
                };

                let snapshot = visit(Visit { lane, at, kind })?;
                if matches!(step, Step::Signal { peer, .. } if *peer == rank) {
                    snapshots.insert((number, at), snapshot);
                }

                *next += 1;
                progressed = true;
            }
        }
    }

    Ok(())
}
