//! `cargo xtask bench host`: measures Peerlane and Open MPI by turns, size by size.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use super::report::{self, Column, Goals, Machine, figure, size};
use super::{median, sizes};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// Totals from here on have to be faster than Open MPI by `FASTER`, or reach `SHARE_OF_LIMIT` of
/// the speed of bare copies. Smaller ones must not be slower.
const LARGE_BYTES: u64 = 64 << 10;
const FASTER: f64 = 1.3;
const SHARE_OF_LIMIT: f64 = 0.9;

/// Options of `cargo xtask bench host`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The collectives.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Collective::AllGather])]
    collectives: Vec<Collective>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// Number of measurements of each size on each side.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// The smallest total.
    #[arg(long, default_value_t = 1 << 10)]
    min_bytes: u64,
    /// The largest total.
    #[arg(long, default_value_t = 256 << 20)]
    max_bytes: u64,
    /// The factor from one total to the next.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Collective {
    AllGather,
    Gather,
    Scatter,
    AllToAllV,
}

impl Collective {
    /// Returns the name in both programs.
    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAllV => "all-to-all-v",
        }
    }

    /// Returns the title and the name of the page.
    fn page(self) -> (&'static str, &'static str) {
        match self {
            Self::AllGather => ("All-gather between processes of one host", "host-allgather"),
            Self::Gather => ("Gather between processes of one host", "host-gather"),
            Self::Scatter => ("Scatter between processes of one host", "host-scatter"),
            Self::AllToAllV => ("All-to-all-v between processes of one host", "host-all-to-all-v"),
        }
    }
}

#[derive(Debug, Serialize)]
struct Record {
    collective: Collective,
    machine: Machine,
    open_mpi: String,
    rounds: u16,
    rows: Vec<Row>,
}

/// One number of ranks and one size. Each time is the median of the rounds.
#[derive(Debug, Default, Serialize)]
struct Row {
    ranks: usize,
    total_bytes: u64,
    block_bytes: u64,
    iterations: u32,
    open_mpi: Side,
    peerlane: Side,
    /// Time of as many bare copies at once.
    limit_us: Option<f64>,
}

#[derive(Debug, Default, Serialize)]
struct Side {
    /// Open MPI's fastest setting, or Peerlane's algorithm and engine.
    how: String,
    median_us: f64,
    p99_us: f64,
    /// The median of each round.
    rounds_us: Vec<f64>,
}

/// A size, as a measured program prints it.
#[derive(Clone, Debug, Deserialize)]
struct Sample {
    total_bytes: u64,
    block_bytes: u64,
    median_us: f64,
    p99_us: f64,
    checked: bool,
    #[serde(default)]
    algorithm: String,
    #[serde(default)]
    engine: String,
    limit_us: Option<f64>,
}

/// Configurations of Open MPI: name, whether waiting ranks spin, and options. Each size is measured
/// in all that apply, and the fastest counts. If ranks that spin outnumber cores, each wait takes a
/// time slice, and Open MPI refuses to start without `--oversubscribe`.
const SETTINGS: [Setting; 3] = [
    ("default", true, ""),
    ("unbound", true, "--bind-to none"),
    ("yielding", false, "--bind-to none --oversubscribe --mca mpi_yield_when_idle 1"),
];

pub(super) type Setting = (&'static str, bool, &'static str);

/// The two programs that are compared, in so many rounds.
struct Programs {
    collective: Collective,
    open_mpi: PathBuf,
    peerlane: PathBuf,
    rounds: u16,
}

/// Measures all sizes of the collectives and writes a page of docs/perf for each.
pub(super) fn run(options: &Options) -> Outcome {
    let measured = options.collectives.iter().map(|&collective| measure(options, collective));
    // A missed goal of one collective does not prevent the measurement of the next one.
    measured.collect::<Vec<_>>().into_iter().collect()
}

fn measure(options: &Options, collective: Collective) -> Outcome {
    let metadata = workspace::members()?;
    let target = metadata.target_directory.as_std_path();
    let root = metadata.workspace_root.as_std_path();
    let programs = Programs {
        collective,
        rounds: options.rounds,
        open_mpi: build_open_mpi(root, &target.join("peers"), "mpi_collective")?,
        peerlane: workspace::build_program(target, true)?,
    };
    let open_mpi = open_mpi_version()?;
    let machine = Machine::ask()?;

    print!("{}", report::head(&columns()));
    let mut rows = Vec::new();
    for &ranks in &options.ranks {
        let settings: Vec<Setting> = settings(ranks, machine.cores).collect();
        for total_bytes in sizes((options.min_bytes.max(1), options.max_bytes, options.factor)) {
            let row = programs.compare(&settings, ranks, total_bytes)?;
            print!("{}", report::line(&&row, &columns()));
            rows.push(row);
        }
    }
    let record = Record { collective, machine, open_mpi, rounds: options.rounds, rows };
    let name = |row: &Row| format!("{} ranks, {}", row.ranks, size(row.total_bytes));
    let goals = record.rows.iter().map(|row| (name(row), row.goals()));
    report::save(collective.page().1, &record, &record.page(), goals)
}

/// Returns the version of Open MPI.
pub(super) fn open_mpi_version() -> Outcome<String> {
    let printed = process::output(Command::new("mpirun").arg("--version"))?;
    let version = printed.lines().next().and_then(|line| line.rsplit(' ').next());
    Ok(version.unwrap_or_default().to_owned())
}

/// Compiles a program that times Open MPI, of which xtask/peers has the source.
pub(super) fn build_open_mpi(root: &Path, folder: &Path, name: &str) -> Outcome<PathBuf> {
    for tool in ["mpicc", "mpirun"] {
        if !process::answers(Command::new(tool).arg("--version")) {
            let hint = "apt install openmpi-bin libopenmpi-dev";
            return Err(format!("{tool} is missing; {hint}").into());
        }
    }

    std::fs::create_dir_all(folder)?;
    let program = folder.join(name);
    let mut compiler = Command::new("mpicc");
    compiler.args(["-O2", "-Wall", "-Wextra", "-o"]).arg(&program);
    process::run(compiler.arg(root.join(format!("xtask/peers/{name}.c"))))?;
    Ok(program)
}

/// Returns the settings that suit this number of ranks and cores.
pub(super) fn settings(ranks: usize, cores: usize) -> impl Iterator<Item = Setting> {
    SETTINGS.into_iter().filter(move |(_, spins, _)| !spins || ranks <= cores)
}

/// Returns a number of iterations for a steady median within about a second.
fn iterations(total_bytes: u64) -> u32 {
    match total_bytes {
        0..=0x1_0000 => 1000,
        0x1_0001..=0x10_0000 => 300,
        0x10_0001..=0x100_0000 => 60,
        _ => 15,
    }
}

impl Programs {
    /// Measures one size in rounds, in which both sides take turns.
    fn compare(&self, settings: &[Setting], ranks: usize, total_bytes: u64) -> Outcome<Row> {
        let iterations = iterations(total_bytes);
        let sample = |command: &mut Command| -> Outcome<Sample> {
            Sample::parse(&process::output(command)?, total_bytes)
        };
        let mut theirs = vec![Vec::new(); settings.len()];
        let mut ours = Vec::new();
        for _ in 0..self.rounds {
            for (samples, (.., options)) in theirs.iter_mut().zip(settings) {
                samples.push(sample(&mut self.open_mpi(options, ranks, total_bytes, iterations))?);
            }
            ours.push(sample(&mut self.peerlane(ranks, total_bytes, iterations))?);
        }

        let theirs = settings.iter().zip(&theirs);
        let open_mpi = theirs
            .map(|((name, ..), samples)| Side::new((*name).to_owned(), samples))
            .min_by(|left, right| left.median_us.total_cmp(&right.median_us))
            .ok_or("Open MPI has no setting for this machine")?;
        let first = &ours[0];
        let limits: Vec<f64> = ours.iter().filter_map(|sample| sample.limit_us).collect();
        Ok(Row {
            ranks,
            total_bytes,
            block_bytes: first.block_bytes,
            iterations,
            open_mpi,
            peerlane: Side::new(format!("{}, {}", first.algorithm, first.engine), &ours),
            limit_us: (!limits.is_empty()).then(|| median(limits)),
        })
    }

    fn open_mpi(&self, options: &str, ranks: usize, bytes: u64, iterations: u32) -> Command {
        let mut launcher = Command::new("mpirun");
        // Containers run everything as root, which Open MPI refuses without these.
        launcher.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        launcher.args(format!("--timeout 300 {options} -n {ranks}").split_whitespace());
        let warmup = iterations / 5;
        let name = self.collective.name();
        let sizes = format!("{name} {bytes} {bytes} 2 {iterations} {warmup}");
        launcher.arg(&self.open_mpi).args(sizes.split(' '));
        launcher
    }

    fn peerlane(&self, ranks: usize, bytes: u64, iterations: u32) -> Command {
        let warmup = iterations / 5;
        let options = format!(
            "bench {} --backend host --limit --json - --ranks {ranks} --min-bytes {bytes} \
             --max-bytes {bytes} --iterations {iterations} --warmup {warmup}",
            self.collective.name()
        );
        let mut program = Command::new(&self.peerlane);
        program.args(options.split(' '));
        program
    }
}

impl Sample {
    /// Reads the one sample in the output of a program.
    fn parse(printed: &str, total_bytes: u64) -> Outcome<Self> {
        let lines = printed.lines().filter(|line| line.starts_with('{'));
        let samples = lines.map(serde_json::from_str).collect::<Result<Vec<Self>, _>>()?;
        match samples.as_slice() {
            [sample] if sample.total_bytes == total_bytes && sample.checked => Ok(sample.clone()),
            _ => Err(format!("expected a checked line of {total_bytes} bytes:\n{printed}").into()),
        }
    }
}

impl Side {
    fn new(how: String, samples: &[Sample]) -> Self {
        let rounds_us: Vec<f64> = samples.iter().map(|sample| sample.median_us).collect();
        let median_us = median(rounds_us.iter().copied());
        Self { how, median_us, p99_us: median(samples.iter().map(|it| it.p99_us)), rounds_us }
    }
}

/// Returns the columns of the table.
fn columns<'a>() -> [Column<'a, &'a Row>; 9] {
    [
        ("ranks", &|row| row.ranks.to_string()),
        ("total", &|row| size(row.total_bytes)),
        ("Open MPI, µs", &|row| figure(row.open_mpi.median_us, 1)),
        ("<its setting", &|row| row.open_mpi.how.clone()),
        ("Peerlane, µs", &|row| figure(row.peerlane.median_us, 1)),
        ("times faster", &|row| figure(row.ratio(), 2)),
        ("limit, µs", &|row| figure(row.limit_us, 1)),
        ("share of the limit", &|row| figure(row.share(), 2)),
        ("<goal", &|row| row.goals().cell()),
    ]
}

impl Row {
    /// Returns Open MPI's time by Peerlane's.
    fn ratio(&self) -> f64 {
        self.open_mpi.median_us / self.peerlane.median_us
    }

    /// Returns the speed of Peerlane as a share of that of bare copies.
    fn share(&self) -> Option<f64> {
        self.limit_us.map(|limit_us| limit_us / self.peerlane.median_us)
    }

    fn goals(&self) -> Goals {
        let goals = Goals::default();
        let (ratio, near_limit) = (self.ratio(), self.share().filter(|it| *it >= SHARE_OF_LIMIT));
        match near_limit {
            _ if ratio < 1.0 || self.total_bytes < LARGE_BYTES => {
                goals.at_least("× Open MPI", ratio, 1.0)
            }
            Some(share) if ratio < FASTER => goals.at_least("of the limit", share, SHARE_OF_LIMIT),
            _ => goals.at_least("× Open MPI", ratio, FASTER),
        }
    }
}

impl Record {
    fn page(&self) -> String {
        let values = [
            ("head", self.machine.head(self.collective.page().0)),
            ("open_mpi", self.open_mpi.clone()),
            ("rounds", self.rounds.to_string()),
            ("rows", report::table(&self.rows, &columns())),
        ];
        report::page(include_str!("pages/host.md.in"), &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(total_bytes: u64, open_mpi_us: f64, limit_us: Option<f64>) -> Row {
        let side = |how: &str, median_us| Side { how: how.into(), median_us, ..Side::default() };
        let (open_mpi, peerlane) = (side("yielding", open_mpi_us), side("direct, host", 150.0));
        Row { ranks: 4, total_bytes, open_mpi, peerlane, limit_us, ..Row::default() }
    }

    #[test]
    fn spinning_needs_a_core_for_every_rank() {
        let names = |ranks| settings(ranks, 2).map(|(name, ..)| name).collect::<Vec<_>>();
        assert_eq!(names(2), ["default", "unbound", "yielding"]);
        assert_eq!(names(4), ["yielding"]);
    }

    #[test]
    fn a_sample_is_read_among_other_lines() {
        let line = r#"{"total_bytes":8,"block_bytes":4,"median_us":1.5,"p99_us":2,"checked":true}"#;
        let sample = Sample::parse(&format!("progress\n{line}\n"), 8).unwrap();
        assert_eq!((sample.block_bytes, sample.median_us, sample.limit_us), (4, 1.5, None));
        assert!(Sample::parse(line, 16).is_err());
        assert!(Sample::parse("nothing", 8).is_err());
    }

    #[test]
    fn large_sizes_need_a_lead_or_the_limit_and_small_ones_must_not_be_slower() {
        let goal = |bytes, open_mpi_us, limit_us| row(bytes, open_mpi_us, limit_us).goals().cell();
        assert_eq!(goal(65536, 195.0, None), "≥ 1.3 × Open MPI");
        assert_eq!(goal(65536, 165.0, Some(142.5)), "≥ 0.9 of the limit");
        let missed = "**missed**: ≥ 1.3 × Open MPI (found 1.100)";
        assert_eq!(goal(65536, 165.0, Some(120.0)), missed);
        assert_eq!(goal(65536, 165.0, None), missed);
        let missed = "**missed**: ≥ 1 × Open MPI (found 0.990)";
        assert_eq!(goal(65536, 148.5, Some(142.5)), missed);
        assert_eq!(goal(1024, 150.0, None), "≥ 1 × Open MPI");
        let missed = "**missed**: ≥ 1 × Open MPI (found 0.500)";
        assert_eq!(goal(1024, 75.0, Some(150.0)), missed);
    }

    #[test]
    fn a_row_shows_both_sides_and_the_goal() {
        assert_eq!(
            report::line(&&row(1 << 20, 300.0, Some(120.0)), &columns()),
            "| 4 | 1 MiB | 300.0 | yielding | 150.0 | 2.00 | 120.0 | 0.80 | ≥ 1.3 × Open MPI |\n"
        );
        assert_eq!(
            report::line(&&row(1 << 20, 120.0, None), &columns()),
            "| 4 | 1 MiB | 120.0 | yielding | 150.0 | 0.80 | – | – | \
             **missed**: ≥ 1 × Open MPI (found 0.800) |\n"
        );
    }
}
