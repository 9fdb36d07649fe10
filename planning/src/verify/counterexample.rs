//! Explains a fault in a set of plans by a sequence of events that leads to the fault.
//!
//! Everything that precedes the faulty step has certainly happened before it; everything else may not have happened. So a
//! counterexample lists the preceding events in a possible order, then the step, then what the step needed. Of the preceding
//! events it shows the flags between the two ranks involved, or if there are none, everything for which the lane of the step
//! has waited.

use std::fmt;

use peerlane_hal::Rank;

use super::fault::{Fault, Location};
use super::flags::{self, Flags};
use super::happens_before::{Event, HappensBefore};
use super::plan_set::{self, PlanSet};
use super::symmetry::Symmetry;
use crate::plan::{Cell, LaneId, Plan, Source, Step};

const EVENTS_MAX: usize = 12;

/// A sequence of events that leads to a fault in a set of plans, printed with one event per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterexample {
    /// The events before the fault, in a possible order.
    pub events: Vec<String>,
    /// The text that states the fault to which the events lead.
    pub end: String,
}

impl fmt::Display for Counterexample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, event) in (1..).zip(&self.events) {
            writeln!(f, "{number:3}. {event}")?;
        }
        write!(f, "     {}", self.end)
    }
}

impl Fault {
    /// Returns a sequence of events that leads to this fault. `plans` are the plans of all ranks.
    pub fn counterexample(&self, plans: &[Plan]) -> Counterexample {
        let from_order = || {
            let owners: Vec<Rank> = Rank::all(plans.len()).collect();
            plan_set::check(plans, plans.len(), &owners).ok()?;
            let set = PlanSet::new(plans, Symmetry::none(plans.len()));
            let flags = flags::check(&set).ok()?;
            Explainer { set: &set, flags: &flags }.explain(self)
        };
        self.static_counterexample().or_else(from_order).unwrap_or_else(|| Counterexample {
            events: Vec::new(),
            end: "the plans show this fault in every order of events".into(),
        })
    }

    fn static_counterexample(&self) -> Option<Counterexample> {
        let counterexample =
            |events: Vec<String>, end: String| Some(Counterexample { events, end });
        match self {
            Self::CopiedTwice { first, second } => counterexample(
                vec![first.to_string(), second.to_string()],
                "both steps write the same bytes, and no flag orders the second write".into(),
            ),
            Self::CopiedInPlace { location } => counterexample(
                vec![location.to_string()],
                "the step overwrites the block that it reads".into(),
            ),
            Self::NeverCopied { rank, cell } => counterexample(
                Vec::new(),
                format!("all lanes end, but the output of rank {rank} has no cell {cell}"),
            ),
            Self::Deadlock { waits, .. } => {
                let blocked = |(at, wait): (usize, &Location)| {
                    let next = waits[(at + 1) % waits.len()];
                    let (rank, lane) = (next.rank, next.lane);
                    format!("{wait} blocks: its signal comes later in rank {rank}, lane {lane}")
                };
                let events = waits.iter().enumerate().map(blocked).collect();
                counterexample(events, "none of these lanes can continue".into())
            }
            Self::TwoWriters { first, second } => counterexample(
                vec![first.to_string(), second.to_string()],
                "a wait for this flag passes on the signal that comes first".into(),
            ),
            Self::TwoReaders { first, second } => counterexample(
                vec![first.to_string(), second.to_string()],
                "one wait resets the flag before the other wait has read it".into(),
            ),
            Self::Repeated { first, second } => counterexample(
                vec![first.to_string(), second.to_string()],
                "both signals store the same value, so the second wait passes on the first signal"
                    .into(),
            ),
            Self::Unbalanced { location, signals, waits, .. } => {
                let end = if signals > waits {
                    "no lane waits for the flag, so its value after the start differs from the \
                     value before"
                } else {
                    "no lane signals the flag, so the wait never passes"
                };
                counterexample(vec![location.to_string()], end.into())
            }
            _ => None,
        }
    }
}

enum Needed {
    Start(Rank, u32),
    Copy((usize, usize)),
    Wait((usize, usize), u32),
}

struct Explainer<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
}

impl Explainer<'_> {
    fn explain(&self, fault: &Fault) -> Option<Counterexample> {
        match *fault {
            Fault::ReadEarly { location, start } => {
                let rank = location.rank;
                let (owner, cell, from) = match location.step {
                    Step::Put { cell, from, .. } => (rank, cell, from),
                    Step::Get { peer, cell, from } => (peer, cell, from),
                    Step::Reduce { cell, from } => {
                        (rank, Cell { block: from, ..cell }, Source::Input)
                    }
                    Step::Signal { .. } | Step::Wait { .. } => return None,
                };
                let is_initial = from == Source::Input || self.set.is_initial(owner, cell);
                let needed = match location.step {
                    Step::Reduce { from, .. } if from != rank => self.contribution(rank, cell)?,
                    _ if is_initial => Needed::Start(owner, start),
                    _ => self.copy_of(owner, cell)?,
                };
                self.events_to(self.find(location)?, start, &needed)
            }
            Fault::PeerInUse { location, peer, start } => {
                let entered = start + 1 - self.set.outputs;
                self.events_to(self.find(location)?, start, &Needed::Start(peer, entered))
            }
            Fault::NotConsumed { location, start } => {
                let step = self.find(location)?;
                let wait = self.flags.of_step(step.0, step.1).wait;
                let needed = Needed::Wait(wait, start - self.set.outputs);
                self.events_to(step, start, &needed)
            }
            Fault::NotArrived { rank, cell, start } => {
                self.events_to(self.end_of_home(rank), start, &self.copy_of(rank, cell)?)
            }
            Fault::SourceInUse { rank, lane, start } => {
                let is_copy = |step: &Step| matches!(step, Step::Put { .. } | Step::Get { .. });
                let needed = self.last_step(rank, lane, is_copy)?;
                self.events_to(self.end_of_home(rank), start, &needed)
            }
            Fault::PeerReads { rank, peer: by, lane, start } => {
                let gets = |step: &Step| matches!(step, Step::Get { peer, .. } if *peer == rank);
                let needed = self.last_step(by, lane, gets)?;
                self.events_to(self.end_of_home(rank), start, &needed)
            }
            _ => None,
        }
    }

    fn find(&self, location: Location) -> Option<(usize, usize)> {
        let lane = self.set.followed_lane(location.rank, location.lane);
        let steps = self.set.lanes[lane].steps.len();
        (0..steps).find(|&at| self.set.location(lane, at) == location).map(|at| (lane, at))
    }

    fn end_of_home(&self, rank: Rank) -> (usize, usize) {
        let home = self.set.followed_lane(rank, LaneId::HOME);
        (home, self.set.lanes[home].steps.len())
    }

    fn copy_of(&self, owner: Rank, needed: Cell) -> Option<Needed> {
        let copies = |lane: usize, step: Step| match step {
            Step::Put { peer, cell, .. } => peer == owner && cell == needed,
            Step::Get { cell, .. } | Step::Reduce { cell, .. } => {
                self.set.lanes[lane].rank == owner && cell == needed
            }
            Step::Signal { .. } | Step::Wait { .. } => false,
        };
        let collective = self.set.collective;
        let mut steps = self.set.steps().filter(|&(_, _, step)| !step.contributes(collective));
        let (lane, at, step) = steps.find(|&(lane, _, step)| copies(lane, step))?;
        let same = |found: &(usize, usize, Step)| copies(found.0, found.2);
        let at = match step {
            Step::Reduce { .. } => steps.filter(same).last().map_or(at, |(_, at, _)| at),
            _ => at,
        };
        Some(Needed::Copy((lane, at)))
    }

    fn contribution(&self, to: Rank, needed: Cell) -> Option<Needed> {
        let copies = |step: Step| matches!(step, Step::Put { peer, cell, from: Source::Input } if peer == to && cell == needed);
        let (lane, at, _) = self.set.steps().find(|&(_, _, step)| copies(step))?;
        Some(Needed::Copy((lane, at)))
    }

    fn last_step(&self, rank: Rank, lane: LaneId, picks: impl Fn(&Step) -> bool) -> Option<Needed> {
        let number = self.set.followed_lane(rank, lane);
        let at = self.set.lanes[number].steps.iter().rposition(picks)?;
        Some(Needed::Copy((number, at)))
    }

    fn events_to(
        &self,
        (lane, at): (usize, usize),
        start: u32,
        needed: &Needed,
    ) -> Option<Counterexample> {
        let mut happens_before = HappensBefore::new(self.set, self.flags);
        let closed = &self.set.lanes[lane];
        let start_index = i64::from(start) - 1;
        let time = happens_before.time(start_index, at);
        let reached = happens_before.before(Event { rank: closed.rank, lane: closed.lane, time });
        let other = match *needed {
            Needed::Start(rank, _) => self.set.followed_lane(rank, LaneId::HOME),
            Needed::Copy((other, _)) | Needed::Wait((other, _), _) => other,
        };
        let is_between = |[writer, reader]: [usize; 2]| {
            let rank = |lane: usize| self.set.lanes[lane].rank;
            let ranks = [rank(writer), rank(reader)];
            ranks == [rank(lane), rank(other)] || ranks == [rank(other), rank(lane)]
        };
        let mut events = self.events(&happens_before, &reached, is_between);
        if events.is_empty() {
            events = self.events(&happens_before, &reached, |[_, reader]| reader == lane);
        }
        let omitted = events.len().saturating_sub(EVENTS_MAX);
        events.drain(..omitted);
        if omitted > 0 {
            events.insert(0, format!("{omitted} earlier steps"));
        }
        let in_start = |start: u32| format!(" in start {start}");
        events.push(match closed.steps.get(at) {
            Some(_) => format!("{}{}", self.set.location(lane, at), in_start(start)),
            None => format!("rank {}: lane 0 has ended{}", closed.rank, in_start(start)),
        });
        let end = match *needed {
            Needed::Start(rank, start) => format!("rank {rank} may not have entered start {start}"),
            Needed::Copy((lane, at)) => {
                let is_submitted = reached[lane] > happens_before.time(start_index, at);
                let how = if is_submitted { "may not be complete" } else { "may not have begun" };
                format!("{} {how}", self.set.location(lane, at))
            }
            Needed::Wait((lane, at), start) => {
                format!("{} may not have passed{}", self.set.location(lane, at), in_start(start))
            }
        };
        Some(Counterexample { events, end })
    }

    fn events(
        &self,
        happens_before: &HappensBefore<'_>,
        reached: &[i64],
        picks: impl Fn([usize; 2]) -> bool,
    ) -> Vec<String> {
        let last = reached.iter().max().map_or(0, |&time| time / happens_before.start_stride);
        let mut events = Vec::new();
        for start in 0..=last {
            let mut next = vec![0; self.set.lanes.len()];
            let mut progressed = true;
            while progressed {
                progressed = false;
                for lane in 0..next.len() {
                    while let Some(ends) =
                        self.next_step(happens_before, reached, start, &next, lane)
                    {
                        if ends.is_some_and(&picks) {
                            let location = self.set.location(lane, next[lane]);
                            let in_start = format!(" in start {}", start + 1);
                            let in_start = if last > 0 { &in_start } else { "" };
                            events.push(format!("{location}{in_start}"));
                        }
                        next[lane] += 1;
                        progressed = true;
                    }
                }
            }
        }
        events
    }

    fn next_step(
        &self,
        happens_before: &HappensBefore<'_>,
        reached: &[i64],
        start: i64,
        next: &[usize],
        lane: usize,
    ) -> Option<Option<[usize; 2]>> {
        let at = next[lane];
        let step = self.set.lanes[lane].steps.get(at)?;
        let has_passed = reached[lane] > happens_before.time(start, at);
        match step {
            Step::Put { .. } | Step::Get { .. } | Step::Reduce { .. } => has_passed.then_some(None),
            Step::Wait { .. } => {
                let (writer, signal) = self.flags.of_step(lane, at).signal;
                (has_passed && next[writer] > signal).then_some(Some([writer, lane]))
            }
            Step::Signal { .. } => {
                let (reader, wait) = self.flags.of_step(lane, at).wait;
                let is_consumed = reached[reader] > happens_before.time(start, wait);
                (has_passed || is_consumed).then_some(is_consumed.then_some([lane, reader]))
            }
        }
    }
}
