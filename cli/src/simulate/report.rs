//! Formats the results of simulations as text and as JSON.

use std::fmt::Write;

use peerlane_planning::simulate::{LinkClass, PathStep, Simulation};
use serde_json::{Value, json};

use super::scenario::{Run, Scenario};
use crate::error::Result;
use crate::report::{Columns, pretty_json};
use crate::units::Size;

#[derive(Clone, Copy, Debug)]
pub(super) struct Report<'a> {
    pub(super) scenario: &'a Scenario,
    pub(super) runs: &'a [Run],
    pub(super) path: usize,
}

/// The first and last steps of a critical path, with the number of steps between them that are left
/// out.
struct PathExcerpt<'a> {
    first: &'a [PathStep],
    left_out: usize,
    last: &'a [PathStep],
}

impl<'a> PathExcerpt<'a> {
    fn of_path(path: &'a [PathStep], most: usize) -> Self {
        if path.len() <= most {
            return Self { first: path, left_out: 0, last: &[] };
        }
        let (first, rest) = path.split_at(most.div_ceil(2));
        let (middle, last) = rest.split_at(rest.len() - most / 2);
        Self { first, left_out: middle.len(), last }
    }
}

impl Report<'_> {
    pub(super) fn title(&self, run: &Run) -> String {
        let Run { algorithm, chunks, .. } = run;
        let plural = if *chunks == 1 { "" } else { "s" };
        format!(
            "{algorithm} in {chunks} chunk{plural}, {}, {}",
            self.scenario.topology,
            self.blocks()
        )
    }

    pub(super) fn text(&self) -> String {
        let mut text = format!("{}, {}\n\n", self.scenario.topology, self.blocks());
        text += &self.table();
        text += "\n";
        for run in self.runs.iter().filter(|_| self.path > 0) {
            text += &self.path_text(run);
        }
        text
    }

    pub(super) fn json(&self) -> Result<String> {
        let document = json!({
            "topology": self.scenario.topology.notation(),
            "ranks": self.scenario.topology.ranks(),
            "total_bytes": self.total_bytes(),
            "links": self.scenario.links,
            "runs": self.runs.iter().map(|run| self.run_json(run)).collect::<Vec<_>>(),
        });
        pretty_json(&document)
    }

    fn total_bytes(&self) -> u64 {
        self.scenario.layout.total_bytes()
    }

    fn blocks(&self) -> String {
        match self.scenario.block_bytes.as_slice() {
            [first, rest @ ..] if rest.iter().all(|bytes| bytes == first) => {
                format!("blocks of {}", Size(*first))
            }
            _ => format!("blocks of {} together", Size(self.total_bytes())),
        }
    }

    fn table(&self) -> String {
        let links = &self.scenario.links;
        let carried = |run: &Run, class| match run.simulation.bytes(class) {
            0 => "-".to_owned(),
            bytes => Size(bytes).to_string(),
        };
        let used = |run: &Run, class: LinkClass| match run.simulation.bytes(class) {
            0 => "-".to_owned(),
            _ => {
                let share = run.simulation.utilisation(class, class.link(links));
                format!("{:.0} %", share.most * 100.0)
            }
        };

        Columns::of_rows(self.runs)
            .left("algorithm", |run| run.algorithm)
            .right("chunks", |run| run.chunks)
            .right("µs", |run| microseconds(run.simulation.end_ps()))
            .right("predicted µs", |run| microseconds(run.predicted_ps))
            .right("GB/s", |run| format!("{:.1}", self.gigabytes_per_second(&run.simulation)))
            .right("local", |run| carried(run, LinkClass::Local))
            .right("used", |run| used(run, LinkClass::Local))
            .right("network", |run| carried(run, LinkClass::Network))
            .right("used", |run| used(run, LinkClass::Network))
            .right("local incast", |run| run.simulation.incast[0].flows)
            .right("network incast", |run| {
                run.simulation.incast[1].flows.max(run.simulation.nic_incast.flows)
            })
            .text()
    }

    fn gigabytes_per_second(&self, simulation: &Simulation) -> f64 {
        match simulation.seconds() {
            seconds if seconds > 0.0 => self.total_bytes() as f64 / 1e9 / seconds,
            _ => 0.0,
        }
    }

    fn path_text(&self, run: &Run) -> String {
        let path = &run.simulation.critical_path;
        let mut text = format!("\ncritical path of {}, {} steps\n", run.algorithm, path.len());
        let line = |step: &PathStep| {
            let (end, took) = (step.end_ps, step.end_ps - step.begin_ps);
            format!("  {:>12} µs  +{:>10}  {step}\n", microseconds(end), microseconds(took))
        };
        let PathExcerpt { first, left_out, last } = PathExcerpt::of_path(path, self.path);
        text.extend(first.iter().map(line));
        if left_out > 0 {
            // Writing to a string does not fail.
            writeln!(text, "  … {left_out} steps …").ok();
        }
        text.extend(last.iter().map(line));
        let (end, lanes) = (run.simulation.end_ps(), path.last().map_or(0, |step| step.end_ps));
        let host = run.simulation.ranks.iter().map(|rank| rank.host_ps).max().unwrap_or(0);
        if host == end && host > lanes {
            let host = microseconds(host);
            writeln!(text, "  a host needs {host} µs to submit its puts, which is longer").ok();
        }
        text
    }

    fn run_json(&self, run: &Run) -> Value {
        let Run { algorithm, chunks, predicted_ps, simulation } = run;
        let ends = || simulation.ends_ps.iter().copied();
        let classes = LinkClass::ALL.map(|class| {
            let share = simulation.utilisation(class, class.link(&self.scenario.links));
            json!({
                "link_class": class.name(),
                "bytes": simulation.bytes(class),
                "utilisation_mean": share.mean,
                "utilisation_max": share.most,
            })
        });
        let incast = |target: &str, incast: peerlane_planning::simulate::Incast| json!({"into": target, "flows_max": incast.flows, "rank": incast.rank.0});
        let [local, network] = simulation.incast;

        json!({
            "algorithm": algorithm,
            "chunks": chunks,
            "microseconds": simulation.end_ps() as f64 / 1e6,
            "first_rank_microseconds": ends().min().unwrap_or(0) as f64 / 1e6,
            "predicted_microseconds": *predicted_ps as f64 / 1e6,
            "host_microseconds_max":
                simulation.ranks.iter().map(|rank| rank.host_ps).max().unwrap_or(0) as f64 / 1e6,
            "algbw_gbs": self.gigabytes_per_second(simulation),
            "steps": simulation.steps,
            "link_classes": classes,
            "incast": [
                incast("rank, local", local),
                incast("rank, network", network),
                incast("NIC", simulation.nic_incast),
            ],
            "critical_path": self.path_json(&simulation.critical_path),
        })
    }

    fn path_json(&self, path: &[PathStep]) -> Value {
        let PathExcerpt { first, left_out, last } = PathExcerpt::of_path(path, self.path);
        let stages = first.iter().chain(last).map(|step| {
            json!({
                "rank": step.rank.0,
                "lane": step.lane.0,
                "step": step.text(),
                "begin_microseconds": step.begin_ps as f64 / 1e6,
                "end_microseconds": step.end_ps as f64 / 1e6,
            })
        });
        json!({"steps": path.len(), "left_out": left_out, "stages": stages.collect::<Vec<_>>()})
    }
}

fn microseconds(picoseconds: u64) -> String {
    format!("{:.1}", picoseconds as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_paths_are_shown_from_both_ends() {
        use peerlane::Rank;
        use peerlane_planning::plan::{Flag, LaneId, Step};
        let lane = LaneId::HOME;
        let step = |end_ps| PathStep {
            rank: Rank(0),
            lane,
            step: Step::Wait { flag: Flag::Go { lane } },
            begin_ps: 0,
            end_ps,
        };
        let path: Vec<PathStep> = (0..9).map(step).collect();
        let shown = |most| {
            let PathExcerpt { first, left_out, last } = PathExcerpt::of_path(&path, most);
            assert_eq!(first.len() + left_out + last.len(), path.len());
            (first.len(), last.first().map(|step| step.end_ps))
        };
        assert_eq!(shown(9), (9, None));
        assert_eq!(shown(5), (3, Some(7)));
        assert_eq!(shown(1), (1, None));
        assert_eq!(shown(0), (0, None));
    }
}
