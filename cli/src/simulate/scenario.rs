//! Simulates one scenario with one algorithm.

use peerlane::planning::cost::{self, Choice, Links, Question};
use peerlane::planning::layout::Layout;
use peerlane::planning::plan::{Algorithm, FlagOrder};
use peerlane::planning::schedule::{self, Shape};
use peerlane::topology::Topology;
use peerlane_planning::simulate::{self, Simulation};

use super::options::Options;
use crate::error::{Failure, Result};
use crate::goal::Goal;

/// Topology, blocks and links of a simulation.
#[derive(Debug)]
pub(super) struct Scenario {
    pub(super) topology: Topology,
    pub(super) goal: Goal,
    pub(super) block_bytes: Vec<u64>,
    /// The bytes of all blocks, in one chunk.
    pub(super) layout: Layout,
    pub(super) links: Links,
}

/// The simulation of one algorithm.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) algorithm: Algorithm,
    pub(super) chunks: u32,
    /// Prediction of the cost model in picoseconds.
    pub(super) predicted_ps: u64,
    pub(super) simulation: Simulation,
}

impl Scenario {
    /// Simulates `algorithm`, or the one with the lowest predicted time.
    pub(super) fn simulate(&self, options: &Options, algorithm: Option<Algorithm>) -> Result<Run> {
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let Self { topology, goal, block_bytes, layout, links } = self;
        let collective = goal.collective;
        let shape = Shape {
            collective,
            chunks: 1,
            in_place: options.plan.in_place,
            outputs: options.plan.outputs,
            flags: options.plan.flags.unwrap_or(FlagOrder::Prompt),
            tiers: topology.nodes() > 1 && !options.one_fabric,
        };
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
        let shape = Shape { chunks, ..shape };
        let layout = goal.layout(std::slice::from_ref(block_bytes), chunks).map_err(usage)?;
        let ranks = topology.ranks();
        let how = simulate::Options {
            delays: options.delays(ranks)?,
            traced: options.shown(ranks),
            forks: false,
        };
        let plan = |rank| schedule::plan(algorithm, topology, rank, shape);
        let simulation = simulate::simulate(topology, &layout, links, &how, plan).map_err(usage)?;
        Ok(Run { algorithm, chunks, predicted_ps: cost.picoseconds, simulation })
    }
}
