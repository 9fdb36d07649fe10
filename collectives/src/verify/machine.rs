//! Runs the lanes of all ranks and follows what each lane knows.
//!
//! A lane learns only by its own waits: a wait gives it what the signal published. A signal
//! publishes what its lane knew, and the cells that its lane has put to that same peer; cells put
//! to others are in flight as far as anybody knows. A signal to oneself comes after everything
//! before it in the lane is complete, so it also says that the lane has no source left to read.
//!
//! One interleaving decides for all. Only a wait can hold a lane, and since its flag has one writer,
//! one reader and one signal a start, no other lane can take that signal away: a lane that can go on
//! can still go on later. The n-th wait for a flag gets what the n-th signal published, so what a
//! lane knows at a step does not depend on the order in which lanes were run. Hence every order that
//! runs lanes for as long as any can go on ends at the same steps, with the same faults on the way.

use std::rc::Rc;

use peerlane_hal::Rank;

use super::facts::{Domain, Fact, Facts};
use super::fault::{Fault, Place};
use super::flags::Flags;
use super::program::{ClosedLane, Program};
use crate::plan::{Cell, LaneId, Source, Step};

/// Runs `starts` consecutive starts.
pub(super) fn run(program: &Program, flags: &Flags, starts: u32) -> Result<(), Fault> {
    let mut machine = Machine::new(program, flags);
    for start in 1..=starts {
        machine.run_start(start)?;
    }
    Ok(())
}

struct Machine<'a> {
    program: &'a Program,
    flags: &'a Flags,
    domain: Domain,
    start: u32,
    lanes: Vec<LaneState>,
    /// What the signal of each flag has published, until the wait takes it.
    mail: Vec<Option<Letter>>,
}

struct LaneState {
    /// The next step.
    at: usize,
    /// Shared with the letters that were written since the last wait.
    known: Rc<Facts>,
    /// Counts the changes of `known`.
    version: u64,
    /// The latest version of every lane's knowledge that this lane has got.
    versions_got: Vec<u64>,
    /// The cells put to each peer in this start, as numbers of facts.
    posted: Vec<Vec<usize>>,
    /// The first index behind all puts of the lane.
    puts_end: usize,
}

/// What a signal publishes.
struct Letter {
    writer: usize,
    known: Rc<Facts>,
    version: u64,
    /// How many of the cells that the writer has posted to the reader's rank.
    posted: usize,
    /// Whether the writer has no source left to read.
    done: bool,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, flags: &'a Flags) -> Self {
        let domain = Domain::new(program, flags);
        let is_put = |step: &Step| matches!(step, Step::Put { .. });
        let lanes = program.lanes.iter().map(|lane| LaneState {
            at: 0,
            known: Rc::new(domain.nothing()),
            version: 0,
            versions_got: vec![0; program.lanes.len()],
            posted: vec![Vec::new(); program.ranks as usize],
            puts_end: lane.steps.iter().rposition(is_put).map_or(0, |last| last + 1),
        });
        let lanes = lanes.collect();
        let mail = (0..flags.len()).map(|_| None).collect();
        Self { program, flags, domain, start: 0, lanes, mail }
    }

    fn run_start(&mut self, start: u32) -> Result<(), Fault> {
        self.start = start;
        for number in 0..self.lanes.len() {
            self.begin(number);
        }
        let mut runnable: Vec<usize> = (0..self.lanes.len()).rev().collect();
        while let Some(number) = runnable.pop() {
            self.run_lane(number, &mut runnable)?;
        }
        match (0..self.lanes.len()).find(|&number| self.waits_at(number).is_some()) {
            Some(stuck) => Err(self.deadlock(stuck)),
            None => (0..self.lanes.len()).try_for_each(|number| self.finish(number)),
        }
    }

    fn begin(&mut self, number: usize) {
        let &ClosedLane { rank, lane, .. } = &self.program.lanes[number];
        let state = &mut self.lanes[number];
        state.at = 0;
        let mut known = self.domain.next_start(&state.known);
        if lane == LaneId::HOME {
            known.insert(self.domain.index(Fact::Entered(rank, 0)));
        }
        state.known = Rc::new(known);
        state.version += 1;
        state.posted.iter_mut().for_each(Vec::clear);
    }

    /// Runs a lane until a wait holds it, and adds the lanes that it has woken to `runnable`.
    fn run_lane(&mut self, number: usize, runnable: &mut Vec<usize>) -> Result<(), Fault> {
        let lane = &self.program.lanes[number];
        while let Some(&step) = lane.steps.get(self.lanes[number].at) {
            match step {
                Step::Put { peer, cell, from } => {
                    self.check_put(number, peer, cell, from)?;
                    let written = self.domain.index(Fact::Written(peer, cell));
                    self.lanes[number].posted[peer.index()].push(written);
                }
                Step::Get { .. } => unimplemented!("gets are not followed yet"),
                Step::Signal { peer, flag } => {
                    let flag = self.flags.number(peer, flag);
                    self.check_signal(number, flag)?;
                    self.mail[flag] = Some(self.letter(number, peer));
                    runnable.push(self.flags.ends(flag).reader);
                }
                Step::Wait { flag } => {
                    let flag = self.flags.number(lane.rank, flag);
                    let Some(letter) = self.mail[flag].take() else { return Ok(()) };
                    self.take(number, letter);
                    self.learn(number, Fact::Consumed(flag, 0));
                }
            }
            self.lanes[number].at += 1;
        }
        Ok(())
    }

    fn check_put(&self, number: usize, peer: Rank, cell: Cell, from: Source) -> Result<(), Fault> {
        let me = self.program.lanes[number].rank;
        let start = self.start;
        let source_is_there = match from {
            Source::Output if !self.is_there_from_the_start(number, cell) => {
                self.knows(number, Fact::Written(me, cell))
            }
            Source::Input | Source::Output => self.knows(number, Fact::Entered(me, 0)),
        };
        if !source_is_there {
            return Err(Fault::ReadEarly { place: self.place(number), start });
        }
        if !self.may_overwrite(number, peer) {
            return Err(Fault::PeerInUse { place: self.place(number), peer, start });
        }
        Ok(())
    }

    /// Whether the output of `peer` that this start uses is free, as far as the lane knows. Of
    /// several outputs it is the one of `outputs` starts ago, which the caller had until it entered
    /// the start behind that; one that no start has used is free.
    fn may_overwrite(&self, number: usize, peer: Rank) -> bool {
        let age = self.program.outputs - 1;
        self.start <= age || self.knows(number, Fact::Entered(peer, age))
    }

    /// A flag that no start has used is as new.
    fn check_signal(&self, number: usize, flag: usize) -> Result<(), Fault> {
        let age = self.program.outputs;
        if self.start <= age || self.knows(number, Fact::Consumed(flag, age)) {
            return Ok(());
        }
        Err(Fault::NotConsumed { place: self.place(number), start: self.start })
    }

    fn letter(&self, number: usize, peer: Rank) -> Letter {
        let state = &self.lanes[number];
        Letter {
            writer: number,
            known: Rc::clone(&state.known),
            version: state.version,
            posted: state.posted[peer.index()].len(),
            done: peer == self.program.lanes[number].rank && state.at >= state.puts_end,
        }
    }

    fn take(&mut self, number: usize, letter: Letter) {
        let Letter { writer, known, version, posted, done } = letter;
        let rank = self.program.lanes[number].rank;
        let state = &mut self.lanes[number];
        state.version += 1;
        if state.versions_got[writer] < version {
            state.versions_got[writer] = version;
            Rc::make_mut(&mut state.known).extend(&known);
        }
        for index in 0..posted {
            let written = self.lanes[writer].posted[rank.index()][index];
            Rc::make_mut(&mut self.lanes[number].known).insert(written);
        }
        if done {
            self.learn(number, Fact::Done(writer));
        }
    }

    fn learn(&mut self, number: usize, fact: Fact) {
        let index = self.domain.index(fact);
        Rc::make_mut(&mut self.lanes[number].known).insert(index);
    }

    /// What the caller relies on when lane 0 has ended.
    fn finish(&self, number: usize) -> Result<(), Fault> {
        let &ClosedLane { rank, lane, .. } = &self.program.lanes[number];
        if lane != LaneId::HOME {
            return Ok(());
        }
        let start = self.start;
        if let Some(lane) = self.lane_not_done(number) {
            return Err(Fault::SourceInUse { rank, lane, start });
        }
        match self.cell_not_there(number) {
            Some(cell) => Err(Fault::NotArrived { rank, cell, start }),
            None => Ok(()),
        }
    }

    /// Another lane of the same rank that may still read its sources, as far as `home` knows.
    fn lane_not_done(&self, home: usize) -> Option<LaneId> {
        let rank = self.program.lanes[home].rank;
        let lanes = self.program.lanes.iter().enumerate();
        lanes
            .filter(|&(number, lane)| lane.rank == rank && number != home)
            .find(|&(number, _)| !self.knows(home, Fact::Done(number)))
            .map(|(_, lane)| lane.lane)
    }

    /// A cell of the rank's output that may be missing when `home` has ended. What `home` itself has
    /// put there is complete then.
    fn cell_not_there(&self, home: usize) -> Option<Cell> {
        let rank = self.program.lanes[home].rank;
        let mut there = Facts::clone(&self.lanes[home].known);
        for &written in &self.lanes[home].posted[rank.index()] {
            there.insert(written);
        }
        self.program.cells().find(|&cell| {
            !self.is_there_from_the_start(home, cell)
                && !there.has(self.domain.index(Fact::Written(rank, cell)))
        })
    }

    fn is_there_from_the_start(&self, number: usize, cell: Cell) -> bool {
        self.program.in_place && cell.shard == self.program.lanes[number].rank
    }

    fn knows(&self, number: usize, fact: Fact) -> bool {
        self.lanes[number].known.has(self.domain.index(fact))
    }

    /// Follows the waits from a lane that is held to the lanes whose signals they lack. Each of those
    /// is held too, so the way must come back to a lane where it was.
    fn deadlock(&self, stuck: usize) -> Fault {
        let mut way = Vec::new();
        let mut number = stuck;
        while !way.contains(&number) {
            way.push(number);
            let flag = self.waits_at(number).expect("a lane that lacks a signal is held");
            number = self.flags.ends(flag).writer;
        }
        let first = way.iter().position(|&seen| seen == number).unwrap_or(0);
        let waits = way[first..].iter().map(|&number| self.place(number)).collect();
        Fault::Deadlock { waits, start: self.start }
    }

    /// The flag that holds a lane, if it has not ended.
    fn waits_at(&self, number: usize) -> Option<usize> {
        let lane = &self.program.lanes[number];
        match *lane.steps.get(self.lanes[number].at)? {
            Step::Wait { flag } => Some(self.flags.number(lane.rank, flag)),
            Step::Put { .. } | Step::Get { .. } | Step::Signal { .. } => None,
        }
    }

    fn place(&self, number: usize) -> Place {
        self.program.place(number, self.lanes[number].at)
    }
}

/// Faults that no plan can have, because lanes are closed here: what if they were closed wrongly.
#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;
    use crate::plan::{Algorithm, FlagOrder, Lane, Plan};
    use crate::verify::flags;

    /// One rank that copies its shard in lane 1; `change` gets the closed lanes 0 and 1.
    fn fault(change: impl FnOnce(&mut [ClosedLane])) -> Option<String> {
        let rank = Rank(0);
        let cell = Cell { shard: rank, part: 0 };
        let copy = Step::Put { peer: rank, cell, from: Source::Input };
        let lanes = vec![Lane::default(), Lane { steps: vec![copy], ..Lane::default() }];
        let algorithm = Algorithm::Direct;
        let (in_place, outputs) = (false, 1);
        let flags = FlagOrder::Prompt;
        let plan = Plan { algorithm, rank, ranks: 1, parts: 1, in_place, outputs, flags, lanes };
        let mut program = Program::new(&[plan]);
        change(&mut program.lanes);
        let flags = flags::check(&program).unwrap();
        run(&program, &flags, 2).err().map(|fault| fault.to_string())
    }

    #[test]
    fn a_closed_lane_is_right() {
        assert_eq!(fault(|_| {}), None);
    }

    #[test]
    fn a_lane_that_ends_before_its_puts_is_a_fault() {
        let early = fault(|lanes| lanes[1].steps.swap(1, 2)).unwrap();
        assert_snapshot!(early, @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
    }

    #[test]
    fn a_lane_that_begins_before_the_caller_is_a_fault() {
        let early = fault(|lanes| lanes[1].steps.swap(0, 1)).unwrap();
        assert_snapshot!(early, @"rank 0, lane 1, entry (put 0.0 input to 0) in start 1: the source may not have arrived");
    }

    #[test]
    fn a_caller_that_does_not_wait_for_a_lane_is_a_fault() {
        let unawaited = fault(|lanes| {
            for lane in lanes {
                lane.steps.pop();
            }
        });
        assert_snapshot!(unawaited.unwrap(), @"rank 0, end of lane 0 in start 1: lane 1 may still read its sources");
    }
}
