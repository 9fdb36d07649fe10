//! `peerlane simulate`: executes the plans of all ranks on modelled links.

use std::path::Path;

use peerlane::planning::cost::{self, Choice, Links, Question};
use peerlane::planning::layout::Layout;
use peerlane::planning::plan::{Algorithm, FlagOrder};
use peerlane::planning::schedule::{self, Shape};
use peerlane::planning::simulate::{self, Simulation, Slice};
use peerlane::topology::Topology;

use crate::error::{Failure, Result};
use crate::goal::provided;
use crate::report::{OutputFile, print};
use crate::trace::{self, TraceEvent};

mod chart;
mod options;
mod report;

use chart::chart;
pub(crate) use options::Options;
use report::Report;

/// Topology, shards and links of a simulation.
#[derive(Debug)]
struct Scenario {
    topology: Topology,
    shard_bytes: Vec<u64>,
    links: Links,
}

/// The simulation of one algorithm.
#[derive(Debug)]
struct Run {
    algorithm: Algorithm,
    chunks: u32,
    /// Prediction of the cost model in picoseconds.
    predicted_ps: u64,
    simulation: Simulation,
}

/// Simulates the algorithms, prints the results and writes the files.
///
/// # Errors
/// If the options contradict each other, or an output cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let topology = options.topology()?;
    let ranks = topology.ranks();
    let collective = options.plan.goal.collective(ranks)?;
    let shard_bytes = provided(collective, options.shard_bytes(ranks)?);
    let scenario = Scenario { links: options.links.links()?, shard_bytes, topology };
    let file = |option, path: Option<&Path>, extension| {
        path.map(|path| OutputFile::new(option, path, extension)).transpose()
    };
    let svg = file("--svg", options.svg.as_deref(), "svg")?;
    let trace = file("--trace", options.trace.as_deref(), "json")?;
    let algorithms = options.algorithms(collective).into_iter();
    let runs: Vec<Run> =
        algorithms.map(|algorithm| scenario.simulate(options, algorithm)).collect::<Result<_>>()?;
    let report = Report { scenario: &scenario, runs: &runs, path: options.path };
    let text = if options.plan.json { report.json()? } else { report.text() };
    print(&text)?;
    let Some(fastest) = runs.iter().min_by_key(|run| run.simulation.end_ps()) else {
        return Ok(());
    };
    let title = report.title(fastest);
    if let Some(svg) = svg {
        svg.write(&chart(&title, &fastest.simulation, &scenario.links)?)?;
    }
    if let Some(trace) = trace {
        let slices = fastest.simulation.slices.iter();
        trace.write(&trace::render(&title, slices.map(event).collect()))?;
    }
    Ok(())
}

fn event(slice: &Slice) -> TraceEvent {
    let nanoseconds = |picoseconds: u64| picoseconds as f64 / 1e3;
    TraceEvent {
        rank: slice.rank.0,
        lane: slice.lane.0,
        name: slice.text(),
        start_ns: nanoseconds(slice.begin_ps),
        duration_ns: nanoseconds(slice.end_ps - slice.begin_ps),
    }
}

impl Scenario {
    /// Simulates `algorithm`, or the one with the lowest predicted time.
    fn simulate(&self, options: &Options, algorithm: Option<Algorithm>) -> Result<Run> {
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let Self { topology, shard_bytes, links } = self;
        let collective = options.plan.goal.collective(topology.ranks())?;
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
            shard_bytes,
            shape,
            links,
            measured: true,
            algorithm,
            chunks: options.plan.chunks,
            refused: &[],
        };
        let Choice { algorithm, chunks, cost, .. } = cost::choose(&question).map_err(usage)?;
        let shape = Shape { chunks, ..shape };
        let layout = Layout::new(shard_bytes, chunks)
            .and_then(|layout| layout.for_collective(collective))
            .map_err(usage)?;
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
