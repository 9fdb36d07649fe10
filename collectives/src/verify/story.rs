//! Explains a fault by an interleaving that leads to it.
//!
//! What certainly happened before the faulty step is its past; everything else may not have happened. So a story lists that
//! past in a possible order, then the step, then what the step needed. Of the past it shows the flags between the two ranks
//! involved, or if there are none, everything that the lane of the step has waited for.

use std::fmt;

use peerlane_hal::Rank;

use super::fault::{Fault, Place};
use super::flags::{self, Flags};
use super::past::{Moment, Past};
use super::program::Program;
use super::shape;
use super::symmetry::Symmetry;
use crate::plan::{Cell, LaneId, Plan, Source, Step};

/// The largest number of steps before the last that a story shows.
const STEPS_MAX: usize = 12;

/// The events that lead to a fault, one per line in its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Story {
    /// The events, in order.
    pub events: Vec<String>,
    /// The fault at their end.
    pub end: String,
}

impl fmt::Display for Story {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, event) in (1..).zip(&self.events) {
            writeln!(f, "{number:3}. {event}")?;
        }
        write!(f, "     {}", self.end)
    }
}

impl Fault {
    /// Returns the events that lead to this fault of `plans`, the plans of all ranks.
    pub fn story(&self, plans: &[Plan]) -> Story {
        let happens = || {
            let owners: Vec<Rank> = Rank::all(plans.len()).collect();
            shape::check(plans, plans.len(), &owners).ok()?;
            let program = Program::new(plans, Symmetry::none(plans.len()));
            let flags = flags::check(&program).ok()?;
            Teller { program: &program, flags: &flags }.tell(self)
        };
        self.structure().or_else(happens).unwrap_or_else(|| Story {
            events: Vec::new(),
            end: "it shows in the plans, whichever way they run".into(),
        })
    }

    /// Returns the story of a fault that does not depend on the order of events.
    fn structure(&self) -> Option<Story> {
        let story = |events: Vec<String>, end: String| Some(Story { events, end });
        match self {
            Self::PutTwice { first, second } => story(
                vec![first.to_string(), second.to_string()],
                "both write the same bytes, and nobody knows when the second is under way".into(),
            ),
            Self::PutInPlace { place } => {
                story(vec![place.to_string()], "it writes over the shard that it reads".into())
            }
            Self::NeverPut { rank, cell } => {
                story(Vec::new(), format!("all lanes end, and rank {rank} has no cell {cell}"))
            }
            Self::Deadlock { waits, .. } => {
                let held = |(at, wait): (usize, &Place)| {
                    let next = waits[(at + 1) % waits.len()];
                    let (rank, lane) = (next.rank, next.lane);
                    format!("{wait} holds: its signal stands behind rank {rank}, lane {lane}")
                };
                let events = waits.iter().enumerate().map(held).collect();
                story(events, "so none of these lanes ever goes on".into())
            }
            Self::TwoWriters { first, second } => story(
                vec![first.to_string(), second.to_string()],
                "a wait for this flag passes on whichever comes first".into(),
            ),
            Self::TwoReaders { first, second } => story(
                vec![first.to_string(), second.to_string()],
                "one of them resets the flag before the other has seen it".into(),
            ),
            Self::Repeated { first, second } => story(
                vec![first.to_string(), second.to_string()],
                "both store the same value, so the second wait passes on the first signal".into(),
            ),
            Self::Unbalanced { place, signals, waits, .. } => {
                let end = if signals > waits {
                    "nobody waits for it, so the flag is not as it was before the start"
                } else {
                    "nobody signals it, so the wait passes in no start"
                };
                story(vec![place.to_string()], end.into())
            }
            _ => None,
        }
    }
}

/// What a step needed and did not know.
enum Lacking {
    /// A rank has entered a start.
    Start(Rank, u32),
    /// A copy is complete: the lane and the index of the step.
    Copy((usize, usize)),
    /// A wait of an earlier start has passed.
    Wait((usize, usize), u32),
}

struct Teller<'a> {
    program: &'a Program,
    flags: &'a Flags,
}

impl Teller<'_> {
    fn tell(&self, fault: &Fault) -> Option<Story> {
        match *fault {
            Fault::ReadEarly { place, start } => {
                let (owner, cell, from) = match place.step {
                    Step::Put { cell, from, .. } => (place.rank, cell, from),
                    Step::Get { peer, cell, from } => (peer, cell, from),
                    Step::Signal { .. } | Step::Wait { .. } => return None,
                };
                let there =
                    from == Source::Input || self.program.is_there_from_the_start(owner, cell);
                let lacking =
                    if there { Lacking::Start(owner, start) } else { self.delivery(owner, cell)? };
                self.story(self.spot(place)?, start, &lacking)
            }
            Fault::PeerInUse { place, peer, start } => {
                let entered = start + 1 - self.program.outputs;
                self.story(self.spot(place)?, start, &Lacking::Start(peer, entered))
            }
            Fault::NotConsumed { place, start } => {
                let spot = self.spot(place)?;
                let wait = self.flags.of_step(spot.0, spot.1).wait;
                let lacking = Lacking::Wait(wait, start - self.program.outputs);
                self.story(spot, start, &lacking)
            }
            Fault::NotArrived { rank, cell, start } => {
                self.story(self.end(rank), start, &self.delivery(rank, cell)?)
            }
            Fault::SourceInUse { rank, lane, start } => {
                let is_copy = |step: &Step| matches!(step, Step::Put { .. } | Step::Get { .. });
                self.story(self.end(rank), start, &self.last(rank, lane, is_copy)?)
            }
            Fault::StillGot { rank, by, lane, start } => {
                let gets = |step: &Step| matches!(step, Step::Get { peer, .. } if *peer == rank);
                self.story(self.end(rank), start, &self.last(by, lane, gets)?)
            }
            _ => None,
        }
    }

    fn spot(&self, place: Place) -> Option<(usize, usize)> {
        let lane = self.program.lane(place.rank, place.lane);
        let steps = self.program.lanes[lane].steps.len();
        (0..steps).find(|&at| self.program.place(lane, at) == place).map(|at| (lane, at))
    }

    /// Returns the end of lane 0.
    fn end(&self, rank: Rank) -> (usize, usize) {
        let home = self.program.lane(rank, LaneId::HOME);
        (home, self.program.lanes[home].steps.len())
    }

    fn delivery(&self, owner: Rank, wanted: Cell) -> Option<Lacking> {
        let copies = |lane: usize, step: Step| match step {
            Step::Put { peer, cell, .. } => peer == owner && cell == wanted,
            Step::Get { cell, .. } => self.program.lanes[lane].rank == owner && cell == wanted,
            Step::Signal { .. } | Step::Wait { .. } => false,
        };
        let (lane, at, _) = self.program.steps().find(|&(lane, _, step)| copies(lane, step))?;
        Some(Lacking::Copy((lane, at)))
    }

    fn last(&self, rank: Rank, lane: LaneId, picks: impl Fn(&Step) -> bool) -> Option<Lacking> {
        let number = self.program.lane(rank, lane);
        let at = self.program.lanes[number].steps.iter().rposition(picks)?;
        Some(Lacking::Copy((number, at)))
    }

    fn story(&self, (lane, at): (usize, usize), start: u32, lacking: &Lacking) -> Option<Story> {
        let mut past = Past::new(self.program, self.flags);
        let closed = &self.program.lanes[lane];
        let begun = i64::from(start) - 1;
        let now = Moment { rank: closed.rank, lane: closed.lane, time: past.at(begun, at) };
        let reached = past.of(now);
        let other = match *lacking {
            Lacking::Start(rank, _) => self.program.lane(rank, LaneId::HOME),
            Lacking::Copy((other, _)) | Lacking::Wait((other, _), _) => other,
        };
        let between = |ends: [usize; 2]| {
            let ranks = ends.map(|end| self.program.lanes[end].rank);
            let parties = [lane, other].map(|party| self.program.lanes[party].rank);
            ranks == parties || ranks == [parties[1], parties[0]]
        };
        let mut events = self.events(&past, &reached, between);
        if events.is_empty() {
            events = self.events(&past, &reached, |[_, reader]| reader == lane);
        }
        let untold = events.len().saturating_sub(STEPS_MAX);
        events.drain(..untold);
        if untold > 0 {
            events.insert(0, format!("{untold} steps before"));
        }
        let in_start = |start: u32| format!(" in start {start}");
        events.push(match closed.steps.get(at) {
            Some(_) => format!("{}{}", self.program.place(lane, at), in_start(start)),
            None => format!("rank {}: lane 0 has ended{}", closed.rank, in_start(start)),
        });
        let end = match *lacking {
            Lacking::Start(rank, start) => {
                format!("rank {rank} may not have come to start {start}")
            }
            Lacking::Copy((lane, at)) => {
                let submitted = reached[lane] > past.at(begun, at);
                let how = if submitted { "may still be under way" } else { "may not have begun" };
                format!("{} {how}", self.program.place(lane, at))
            }
            Lacking::Wait((lane, at), start) => {
                format!("{} may not have passed{}", self.program.place(lane, at), in_start(start))
            }
        };
        Some(Story { events, end })
    }

    /// Returns the flags that have certainly passed, in a possible order, filtered by the lanes of writer and reader.
    fn events(
        &self,
        past: &Past<'_>,
        reached: &[i64],
        picks: impl Fn([usize; 2]) -> bool,
    ) -> Vec<String> {
        let last = reached.iter().max().map_or(0, |&time| time / past.stride);
        let mut events = Vec::new();
        for start in 0..=last {
            let mut next = vec![0; self.program.lanes.len()];
            let mut moves = true;
            while moves {
                moves = false;
                for lane in 0..next.len() {
                    while let Some(ends) = self.next(past, reached, start, &next, lane) {
                        if ends.is_some_and(&picks) {
                            let place = self.program.place(lane, next[lane]);
                            let when = format!(" in start {}", start + 1);
                            events.push(format!("{place}{}", if last > 0 { &when } else { "" }));
                        }
                        next[lane] += 1;
                        moves = true;
                    }
                }
            }
        }
        events
    }

    /// Returns whether the next step of a lane has certainly happened, and the lanes at the ends of its flag.
    fn next(
        &self,
        past: &Past<'_>,
        reached: &[i64],
        start: i64,
        next: &[usize],
        lane: usize,
    ) -> Option<Option<[usize; 2]>> {
        let at = next[lane];
        let step = self.program.lanes[lane].steps.get(at)?;
        let has_passed = reached[lane] > past.at(start, at);
        match step {
            Step::Put { .. } | Step::Get { .. } => has_passed.then_some(None),
            Step::Wait { .. } => {
                let (writer, signal) = self.flags.of_step(lane, at).signal;
                (has_passed && next[writer] > signal).then_some(Some([writer, lane]))
            }
            Step::Signal { .. } => {
                let (reader, wait) = self.flags.of_step(lane, at).wait;
                let is_heard = reached[reader] > past.at(start, wait);
                (has_passed || is_heard).then_some(is_heard.then_some([lane, reader]))
            }
        }
    }
}
