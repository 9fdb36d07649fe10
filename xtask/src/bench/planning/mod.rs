//! `cargo xtask bench plan`: measures the time and memory of plans and simulations over the number of ranks.

use serde::{Deserialize, Serialize};

use super::report::{self, Goals, Machine};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

mod plot;

/// One algorithm and number of ranks, as the measuring program prints it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    what: What,
    algorithm: String,
    nodes: usize,
    ranks: usize,
    /// Steps of one rank's plan; in a simulation the steps, entries and exits of all ranks.
    steps: u64,
    seconds: f64,
    peak_bytes: u64,
}

/// The measured function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// One rank's plan.
    Plan,
    /// The simulation of all ranks.
    Simulate,
}

/// A whole measurement.
#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    rows: Vec<Row>,
}

/// The goals: the function, the number of ranks, and the maximum seconds and bytes of every algorithm.
const GOALS: [(What, usize, f64, f64); 2] =
    [(What::Plan, 16_384, 5e-3, 5e6), (What::Simulate, 4096, 60.0, 8e9)];

/// Measures everything and writes docs/perf/planning.
pub(super) fn run() -> Outcome {
    let mut program = cargo(["run", "--quiet", "--release", "--package", "peerlane-collectives"]);
    let printed = process::output(program.args(["--example", "planning"]))?;
    let rows = printed.lines().map(serde_json::from_str).collect::<Result<Vec<Row>, _>>()?;
    let record = Record { machine: Machine::ask()?, rows };
    report::save("planning", &record, &record.page())?;
    let folder = workspace::members()?.workspace_root.join("docs/perf");
    std::fs::write(folder.join("planning.svg"), plot::svg(&record)?)?;
    report::judge([("planning".to_owned(), record.goals())])
}

impl Record {
    /// Returns the algorithms of `what` in the order of their rows, each with its rows.
    fn series(&self, what: What) -> Vec<(&str, Vec<&Row>)> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.what == what).collect();
        let series = rows.chunk_by(|a, b| a.algorithm == b.algorithm);
        series.map(|rows| (rows[0].algorithm.as_str(), rows.to_vec())).collect()
    }

    fn goals(&self) -> Goals {
        let mut goals = Goals::default();
        for (what, ranks, seconds, bytes) in GOALS {
            let (max_time, max_memory) = (time(seconds), memory(bytes));
            let goal = match what {
                What::Plan => format!("one plan of {ranks} ranks < {max_time} and {max_memory}"),
                What::Simulate => format!("simulating {ranks} ranks < {max_time} and {max_memory}"),
            };
            let rows = || self.rows.iter().filter(|row| (row.what, row.ranks) == (what, ranks));
            let exceeds = |row: &&Row| row.seconds >= seconds || row.peak_bytes as f64 >= bytes;
            let too_much = rows().filter(exceeds).map(|row| {
                let (time, memory) = (time(row.seconds), memory(row.peak_bytes as f64));
                format!("{} {time}, {memory}", row.algorithm)
            });
            let mut found = too_much.collect::<Vec<_>>();
            if rows().next().is_none() {
                found.push("no measurement".to_owned());
            }
            goals = goals.enter(found.is_empty(), &goal, found.join("; "));
        }
        goals
    }

    fn page(&self) -> String {
        let values = [
            ("head", self.machine.head("Planning and simulating over the number of ranks")),
            ("goals", self.goals().cell()),
            ("plans", self.table(What::Plan)),
            ("simulations", self.table(What::Simulate)),
        ];
        report::page(include_str!("../pages/planning.md.in"), &values)
    }

    fn table(&self, what: What) -> String {
        report::table(
            self.rows.iter().filter(|row| row.what == what),
            &[
                ("<algorithm", &|row| row.algorithm.clone()),
                ("ranks", &|row| row.ranks.to_string()),
                ("steps", &|row| row.steps.to_string()),
                ("time", &|row| time(row.seconds)),
                ("memory", &|row| memory(row.peak_bytes as f64)),
            ],
        )
    }
}

/// Returns a time in the unit that leaves one to three digits before the point.
fn time(seconds: f64) -> String {
    match seconds {
        _ if seconds < 1e-3 => format!("{:.1} µs", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

/// Returns bytes in powers of 1000.
fn memory(bytes: f64) -> String {
    match bytes {
        _ if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        _ if bytes < 1e9 => format!("{:.2} MB", bytes / 1e6),
        _ => format!("{:.2} GB", bytes / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn row(what: What, algorithm: &str, ranks: usize, seconds: f64) -> Row {
        let (nodes, steps, peak_bytes) = (ranks / 8, 3 * ranks as u64, 100 * ranks as u64);
        Row { what, algorithm: algorithm.into(), nodes, ranks, steps, seconds, peak_bytes }
    }

    #[test]
    fn rows_are_read_and_grouped() {
        let line = r#"{"what":"plan","algorithm":"ring","nodes":1,"ranks":8,"steps":27,
            "seconds":2e-6,"peak_bytes":700}"#;
        let read: Row = serde_json::from_str(line).unwrap();
        assert_eq!((read.what, read.ranks, read.peak_bytes), (What::Plan, 8, 700));
        let rows = vec![
            row(What::Plan, "direct", 8, 1e-6),
            row(What::Plan, "direct", 16, 2e-6),
            row(What::Plan, "ring", 8, 3e-6),
            row(What::Simulate, "ring", 8, 4e-6),
        ];
        let record = Record { machine: Machine::default(), rows };
        let series = record.series(What::Plan);
        let shape: Vec<_> = series.iter().map(|(name, rows)| (*name, rows.len())).collect();
        assert_eq!(shape, [("direct", 2), ("ring", 1)]);
    }

    #[test]
    fn units_fit() {
        assert_eq!([2e-6, 0.0042, 31.26].map(time), ["2.0 µs", "4.20 ms", "31.3 s"]);
        assert_eq!([7e2, 4.2e6, 1.25e9].map(memory), ["0.7 kB", "4.20 MB", "1.25 GB"]);
    }

    #[test]
    fn goals_are_judged_where_they_are_set() {
        let rows = vec![
            row(What::Plan, "ring", 16_384, 4e-3),
            row(What::Plan, "direct", 16_384, 6e-3),
            row(What::Plan, "direct", 8192, 7e-3),
        ];
        assert_eq!(
            Record { machine: Machine::default(), rows }.goals().cell(),
            "**missed**: one plan of 16384 ranks < 5.00 ms and 5.00 MB (found direct 6.00 ms, 1.64 MB), \
             simulating 4096 ranks < 60.0 s and 8.00 GB (found no measurement)"
        );
    }

    #[test]
    fn a_page_has_goals_a_plot_and_both_tables() {
        let rows =
            vec![row(What::Plan, "ring", 16_384, 4e-3), row(What::Simulate, "ring", 4096, 31.26)];
        let page = Record { machine: Machine::default(), rows }.page();
        for text in [
            "Goals: one plan of 16384 ranks < 5.00 ms and 5.00 MB, simulating 4096 ranks < 60.0 s",
            "planning.svg",
            "| ring | 16384 | 49152 | 4.00 ms | 1.64 MB |",
            "| ring | 4096 | 12288 | 31.3 s | 409.6 kB |",
        ] {
            assert!(page.contains(text), "{text}:\n{page}");
        }
    }
}
