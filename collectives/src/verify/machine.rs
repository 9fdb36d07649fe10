//! Runs the lanes of all ranks and follows what each lane knows.
//!
//! A lane learns only by its own waits: a wait gives it what the signal published. A signal
//! publishes what its lane knew, the cells that its lane has put to that same peer, and that its
//! lane has got what it gets from that peer; cells put to and got from others are in flight as far as
//! anybody knows. A signal to oneself comes after everything before it in the lane is complete, so it
//! publishes all that the lane has got, and that the lane has no source left to read.
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
    /// Which lane gets from which rank, in order.
    takings: Vec<Taking>,
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
    /// The cells put to each peer in this start, and those got from it, as numbers of facts; those got
    /// from any peer stand at the own rank too.
    posted: Vec<Vec<usize>>,
    /// The first index behind all puts and gets of the lane.
    copies_end: usize,
}

/// That a lane gets from a rank.
struct Taking {
    lane: usize,
    peer: Rank,
    /// The first index behind all of these gets.
    end: usize,
}

/// What a signal publishes.
struct Letter {
    writer: usize,
    known: Rc<Facts>,
    version: u64,
    /// How many of the cells that the writer has posted to the reader's rank.
    posted: usize,
    /// Where the signal stands in its lane.
    at: usize,
}

impl<'a> Machine<'a> {
    fn new(program: &'a Program, flags: &'a Flags) -> Self {
        let takings = takings(program);
        let domain = Domain::new(program, flags, takings.len());
        let is_copy = |step: &Step| matches!(step, Step::Put { .. } | Step::Get { .. });
        let lanes = program.lanes.iter().map(|lane| LaneState {
            at: 0,
            known: Rc::new(domain.nothing()),
            version: 0,
            versions_got: vec![0; program.lanes.len()],
            posted: vec![Vec::new(); program.ranks as usize],
            copies_end: lane.steps.iter().rposition(is_copy).map_or(0, |last| last + 1),
        });
        let lanes = lanes.collect();
        let mail = (0..flags.len()).map(|_| None).collect();
        Self { program, flags, domain, start: 0, lanes, takings, mail }
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
                Step::Get { peer, cell, from } => {
                    self.check_get(number, peer, cell, from)?;
                    let written = self.domain.index(Fact::Written(lane.rank, cell));
                    self.lanes[number].posted[peer.index()].push(written);
                    if peer != lane.rank {
                        self.lanes[number].posted[lane.rank.index()].push(written);
                    }
                }
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
        self.check_copy(number, (me, from), peer, cell)
    }

    fn check_get(&self, number: usize, peer: Rank, cell: Cell, from: Source) -> Result<(), Fault> {
        let me = self.program.lanes[number].rank;
        self.check_copy(number, (peer, from), me, cell)
    }

    /// Checks a copy from the memory of one rank to the output of another.
    fn check_copy(
        &self,
        number: usize,
        (source, from): (Rank, Source),
        target: Rank,
        cell: Cell,
    ) -> Result<(), Fault> {
        let start = self.start;
        let there_from_the_start =
            from == Source::Input || self.program.is_there_from_the_start(source, cell);
        let needed = if there_from_the_start {
            Fact::Entered(source, 0)
        } else {
            Fact::Written(source, cell)
        };
        if !self.knows(number, needed) {
            return Err(Fault::ReadEarly { place: self.place(number), start });
        }
        if !self.may_overwrite(number, target) {
            return Err(Fault::PeerInUse { place: self.place(number), peer: target, start });
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
            at: state.at,
        }
    }

    fn take(&mut self, number: usize, letter: Letter) {
        let Letter { writer, known, version, posted, at } = letter;
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
        let to_oneself = self.program.lanes[writer].rank == rank;
        if to_oneself && at >= self.lanes[writer].copies_end {
            self.learn(number, Fact::Done(writer));
        }
        let first = self.takings.partition_point(|taking| taking.lane < writer);
        for index in first..self.takings.len() {
            let &Taking { lane, peer, end } = &self.takings[index];
            if lane != writer {
                break;
            }
            if (peer == rank || to_oneself) && at >= end {
                self.learn(number, Fact::Taken(index));
            }
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
        if let Some((by, lane)) = self.lane_that_still_gets(number) {
            return Err(Fault::StillGot { rank, by, lane, start });
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
            .filter(|&(number, lane)| lane.rank == rank && number != home && !lane.steps.is_empty())
            .find(|&(number, _)| !self.knows(home, Fact::Done(number)))
            .map(|(_, lane)| lane.lane)
    }

    /// A lane of another rank that may still get from this one, as far as `home` knows.
    fn lane_that_still_gets(&self, home: usize) -> Option<(Rank, LaneId)> {
        let rank = self.program.lanes[home].rank;
        let takings = self.takings.iter().enumerate();
        takings
            .filter(|(_, taking)| taking.peer == rank && taking.lane != home)
            .find(|&(index, _)| !self.knows(home, Fact::Taken(index)))
            .map(|(_, taking)| &self.program.lanes[taking.lane])
            .map(|lane| (lane.rank, lane.lane))
    }

    /// A cell of the rank's output that may be missing when `home` has ended. What `home` itself has
    /// put or got there is complete then.
    fn cell_not_there(&self, home: usize) -> Option<Cell> {
        let rank = self.program.lanes[home].rank;
        let mut there = Facts::clone(&self.lanes[home].known);
        for &written in &self.lanes[home].posted[rank.index()] {
            there.insert(written);
        }
        self.program.cells().find(|&cell| {
            !self.program.is_there_from_the_start(rank, cell)
                && !there.has(self.domain.index(Fact::Written(rank, cell)))
        })
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

/// Who gets from whom.
fn takings(program: &Program) -> Vec<Taking> {
    let gets = program.steps().filter_map(|(lane, at, step)| match step {
        Step::Get { peer, .. } => Some((lane, peer, at + 1)),
        Step::Put { .. } | Step::Signal { .. } | Step::Wait { .. } => None,
    });
    let mut gets: Vec<_> = gets.collect();
    gets.sort_unstable();
    let last = gets.chunk_by(|(lane, peer, _), other| (*lane, *peer) == (other.0, other.1));
    last.filter_map(|gets| gets.last())
        .map(|&(lane, peer, end)| Taking { lane, peer, end })
        .collect()
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
