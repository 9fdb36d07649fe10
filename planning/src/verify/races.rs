//! Checks that no rank reads data before it has arrived, or overwrites data that is still in use.
//!
//! A lane learns only by its own waits: a wait tells it what the signal published. Every wait passes, because
//! [no cycle of waits exists](super::flags::check_deadlock). So what a lane knows at a step does not depend on the order in
//! which lanes run: it is what happens before the step, along lanes and from each signal to its wait.
//!
//! Flags can tell a lane only facts of the start in which they are signalled, and all starts are alike. So it is enough to examine one
//! start, after as many starts as there are outputs: a flag was last used `outputs` starts ago, and so was an output.
//! Earlier starts know less of previous starts, but find flags and outputs unused.
//!
//! A rank is followed with all its lanes. From each signal of another rank it keeps how far the writer's lane had come, and
//! the writer's other lanes as far as that lane knew. That nearly always decides, and costs the same for any number of ranks.
//! If it does not, a [complete search](super::happens_before::HappensBefore) does, so no correct plan is refused.

use std::collections::HashMap;

use peerlane_hal::Rank;

use super::copies::{CellCopy, Completions, Copies, Wait, WaitRange};
use super::fault::{Fault, Location};
use super::flags::Flags;
use super::happens_before::{Event, HappensBefore, VectorClocks};
use super::plan_set::PlanSet;
use crate::plan::{Cell, LaneId, Source, Step};

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

struct RaceCheck<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
    copies: &'a Copies,
    completions: Completions,
    sibling_times: SiblingTimes,
    happens_before: HappensBefore<'a>,
    clocks: VectorClocks,
    later: Option<(u32, Fault)>,
}

#[derive(Clone, Copy)]
struct Fact {
    rank: Rank,
    lane: LaneId,
    at: usize,
    age: u32,
}

impl Fact {
    fn entered(rank: Rank, age: u32) -> Self {
        Self { rank, lane: LaneId::HOME, at: 0, age }
    }

    fn passed(Wait { rank, lane, at }: Wait, age: u32) -> Self {
        Self { rank, lane, at: at + 1, age }
    }
}

#[derive(Clone, Copy)]
struct Current {
    rank: Rank,
    home: usize,
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
        self.set.outputs.into()
    }

    fn check_rank(&mut self, rank: Rank, home: usize) -> Result<(), Fault> {
        self.clocks.clear();
        let (set, flags) = (self.set, self.flags);
        for start in 0..=self.last_start() {
            run_start(set, flags, home, |Visit { lane, at, kind }| {
                let current = Current { rank, home, lane, at };
                let entry = set.clock_index(rank, LaneId(Rank::at(lane).0));
                self.clocks.advance(lane, entry, self.happens_before.time(start, at));
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
            })?;
            let steps = set.lanes[home].steps.len();
            let entry = set.clock_index(rank, LaneId::HOME);
            self.clocks.advance(0, entry, self.happens_before.time(start, steps));
        }
        self.check_end(Current { rank, home, lane: 0, at: set.lanes[home].steps.len() })
    }

    fn merge_remote(&mut self, Current { home, lane, at, .. }: Current, start: i64) {
        let flag_use = self.flags.of_step(home + lane, at);
        let (writer, signal) = flag_use.signal;
        let start = start - self.set.lag(home + lane, at);
        if start < 0 {
            // The first starts find unused memory, and learn nothing from flags of earlier ones.
            return;
        }
        let entry = self.set.clock_index(flag_use.writer, self.set.lanes[writer].lane);
        self.clocks.advance(lane, entry, self.happens_before.time(start, signal));
        let lanes = self.set.lanes_per_rank;
        if let Some(times) = self.sibling_times.get(writer) {
            let first = self.set.clock_index(flag_use.writer, LaneId::HOME);
            for (sibling, time) in times[signal * lanes..][..lanes].iter().enumerate() {
                let time = self.happens_before.time(start, 0) + time;
                self.clocks.advance(lane, first + sibling, time);
            }
        }
    }

    fn knows(&mut self, current: Current, fact: Fact) -> bool {
        self.is_implied(current, fact) || self.is_found(current, fact)
    }

    fn time(&self, fact: Fact) -> i64 {
        self.happens_before.time(self.last_start() - i64::from(fact.age), fact.at)
    }

    fn is_implied(&self, current: Current, fact: Fact) -> bool {
        let entry = self.set.clock_index(fact.rank, fact.lane);
        if self.clocks.time(current.lane, entry) >= self.time(fact) {
            return true;
        }
        // A rank that has entered a start has ended the one before. If its output then held a block of every rank,
        // every rank had entered that start, because each block comes from the input of its provider, from copy to
        // copy. So every rank has entered the start before, and ended the one before that. The collective decides for
        // which ranks this holds; the root of a broadcast gets no data from others. (A cell that does not come from an
        // input is a fault of the first start, which is reported whatever is concluded here.)
        let Some(age) = fact.age.checked_sub(1) else { return false };
        if fact.at > 0 || fact.lane != LaneId::HOME {
            let lane = self.set.followed_lane(fact.rank, fact.lane);
            let joins_home = self.completions.joins_home(lane);
            return joins_home && self.is_implied(current, Fact::entered(fact.rank, age));
        }
        if !self.set.collective.hears_from_everyone(current.rank, self.set.ranks) {
            return false;
        }
        let own = self.set.clock_index(current.rank, LaneId::HOME);
        self.clocks.time(current.lane, own) >= self.time(Fact::entered(current.rank, age))
    }

    fn is_found(&mut self, current: Current, fact: Fact) -> bool {
        let (entry, time) = (self.set.clock_index(fact.rank, fact.lane), self.time(fact));
        let lane = self.set.lanes[current.home + current.lane].lane;
        let now = self.happens_before.time(self.last_start(), current.at);
        let later = Event { rank: current.rank, lane, time: now };
        let earlier = Event { rank: fact.rank, lane: fact.lane, time };
        let is_found = self.happens_before.precedes(earlier, later);
        if is_found {
            self.clocks.advance(current.lane, entry, time);
        }
        is_found
    }

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

    fn knows_copied(&mut self, current: Current, rank: Rank, cell: Cell) -> bool {
        self.knows_arrived(current, rank, cell, Copies::of)
    }

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
        let cell = symmetry.rotated_cell(back, cell);
        let Some(copy) = find(self.copies, self.set, representative, cell) else { return false };
        let (lane, at) = copy.step;
        let is_sum = matches!(self.set.lanes[lane].steps[at], Step::Reduce { .. });
        let is_own = rank == current.rank && lane == current.home + current.lane;
        if is_sum && is_own && at < current.at {
            // What follows the additions in their lane reads the result.
            return true;
        }
        let owner = symmetry.rotated(symmetry.rotation_of(rank), copy.rank);
        let waits = self.completions.of_copy(copy.step);
        self.knows_any(current, owner, waits)
    }

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
        if !has_arrived {
            return Err(Fault::ReadEarly { location: current.location(self.set), start: 1 });
        }
        if let Some(start) = self.start_in_use(current, target) {
            let location = current.location(self.set);
            return self.refuse(start, Fault::PeerInUse { location, peer: target, start });
        }
        // In place, a result overwrites a contribution of the target, which must have been read.
        let given = Cell { block: target, chunk: cell.chunk };
        let overwrites = self.set.in_place && self.set.collective.is_reduction();
        if overwrites
            && from == Source::Output
            && !self.knows_arrived(current, cell.block, given, Copies::of_contribution)
        {
            let location = current.location(self.set);
            return Err(Fault::PeerInUse { location, peer: target, start: 1 });
        }
        Ok(())
    }

    fn check_reduce(&mut self, current: Current, cell: Cell, from: Rank) -> Result<(), Fault> {
        let own_rank = current.rank;
        let contribution = Cell { block: from, chunk: cell.chunk };
        let has_arrived = match from == own_rank {
            true => self.knows(current, Fact::entered(own_rank, 0)),
            false => self.knows_arrived(current, own_rank, contribution, Copies::of_contribution),
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

    /// Returns the first start whose step could write to an output of `target` that its caller still uses.
    ///
    /// With several outputs, a start writes to the output of `outputs` starts ago. The caller of the target had it until it
    /// entered the start after that one.
    fn start_in_use(&mut self, current: Current, target: Rank) -> Option<u32> {
        let age = self.set.outputs - 1;
        (!self.knows(current, Fact::entered(target, age))).then_some(age + 1)
    }

    fn refuse(&mut self, start: u32, fault: Fault) -> Result<(), Fault> {
        if start == 1 {
            return Err(fault);
        }
        if self.later.as_ref().is_none_or(|&(first, _)| start < first) {
            self.later = Some((start, fault));
        }
        Ok(())
    }

    fn check_signal(&mut self, current: Current, peer: Rank) -> Result<(), Fault> {
        let (reader, at) = self.flags.of_step(current.home + current.lane, current.at).wait;
        let wait = Wait { rank: peer, lane: self.set.lanes[reader].lane, at };
        // The flag was last signalled `outputs` starts ago.
        let lag = self.set.lanes[reader].lag(at);
        let age = self.set.outputs.saturating_sub(lag);
        if self.knows(current, Fact::passed(wait, age)) {
            return Ok(());
        }
        let (location, start) = (current.location(self.set), age + 1);
        self.refuse(start, Fault::NotConsumed { location, start })
    }

    fn check_end(&mut self, current: Current) -> Result<(), Fault> {
        let Current { rank, home, .. } = current;
        let (set, start) = (self.set, 1);
        for number in home + 1..home + set.lanes_per_rank {
            let waits = self.completions.of_lane_end(number);
            if !set.lanes[number].steps.is_empty() && !self.knows_any(current, rank, waits) {
                let lane = set.lanes[number].lane;
                return Err(Fault::SourceInUse { rank, lane, start });
            }
        }
        for getter in self.completions.getters(set, rank).to_vec() {
            let lane = set.lanes[getter.lane].lane;
            let is_own = getter.rank == rank && lane == LaneId::HOME;
            if !is_own && !self.knows_any(current, getter.rank, getter.waits) {
                return Err(Fault::PeerReads { rank, peer: getter.rank, lane, start });
            }
        }
        let copies = self.copies;
        for copy in copies.of_output(set, rank) {
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

type SiblingTimes = Vec<Vec<i64>>;

fn sibling_times(set: &PlanSet, flags: &Flags) -> SiblingTimes {
    let lanes = set.lanes_per_rank;
    let mut sibling_times = SiblingTimes::new();
    if lanes == 1 {
        return sibling_times;
    }
    let happens_before = HappensBefore::new(set, flags);
    sibling_times.extend(set.lanes.iter().map(|lane| vec![0; lane.steps.len() * lanes]));
    let mut clocks = VectorClocks::new(lanes, lanes);
    for (_, home) in set.followed_ranks() {
        clocks.clear();
        for start in 0..=i64::from(set.outputs) {
            let start_time = happens_before.time(start, 0);
            run_start(set, flags, home, |Visit { lane, at, kind }| {
                match kind {
                    VisitKind::Copy | VisitKind::RemoteWait => {}
                    VisitKind::LocalWait { writer, snapshot } => {
                        clocks.merge(lane, writer, snapshot);
                    }
                    VisitKind::Signal => {
                        clocks.advance(lane, lane, happens_before.time(start, at));
                        let known = (0..lanes).map(|other| clocks.time(lane, other) - start_time);
                        let slots = &mut sibling_times[home + lane][at * lanes..];
                        for (slot, time) in slots.iter_mut().zip(known) {
                            *slot = time;
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

struct Visit {
    lane: usize,
    at: usize,
    kind: VisitKind,
}

enum VisitKind {
    Copy,
    Signal,
    RemoteWait,
    LocalWait { writer: usize, snapshot: usize },
}

fn run_start(
    set: &PlanSet,
    flags: &Flags,
    home: usize,
    mut visit: impl FnMut(Visit) -> Result<usize, Fault>,
) -> Result<(), Fault> {
    let rank = set.lanes[home].rank;
    let mut next = vec![0; set.lanes_per_rank];
    let mut snapshots: HashMap<(usize, usize), usize> = HashMap::new();
    let mut progressed = true;
    while progressed {
        progressed = false;
        for (lane, next) in next.iter_mut().enumerate() {
            let number = home + lane;
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
                let is_to_own_rank = matches!(step, Step::Signal { peer, .. } if *peer == rank);
                let snapshot = visit(Visit { lane, at, kind })?;
                if is_to_own_rank {
                    snapshots.insert((number, at), snapshot);
                }
                *next += 1;
                progressed = true;
            }
        }
    }
    Ok(())
}
