//! Explains a fault in a set of plans by a sequence of events that leads to the fault.
//!
//! Everything that precedes the faulty step has certainly happened before it; everything else may
//! not have happened. So a counterexample lists the preceding events in a possible order, then the
//! step, then what the step needed. Of the preceding events it shows the flags between the two
//! ranks involved, or everything that the lane of the step has waited for if there are no such
//! flags.

use std::fmt;

use peerlane_hal::Rank;

use super::fault::{Fault, Location};
use super::flags::{self, Flags};
use super::happens_before::{Event, HappensBefore};
use super::plan_set::{self, PlanSet};
use super::symmetry::Symmetry;
use crate::plan::{Cell, LaneId, Plan, Source, Step};

/// The maximum number of events that a counterexample lists; earlier events are omitted.
const EVENTS_MAX: usize = 12;

/// A sequence of events that leads to a fault in a set of plans, printed with one event per line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counterexample {
    /// The steps that lead to the fault, as text, in one order that the plans allow.
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
    /// Returns a sequence of events, from one possible execution of `plans`, that leads to the
    /// fault `self`.
    ///
    /// `plans` are the plans of all ranks.
    pub fn counterexample(&self, plans: &[Plan]) -> Counterexample {
        let counterexample =
            self.static_counterexample().or_else(|| self.ordered_counterexample(plans));

        counterexample.unwrap_or_else(|| Counterexample {
            events: Vec::new(),
            end: "the plans show this fault in every order of events".into(),
        })
    }

    /// Returns the counterexample of a fault that occurs in every order of events, or `None` for
    /// other faults.
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
                let mut events = Vec::new();
                for (index, wait) in waits.iter().enumerate() {
                    // The signal for the last wait comes after the first wait.
                    let Location { rank, lane, .. } = waits[(index + 1) % waits.len()];
                    events.push(format!(
                        "{wait} blocks: its signal comes later in rank {rank}, lane {lane}"
                    ));
                }

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

            // Other faults depend on the order of events, or the plans show them without any event.
            _ => None,
        }
    }

    /// Returns the counterexample of a fault that occurs only in some orders of events, or `None`
    /// for other faults.
    fn ordered_counterexample(&self, plans: &[Plan]) -> Option<Counterexample> {
        // The verifier makes these checks before it looks at the order of events. If one fails,
        // this is another kind of fault, or a fault of other plans.
        let owners: Vec<Rank> = Rank::all(plans.len()).collect();
        plan_set::check(plans, plans.len(), &owners).ok()?;
        let set = PlanSet::new(plans, Symmetry::none(plans.len()));
        let flags = flags::check(&set).ok()?;

        Explainer { set: &set, flags: &flags }.explain(self)
    }
}

/// An event that a faulty step depends on, but that may happen after the step.
enum Needed {
    /// Entry of the rank into the start with this number, counted from 1.
    Start(Rank, u32),
    /// Completion of the copy with this lane index and step index.
    Copy((usize, usize)),
    /// Passing of the wait with this lane index and step index, in the start with this number.
    Wait((usize, usize), u32),
}

/// Builds the counterexamples of faults that occur only in some orders of events.
struct Explainer<'a> {
    set: &'a PlanSet,
    flags: &'a Flags,
}

impl Explainer<'_> {
    /// Returns the counterexample of `fault` if the fault occurs only in some orders of events.
    fn explain(&self, fault: &Fault) -> Option<Counterexample> {
        match *fault {
            Fault::ReadEarly { location, start } => {
                let needed = self.source_of(location, start)?;
                self.events_to(self.find(location)?, start, &needed)
            }

            Fault::PeerInUse { location, peer, start } => {
                // The target's output or inbox is free once the target has entered that start.
                let entered = start - self.set.age_of_target(&location.step);
                self.events_to(self.find(location)?, start, &Needed::Start(peer, entered))
            }

            Fault::NotConsumed { location, start } => {
                let step = self.find(location)?;
                let wait = self.flags.of_step(step.0, step.1).wait;
                // A flag was last signalled `flag_sets` starts ago, and is awaited `lag` starts
                // later.
                let lag = self.set.lanes[wait.0].lag(wait.1);
                let needed = Needed::Wait(wait, start + lag - self.set.flag_sets);
                self.events_to(step, start, &needed)
            }

            Fault::NotArrived { rank, cell, start } => {
                self.events_to(self.end_of_home(rank), start, &self.copy_of(rank, cell)?)
            }

            Fault::SourceInUse { rank, lane, start } => {
                let reads = |step: &Step| !matches!(step, Step::Signal { .. } | Step::Wait { .. });
                let needed = self.last_step(rank, lane, reads)?;
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

    /// Returns the event after which the step at `location` may read its source, or `None` if there
    /// is no such event.
    fn source_of(&self, location: Location, start: u32) -> Option<Needed> {
        let rank = location.rank;
        let (owner, cell, source) = match location.step {
            Step::Put { cell, from, .. } => (rank, cell, from),
            Step::Get { peer, cell, from } => (peer, cell, from),
            Step::Reduce { cell, from } => (rank, Cell { block: from, ..cell }, Source::Input),
            Step::Signal { .. } | Step::Wait { .. } => return None,
        };

        // An input is valid from the beginning of the start, and so is a block that the output
        // holds in place. Copies fill the rest of an output, and the inboxes.
        let is_initial = source == Source::Input || self.set.is_initial(owner, cell);
        match location.step {
            Step::Reduce { from, .. } if from != rank => self.contribution(rank, cell),
            _ if is_initial => Some(Needed::Start(owner, start)),
            _ => self.copy_of(owner, cell),
        }
    }

    /// Returns the lane index and the step index of `location` in the plan set, or `None` if the
    /// set has no such step.
    fn find(&self, location: Location) -> Option<(usize, usize)> {
        let lane = self.set.followed_lane(location.rank, location.lane);
        let steps = self.set.lanes[lane].steps.len();
        (0..steps).find(|&at| self.set.location(lane, at) == location).map(|at| (lane, at))
    }

    /// Returns the end of lane 0 of `rank`, as the index of the lane and the number of its steps.
    fn end_of_home(&self, rank: Rank) -> (usize, usize) {
        let home = self.set.followed_lane(rank, LaneId::HOME);
        (home, self.set.lanes[home].steps.len())
    }

    /// Returns the event after which the output of `owner` holds the final bytes of the cell
    /// `needed`, or `None` if no step writes this cell.
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
        let (lane, first, step) = steps.find(|&(lane, _, step)| copies(lane, step))?;

        // A reduced cell is complete with its last addition.
        let same = |found: &(usize, usize, Step)| copies(found.0, found.2);
        let at = match step {
            Step::Reduce { .. } => steps.filter(same).last().map_or(first, |(_, last, _)| last),
            _ => first,
        };

        Some(Needed::Copy((lane, at)))
    }

    /// Returns the event after which the inbox of `to` holds the contribution `needed`, or `None`
    /// if no step puts it there.
    fn contribution(&self, to: Rank, needed: Cell) -> Option<Needed> {
        let copies = |step: Step| match step {
            Step::Put { peer, cell, from: Source::Input } => peer == to && cell == needed,
            _ => false,
        };

        let (lane, at, _) = self.set.steps().find(|&(_, _, step)| copies(step))?;
        Some(Needed::Copy((lane, at)))
    }

    /// Returns the completion of the last step in `lane` of `rank` that `picks` accepts, or `None`
    /// if `picks` accepts no step.
    fn last_step(&self, rank: Rank, lane: LaneId, picks: impl Fn(&Step) -> bool) -> Option<Needed> {
        let number = self.set.followed_lane(rank, lane);
        let at = self.set.lanes[number].steps.iter().rposition(picks)?;
        Some(Needed::Copy((number, at)))
    }

    /// Builds the counterexample of a fault at step `at` of `lane`, which needs the event `needed`
    /// first.
    ///
    /// It lists the events that precede the step in `start`, and ends with the missing event.
    ///
    /// If `at` is the number of steps of the lane, the step is the end of the lane.
    fn events_to(
        &self,
        (lane, at): (usize, usize),
        start: u32,
        needed: &Needed,
    ) -> Option<Counterexample> {
        let mut happens_before = HappensBefore::new(self.set, self.flags);
        let closed = &self.set.lanes[lane];
        // Faults count starts from 1, and logical times count them from 0.
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

        // Without a flag between the two ranks, everything that the lane has waited for is listed.
        let mut events = self.events(&happens_before, &reached, is_between);
        if events.is_empty() {
            events = self.events(&happens_before, &reached, |[_, reader]| reader == lane);
        }

        // The latest events explain a fault best.
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
            Needed::Start(rank, entered) => {
                format!("rank {rank} may not have entered start {entered}")
            }
            Needed::Copy((other, copy)) => {
                // A lane that has come further has submitted the copy, but need not have completed
                // it.
                let is_submitted = reached[other] > happens_before.time(start_index, copy);
                let how = if is_submitted { "may not be complete" } else { "may not have begun" };
                format!("{} {how}", self.set.location(other, copy))
            }
            Needed::Wait((other, wait), passed) => {
                format!(
                    "{} may not have passed{}",
                    self.set.location(other, wait),
                    in_start(passed)
                )
            }
        };

        Some(Counterexample { events, end })
    }

    /// Simulates every lane up to its time in `reached`, and returns the signals and waits that
    /// `picks` accepts.
    ///
    /// `picks` is called with the lane that signals and the lane that waits.
    fn events(
        &self,
        happens_before: &HappensBefore<'_>,
        reached: &[i64],
        picks: impl Fn([usize; 2]) -> bool,
    ) -> Vec<String> {
        let last = reached.iter().max().map_or(0, |&time| time / happens_before.start_stride);
        let mut events = Vec::new();
        for start in 0..=last {
            // Each lane runs as far as it can. A wait passes only after its signal, so the events
            // come in a possible order.
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
                            // A single start needs no number.
                            events.push(match last {
                                0 => location.to_string(),
                                _ => format!("{location} in start {}", start + 1),
                            });
                        }

                        next[lane] += 1;
                        progressed = true;
                    }
                }
            }
        }

        events
    }

    /// Returns `Some` if `lane` can execute its next step, and `None` if the lane cannot go on.
    ///
    /// The inner value has the writer and the reader of a flag if the step may be listed.
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
            Step::Wait { flag } => {
                // A signal of an earlier start comes before all steps of this one.
                let (writer, signal) = self.flags.of_step(lane, at).signal;
                let is_signalled = flag.lag() > 0 || next[writer] > signal;
                (has_passed && is_signalled).then_some(Some([writer, lane]))
            }
            Step::Signal { .. } => {
                // The last known step of a lane is often a signal whose wait has passed. A signal
                // without a known wait tells nobody anything and is not listed.
                let (reader, wait) = self.flags.of_step(lane, at).wait;
                let awaited_in = start + self.set.lag(reader, wait);
                let is_consumed = reached[reader] > happens_before.time(awaited_in, wait);
                (has_passed || is_consumed).then_some(is_consumed.then_some([lane, reader]))
            }
        }
    }
}
