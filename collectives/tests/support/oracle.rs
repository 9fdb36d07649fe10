//! An oracle for plans: runs them in random interleavings and compares the bytes.
//!
//! It shares no code with the verifier. Every rank makes several starts, one after another, with new data. A put or a get reads
//! its source at once or later, and its result is visible later, unless a signal to the same peer follows it. When lane 0 is
//! complete, the caller reads the output, overwrites it and the source, and starts again. Some runs use epochs as flag values;
//! the others use flags that a wait resets, like captured starts. With several outputs in turn, the caller overwrites only the
//! last one, and there is a set of flags for each output.

use std::collections::HashMap;
use std::ops::Range;

use fastrand::Rng;
use peerlane_collectives::collective::Collective;
use peerlane_collectives::plan::{Cell, Flag, LaneId, Plan, Source, Step};
use peerlane_hal::Rank;

use run::Run;

#[path = "oracle_run.rs"]
mod run;

/// The harm that a run has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Harm {
    WrongBytes,
    Hang,
    BrokenFlag,
    OutOfRange,
}

/// Runs plans many times.
pub(crate) struct Oracle {
    collective: Collective,
    ranks: usize,
    in_place: Vec<bool>,
    outputs: u64,
    starts: u64,
    /// The offset of each shard in the output in units, and the end of the last one.
    shards: Vec<usize>,
    flags: usize,
    /// The lanes that wait for each flag.
    readers: Vec<Vec<usize>>,
    lanes: Vec<Program>,
}

struct Program {
    rank: usize,
    is_home: bool,
    actions: Vec<Action>,
}

#[derive(Clone)]
enum Action {
    /// A put to, or a get from, `peer`. `units` are counted in the shard.
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
    /// Creates an oracle for shards of these lengths in units, and this number of starts.
    ///
    /// Four starts use each of two outputs twice. Fails for plans that name ranks, cells or outputs that do not exist.
    pub(crate) fn new(plans: &[Plan], shards: &[usize], starts: u64) -> Result<Self, Harm> {
        let mut names = HashMap::new();
        let mut lanes = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for lane in plan.lane_ids() {
                let closed = plan.closed_lane(lane, |_| true);
                let actions = closed.iter().map(|&step| action(shards, plan, step, &mut names));
                let actions = actions.collect::<Option<Vec<_>>>().ok_or(Harm::OutOfRange)?;
                lanes.push(Program { rank, is_home: lane == LaneId::HOME, actions });
            }
        }
        let in_place = plans.iter().map(|plan| plan.in_place).collect();
        let outputs = plans.first().map_or(1, |plan| plan.outputs);
        if outputs == 0 || plans.iter().any(|plan| plan.outputs != outputs) {
            return Err(Harm::OutOfRange);
        }
        let (outputs, flags) = (u64::from(outputs), names.len());
        let mut readers = vec![Vec::new(); flags];
        for (number, lane) in lanes.iter().enumerate() {
            for action in &lane.actions {
                if let Action::Wait { flag } = *action {
                    readers[flag].push(number);
                }
            }
        }
        let mut end = 0;
        let edges = shards.iter().map(|units| {
            end += units;
            end
        });
        let shards = [0].into_iter().chain(edges).collect();
        let collective = plans.first().map_or(Collective::AllGather, |plan| plan.collective);
        let ranks = plans.len();
        Ok(Self { collective, ranks, in_place, outputs, starts, shards, flags, readers, lanes })
    }

    /// Runs the plans once.
    pub(crate) fn run(&self, seed: u64) -> Result<(), Harm> {
        Run::new(self, Rng::with_seed(seed)).finish()
    }

    /// Returns the position of units of a shard in the output.
    fn place(&self, shard: usize, units: &Range<usize>) -> Range<usize> {
        self.shards[shard] + units.start..self.shards[shard] + units.end
    }

    /// Returns the offset of a rank's data for the output of `into` in its input, in units.
    fn input_offset(&self, rank: usize, into: usize) -> usize {
        if self.has_block_per_output() { into * self.units(rank) } else { 0 }
    }

    /// Returns the number of blocks in an input.
    fn inputs(&self) -> usize {
        if self.has_block_per_output() { self.ranks } else { 1 }
    }

    /// Returns whether a rank has different data for every output.
    fn has_block_per_output(&self) -> bool {
        self.collective == Collective::AllToAll
    }

    /// Returns the length of a shard in units.
    fn units(&self, shard: usize) -> usize {
        self.shards[shard + 1] - self.shards[shard]
    }
}

fn action(
    shards: &[usize],
    plan: &Plan,
    step: Step,
    names: &mut HashMap<(Rank, Flag), usize>,
) -> Option<Action> {
    let in_range = |rank: Rank| (rank.index() < shards.len()).then_some(rank.index());
    let mut number = |reader, flag| {
        let next = names.len();
        *names.entry((reader, flag)).or_insert(next)
    };
    Some(match step {
        Step::Put { peer, cell: Cell { shard, chunk }, from }
        | Step::Get { peer, cell: Cell { shard, chunk }, from } => {
            let is_get = matches!(step, Step::Get { .. });
            let shard = in_range(shard)?;
            let edge = |chunk: u32| shards[shard] * chunk as usize / plan.chunks as usize;
            let units = (chunk < plan.chunks).then(|| edge(chunk)..edge(chunk + 1))?;
            Action::Copy { peer: in_range(peer)?, is_get, units, shard, from }
        }
        Step::Signal { peer, flag } => {
            Action::Signal { peer: in_range(peer)?, flag: number(peer, flag) }
        }
        Step::Wait { flag } => Action::Wait { flag: number(plan.rank, flag) },
    })
}
