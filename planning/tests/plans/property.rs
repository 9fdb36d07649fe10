//! Runs every collective and algorithm on random topologies of 1 to 64 ranks, in random shapes,
//! with random delays.
//!
//! Each start must give the result that the collective defines, and the plans must be proven. 1,500
//! cases run, and 10,000 if `PEERLANE_SEEDS` is set. `PEERLANE_PROPERTY_CASES` sets another number
//! of cases, and `PEERLANE_PROPERTY_FIRST` the number of the first one, to repeat a case that
//! failed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use fastrand::Rng;
use peerlane_hal::Rank;
use peerlane_planning::collective::Collective;
use peerlane_planning::plan::{Algorithm, FlagOrder, Tier};
use peerlane_planning::schedule::{self, Shape, algorithms};
use peerlane_planning::topology::Topology;
use peerlane_planning::verify::{Budget, prove, verify};

use crate::support::cases::number_of_cases;
use crate::support::oracle::Oracle;

const SOME_CASES: u64 = 1500;
const ALL_CASES: u64 = 10_000;
/// One case of this many is large.
const LARGE: u64 = 200;
/// One case of this many is also proven without following all plans.
const PROVEN: u64 = 4;
const RANKS_MAX: usize = 64;

/// A configuration of plans, and the lengths of its blocks.
#[derive(Debug)]
struct Case {
    algorithm: Algorithm,
    node_of_rank: Vec<u32>,
    shape: Shape,
    /// One length for each rank in units, as the oracle takes them.
    blocks: Vec<usize>,
    starts: u64,
}

impl Case {
    fn new(number: u64) -> Self {
        let mut rng = Rng::with_seed(number);
        let ranks = match number % LARGE {
            0 => rng.usize(17..=RANKS_MAX),
            few if few < LARGE / 10 => rng.usize(7..=16),
            _ => rng.usize(1..=6),
        };
        // Some algorithms need a power of two.
        let ranks = if rng.u8(..3) == 0 { 1 << ranks.ilog2() } else { ranks };
        let in_place = rng.u8(..4) == 0;
        let shape = Shape {
            chunks: rng.u32(1..=if ranks > 16 { 2 } else { 4 }),
            in_place,
            outputs: if in_place { 1 } else { rng.u32(1..=2) },
            inboxes: 1,
            flags: *rng.choice(FlagOrder::ALL).unwrap(),
            tiers: rng.bool(),
            collective: Collective::AllGather,
        };
        let node_of_rank = nodes(ranks, &mut rng);
        let algorithm = fitting(&node_of_rank, shape, &mut rng);
        let blocks = blocks(ranks, &mut rng);
        let starts = if ranks > 16 { 3 } else { 5 };
        Self { algorithm, node_of_rank, shape, blocks, starts }.of_collective(&mut rng)
    }

    /// Makes about two thirds of the cases any collectives, and not only all-gathers.
    fn of_collective(mut self, rng: &mut Rng) -> Self {
        if rng.u8(..3) == 0 {
            return self;
        }
        let root = Rank::at(rng.usize(..self.blocks.len()));
        self.shape.collective = rng.choice(Collective::ALL).unwrap().with_root(root);
        self.shape.in_place &= self.shape.collective.runs_in_place();
        if self.shape.collective.is_reduction() {
            self.shape.inboxes = rng.u32(1..=2);
        }
        if matches!(self.shape.collective, Collective::Scan | Collective::Exscan) {
            let units = self.blocks[0];
            self.blocks.fill(units);
        }
        self.algorithm = fitting(&self.node_of_rank, self.shape, rng);
        self
    }

    fn check(&self, number: u64) -> Result<(), String> {
        let failure = |error: &dyn std::fmt::Display| format!("case {number}: {error}, {self:?}");
        let topology = Topology::of_nodes(&self.node_of_rank).map_err(|error| failure(&error))?;
        let plans = schedule::plans(self.algorithm, &topology, self.shape);
        let plans = plans.map_err(|error| failure(&error))?;
        let oracle = Oracle::new(&plans, &self.blocks, self.starts)
            .map_err(|harm| failure(&format!("{harm:?}")))?;
        oracle.run(number).map_err(|harm| failure(&format!("{harm:?}")))?;
        let of_local =
            plans.iter().flat_map(|plan| &plan.lanes).all(|lane| lane.tier == Tier::Local);
        if !of_local && !self.shape.tiers {
            return Err(failure(&"a network lane without a network"));
        }
        verify(&plans).map_err(|fault| failure(&fault))?;
        if number.is_multiple_of(PROVEN) {
            let thrifty =
                Budget { followed_steps: 0, asymmetric_steps: 0, compared_steps: usize::MAX };
            prove(self.algorithm, &topology, self.shape, thrifty)
                .map_err(|fault| failure(&fault))?;
        }
        Ok(())
    }
}

/// Returns a random algorithm that can execute the shape on these nodes.
fn fitting(node_of_rank: &[u32], shape: Shape, rng: &mut Rng) -> Algorithm {
    let topology = Topology::of_nodes(node_of_rank).unwrap();
    let suitable: Vec<_> = schedule::fitting(&topology, shape).collect();
    *rng.choice(&suitable).unwrap()
}

/// Returns one node, equal nodes, or random ones, with consecutive or shuffled ranks.
fn nodes(ranks: usize, rng: &mut Rng) -> Vec<u32> {
    let mut nodes: Vec<u32> = match rng.u8(..4) {
        0 => vec![0; ranks],
        1 => {
            let size = rng.usize(1..=ranks);
            (0..ranks).map(|rank| (rank / size) as u32).collect()
        }
        _ => {
            let mut node = 0;
            let next = (0..ranks).map(|rank| {
                node += u32::from(rank > 0 && rng.u8(..3) == 0);
                node
            });
            next.collect()
        }
    };
    if rng.bool() {
        rng.shuffle(&mut nodes);
    }
    nodes
}

/// Returns the lengths of equal, random, or mostly empty blocks.
fn blocks(ranks: usize, rng: &mut Rng) -> Vec<usize> {
    let units = rng.usize(0..=9);
    match rng.u8(..3) {
        0 => vec![units; ranks],
        1 => (0..ranks).map(|_| rng.usize(0..=9)).collect(),
        _ => (0..ranks).map(|_| if rng.u8(..4) == 0 { units } else { 0 }).collect(),
    }
}

fn number_from_env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}, expected a number")))
}

#[test]
fn results_are_as_defined() {
    let first = number_from_env("PEERLANE_PROPERTY_FIRST").unwrap_or(0);
    let cases = number_from_env("PEERLANE_PROPERTY_CASES")
        .unwrap_or_else(|| number_of_cases(SOME_CASES, ALL_CASES));
    let next = AtomicU64::new(first);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= first + cases {
                return;
            }
            Case::new(number).check(number).unwrap_or_else(|failure| panic!("{failure}"));
        }
    };
    thread::scope(|scope| {
        let workers = thread::available_parallelism().map_or(2, usize::from);
        (0..workers).for_each(|_| {
            scope.spawn(work);
        });
    });
}

#[test]
fn cases_are_of_every_kind() {
    let cases: Vec<Case> = (0..SOME_CASES).map(Case::new).collect();
    let some = |holds: &dyn Fn(&Case) -> bool| assert!(cases.iter().any(holds));
    for &algorithm in Algorithm::ALL {
        some(&|case| case.algorithm == algorithm && case.shape.tiers);
        some(&|case| case.algorithm == algorithm && case.shape.outputs == 2);
    }
    for collective in Collective::ALL {
        for algorithm in algorithms(*collective) {
            some(&|case| {
                let found = case.shape.collective;
                (case.algorithm, found.name()) == (algorithm, collective.name())
                    && case.node_of_rank.len() > 4
                    && (found.root().is_none() || found.root() != Some(Rank(0)))
            });
        }
    }
    some(&|case| case.node_of_rank.len() > 32);
    some(&|case| case.node_of_rank.len() == 1);
    some(&|case| !case.node_of_rank.is_sorted());
    some(&|case| case.blocks.contains(&0) && case.blocks.iter().any(|&units| units > 0));
    some(&|case| case.shape.in_place && case.shape.flags == FlagOrder::Batched);
    for &collective in [Collective::ReduceScatter, Collective::AllReduce].iter() {
        for &flags in FlagOrder::ALL {
            some(&|case| {
                let Shape { outputs, inboxes, .. } = case.shape;
                let found = (case.shape.collective, case.shape.flags);
                found == (collective, flags) && (outputs, inboxes) == (1, 2)
            });
        }
    }
    some(&|case| case.shape.in_place && case.shape.inboxes == 2);
}
