//! `cargo xtask bench cost`: compares the times that the cost model predicts with measured ones.
//!
//! The program calibrates itself on some sizes and predicts those and the sizes between; see
//! `peerlane calibrate --check`. This file only writes its figures down.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::report::{self, Goals, Machine, figure, size};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// The share of points that must be predicted within 20 %, in percent.
const GOOD_PERCENT: f64 = 90.0;
/// The maximum time by which a choice may exceed the fastest, in percent.
const WORST_CHOICE_PERCENT: f64 = 10.0;

/// Options of `cargo xtask bench cost`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// The algorithms.
    #[arg(long, default_value = "direct,pull,ring")]
    algorithms: String,
    /// Number of measurements of everything.
    #[arg(long, default_value_t = 15)]
    rounds: u32,
    /// The largest total.
    #[arg(long, default_value_t = 64 << 20)]
    max_bytes: u64,
    /// Use a file that `peerlane calibrate --check` has written elsewhere instead of measuring this host
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// With `--from`: the date and version of the measurement, unless it is new
    #[arg(long, value_name = "TEXT", requires = "from")]
    measured: Option<String>,
}

/// The output of the program.
#[derive(Debug, Serialize, Deserialize)]
struct Check {
    machine: String,
    backend: String,
    topology: String,
    points: Vec<Point>,
    good_share: f64,
    worst_choice: f64,
    /// The choices, which only the record has.
    #[serde(flatten)]
    more: Value,
}

#[derive(Debug, Serialize, Deserialize)]
struct Point {
    algorithm: String,
    outputs: u32,
    block_bytes: u64,
    measured_us: f64,
    predicted_us: f64,
    fitted: bool,
    /// The number of chunks, which only the record has.
    #[serde(flatten)]
    more: Value,
}

#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    measured: Option<String>,
    rounds: u32,
    checks: Vec<Check>,
}

/// Writes docs/perf/cost-host, or the page of the backend of a file.
pub(super) fn run(options: &Options) -> Outcome {
    let checks = match &options.from {
        Some(file) => vec![serde_json::from_str(&std::fs::read_to_string(file)?)?],
        None => measure(options, workspace::members()?.target_directory.as_std_path())?,
    };
    let measured = options.measured.clone();
    let record = Record { machine: Machine::ask()?, measured, rounds: options.rounds, checks };
    let goals = record.checks.iter().map(|check| (check.topology.clone(), check.goals()));
    report::save(&format!("cost-{}", record.backend()), &record, &record.page(), goals)
}

/// Calibrates the host backend and checks the predictions.
fn measure(options: &Options, target: &Path) -> Outcome<Vec<Check>> {
    let program = workspace::build_program(target, true)?;
    let folder = target.join("cost");
    std::fs::create_dir_all(&folder)?;
    let mut checks: Vec<Check> = Vec::new();
    for ranks in &options.ranks {
        let (out, check) = (folder.join("links.json"), folder.join("check.json"));
        let mut command = Command::new(&program);
        command.args(["calibrate", "--backend=host"]).args([
            format!("--ranks={ranks}"),
            format!("--algorithms={}", options.algorithms),
            format!("--rounds={}", options.rounds),
            format!("--max-bytes={}", options.max_bytes),
            format!("--out={}", out.display()),
            format!("--check={}", check.display()),
        ]);
        process::run(&mut command)?;
        checks.push(serde_json::from_str(&std::fs::read_to_string(&check)?)?);
    }
    Ok(checks)
}

impl Check {
    fn goals(&self) -> Goals {
        let (share, worst) = (100.0 * self.good_share, 100.0 * self.worst_choice);
        Goals::default().at_least("% of the points within 20 %", share, GOOD_PERCENT).at_most(
            "% slower than the best at the worst choice",
            worst,
            WORST_CHOICE_PERCENT,
        )
    }

    fn page(&self) -> String {
        let Self { topology, good_share, worst_choice, points, .. } = self;
        let (share, worst) = (good_share * 100.0, worst_choice * 100.0);
        let predicted = points.iter().filter(|point| !point.fitted).count();
        let mut sorted: Vec<&Point> = points.iter().collect();
        sorted.sort_by_key(|point| (point.block_bytes, point.outputs));
        let error = |point: &&Point| {
            format!("{:+.0} %", (point.predicted_us / point.measured_us - 1.0) * 100.0)
        };
        let fitted = |point: &&Point| if point.fitted { "fitted" } else { "" }.to_owned();
        format!(
            "\n## {topology}\n\n{} points; {share:.0} % of the {predicted} that the links were not fitted to are \
             within 20 %. The worst choice is {worst:.0} % slower than the best measured. Goal: {}.\n\n{}",
            points.len(),
            self.goals().cell(),
            report::table(
                sorted,
                &[
                    ("block", &|point| size(point.block_bytes)),
                    ("outputs", &|point| point.outputs.to_string()),
                    ("<algorithm", &|point| point.algorithm.clone()),
                    ("measured, µs", &|point| figure(point.measured_us, 1)),
                    ("predicted, µs", &|point| figure(point.predicted_us, 1)),
                    ("error", &error),
                    ("<", &fitted),
                ],
            )
        )
    }
}

impl Record {
    fn backend(&self) -> &str {
        self.checks.first().map_or("host", |check| &check.backend)
    }

    fn page(&self) -> String {
        let title = format!("Predicted and measured times of the {} backend", self.backend());
        let mut notes = String::new();
        if let Some(Check { topology, machine, .. }) =
            self.checks.first().filter(|check| check.backend != "host")
        {
            notes += &format!("- Measured on {topology} of {machine}, not on the cores above.\n");
        }
        if let Some(measured) = &self.measured {
            notes += &format!("- Measured {measured}; fitted to these times anew.\n");
        }
        let values = [
            ("head", self.machine.head(&title)),
            ("notes", notes),
            ("rounds", self.rounds.to_string()),
            ("checks", self.checks.iter().map(Check::page).collect()),
        ];
        report::page(include_str!("pages/cost.md.in"), &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_shows_points_and_goals() {
        let check = r#"{"machine":"m","backend":"host","topology":"2 ranks","choices":[],"good_share":0.8,
            "worst_choice":0.05,"points":[{"algorithm":"ring","outputs":1,"block_bytes":1024,
            "measured_us":10.0,"predicted_us":11.0,"fitted":true}]}"#;
        let checks = vec![serde_json::from_str(check).unwrap()];
        let record = Record { machine: Machine::default(), measured: None, rounds: 3, checks };
        let page = record.page();
        assert!(page.contains("| 1 KiB | 1 | ring | 10.0 | 11.0 | +10 % | fitted |\n"), "{page}");
        let missed = "**missed**: ≥ 90 % of the points within 20 % (found 80.000).\n";
        assert!(page.contains(missed), "{page}");
    }
}
