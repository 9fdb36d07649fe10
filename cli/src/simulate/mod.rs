//! `peerlane simulate`: runs the plans of all ranks over links that are figures.

use std::io::{self, Write};

use peerlane::cost::{self, Choice, Links, Question};
use peerlane::layout::Layout;
use peerlane::plan::Algorithm;
use peerlane::schedule::{self, Shape};
use peerlane::simulate::{self, Simulation, Slice};
use peerlane::topology::Topology;

use crate::error::{Failure, Result};
use crate::goal::provided;
use crate::trace::{Event, TraceFile};

mod links;
mod options;
mod picture;
mod report;

pub(crate) use options::Options;
use picture::Picture;
use report::Report;

/// What is simulated on.
#[derive(Debug)]
struct Ground {
    topology: Topology,
    shard_bytes: Vec<u64>,
    links: Links,
}

/// One algorithm, simulated.
#[derive(Debug)]
struct Run {
    algorithm: Algorithm,
    parts: u32,
    /// What the cost model says, in picoseconds.
    predicted_ps: u64,
    simulation: Simulation,
}

/// Simulates, prints and writes files.
///
/// # Errors
/// If the options do not fit together, or a file cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let topology = options.topology()?;
    let ranks = topology.ranks();
    let collective = options.goal.collective(ranks)?;
    let shard_bytes = provided(collective, options.shard_bytes(ranks)?);
    let ground = Ground { links: options.links.links()?, shard_bytes, topology };
    let svg = options.svg.as_deref().map(Picture::to).transpose()?;
    let trace = options.trace.as_deref().map(TraceFile::to).transpose()?;
    let algorithms = options.algorithms(collective).into_iter();
    let runs: Vec<Run> =
        algorithms.map(|algorithm| ground.simulate(options, algorithm)).collect::<Result<_>>()?;
    let report = Report { ground: &ground, runs: &runs, path: options.path };
    let text = if options.json { report.json()? } else { report.text() };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::io("cannot print the simulation", &error))?;
    let Some(fastest) = runs.iter().min_by_key(|run| run.simulation.end_ps()) else {
        return Ok(());
    };
    let title = report.title(fastest);
    if let Some(svg) = svg {
        svg.write(&title, &fastest.simulation, &ground.links)?;
    }
    if let Some(trace) = trace {
        let slices = fastest.simulation.slices.iter();
        trace.write(&title, slices.map(event).collect())?;
    }
    Ok(())
}

fn event(slice: &Slice) -> Event {
    let nanoseconds = |picoseconds: u64| picoseconds as f64 / 1e3;
    Event {
        rank: slice.rank.0,
        lane: slice.lane.0,
        name: slice.text(),
        start_ns: nanoseconds(slice.begin_ps),
        duration_ns: nanoseconds(slice.end_ps - slice.begin_ps),
    }
}

impl Ground {
    /// Simulates `algorithm`, or the one that is predicted to be fastest.
    fn simulate(&self, options: &Options, algorithm: Option<Algorithm>) -> Result<Run> {
        let usage = |error: peerlane::Error| Failure::usage(error.to_string());
        let Self { topology, shard_bytes, links } = self;
        let collective = options.goal.collective(topology.ranks())?;
        let shape = Shape {
            collective,
            parts: 1,
            in_place: options.in_place,
            outputs: options.outputs,
            flags: options.flags,
            tiers: topology.nodes() > 1 && !options.one_fabric,
        };
        let question = Question {
            topology,
            shard_bytes,
            shape,
            links,
            measured: true,
            algorithm,
            parts: options.parts,
            refused: &[],
        };
        let Choice { algorithm, parts, cost, .. } = cost::choose(&question).map_err(usage)?;
        let shape = Shape { parts, ..shape };
        let layout = Layout::new(shard_bytes, parts)
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
        Ok(Run { algorithm, parts, predicted_ps: cost.picoseconds, simulation })
    }
}
