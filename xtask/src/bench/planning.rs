//! `cargo xtask bench plan`: measures the time and memory of plans and simulations over the number of ranks.

use serde::{Deserialize, Serialize};

use super::report::{self, Goals, Machine};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// One algorithm and number of ranks, as the measuring program prints it.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    /// `plan` for one rank's plan, `simulate` for the simulation of all ranks.
    what: String,
    algorithm: String,
    nodes: usize,
    ranks: usize,
    /// Steps of one rank's plan; in a simulation the steps, entries and exits of all ranks.
    steps: u64,
    seconds: f64,
    peak_bytes: u64,
}

/// A whole measurement.
#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    rows: Vec<Row>,
}

/// The goals: what is measured, its name in texts, the number of ranks, and the maximum seconds and bytes of every
/// algorithm.
const GOALS: [(&str, &str, usize, f64, u64); 2] = [
    ("plan", "one plan of", 16_384, 5e-3, 5_000_000),
    ("simulate", "simulating", 4096, 60.0, 8_000_000_000),
];

/// Measures everything and writes docs/perf/planning.
pub(super) fn run() -> Outcome {
    let mut program = cargo(["run", "--quiet", "--release", "--package", "peerlane-planning"]);
    let printed = process::output(program.args(["--example", "planning"]))?;
    let rows = printed.lines().map(serde_json::from_str).collect::<Result<Vec<Row>, _>>()?;
    let record = Record { machine: Machine::ask()?, rows };
    report::save("planning", &record, &record.page(), [("planning".to_owned(), record.goals())])
}

impl Record {
    fn goals(&self) -> Goals {
        let mut goals = Goals::default();
        for (what, name, ranks, seconds, bytes) in GOALS {
            let goal = format!("{name} {ranks} ranks < {} and {}", time(seconds), memory(bytes));
            let rows = || self.rows.iter().filter(|row| row.what == what && row.ranks == ranks);
            let exceeds = |row: &&Row| row.seconds >= seconds || row.peak_bytes >= bytes;
            let figures = |row: &Row| {
                format!("{} {}, {}", row.algorithm, time(row.seconds), memory(row.peak_bytes))
            };
            let mut found: Vec<String> = rows().filter(exceeds).map(figures).collect();
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
            ("plans", self.table("plan")),
            ("simulations", self.table("simulate")),
        ];
        report::page(include_str!("pages/planning.md.in"), &values)
    }

    fn table(&self, what: &str) -> String {
        report::table(
            self.rows.iter().filter(|row| row.what == what),
            &[
                ("<algorithm", &|row| row.algorithm.clone()),
                ("ranks", &|row| row.ranks.to_string()),
                ("steps", &|row| row.steps.to_string()),
                ("time", &|row| time(row.seconds)),
                ("memory", &|row| memory(row.peak_bytes)),
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
fn memory(bytes: u64) -> String {
    match bytes as f64 {
        bytes if bytes < 1e6 => format!("{:.1} kB", bytes / 1e3),
        bytes if bytes < 1e9 => format!("{:.2} MB", bytes / 1e6),
        bytes => format!("{:.2} GB", bytes / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(rows: &[(&str, &str, usize, f64)]) -> Record {
        let row = |&(what, algorithm, ranks, seconds): &(&str, &str, usize, f64)| {
            let line = serde_json::json!({
                "what": what, "algorithm": algorithm, "nodes": ranks / 8, "ranks": ranks,
                "steps": 3 * ranks, "seconds": seconds, "peak_bytes": 100 * ranks,
            });
            serde_json::from_value(line).unwrap()
        };
        Record { machine: Machine::default(), rows: rows.iter().map(row).collect() }
    }

    #[test]
    fn units_fit() {
        assert_eq!([2e-6, 0.0042, 31.26].map(time), ["2.0 µs", "4.20 ms", "31.3 s"]);
        assert_eq!([700, 4_200_000, 1_250_000_000].map(memory), ["0.7 kB", "4.20 MB", "1.25 GB"]);
    }

    #[test]
    fn goals_are_judged_where_they_are_set() {
        let rows = [
            ("plan", "ring", 16_384, 4e-3),
            ("plan", "direct", 16_384, 6e-3),
            ("plan", "direct", 8192, 7e-3),
        ];
        assert_eq!(
            record(&rows).goals().cell(),
            "**missed**: one plan of 16384 ranks < 5.00 ms and 5.00 MB (found direct 6.00 ms, 1.64 MB), \
             simulating 4096 ranks < 60.0 s and 8.00 GB (found no measurement)"
        );
    }

    #[test]
    fn a_page_has_goals_and_both_tables() {
        let rows = [("plan", "ring", 16_384, 4e-3), ("simulate", "ring", 4096, 31.26)];
        let page = record(&rows).page();
        for text in [
            "Goals: one plan of 16384 ranks < 5.00 ms and 5.00 MB, simulating 4096 ranks < 60.0 s",
            "| ring | 16384 | 49152 | 4.00 ms | 1.64 MB |",
            "| ring | 4096 | 12288 | 31.3 s | 409.6 kB |",
        ] {
            assert!(page.contains(text), "{text}:\n{page}");
        }
    }
}
