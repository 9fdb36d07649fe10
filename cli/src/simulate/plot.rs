//! Plots the bandwidth of a simulation, and its duration by cause on the critical path, over the
//! size.

use peerlane_planning::plan::Step;
use peerlane_planning::simulate::{LinkClass, Simulation};

use super::options::Options;
use super::scenario::{Scenario, fastest};
use crate::error::Result;
use crate::report::{Line, Panel, panels};

/// The number of simulated sizes, each a quarter of the next one.
const SIZES: u32 = 6;
/// The names of the causes that add up to a duration, in the order of the lines.
const CAUSES: [&str; 6] = ["start", "flags", "self copies", "local", "network", "host"];

/// Simulates the scenario and smaller sizes with the fastest algorithm of each size, and draws the
/// results as an SVG file.
pub(super) fn plot(title: &str, scenario: &Scenario, options: &Options) -> Result<String> {
    let mut points: Vec<(f64, Simulation)> = Vec::new();
    for divisor in (0..SIZES).rev().map(|step| 4_u64.pow(step)) {
        let smaller = scenario.divided_by(divisor)?;
        let bytes = smaller.layout.total_bytes() as f64;
        let runs = smaller.runs(options)?;
        points.extend(fastest(runs).map(|run| (bytes, run.simulation)));
    }

    let line = |name, index, value: &dyn Fn(f64, &Simulation) -> f64| {
        let points = points.iter().map(|(bytes, simulation)| (*bytes, value(*bytes, simulation)));
        Line::new(name, index, points)
    };
    let bandwidth = |bytes: f64, simulation: &Simulation| bytes / 1e9 / simulation.seconds();
    let total = |_: f64, simulation: &Simulation| simulation.end_ps() as f64 / 1e6;

    let mut time = vec![line("all", 0, &total)];
    time.extend(CAUSES.iter().enumerate().map(|(cause, name)| {
        line(*name, cause + 1, &|_, simulation| by_cause(simulation)[cause] as f64 / 1e6)
    }));

    panels(
        title,
        &Panel {
            caption: "Bandwidth",
            unit: "GB/s (10^9 bytes per second)",
            lines: vec![line("algorithm", 0, &bandwidth)],
        },
        &Panel { caption: "Duration by cause", unit: "microseconds", lines: time },
    )
}

/// Divides the duration of a simulation among the [`CAUSES`], in picoseconds.
fn by_cause(simulation: &Simulation) -> [u64; CAUSES.len()] {
    let mut causes = [0; CAUSES.len()];
    let path = &simulation.critical_path;
    for (index, step) in path.iter().enumerate() {
        let cause = match step.step {
            _ if index == 0 => 0,
            Step::Signal { .. } | Step::Wait { .. } => 1,
            Step::Reduce { .. } => {
                2 + LinkClass::from_tier(simulation.tiers[step.lane.index()], true) as usize
            }
            Step::Put { peer, .. } | Step::Get { peer, .. } => {
                let tier = simulation.tiers[step.lane.index()];
                2 + LinkClass::from_tier(tier, peer == step.rank) as usize
            }
        };
        causes[cause] += step.end_ps - step.begin_ps;
    }
    // A host that submits longer than the lanes run ends last.
    let lanes = path.last().map_or(0, |step| step.end_ps);
    causes[5] = simulation.end_ps().saturating_sub(lanes);
    causes
}

#[cfg(test)]
mod tests {
    use super::super::chart::tests::simulation;
    use super::*;
    use peerlane_planning::cost::Links;

    #[test]
    fn the_causes_add_up_to_the_duration() {
        let simulation = simulation(&Links::default());
        let causes = by_cause(&simulation);
        assert_eq!(causes.iter().sum::<u64>(), simulation.end_ps());
        assert!(causes[0] > 0 && causes[1] > 0 && causes[4] > 0, "{causes:?}");
    }
}
