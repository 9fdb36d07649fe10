//! Simulates one topology with one size and one algorithm.

use std::borrow::Borrow;

use peerlane::topology::Topology;
use peerlane_planning::cost::{self, Choice, Links, Question};
use peerlane_planning::layout::Layout;
use peerlane_planning::plan::{Algorithm, FlagOrder};
use peerlane_planning::schedule::{self, Shape};
use peerlane_planning::simulate::{self, Simulation};

use super::options::Options;
use crate::error::{Failure, Result};
use crate::goal::Goal;
use crate::report::print_error;

/// The number of copies, each with its flags, from which a simulation takes seconds and is
/// announced.
const LONG_COPIES: u64 = 1 << 22;

#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) topology: Topology,
    pub(super) goal: Goal,
    pub(super) block_bytes: Vec<u64>,
    /// The layout of all blocks, each as one chunk.
    pub(super) layout: Layout,
    pub(super) links: Links,
}

/// The simulation of one algorithm with its predicted time.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) algorithm: Algorithm,
    pub(super) chunks: u32,
    pub(super) predicted_ps: u64,
    pub(super) simulation: Simulation,
}

pub(super) fn fastest<R: Borrow<Run>>(runs: impl IntoIterator<Item = R>) -> Option<R> {
    runs.into_iter().min_by_key(|run| run.borrow().simulation.end_ps())
}

impl Scenario {
    pub(super) fn new(
        topology: Topology,
        goal: Goal,
        block_bytes: Vec<u64>,
        links: Links,
    ) -> Result<Self> {
        let layout = goal.layout(std::slice::from_ref(&block_bytes), 1);
        let layout = layout.map_err(|error| Failure::usage(error.to_string()))?;
        Ok(Self { topology, goal, block_bytes, layout, links })
    }

    /// Returns the same scenario with smaller blocks, rounded up to whole bytes.
    pub(super) fn divided_by(&self, divisor: u64) -> Result<Self> {
        let block_bytes = self.block_bytes.iter().map(|bytes| bytes.div_ceil(divisor)).collect();
        Self::new(self.topology.clone(), self.goal, block_bytes, self.links.clone())
    }

    pub(super) fn runs(&self, options: &Options) -> Result<Vec<Run>> {
        let algorithms =
            options.algorithm.fitting(&self.topology, self.goal.collective).into_iter();
        algorithms.map(|algorithm| self.simulate(options, algorithm)).collect()
    }

    /// Simulates an algorithm; `None` is the one with the lowest predicted time.
    fn simulate(&self, options: &Options, algorithm: Option<Algorithm>) -> Result<Run> {
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let Self { topology, goal, block_bytes, layout, links } = self;
        let tiers = topology.nodes() > 1 && !options.one_fabric;
        let shape = options.plan.shape(*goal, FlagOrder::Prompt, tiers);

        let question = Question {
            topology,
            block_bytes: &layout.average_blocks(),
            shape,
            links,
            measured: true,
            algorithm,
            chunks: options.plan.chunks,
            refused: &[],
        };
        let Choice { algorithm, chunks, cost, .. } = cost::choose(&question).map_err(usage)?;

        // The choice may divide blocks into chunks, which the layout of the scenario does not.
        let shape = Shape { chunks, ..shape };
        let layout = goal.layout(std::slice::from_ref(block_bytes), chunks).map_err(usage)?;

        let ranks = topology.ranks();
        let how = simulate::Options {
            delays: options.delays(ranks)?,
            traced: options.shown(ranks),
            forks: false,
        };

        let copies = (ranks as u64).pow(2).saturating_mul(chunks.into());
        if copies >= LONG_COPIES {
            print_error(format_args!(
                "simulating {algorithm} on {ranks} ranks in {chunks} chunk{}, which can take minutes",
                if chunks == 1 { "" } else { "s" }
            ));
        }

        let plan = |rank| schedule::plan(algorithm, topology, rank, shape);
        let simulation = simulate::simulate(topology, &layout, links, &how, plan);
        let simulation = simulation.map_err(|error| {
            usage(error).with_advice("lower --nodes, --ranks-per-node, --chunks or --block-bytes")
        })?;
        Ok(Run { algorithm, chunks, predicted_ps: cost.picoseconds, simulation })
    }
}
