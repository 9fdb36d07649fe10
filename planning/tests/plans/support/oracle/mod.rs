//! An oracle for plans: runs them in random interleavings and compares the bytes.
//!
//! It shares no code with the verifier. Every rank makes several starts, one after another, with new data. A put or a get reads
//! its source at once or later, and its result is visible later, unless a signal to the same peer follows it. When lane 0 is
//! complete, the caller reads the output, overwrites it and the source, and starts again. Some runs use epochs as flag values;
//! the others use flags that a wait resets, like captured starts. With several outputs or inboxes in turn, the caller overwrites only the
//! last one, and there is a set of flags for each output or inbox, whichever are more.

use std::collections::HashMap;
use std::ops::Range;

use fastrand::Rng;
use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Cell, Flag, LaneId, Plan, Source, Step};

use run::Run;

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
    ranks: usize,
    in_place: Vec<bool>,
    outputs: u64,
    /// The number of sets of flags, and of inboxes.
    sets: u64,
    starts: u64,
    /// The length in units of the block that each rank provides for each output, or nothing.
    blocks: Vec<Vec<usize>>,
    /// The length in units of what each rank contributes to the block of each other, in a reduction.
    given: Option<Vec<Vec<usize>>>,
    /// Whether a rank has different data for every output.
    is_by_output: bool,
    /// For each rank, the ranks whose contributions it adds, in order.
    order: Vec<Vec<usize>>,
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
    /// A put to, or a get from, `peer`. `units` are counted in the block.
    Copy {
        peer: usize,
        is_get: bool,
        units: Range<usize>,
        block: usize,
        from: Source,
        /// Whether the copy is a contribution to a reduction, and goes to the inbox of the target.
        is_given: bool,
    },
    /// Adds a contribution to the rank's own block; the first one overwrites it.
    Reduce {
        units: Range<usize>,
        from: usize,
        is_first: bool,
    },
    Signal {
        peer: usize,
        flag: usize,
    },
    Wait {
        flag: usize,
        /// The number of starts since the signal.
        lag: u64,
    },
}

impl Oracle {
    /// Creates an oracle with one length for each rank in units, and this number of starts.
    ///
    /// In a scatter they are the lengths of the blocks that the ranks receive. In an all-to-all, rank p sends the length of
    /// number q - p to rank q, modulo their count.
    ///
    /// Four starts use each of two outputs or inboxes twice. Fails for plans that name ranks, cells, outputs or inboxes that do
    /// not exist.
    pub(crate) fn new(plans: &[Plan], lengths: &[usize], starts: u64) -> Result<Self, Harm> {
        let collective = plans.first().map_or(Collective::AllGather, |plan| plan.collective);
        let (blocks, mut is_by_output) = blocks(collective, lengths);
        let order: Vec<Vec<usize>> =
            (0..lengths.len()).map(|to| order(collective, to, plans)).collect();
        let given = order.iter().any(|order| !order.is_empty()).then(|| {
            // In scans, each rank has one block for all outputs.
            is_by_output = !matches!(collective, Collective::Scan | Collective::Exscan);
            let to = |to: usize| if order[to].is_empty() { 0 } else { lengths[to] };
            vec![(0..lengths.len()).map(to).collect::<Vec<_>>(); lengths.len()]
        });
        let mut names = HashMap::new();
        let mut lanes = Vec::new();
        for (rank, plan) in plans.iter().enumerate() {
            for lane in plan.lane_ids() {
                let closed = plan.closed_lane(lane, |_| true);
                let lengths = (blocks.as_slice(), given.as_ref());
                let actions = closed.iter().map(|&step| action(lengths, plan, step, &mut names));
                let mut actions = actions.collect::<Option<Vec<_>>>().ok_or(Harm::OutOfRange)?;
                let mut seen: Vec<Range<usize>> = Vec::new();
                for action in &mut actions {
                    if let Action::Reduce { units, is_first, .. } = action {
                        *is_first = !seen.contains(units);
                        seen.push(units.clone());
                    }
                }
                lanes.push(Program { rank, is_home: lane == LaneId::HOME, actions });
            }
        }
        let in_place: Vec<bool> = plans.iter().map(|plan| plan.in_place).collect();
        let takes_place = matches!(
            collective,
            Collective::AllGather | Collective::Broadcast { .. } | Collective::AllReduce
        );
        if in_place.contains(&true) && !takes_place {
            return Err(Harm::OutOfRange);
        }
        let outputs = plans.first().map_or(1, |plan| plan.outputs);
        let inboxes = plans.first().map_or(1, |plan| plan.inboxes);
        let agrees = |plan: &Plan| (plan.outputs, plan.inboxes) == (outputs, inboxes);
        if outputs == 0 || inboxes == 0 || !plans.iter().all(agrees) {
            return Err(Harm::OutOfRange);
        }
        // Every output has an inbox of its own, and only reductions have inboxes.
        let is_reduction = matches!(
            collective,
            Collective::ReduceScatter
                | Collective::AllReduce
                | Collective::Reduce { .. }
                | Collective::Scan
                | Collective::Exscan
        );
        if inboxes > 1 && !is_reduction {
            return Err(Harm::OutOfRange);
        }
        let (outputs, sets) = (u64::from(outputs), u64::from(outputs.max(inboxes)));
        let flags = names.len();
        let mut readers = vec![Vec::new(); flags];
        for (number, lane) in lanes.iter().enumerate() {
            for action in &lane.actions {
                if let Action::Wait { flag, .. } = *action {
                    readers[flag].push(number);
                }
            }
        }
        let ranks = plans.len();
        Ok(Self {
            ranks,
            in_place,
            outputs,
            sets,
            starts,
            blocks,
            given,
            is_by_output,
            order,
            flags,
            readers,
            lanes,
        })
    }

    /// Runs the plans once.
    pub(crate) fn run(&self, seed: u64) -> Result<(), Harm> {
        Run::new(self, Rng::with_seed(seed)).finish()
    }

    /// Returns the offset of a block in the output of `into`.
    fn output_offset(&self, block: usize, into: usize) -> usize {
        (0..block).map(|block| self.blocks[block][into]).sum()
    }

    /// Returns the length of the output of a rank.
    fn output_units(&self, rank: usize) -> usize {
        self.output_offset(self.ranks, rank)
    }

    /// Returns the position of units of a block in the output of `into`.
    fn place(&self, block: usize, into: usize, units: &Range<usize>) -> Range<usize> {
        let offset = self.output_offset(block, into);
        offset + units.start..offset + units.end
    }

    /// Returns the offset of a rank's data for the output of `into` in its input.
    fn input_offset(&self, rank: usize, into: usize) -> usize {
        if self.is_by_output { self.inputs()[rank][..into].iter().sum() } else { 0 }
    }

    /// Returns the lengths of the data that each rank has for each other.
    fn inputs(&self) -> &[Vec<usize>] {
        self.given.as_ref().unwrap_or(&self.blocks)
    }

    /// Returns the position of units of a contribution in the inbox of `into`.
    fn inbox_place(&self, from: usize, into: usize, units: &Range<usize>) -> Range<usize> {
        let offset = from * self.given.as_ref().map_or(0, |given| given[from][into]);
        offset + units.start..offset + units.end
    }

    fn inbox_units(&self, rank: usize) -> usize {
        self.given.iter().flatten().map(|given| given[rank]).sum()
    }

    /// Returns the length of the input of a rank.
    fn input_units(&self, rank: usize) -> usize {
        match self.is_by_output {
            true => self.inputs()[rank].iter().sum(),
            false => self.inputs()[rank].iter().copied().max().unwrap_or(0),
        }
    }
}

/// Returns the ranks whose contributions rank `to` adds to its block, in the order of ranks.
///
/// In place, the own contribution comes first.
fn order(collective: Collective, to: usize, plans: &[Plan]) -> Vec<usize> {
    let contributors = match collective {
        Collective::ReduceScatter | Collective::AllReduce => 0..plans.len(),
        Collective::Reduce { root } => 0..if root.index() == to { plans.len() } else { 0 },
        Collective::Scan => 0..to + 1,
        Collective::Exscan => 0..to,
        Collective::AllGather
        | Collective::Broadcast { .. }
        | Collective::AllToAll
        | Collective::Gather { .. }
        | Collective::Scatter { .. } => 0..0,
    };
    let is_first = |from: &usize| plans[to].in_place && *from == to;
    let (first, others): (Vec<usize>, Vec<usize>) = contributors.partition(is_first);
    [first, others].concat()
}

/// Returns the length of the block of each rank for each output, and whether these are different blocks.
fn blocks(collective: Collective, lengths: &[usize]) -> (Vec<Vec<usize>>, bool) {
    let ranks = lengths.len();
    let by_output = matches!(collective, Collective::AllToAll | Collective::Scatter { .. });
    let only = |holds: bool, length: usize| if holds { length } else { 0 };
    let block = |from: usize, to: usize| match collective {
        Collective::AllGather | Collective::AllReduce => lengths[from],
        Collective::Broadcast { root } => only(root.index() == from, lengths[from]),
        Collective::AllToAll => lengths[(to + ranks - from) % ranks],
        Collective::Gather { root } => only(root.index() == to, lengths[from]),
        Collective::Scatter { root } => only(root.index() == from, lengths[to]),
        Collective::ReduceScatter | Collective::Scan => only(from == to, lengths[to]),
        Collective::Reduce { root } => only(from == to && root.index() == to, lengths[to]),
        Collective::Exscan => only(from == to && to > 0, lengths[to]),
    };
    let row = |from| (0..ranks).map(|to| block(from, to)).collect();
    ((0..ranks).map(row).collect(), by_output)
}

fn action(
    (blocks, given): (&[Vec<usize>], Option<&Vec<Vec<usize>>>),
    plan: &Plan,
    step: Step,
    names: &mut HashMap<(Rank, Flag), usize>,
) -> Option<Action> {
    let in_range = |rank: Rank| (rank.index() < blocks.len()).then_some(rank.index());
    let mut number = |reader, flag| {
        let next = names.len();
        *names.entry((reader, flag)).or_insert(next)
    };
    Some(match step {
        Step::Put { peer, cell: Cell { block, chunk }, from }
        | Step::Get { peer, cell: Cell { block, chunk }, from } => {
            let is_get = matches!(step, Step::Get { .. });
            let (block, peer) = (in_range(block)?, in_range(peer)?);
            let target = if is_get { plan.rank.index() } else { peer };
            let is_given = from == Source::Input && given.is_some();
            let lengths = given.filter(|_| is_given).map_or(blocks, Vec::as_slice);
            let length = lengths[block][target];
            let edge = |chunk: u32| length * chunk as usize / plan.chunks as usize;
            let units = (chunk < plan.chunks).then(|| edge(chunk)..edge(chunk + 1))?;
            Action::Copy { peer, is_get, units, block, from, is_given }
        }
        Step::Reduce { cell: Cell { block, chunk }, from } => {
            let (block, from) = (in_range(block)?, in_range(from)?);
            let length = given?[from][plan.rank.index()];
            let edge = |chunk: u32| length * chunk as usize / plan.chunks as usize;
            let is_own = chunk < plan.chunks && block == plan.rank.index();
            let units = is_own.then(|| edge(chunk)..edge(chunk + 1))?;
            Action::Reduce { units, from, is_first: false }
        }
        Step::Signal { peer, flag } => {
            Action::Signal { peer: in_range(peer)?, flag: number(peer, flag) }
        }
        Step::Wait { flag } => {
            Action::Wait { flag: number(plan.rank, flag), lag: flag.lag().into() }
        }
    })
}
