//! `cargo xtask bench plan`: what it costs to plan for one rank and to simulate all, over their
//! number.

use std::path::Path;

use super::facts::Machine;
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

mod goals;
mod page;
mod plot;

/// One algorithm and number of ranks, as the measuring program prints it.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
struct Row {
    what: What,
    algorithm: String,
    nodes: usize,
    ranks: usize,
    /// Of one rank's plan; of all ranks with entries and exits where that is simulated.
    steps: u64,
    seconds: f64,
    peak_bytes: u64,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum What {
    /// One rank's plan.
    Plan,
    /// The simulation of all ranks.
    Simulate,
}

/// A whole measurement.
#[derive(Debug, serde::Serialize)]
struct Record {
    machine: Machine,
    rows: Vec<Row>,
}

impl Record {
    /// The algorithms of `what`, in the order of their rows, each with its rows.
    fn series(&self, what: What) -> Vec<(&str, Vec<&Row>)> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.what == what).collect();
        let series = rows.chunk_by(|a, b| a.algorithm == b.algorithm);
        series.map(|rows| (rows[0].algorithm.as_str(), rows.to_vec())).collect()
    }
}

/// Measures, then writes docs/perf/planning; a missed goal is an error.
pub(super) fn run() -> Outcome {
    let metadata = workspace::members()?;
    let mut program = cargo(["run", "--quiet", "--release", "--package", "peerlane-collectives"]);
    program.args(["--example", "planning"]);
    let printed = process::output(&mut program)?;
    let rows = printed.lines().map(serde_json::from_str).collect::<Result<Vec<Row>, _>>()?;
    let record = Record { machine: Machine::ask()?, rows };
    save(&record, &metadata.workspace_root.as_std_path().join("docs/perf"))?;
    let verdicts = goals::judge(&record.rows);
    verdicts.iter().for_each(|verdict| println!("{verdict}"));
    match verdicts.iter().filter(|verdict| !verdict.reached()).count() {
        0 => Ok(()),
        missed => Err(format!("{missed} goals are missed").into()),
    }
}

fn save(record: &Record, folder: &Path) -> Outcome {
    std::fs::create_dir_all(folder)?;
    let json = serde_json::to_string_pretty(record)? + "\n";
    std::fs::write(folder.join("planning.json"), json)?;
    std::fs::write(folder.join("planning.md"), page::page(record)?)?;
    std::fs::write(folder.join("planning.svg"), plot::svg(record)?)?;
    Ok(())
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
}
