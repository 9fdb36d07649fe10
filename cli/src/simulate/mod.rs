//! Implements `peerlane simulate`, which executes the plans of all ranks on modelled links.

use peerlane_planning::simulate::Slice;

use crate::error::Result;
use crate::options::block_bytes;
use crate::report::print;
use crate::trace::{self, TraceEvent};

mod chart;
mod options;
mod plot;
mod report;
mod scenario;

use chart::chart;
pub(crate) use options::Options;
use plot::plot;
use report::Report;
use scenario::{Scenario, fastest};

pub(crate) fn run(options: &Options) -> Result<()> {
    let topology = options.topology()?;
    let ranks = topology.ranks();
    let goal = options.plan.goal.goal(ranks, options.plan.in_place)?;
    let block_bytes = block_bytes("--block-bytes", &options.block_bytes, ranks)?;

    let scenario = Scenario::new(topology, goal, block_bytes, options.links.links()?)?;
    let runs = scenario.runs(options)?;
    let report = Report { scenario: &scenario, runs: &runs, path: options.path };
    let text = if options.plan.json { report.json()? } else { report.text() };
    print(&text)?;

    let Some(fastest) = fastest(&runs) else { return Ok(()) };
    let title = report.title(fastest);
    if let Some(svg) = &options.svg {
        svg.write(&chart(&title, &fastest.simulation, &scenario.links)?)?;
    }
    if let Some(file) = &options.plot {
        file.write(&plot(&title, &scenario, options)?)?;
    }
    if let Some(trace) = &options.trace {
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
