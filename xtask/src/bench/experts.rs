//! `cargo xtask bench experts`: measures all-to-alls whose starts have counts of their own, and
//! Open MPI, by turns.

use std::path::PathBuf;
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::host::{OpenMpi, Setting, settings};
use super::median;
use super::report::{self, Column, Goals, Machine, figure, size};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// The least number of times by which Peerlane must be faster.
const FASTER: f64 = 1.0;
/// The options of the launcher for the ranks of Peerlane, which sleep when they wait.
const UNBOUND: &str = "--bind-to none --oversubscribe";

/// Options of `cargo xtask bench experts`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The number of ranks.
    #[arg(long, default_value_t = 4)]
    ranks: usize,
    /// Numbers of tokens of each rank.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 256, 1024, 4096])]
    tokens: Vec<usize>,
    /// The number of bytes of a token.
    #[arg(long, default_value_t = 7168)]
    row_bytes: usize,
    /// Number of measurements of each row on each side.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
}

#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    open_mpi: String,
    row_bytes: usize,
    rounds: u16,
    rows: Vec<Row>,
}

/// One number of tokens with one kind of routing. Each time is the median of a run.
#[derive(Debug, Default, Serialize)]
struct Row {
    ranks: usize,
    tokens: usize,
    is_skewed: bool,
    input_bytes: u64,
    /// The fastest setting of Open MPI.
    setting: String,
    open_mpi_us: Vec<f64>,
    peerlane_us: Vec<f64>,
}

/// The figures of a run, as both programs print them.
#[derive(Clone, Copy, Debug, Deserialize)]
struct Sample {
    tokens: usize,
    median_us: f64,
    checked: bool,
}

/// The two programs that are compared.
struct Programs<'a> {
    options: &'a Options,
    settings: Vec<Setting>,
    open_mpi: OpenMpi,
    peerlane: PathBuf,
}

/// Measures all numbers of tokens and writes docs/perf/experts.
pub(super) fn run(options: &Options) -> Outcome {
    let metadata = workspace::members()?;
    let target = metadata.target_directory.as_std_path();
    let root = metadata.workspace_root.as_std_path();
    let machine = Machine::ask()?;
    let programs = Programs {
        options,
        settings: settings(options.ranks, machine.cores).collect(),
        open_mpi: OpenMpi::build(root, &target.join("peers"), "openmpi_experts")?,
        peerlane: workspace::build_example(target, "peerlane-cli", "experts")?,
    };

    print!("{}", report::head(&columns()));
    let mut rows = Vec::new();
    for is_skewed in [false, true] {
        for &tokens in &options.tokens {
            let row = programs.compare(tokens, is_skewed)?;
            print!("{}", report::line(&&row, &columns()));
            rows.push(row);
        }
    }

    let (row_bytes, rounds) = (options.row_bytes, options.rounds);
    let open_mpi = programs.open_mpi.version;
    let record = Record { machine, open_mpi, row_bytes, rounds, rows };
    let goals = record.rows.iter().map(|row| (row.name(), row.goals()));
    report::save("experts", &record, &record.page(), goals)
}

impl Programs<'_> {
    /// Measures one number of tokens in rounds, in which both sides take turns.
    fn compare(&self, tokens: usize, is_skewed: bool) -> Outcome<Row> {
        let sample = |mut command: Command| -> Outcome<f64> {
            Sample::parse(&process::output(&mut command)?, tokens)
        };
        let mut theirs = vec![Vec::new(); self.settings.len()];
        let mut peerlane_us = Vec::new();
        for _ in 0..self.options.rounds {
            for (times, (.., launch)) in theirs.iter_mut().zip(&self.settings) {
                times.push(sample(self.open_mpi(launch, tokens, is_skewed))?);
            }
            peerlane_us.push(sample(self.peerlane(tokens, is_skewed))?);
        }

        let of_settings = self.settings.iter().zip(theirs);
        let fastest =
            of_settings.min_by(|(_, one), (_, other)| median_of(one).total_cmp(&median_of(other)));
        let ((name, ..), open_mpi_us) =
            fastest.ok_or("Open MPI has no setting for this machine")?;
        Ok(Row {
            ranks: self.options.ranks,
            tokens,
            is_skewed,
            input_bytes: (tokens * self.options.row_bytes) as u64,
            setting: (*name).to_owned(),
            open_mpi_us,
            peerlane_us,
        })
    }

    fn open_mpi(&self, launch: &str, tokens: usize, is_skewed: bool) -> Command {
        let mut launcher = self.open_mpi.launch(launch, self.options.ranks);
        let (row_bytes, skew) = (self.options.row_bytes, u8::from(is_skewed));
        let (iterations, warmup) = iterations(tokens);
        launcher
            .args(format!("{tokens} {row_bytes} {skew} {iterations} {warmup}").split_whitespace());
        launcher
    }

    fn peerlane(&self, tokens: usize, is_skewed: bool) -> Command {
        let mut launcher = self.open_mpi.launcher(UNBOUND, self.options.ranks);
        let row_bytes = self.options.row_bytes;
        let (iterations, warmup) = iterations(tokens);
        let skew = if is_skewed { "--skew" } else { "" };
        // A program prepares one operation for all of its steps.
        let tokens_max = self.options.tokens.iter().max().unwrap_or(&tokens);
        let options = format!(
            "--tokens {tokens} --tokens-max {tokens_max} --row-bytes {row_bytes} \
             --iterations {iterations} --warmup {warmup} {skew}"
        );
        launcher.arg(&self.peerlane).args(options.split_whitespace());
        launcher
    }
}

/// Returns the number of measured iterations and of those before them.
fn iterations(tokens: usize) -> (u32, u32) {
    match tokens {
        0..=256 => (400, 40),
        257..=1024 => (100, 20),
        _ => (30, 10),
    }
}

impl Sample {
    /// Reads the median in the output of a program.
    fn parse(printed: &str, tokens: usize) -> Outcome<f64> {
        let lines = printed.lines().filter(|line| line.starts_with('{'));
        let samples = lines.map(serde_json::from_str).collect::<Result<Vec<Self>, _>>()?;
        match samples.as_slice() {
            [sample] if sample.tokens == tokens && sample.checked => Ok(sample.median_us),
            _ => Err(format!("expected a checked line of {tokens} tokens:\n{printed}").into()),
        }
    }
}

fn median_of(times: &[f64]) -> f64 {
    median(times.iter().copied())
}

/// Returns the columns of the table.
fn columns<'a>() -> [Column<'a, &'a Row>; 9] {
    [
        ("tokens", &|row| row.tokens.to_string()),
        ("<rows go to", &|row| row.routing().to_owned()),
        ("bytes of a rank", &|row| size(row.input_bytes)),
        ("Open MPI, µs", &|row| figure(median_of(&row.open_mpi_us), 1)),
        ("<its setting", &|row| row.setting.clone()),
        ("Peerlane, µs", &|row| figure(median_of(&row.peerlane_us), 1)),
        ("times faster", &|row| figure(row.ratio(), 2)),
        ("in the rounds", &|row| row.ratios()),
        ("<goal", &|row| row.goals().cell()),
    ]
}

impl Row {
    fn routing(&self) -> &'static str {
        if self.is_skewed { "rank 0 half of them" } else { "all ranks alike" }
    }

    fn name(&self) -> String {
        format!("{} tokens, {}", self.tokens, self.routing())
    }

    /// Returns the time of Open MPI by that of Peerlane.
    fn ratio(&self) -> f64 {
        median_of(&self.open_mpi_us) / median_of(&self.peerlane_us)
    }

    /// Returns the least and the largest ratio of two measurements that follow each other.
    fn ratios(&self) -> String {
        let pairs = self.open_mpi_us.iter().zip(&self.peerlane_us);
        let ratios: Vec<f64> = pairs.map(|(theirs, ours)| theirs / ours).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        format!("{} to {}", figure(least, 2), figure(most, 2))
    }

    fn goals(&self) -> Goals {
        Goals::default().at_least("× Open MPI", self.ratio(), FASTER)
    }
}

impl Record {
    fn page(&self) -> String {
        let ranks = self.rows.first().map_or(0, |row| row.ranks);
        let values = [
            ("head", self.machine.head("Tokens for experts between processes of one host")),
            ("open_mpi", self.open_mpi.clone()),
            ("ranks", ranks.to_string()),
            ("cores", self.machine.cores.to_string()),
            ("row_bytes", self.row_bytes.to_string()),
            ("rounds", self.rounds.to_string()),
            ("rows", report::table(&self.rows, &columns())),
        ];
        report::page(include_str!("pages/experts.md.in"), &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_shows_both_sides_and_the_goal() {
        let row = Row {
            tokens: 64,
            input_bytes: 7 << 16,
            setting: "yielding".to_owned(),
            open_mpi_us: vec![90.0, 110.0, 100.0],
            peerlane_us: vec![50.0, 40.0, 50.0],
            ..Row::default()
        };
        assert_eq!(
            report::line(&&row, &columns()),
            "| 64 | all ranks alike | 448 KiB | 100.0 | yielding | 50.0 | 2.00 | 1.80 to 2.75 | ≥ 1 × Open MPI |\n"
        );
    }

    #[test]
    fn a_sample_is_read_among_other_lines() {
        let line = r#"{"tokens":64,"median_us":1.5,"p99_us":2,"checked":true}"#;
        assert_eq!(Sample::parse(&format!("progress\n{line}\n"), 64).unwrap(), 1.5);
        assert!(Sample::parse(line, 65).is_err());
    }
}
