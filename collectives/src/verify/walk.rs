//! Follows what the lanes of each rank know, and checks that it is enough for what they do.
//!
//! A lane learns only by its own waits: a wait gives it what the signal published. Since every wait
//! passes (see [order](super::order)), what a lane knows at a step does not depend on the order in
//! which lanes run: it is what lies in the step's past, along lanes and from waits back to signals.
//!
//! A fact of the same start can only come by flags of the same start, and all starts are alike. So it
//! suffices to look at one start with as many before it as facts may be old: a flag is as it was
//! `outputs` starts ago, and an output has been used then. Earlier starts know less of what was
//! before, but find flags and outputs new.
//!
//! A rank is followed with all its lanes. Of what it hears from others it keeps how far the writer,
//! and the writer's other lanes as far as that one knew, had come. That is nearly always all that is
//! needed, and costs the same for any number of ranks; if it is not enough, [the past](super::past)
//! is searched, so nothing true is refused.

use peerlane_hal::Rank;

use super::clocks::Clocks;
use super::delivery::Deliveries;
use super::fault::{Fault, Place};
use super::flags::Flags;
use super::past::{Moment, Past};
use super::program::Program;
use super::published::{Published, Waited, Waits};
use super::siblings::{Siblings, siblings};
use super::start::{Kind, Passing, run_start};
use crate::plan::{Cell, LaneId, Source, Step};

/// Checks the ranks that are followed.
pub(super) fn check(
    program: &Program,
    flags: &Flags,
    deliveries: &Deliveries,
) -> Result<(), Fault> {
    let siblings = siblings(program, flags);
    let past = Past::new(program, flags);
    let clocks = Clocks::new(program.width, program.ranks as usize * program.width);
    let published = Published::new(program, flags);
    let later = None;
    let mut walk = Walk { program, flags, deliveries, published, siblings, past, clocks, later };
    program.homes().try_for_each(|(rank, home)| walk.check_rank(rank, home))?;
    walk.later.map_or(Ok(()), |(_, fault)| Err(fault))
}

struct Walk<'a> {
    program: &'a Program,
    flags: &'a Flags,
    deliveries: &'a Deliveries,
    published: Published,
    siblings: Siblings,
    past: Past<'a>,
    clocks: Clocks,
    /// The first fault that does not occur in the first start.
    later: Option<(u32, Fault)>,
}

/// An event that must be known to have happened, in the current start or some starts before.
#[derive(Clone, Copy)]
struct Fact {
    rank: Rank,
    lane: LaneId,
    /// The step that the lane must have reached.
    at: usize,
    age: u32,
}

impl Fact {
    /// Returns the event that a rank has entered a start.
    fn entered(rank: Rank, age: u32) -> Self {
        Self { rank, lane: LaneId::HOME, at: 0, age }
    }

    /// Returns the event that a wait has passed.
    fn waited(Waited { rank, lane, at }: Waited, age: u32) -> Self {
        Self { rank, lane, at: at + 1, age }
    }
}

/// A step of a lane of the followed rank.
#[derive(Clone, Copy)]
struct Here {
    rank: Rank,
    home: usize,
    lane: usize,
    at: usize,
}

impl Here {
    fn place(&self, program: &Program) -> Place {
        program.place(self.home + self.lane, self.at)
    }
}

impl Walk<'_> {
    /// Returns the number of the current start; starts from 0 are before it.
    fn start(&self) -> i64 {
        self.program.outputs.into()
    }

    fn check_rank(&mut self, rank: Rank, home: usize) -> Result<(), Fault> {
        self.clocks.clear();
        let (program, flags) = (self.program, self.flags);
        for start in 0..=self.start() {
            run_start(program, flags, home, |Passing { lane, at, kind }| {
                let here = Here { rank, home, lane, at };
                let column = program.column(rank, LaneId(Rank::at(lane).0));
                self.clocks.learn(lane, column, self.past.at(start, at));
                if start == self.start() {
                    self.check_step(here)?;
                }
                match kind {
                    Kind::Copy | Kind::Signal => {}
                    Kind::Heard => self.hear(here, start),
                    Kind::Told { from, snapshot } => self.clocks.take(lane, from, snapshot),
                }
                Ok(self.clocks.snapshot(lane))
            })?;
            let ends = program.lanes[home].steps.len();
            let column = program.column(rank, LaneId::HOME);
            self.clocks.learn(0, column, self.past.at(start, ends));
        }
        self.check_end(Here { rank, home, lane: 0, at: program.lanes[home].steps.len() })
    }

    /// Adds what a wait for a signal of another rank publishes.
    fn hear(&mut self, Here { home, lane, at, .. }: Here, start: i64) {
        let ends = self.flags.of_step(home + lane, at);
        let (writer, signal) = ends.signal;
        let column = self.program.column(ends.writer, self.program.lanes[writer].lane);
        self.clocks.learn(lane, column, self.past.at(start, signal));
        let width = self.program.width;
        if let Some(siblings) = self.siblings.get(writer) {
            let first = self.program.column(ends.writer, LaneId::HOME);
            for (other, time) in siblings[signal * width..][..width].iter().enumerate() {
                self.clocks.learn(lane, first + other, self.past.at(start, 0) + time);
            }
        }
    }

    fn knows(&mut self, here: Here, fact: Fact) -> bool {
        self.sees(here, fact) || self.finds(here, fact)
    }

    fn time(&self, fact: Fact) -> i64 {
        self.past.at(self.start() - i64::from(fact.age), fact.at)
    }

    /// Returns whether the lane knows a fact without a search.
    ///
    /// A rank that has entered a start has ended the one before. If its output then held a block of every
    /// rank, every rank had entered that start, because each block comes from the input of its provider,
    /// from copy to copy. So every rank has entered the start before, and ended the one before that. The
    /// collective says for which ranks this holds; the root of a broadcast gets no data from others. (A
    /// cell that does not come from an input is a fault of the first start, which is reported whatever is
    /// concluded here.)
    fn sees(&self, here: Here, fact: Fact) -> bool {
        let column = self.program.column(fact.rank, fact.lane);
        if self.clocks.known(here.lane, column) >= self.time(fact) {
            return true;
        }
        let Some(age) = fact.age.checked_sub(1) else { return false };
        if fact.at > 0 || fact.lane != LaneId::HOME {
            let joins = self.published.joins(self.program.lane(fact.rank, fact.lane));
            return joins && self.sees(here, Fact::entered(fact.rank, age));
        }
        if !self.program.collective.hears_from_everyone(here.rank, self.program.ranks) {
            return false;
        }
        let own = self.program.column(here.rank, LaneId::HOME);
        self.clocks.known(here.lane, own) >= self.time(Fact::entered(here.rank, age))
    }

    /// Returns whether the complete search finds that the lane knows.
    fn finds(&mut self, here: Here, fact: Fact) -> bool {
        let (column, time) = (self.program.column(fact.rank, fact.lane), self.time(fact));
        let lane = self.program.lanes[here.home + here.lane].lane;
        let now = Moment { rank: here.rank, lane, time: self.past.at(self.start(), here.at) };
        let wanted = Moment { rank: fact.rank, lane: fact.lane, time };
        let found = self.past.holds(now, wanted);
        if found {
            self.clocks.learn(here.lane, column, time);
        }
        found
    }

    /// Returns whether one of some waits of the current start has passed.
    fn knows_any(&mut self, here: Here, owner: Rank, waits: Waits) -> bool {
        let symmetry = &self.program.symmetry;
        let turn = symmetry.turn_of(owner);
        let fact = |wait: Waited| {
            Fact::waited(Waited { rank: symmetry.turned(turn, wait.rank), ..wait }, 0)
        };
        // A search is dear, so only when nothing is seen.
        self.published.waits(waits).any(|wait| self.sees(here, fact(wait)))
            || waits.indices().any(|wait| self.finds(here, fact(self.published.wait(wait))))
    }

    /// Returns whether a copied cell is known to be in the output of `rank`.
    fn knows_written(&mut self, here: Here, rank: Rank, cell: Cell) -> bool {
        let symmetry = &self.program.symmetry;
        let back = symmetry.turn_back(rank);
        let standing = symmetry.turned(back, rank);
        let cell = symmetry.turned_cell(back, cell);
        let Some(delivery) = self.deliveries.of(self.program, standing, cell) else { return false };
        let owner = symmetry.turned(symmetry.turn_of(rank), delivery.rank);
        let waits = self.published.copy(delivery.step);
        self.knows_any(here, owner, waits)
    }

    fn check_step(&mut self, here: Here) -> Result<(), Fault> {
        let me = here.rank;
        match here.place(self.program).step {
            Step::Put { peer, cell, from } => self.check_copy(here, (me, from), peer, cell),
            Step::Get { peer, cell, from } => self.check_copy(here, (peer, from), me, cell),
            Step::Signal { peer, .. } => self.check_signal(here, peer),
            Step::Wait { .. } => Ok(()),
        }
    }

    /// Checks a copy from the memory of one rank to the output of another.
    fn check_copy(
        &mut self,
        here: Here,
        (source, from): (Rank, Source),
        target: Rank,
        cell: Cell,
    ) -> Result<(), Fault> {
        let there_from_the_start =
            from == Source::Input || self.program.is_there_from_the_start(source, cell);
        let is_there = if there_from_the_start {
            self.knows(here, Fact::entered(source, 0))
        } else {
            self.knows_written(here, source, cell)
        };
        if !is_there {
            return Err(Fault::ReadEarly { place: here.place(self.program), start: 1 });
        }
        // Of several outputs a start uses that of `outputs` starts ago, which the caller had until it
        // entered the start behind that.
        let age = self.program.outputs - 1;
        if !self.knows(here, Fact::entered(target, age)) {
            let (place, start) = (here.place(self.program), age + 1);
            return self.refuse(start, Fault::PeerInUse { place, peer: target, start });
        }
        Ok(())
    }

    /// Reports a fault of the first start; keeps a later one in case there is none.
    fn refuse(&mut self, start: u32, fault: Fault) -> Result<(), Fault> {
        if start == 1 {
            return Err(fault);
        }
        if self.later.as_ref().is_none_or(|&(first, _)| start < first) {
            self.later = Some((start, fault));
        }
        Ok(())
    }

    fn check_signal(&mut self, here: Here, peer: Rank) -> Result<(), Fault> {
        let (reader, at) = self.flags.of_step(here.home + here.lane, here.at).wait;
        let wait = Waited { rank: peer, lane: self.program.lanes[reader].lane, at };
        let age = self.program.outputs;
        if self.knows(here, Fact::waited(wait, age)) {
            return Ok(());
        }
        let (place, start) = (here.place(self.program), age + 1);
        self.refuse(start, Fault::NotConsumed { place, start })
    }

    /// Checks what the caller relies on when lane 0 has ended.
    fn check_end(&mut self, here: Here) -> Result<(), Fault> {
        let Here { rank, home, .. } = here;
        let (program, start) = (self.program, 1);
        for number in home + 1..home + program.width {
            let done = self.published.done(number);
            if !program.lanes[number].steps.is_empty() && !self.knows_any(here, rank, done) {
                let lane = program.lanes[number].lane;
                return Err(Fault::SourceInUse { rank, lane, start });
            }
        }
        for taking in self.published.takings(program, rank).to_vec() {
            let lane = program.lanes[taking.lane].lane;
            let is_own = taking.by == rank && lane == LaneId::HOME;

            if !is_own && !self.knows_any(here, taking.by, taking.waits) {
                return Err(Fault::StillGot { rank, by: taking.by, lane, start });
            }
        }
        let deliveries = self.deliveries;
        for delivery in deliveries.to(program, rank) {
            let cell = delivery.cell;
            let lane = program.lanes[delivery.step.0].lane;
            // What the lane itself has copied is complete when it has ended.
            let is_own = delivery.rank == rank && lane == LaneId::HOME;
            if !is_own && !self.knows_written(here, rank, cell) {
                return Err(Fault::NotArrived { rank, cell, start });
            }
        }
        Ok(())
    }
}
