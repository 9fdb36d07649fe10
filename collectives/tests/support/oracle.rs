//! An oracle for plans: runs them in random interleavings and looks at the bytes.
//!
//! It shares no code with the verifier and knows no facts, only contents. Every rank starts several
//! times, back to back, with fresh data. A put or a get reads its source late or at once, and is seen
//! late, unless a signal to the same peer comes behind it. As soon as lane 0 is complete, the caller reads
//! the output, scribbles over it and over the source, and starts again. Some runs use epochs as
//! flag values; the others, as captured starts do, mailboxes that a wait empties. Where outputs are
//! used in turn, the caller scribbles over the last one only, and flags come in as many sets.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use fastrand::Rng;
use peerlane_collectives::plan::{Cell, Flag, LaneId, Plan, Source, Step};
use peerlane_hal::Rank;

/// What a run has shown, if anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    WrongBytes,
    Hang,
    BrokenFlag,
    NoSuchPlace,
}

/// Enough to use each of two outputs twice.
const STARTS: u64 = 5;
const SHARD_UNITS: usize = 12;
const SCRIBBLE: u64 = u64::MAX;

/// Plans made ready to run many times.
pub(crate) struct Oracle {
    ranks: usize,
    in_place: Vec<bool>,
    outputs: u64,
    flags: usize,
    lanes: Vec<Program>,
}

struct Program {
    rank: usize,
    is_home: bool,
    actions: Vec<Action>,
}

#[derive(Clone)]
enum Action {
    /// A put to, or a get from, `peer`.
    Copy {
        peer: usize,
        is_get: bool,
        units: Range<usize>,
        shard: usize,
        from: Source,
    },
    Signal {
        peer: usize,
        flag: usize,
    },
    Wait {
        flag: usize,
    },
}

impl Oracle {
    /// Fails for plans that name places that are not there.
    pub(crate) fn new(plans: &[Plan]) -> Result<Self, Harm> {
        let mut names = HashMap::new();
        let mut lanes = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for lane in plan.lane_ids() {
                let closed = plan.closed_lane(lane, |_| true);
                let actions =
                    closed.iter().map(|&step| action(plans.len(), plan, step, &mut names));
                let actions = actions.collect::<Option<Vec<_>>>().ok_or(Harm::NoSuchPlace)?;
                lanes.push(Program { rank, is_home: lane == LaneId::HOME, actions });
            }
        }
        let in_place = plans.iter().map(|plan| plan.in_place).collect();
        let outputs = plans.first().map_or(1, |plan| plan.outputs);
        if outputs == 0 || plans.iter().any(|plan| plan.outputs != outputs) {
            return Err(Harm::NoSuchPlace);
        }
        let outputs = u64::from(outputs);
        Ok(Self { ranks: plans.len(), in_place, outputs, flags: names.len(), lanes })
    }

    /// One run.
    pub(crate) fn run(&self, seed: u64) -> Result<(), Harm> {
        Run::new(self, Rng::with_seed(seed)).finish()
    }
}

fn action(
    ranks: usize,
    plan: &Plan,
    step: Step,
    names: &mut HashMap<(Rank, Flag), usize>,
) -> Option<Action> {
    let in_range = |rank: Rank| (rank.index() < ranks).then_some(rank.index());
    let mut number = |reader, flag| {
        let next = names.len();
        *names.entry((reader, flag)).or_insert(next)
    };
    Some(match step {
        Step::Put { peer, cell: Cell { shard, part }, from }
        | Step::Get { peer, cell: Cell { shard, part }, from } => {
            let is_get = matches!(step, Step::Get { .. });
            let edge = |part: u32| SHARD_UNITS * part as usize / plan.parts as usize;
            let units = (part < plan.parts).then(|| edge(part)..edge(part + 1))?;
            Action::Copy { peer: in_range(peer)?, is_get, units, shard: in_range(shard)?, from }
        }
        Step::Signal { peer, flag } => {
            Action::Signal { peer: in_range(peer)?, flag: number(peer, flag) }
        }
        Step::Wait { flag } => Action::Wait { flag: number(plan.rank, flag) },
    })
}

struct Run<'a> {
    oracle: &'a Oracle,
    rng: Rng,
    mailboxes: bool,
    /// Of 4 copies, how many read their source at once.
    hasty: u8,
    callers: Vec<Caller>,
    lanes: Vec<Lane>,
    flags: Vec<u64>,
}

struct Caller {
    input: Vec<u64>,
    outputs: Vec<Vec<u64>>,
    /// The start that runs, or the next one; from 1.
    start: u64,
    running: bool,
}

impl Caller {
    fn output(&mut self, start: u64) -> &mut Vec<u64> {
        let turn = start as usize % self.outputs.len();
        &mut self.outputs[turn]
    }
}

struct Lane {
    start: u64,
    at: usize,
    submitted: u64,
    /// What is under way to each peer, in submission order.
    under_way: Vec<VecDeque<Flying>>,
    /// The lane's own turn, then one for each peer: the largest that can act is next.
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
        shard: usize,
        is_get: bool,
        from: Source,
        taken: Option<Vec<u64>>,
    },
    Signal {
        flag: usize,
        value: u64,
    },
}

impl Flying {
    /// Whether the lane's completion is held: by a source that is not read yet, and by a get.
    fn is_incomplete(&self) -> bool {
        matches!(self.what, Freight::Copy { taken: None, .. } | Freight::Copy { is_get: true, .. })
    }
}

impl<'a> Run<'a> {
    fn new(oracle: &'a Oracle, mut rng: Rng) -> Self {
        let ranks = oracle.ranks;
        let callers = (0..ranks).map(|_| Caller {
            input: vec![SCRIBBLE; SHARD_UNITS],
            outputs: vec![vec![SCRIBBLE; SHARD_UNITS * ranks]; oracle.outputs as usize],
            start: 1,
            running: false,
        });
        let callers = callers.collect();
        let lanes = oracle.lanes.iter().map(|_| Lane {
            start: 1,
            at: 0,
            submitted: 0,
            under_way: (0..ranks).map(|_| VecDeque::new()).collect(),
            priorities: (0..=ranks).map(|_| rng.u32(..)).collect(),
        });
        let lanes = lanes.collect();
        let (mailboxes, hasty) = (rng.bool(), rng.u8(0..=4));
        let flags = vec![0; oracle.flags * oracle.outputs as usize];
        Self { oracle, rng, mailboxes, hasty, callers, lanes, flags }
    }

    fn finish(mut self) -> Result<(), Harm> {
        let mut last = None;
        while let Some((lane, actor)) = self.next_actor(last) {
            last = Some((lane, actor));
            match actor.checked_sub(1) {
                None => self.advance(lane)?,
                Some(peer) => self.carry(lane, peer)?,
            }
            if self.rng.u8(..4) == 0 {
                self.lanes[lane].priorities[actor] = self.rng.u32(..);
            }
        }
        if self.callers.iter().any(|caller| caller.start <= STARTS) {
            return Err(Harm::Hang);
        }
        if self.lanes.iter().any(|lane| lane.start <= STARTS) {
            return Err(Harm::Hang);
        }
        if self.mailboxes && self.flags.iter().any(|&value| value != 0) {
            return Err(Harm::BrokenFlag);
        }
        (0..self.oracle.ranks).try_for_each(|rank| self.check_scribble(rank))
    }

    /// Mostly the last actor goes on; else the one of highest priority does.
    fn next_actor(&mut self, last: Option<(usize, usize)>) -> Option<(usize, usize)> {
        if let Some((lane, actor)) = last
            && self.rng.u8(..4) != 0
            && self.can_act(lane, actor)
        {
            return last;
        }
        let mut best = None;
        for (number, lane) in self.lanes.iter().enumerate() {
            for (actor, &priority) in lane.priorities.iter().enumerate() {
                if best.is_none_or(|(best, _)| priority > best) && self.can_act(number, actor) {
                    best = Some((priority, (number, actor)));
                }
            }
        }
        best.map(|(_, actor)| actor)
    }

    fn can_act(&self, number: usize, actor: usize) -> bool {
        let (program, lane) = (&self.oracle.lanes[number], &self.lanes[number]);
        if let Some(peer) = actor.checked_sub(1) {
            let Some(first) = lane.under_way[peer].front() else { return false };
            let is_held =
                |flying: &Flying| flying.is_incomplete() && flying.submitted < first.submitted;
            return match first.what {
                Freight::Signal { .. } if peer == program.rank => {
                    !lane.under_way.iter().flatten().any(is_held)
                }
                _ => true,
            };
        }
        if lane.start > STARTS {
            return false;
        }
        match program.actions.get(lane.at) {
            Some(Action::Wait { flag }) => {
                self.flags[self.in_turn(*flag, lane.start)] >= self.value(number)
            }
            Some(_) => true,
            None if program.is_home => {
                lane.under_way[program.rank].is_empty()
                    && !lane.under_way.iter().flatten().any(Flying::is_incomplete)
            }
            None => true,
        }
    }

    /// The flag in the set of a start.
    fn in_turn(&self, flag: usize, start: u64) -> usize {
        (start % self.oracle.outputs) as usize * self.oracle.flags + flag
    }

    fn value(&self, lane: usize) -> u64 {
        if self.mailboxes { 1 } else { self.lanes[lane].start }
    }

    /// Submits the next step of a lane, or ends its start.
    fn advance(&mut self, number: usize) -> Result<(), Harm> {
        let program = &self.oracle.lanes[number];
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
            Action::Wait { flag } => {
                if self.mailboxes {
                    let flag = self.in_turn(flag, start);
                    self.flags[flag] = 0;
                }
                return Ok(());
            }
            Action::Signal { peer, flag } => {
                (peer, Freight::Signal { flag: self.in_turn(flag, start), value })
            }
            Action::Copy { peer, is_get, units, shard, from } => {
                let hasty = self.rng.u8(..4) < self.hasty;
                let source = if is_get { peer } else { rank };
                let taken = hasty.then(|| self.read(source, start, shard, &units, from));
                (peer, Freight::Copy { start, units, shard, is_get, from, taken })
            }
        };
        self.lanes[number].under_way[peer].push_back(Flying { submitted, what });
        Ok(())
    }

    /// Moves what is first on the way from a lane to a peer.
    fn carry(&mut self, number: usize, peer: usize) -> Result<(), Harm> {
        let rank = self.oracle.lanes[number].rank;
        let Some(first) = self.lanes[number].under_way[peer].pop_front() else { return Ok(()) };
        let submitted = first.submitted;
        match first.what {
            Freight::Copy { start, units, shard, is_get, from, taken: None } => {
                let source = if is_get { peer } else { rank };
                let taken = Some(self.read(source, start, shard, &units, from));
                let what = Freight::Copy { start, units, shard, is_get, from, taken };
                self.lanes[number].under_way[peer].push_front(Flying { submitted, what });
            }
            Freight::Copy { start, units, shard, is_get, taken: Some(content), .. } => {
                let at = shard * SHARD_UNITS;
                let target = if is_get { rank } else { peer };
                let output = self.callers[target].output(start);
                output[at + units.start..at + units.end].copy_from_slice(&content);
            }
            Freight::Signal { flag, value } => {
                if self.mailboxes && self.flags[flag] != 0 {
                    return Err(Harm::BrokenFlag);
                }
                self.flags[flag] = value;
            }
        }
        Ok(())
    }

    fn read(
        &mut self,
        rank: usize,
        start: u64,
        shard: usize,
        units: &Range<usize>,
        from: Source,
    ) -> Vec<u64> {
        let in_place = self.oracle.in_place[rank];
        let caller = &mut self.callers[rank];
        let at = |shard: usize| shard * SHARD_UNITS + units.start..shard * SHARD_UNITS + units.end;
        match from {
            Source::Input if !in_place => caller.input[units.clone()].to_vec(),
            Source::Input => caller.output(start)[at(rank)].to_vec(),
            Source::Output => caller.output(start)[at(shard)].to_vec(),
        }
    }

    /// The caller hands over its memory, which nobody has touched since it got it back.
    fn enter(&mut self, rank: usize) -> Result<(), Harm> {
        self.check_scribble(rank)?;
        let in_place = self.oracle.in_place[rank];
        let caller = &mut self.callers[rank];
        let start = caller.start;
        let own = if in_place {
            &mut caller.output(start)[rank * SHARD_UNITS..(rank + 1) * SHARD_UNITS]
        } else {
            &mut caller.input[..]
        };
        for (unit, word) in own.iter_mut().enumerate() {
            *word = content(start, rank, unit);
        }
        caller.running = true;
        Ok(())
    }

    /// The caller gets its memory back, reads it, and scribbles over it.
    fn leave(&mut self, rank: usize) -> Result<(), Harm> {
        let caller = &mut self.callers[rank];
        let start = caller.start;
        for (at, word) in caller.output(start).iter_mut().enumerate() {
            if *word != content(start, at / SHARD_UNITS, at % SHARD_UNITS) {
                return Err(Harm::WrongBytes);
            }
            *word = SCRIBBLE;
        }
        caller.input.fill(SCRIBBLE);
        caller.start += 1;
        caller.running = false;
        Ok(())
    }

    /// Nobody has touched the output that the caller got back last.
    fn check_scribble(&mut self, rank: usize) -> Result<(), Harm> {
        let last = self.callers[rank].start - 1;
        let untouched = self.callers[rank].output(last).iter().all(|&word| word == SCRIBBLE);
        if untouched { Ok(()) } else { Err(Harm::WrongBytes) }
    }
}

fn content(start: u64, shard: usize, unit: usize) -> u64 {
    (start * 100 + shard as u64) * 100 + unit as u64
}
