//! Runs the plans of an oracle once.
//!
//! The actors are the lanes, and the submitted copies and signals of each lane to each peer. Usually the last actor continues;
//! otherwise the one with the highest priority does, and priorities change at random. An actor that cannot act sleeps until an
//! event for which it may wait.

use std::collections::{BTreeSet, BinaryHeap, VecDeque};
use std::ops::Range;

use fastrand::Rng;
use peerlane_planning::plan::Source;

use super::{Action, Harm, Oracle};

const SCRIBBLE: u64 = u64::MAX;

pub(super) struct Run<'a> {
    oracle: &'a Oracle,
    rng: Rng,
    mailboxes: bool,
    /// The number of copies, of 4, that read their source at once.
    hasty: u8,
    callers: Vec<Caller>,
    lanes: Vec<Lane>,
    flags: Vec<u64>,
    /// The actors that may be able to act, by priority.
    awake: BinaryHeap<(u32, Actor)>,
}

/// A lane, or the submitted copies and signals of a lane to one peer.
type Actor = (usize, Option<usize>);

struct Caller {
    input: Vec<u64>,
    outputs: Vec<Vec<u64>>,
    inboxes: Vec<Vec<u64>>,
    /// The start that runs, or the next one; from 1.
    start: u64,
    running: bool,
}

impl Caller {
    fn output(&mut self, start: u64) -> &mut Vec<u64> {
        let turn = start as usize % self.outputs.len();
        &mut self.outputs[turn]
    }

    fn inbox(&mut self, start: u64) -> &mut Vec<u64> {
        let turn = start as usize % self.inboxes.len();
        &mut self.inboxes[turn]
    }
}

struct Lane {
    start: u64,
    at: usize,
    submitted: u64,
    /// The submitted copies and signals to each peer, in order.
    under_way: Vec<VecDeque<Flying>>,
    /// The submissions without which the lane is not complete: copies whose source is not yet read, and gets.
    incomplete: BTreeSet<u64>,
    /// The priority of the lane, then of its submissions to each peer; 0 sleeps.
    priorities: Vec<u32>,
}

struct Flying {
    submitted: u64,
    what: Freight,
}

enum Freight {
    Copy {
        start: u64,
        units: Range<usize>,
        block: usize,
        is_get: bool,
        from: Source,
        is_given: bool,
        taken: Option<Vec<u64>>,
    },
    Signal {
        flag: usize,
        value: u64,
    },
}

impl<'a> Run<'a> {
    pub(super) fn new(oracle: &'a Oracle, mut rng: Rng) -> Self {
        let ranks = oracle.ranks;
        let callers = (0..ranks).map(|rank| Caller {
            input: vec![SCRIBBLE; oracle.input_units(rank)],
            outputs: vec![vec![SCRIBBLE; oracle.output_units(rank)]; oracle.outputs as usize],
            inboxes: vec![vec![SCRIBBLE; oracle.inbox_units(rank)]; oracle.sets as usize],
            start: 1,
            running: false,
        });
        let callers = callers.collect();
        let lanes = oracle.lanes.iter().map(|_| Lane {
            start: 1,
            at: 0,
            submitted: 0,
            under_way: (0..ranks).map(|_| VecDeque::new()).collect(),
            incomplete: BTreeSet::new(),
            priorities: vec![0; ranks + 1],
        });
        let lanes = lanes.collect();
        // A reset flag holds no signal of an earlier start.
        let lags = |action: &Action| matches!(action, Action::Wait { lag: 1.., .. });
        let has_lag = oracle.lanes.iter().flat_map(|lane| &lane.actions).any(lags);
        let (mailboxes, hasty) = (rng.bool() && !has_lag, rng.u8(0..=4));
        let flags = vec![0; oracle.flags * oracle.sets as usize];
        let awake = BinaryHeap::new();
        let mut run = Self { oracle, rng, mailboxes, hasty, callers, lanes, flags, awake };
        (0..oracle.lanes.len()).for_each(|lane| run.wake((lane, None)));
        run
    }

    pub(super) fn finish(mut self) -> Result<(), Harm> {
        while let Some((_, actor)) = self.awake.pop() {
            *self.priority(actor) = 0;
            while self.can_act(actor) {
                match actor.1 {
                    None => self.advance(actor.0)?,
                    Some(peer) => self.carry(actor.0, peer)?,
                }
                if self.rng.u8(..4) == 0 {
                    self.wake(actor);
                    break;
                }
            }
        }
        let starts = self.oracle.starts;
        if self.callers.iter().any(|caller| caller.start <= starts) {
            return Err(Harm::Hang);
        }
        if self.lanes.iter().any(|lane| lane.start <= starts) {
            return Err(Harm::Hang);
        }
        if self.mailboxes && self.flags.iter().any(|&value| value != 0) {
            return Err(Harm::BrokenFlag);
        }
        (0..self.oracle.ranks).try_for_each(|rank| self.check_scribble(rank))
    }

    fn priority(&mut self, (lane, peer): Actor) -> &mut u32 {
        &mut self.lanes[lane].priorities[peer.map_or(0, |peer| peer + 1)]
    }

    /// Wakes an actor that may be able to act now.
    fn wake(&mut self, actor: Actor) {
        let priority = self.rng.u32(1..);
        let present = self.priority(actor);
        if *present == 0 {
            *present = priority;
            self.awake.push((priority, actor));
        }
    }

    fn can_act(&self, (number, peer): Actor) -> bool {
        let (program, lane) = (&self.oracle.lanes[number], &self.lanes[number]);
        if let Some(peer) = peer {
            let Some(first) = lane.under_way[peer].front() else { return false };
            // A signal to the own rank waits until everything before it is complete.
            let waits = matches!(first.what, Freight::Signal { .. }) && peer == program.rank;
            return !waits || lane.incomplete.first().is_none_or(|&held| held > first.submitted);
        }
        if lane.start > self.oracle.starts {
            return false;
        }
        match program.actions.get(lane.at) {
            Some(Action::Wait { flag, lag }) => {
                self.flags[self.in_turn(*flag, lane.start - lag)] >= self.value(number) - lag
            }
            Some(_) => true,
            None if program.is_home => {
                lane.under_way[program.rank].is_empty() && lane.incomplete.is_empty()
            }
            None => true,
        }
    }

    /// Returns the flag of a start.
    fn in_turn(&self, flag: usize, start: u64) -> usize {
        (start % self.oracle.sets) as usize * self.oracle.flags + flag
    }

    fn value(&self, lane: usize) -> u64 {
        if self.mailboxes { 1 } else { self.lanes[lane].start }
    }

    /// Submits the next step of a lane, or ends its start.
    fn advance(&mut self, number: usize) -> Result<(), Harm> {
        let oracle = self.oracle;
        let program = &oracle.lanes[number];
        let rank = program.rank;
        if program.is_home && !self.callers[rank].running {
            return self.enter(rank);
        }
        let value = self.value(number);
        let start = self.lanes[number].start;
        let lane = &mut self.lanes[number];
        let Some(action) = program.actions.get(lane.at) else {
            (lane.start, lane.at) = (lane.start + 1, 0);
            return if program.is_home { self.leave(rank) } else { Ok(()) };
        };
        lane.at += 1;
        lane.submitted += 1;
        let submitted = lane.submitted;
        let (peer, what) = match action.clone() {
            Action::Wait { flag, .. } => {
                if self.mailboxes {
                    let flag = self.in_turn(flag, start);
                    self.flags[flag] = 0;
                }
                return Ok(());
            }
            Action::Signal { peer, flag } => (peer, Freight::Signal { flag, value }),
            Action::Reduce { units, from, is_first } => {
                self.reduce(rank, start, &units, from, is_first);
                return Ok(());
            }
            Action::Copy { peer, is_get, units, block, from, is_given } => {
                let hasty = self.rng.u8(..4) < self.hasty;
                let source = if is_get { peer } else { rank };
                let target = if is_get { rank } else { peer };
                let taken = hasty.then(|| self.read((source, target), start, block, &units, from));
                if is_get || taken.is_none() {
                    self.lanes[number].incomplete.insert(submitted);
                }
                (peer, Freight::Copy { start, units, block, is_get, from, is_given, taken })
            }
        };
        let what = match what {
            Freight::Signal { flag, value } => {
                Freight::Signal { flag: self.in_turn(flag, start), value }
            }
            copy @ Freight::Copy { .. } => copy,
        };
        self.lanes[number].under_way[peer].push_back(Flying { submitted, what });
        self.wake((number, Some(peer)));
        Ok(())
    }

    /// Executes the oldest submitted copy or signal from a lane to a peer.
    fn carry(&mut self, number: usize, peer: usize) -> Result<(), Harm> {
        let rank = self.oracle.lanes[number].rank;
        let Some(first) = self.lanes[number].under_way[peer].pop_front() else { return Ok(()) };
        let submitted = first.submitted;
        match first.what {
            Freight::Copy { start, units, block, is_get, from, is_given, taken: None } => {
                let source = if is_get { peer } else { rank };
                let target = if is_get { rank } else { peer };
                let taken = Some(self.read((source, target), start, block, &units, from));
                if !is_get {
                    self.lanes[number].incomplete.remove(&submitted);
                }
                let what = Freight::Copy { start, units, block, is_get, from, is_given, taken };
                self.lanes[number].under_way[peer].push_front(Flying { submitted, what });
            }
            Freight::Copy {
                start, units, block, is_get, is_given, taken: Some(content), ..
            } => {
                let target = if is_get { rank } else { peer };
                if is_given {
                    let place = self.oracle.inbox_place(block, target, &units);
                    self.callers[target].inbox(start)[place].copy_from_slice(&content);
                } else {
                    let place = self.oracle.place(block, target, &units);
                    self.callers[target].output(start)[place].copy_from_slice(&content);
                }
                self.lanes[number].incomplete.remove(&submitted);
            }
            Freight::Signal { flag, value } => {
                if self.mailboxes && self.flags[flag] != 0 {
                    return Err(Harm::BrokenFlag);
                }
                self.flags[flag] = value;
                let oracle = self.oracle;
                oracle.readers[flag % oracle.flags]
                    .iter()
                    .for_each(|&lane| self.wake((lane, None)));
            }
        }
        // A signal to oneself, and the end of the start, may have waited for this.
        self.wake((number, Some(rank)));
        self.wake((number, None));
        Ok(())
    }

    fn reduce(
        &mut self,
        rank: usize,
        start: u64,
        units: &Range<usize>,
        from: usize,
        is_first: bool,
    ) {
        let added = match from == rank {
            true => self.read((rank, rank), start, rank, units, Source::Input),
            false => {
                let place = self.oracle.inbox_place(from, rank, units);
                self.callers[rank].inbox(start)[place].to_vec()
            }
        };
        let place = self.oracle.place(rank, rank, units);
        for (word, added) in self.callers[rank].output(start)[place].iter_mut().zip(added) {
            *word = if is_first { added } else { combined(*word, added) };
        }
    }

    fn read(
        &mut self,
        (rank, target): (usize, usize),
        start: u64,
        block: usize,
        units: &Range<usize>,
        from: Source,
    ) -> Vec<u64> {
        let oracle = self.oracle;
        let offset = oracle.input_offset(rank, target);
        let caller = &mut self.callers[rank];
        match from {
            // A source that is shorter than asked for is a fault of the plan too.
            Source::Input if !oracle.in_place[rank] => {
                let unit = |unit: usize| *caller.input.get(offset + unit).unwrap_or(&SCRIBBLE);
                units.clone().map(unit).collect()
            }
            Source::Input => {
                let own = match oracle.given {
                    Some(_) => oracle.output_offset(target, rank),
                    None => oracle.output_offset(rank, rank),
                };
                let output = caller.output(start);
                let unit = |unit: usize| *output.get(own + unit).unwrap_or(&SCRIBBLE);
                units.clone().map(unit).collect()
            }
            Source::Output => {
                let output = caller.output(start);
                let unit = |unit: usize| *output.get(unit).unwrap_or(&SCRIBBLE);
                oracle.place(block, rank, units).map(unit).collect()
            }
        }
    }

    /// Starts once more, after a check that no copy has changed the memory since the caller got it back.
    fn enter(&mut self, rank: usize) -> Result<(), Harm> {
        self.check_scribble(rank)?;
        let oracle = self.oracle;
        let caller = &mut self.callers[rank];
        let start = caller.start;
        let outputs = if oracle.is_by_output { oracle.ranks } else { 1 };
        for into in 0..outputs {
            let units = match oracle.is_by_output {
                true => oracle.inputs()[rank][into],
                false => oracle.input_units(rank),
            };
            let own = match oracle.in_place[rank] {
                true => {
                    let block = if oracle.given.is_some() { into } else { rank };
                    &mut caller.output(start)[oracle.place(block, rank, &(0..units))]
                }
                false => &mut caller.input[oracle.input_offset(rank, into)..][..units],
            };
            for (unit, word) in own.iter_mut().enumerate() {
                *word = content(start, rank, into, unit);
            }
        }
        caller.running = true;
        Ok(())
    }

    /// Returns the memory to the caller, which reads it and overwrites it.
    fn leave(&mut self, rank: usize) -> Result<(), Harm> {
        let oracle = self.oracle;
        let caller = &mut self.callers[rank];
        let start = caller.start;
        let output = caller.output(start);
        for block in 0..oracle.ranks {
            let units = oracle.place(block, rank, &(0..oracle.blocks[block][rank]));
            for (unit, word) in output[units].iter().enumerate() {
                let output = if oracle.is_by_output { rank } else { 0 };
                let given = |from: &usize| {
                    let output = if oracle.is_by_output { block } else { 0 };
                    content(start, *from, output, unit)
                };
                let expected = match oracle.given {
                    Some(_) => oracle.order[block].iter().map(given).reduce(combined),
                    None => Some(content(start, block, output, unit)),
                };
                if Some(*word) != expected {
                    return Err(Harm::WrongBytes);
                }
            }
        }
        output.fill(SCRIBBLE);
        caller.inbox(start).fill(SCRIBBLE);
        caller.input.fill(SCRIBBLE);
        caller.start += 1;
        caller.running = false;
        Ok(())
    }

    /// Checks that no copy has changed the last output since the caller got it back.
    fn check_scribble(&mut self, rank: usize) -> Result<(), Harm> {
        let last = self.callers[rank].start - 1;
        let is_scribble = |word: &u64| *word == SCRIBBLE;
        let untouched = self.callers[rank].output(last).iter().all(is_scribble)
            && self.callers[rank].inbox(last).iter().all(is_scribble);
        if untouched { Ok(()) } else { Err(Harm::WrongBytes) }
    }
}

/// Combines two words so that the order of several combinations matters.
fn combined(sum: u64, added: u64) -> u64 {
    sum.wrapping_mul(3).wrapping_add(added)
}

/// Returns the content of a unit of a rank's data for an output.
fn content(start: u64, block: usize, output: usize, unit: usize) -> u64 {
    ((start * 100 + block as u64) * 100 + output as u64) * 100 + unit as u64
}
