//! `cargo xtask bench host`: measures Peerlane, Open MPI and MPICH by turns, size by size and load
//! by load.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::{Deserialize, Serialize};

use super::report::{self, Column, Goals, Machine, figure, size};
use super::{median, sizes};
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

/// With a core for each rank, totals from here on have to be faster than Open MPI by `FASTER`.
/// Others must not be slower.
const LARGE_BYTES: u64 = 16 << 10;
const FASTER: f64 = 1.3;
/// The largest size of an element.
const ELEMENT_BYTES: u64 = 4;
/// A time beside a process that computes is at most this multiple of the idle one.
const SLOWDOWN_MAX: f64 = 2.0;

/// Options of `cargo xtask bench host`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The collectives.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Collective::AllGather])]
    collectives: Vec<Collective>,
    /// Numbers of ranks [default: as many as cores, two and four times as many].
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<usize>,
    /// What else runs on the machine.
    #[arg(long, value_delimiter = ',', value_enum, default_values_t = [Load::Idle])]
    loads: Vec<Load>,
    /// How the ranks of Peerlane are bound. Open MPI runs in all ways, and its fastest counts.
    #[arg(long, value_delimiter = ',', default_values = ["core", "auto"])]
    binds: Vec<String>,
    /// Number of measurements of each size on each side.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// The smallest total.
    #[arg(long, default_value_t = 8)]
    min_bytes: u64,
    /// The largest total.
    #[arg(long, default_value_t = 16 << 20)]
    max_bytes: u64,
    /// The factor from one total to the next.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Collective {
    AllGather,
    Gather,
    Scatter,
    AllToAllV,
    AllToAll,
    Broadcast,
    AllReduce,
    ReduceScatter,
    Reduce,
    Scan,
}

impl Collective {
    /// Returns the name in all programs.
    fn name(self) -> &'static str {
        match self {
            Self::AllGather => "all-gather",
            Self::Gather => "gather",
            Self::Scatter => "scatter",
            Self::AllToAllV => "all-to-all-v",
            Self::AllToAll => "all-to-all",
            Self::Broadcast => "broadcast",
            Self::AllReduce => "all-reduce",
            Self::ReduceScatter => "reduce-scatter",
            Self::Reduce => "reduce",
            Self::Scan => "scan",
        }
    }

    /// Returns the options of the program peerlane by which it moves what the programs of MPI move.
    fn options(self) -> &'static str {
        match self {
            Self::AllReduce | Self::ReduceScatter | Self::Reduce | Self::Scan => "--dtype f32",
            _ => "",
        }
    }

    /// Returns the title and the name of the page.
    fn page(self) -> (String, String) {
        let name = self.name();
        let title = name[..1].to_uppercase() + &name[1..] + " between processes of one host";
        let page = if self == Self::AllGather { "allgather" } else { name };
        (title, format!("host-{page}"))
    }
}

/// What runs on the machine beside the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Load {
    #[default]
    Idle,
    /// A process that computes, in the session of the ranks.
    Busy,
    /// A process that computes, in a session of its own, to which Linux gives a share of its own.
    OtherSession,
}

impl Load {
    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Busy => "busy",
            Self::OtherSession => "busy, other session",
        }
    }

    /// Starts what runs beside the ranks.
    fn begin(self) -> Outcome<Running> {
        let mut command = match self {
            Self::Idle => return Ok(Running(None)),
            Self::Busy => Command::new("sh"),
            Self::OtherSession => {
                let mut session = Command::new("setsid");
                session.arg("sh");
                session
            }
        };
        let child = command.args(["-c", "while :; do :; done"]).stdin(Stdio::null()).spawn()?;
        Ok(Running(Some(child)))
    }
}

/// A process that is killed at the end of a measurement.
struct Running(Option<Child>);

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[derive(Debug, Serialize)]
struct Record {
    collective: Collective,
    machine: Machine,
    open_mpi: String,
    mpich: Option<String>,
    rounds: u16,
    rows: Vec<Row>,
}

/// One number of ranks, one load, one size and one way to bind ranks. Each time is the median of
/// the rounds.
#[derive(Debug, Default, Serialize)]
struct Row {
    ranks: usize,
    load: Load,
    bind: String,
    total_bytes: u64,
    block_bytes: u64,
    iterations: u32,
    open_mpi: Side,
    mpich: Option<Side>,
    peerlane: Side,
    /// The time without a load.
    idle_us: Option<f64>,
    /// Whether each rank has a core.
    has_cores: bool,
}

#[derive(Clone, Debug, Default, Serialize)]
struct Side {
    /// The fastest setting of MPI, or Peerlane's algorithm and engine.
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

/// The programs that are compared, in so many rounds.
struct Programs<'a> {
    options: &'a Options,
    collective: Collective,
    open_mpi: OpenMpi,
    mpich: Option<PathBuf>,
    peerlane: PathBuf,
}

/// A program that times Open MPI, with what launches it.
pub(super) struct OpenMpi {
    program: PathBuf,
    launcher: String,
    pub(super) version: String,
}

/// Where a measurement takes place.
#[derive(Clone, Copy)]
struct Setup<'a> {
    settings: &'a [Setting],
    ranks: usize,
    has_cores: bool,
    load: Load,
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
    let folder = target.join("peers");
    let programs = Programs {
        options,
        collective,
        open_mpi: OpenMpi::build(root, &folder, "mpi_collective")?,
        mpich: build_mpich(root, &folder)?,
        peerlane: workspace::build_program(target, true)?,
    };
    let machine = Machine::ask()?;
    let ranks = match options.ranks.as_slice() {
        [] => [1, 2, 4].map(|factor| factor * machine.cores).to_vec(),
        ranks => ranks.to_vec(),
    };

    print!("{}", report::head(&columns()));
    let mut rows: Vec<Row> = Vec::new();
    for ranks in ranks {
        let settings: Vec<Setting> = settings(ranks, machine.cores).collect();
        for &load in &options.loads {
            let has_cores = ranks <= machine.cores;
            let setup = Setup { settings: &settings, ranks, has_cores, load };
            let all = sizes((options.min_bytes.max(1), options.max_bytes, options.factor));
            // Each rank has at least one element.
            for total_bytes in all.filter(|&bytes| bytes >= ranks as u64 * ELEMENT_BYTES) {
                for mut row in programs.compare(setup, total_bytes)? {
                    row.idle_us = row.idle_in(&rows);
                    print!("{}", report::line(&&row, &columns()));
                    rows.push(row);
                }
            }
        }
    }

    let mpich = programs.mpich.as_ref().map(|_| mpich_version()).transpose()?;
    let (open_mpi, rounds) = (programs.open_mpi.version, options.rounds);
    let record = Record { collective, machine, open_mpi, mpich, rounds, rows };
    let goals = record.rows.iter().map(|row| (row.name(), row.goals()));
    report::save(&collective.page().1, &record, &record.page(), goals)
}

/// Returns the name of the launcher or compiler of a library, since distributions have both
/// libraries.
fn tool(name: &str, library: &str) -> String {
    let own = format!("{name}.{library}");
    if process::answers(Command::new(&own).arg("--version")) { own } else { name.to_owned() }
}

fn mpich_version() -> Outcome<String> {
    let printed = process::output(Command::new("mpirun.mpich").arg("--version"))?;
    let version = printed.lines().find_map(|line| line.trim().strip_prefix("Version:"));
    Ok(version.unwrap_or_default().trim().to_owned())
}

impl OpenMpi {
    /// Compiles a program that times Open MPI, of which xtask/peers has the source.
    pub(super) fn build(root: &Path, folder: &Path, name: &str) -> Outcome<Self> {
        let [compiler, launcher] = ["mpicc", "mpirun"].map(|name| tool(name, "openmpi"));
        for tool in [&compiler, &launcher] {
            if !process::answers(Command::new(tool).arg("--version")) {
                let hint = "apt install openmpi-bin libopenmpi-dev";
                return Err(format!("{tool} is missing; {hint}").into());
            }
        }
        let program = build(&compiler, root, &folder.join("openmpi"), name)?;

        let printed = process::output(Command::new(&launcher).arg("--version"))?;
        let version = printed.lines().next().and_then(|line| line.rsplit(' ').next());
        let version = version.unwrap_or_default().to_owned();
        Ok(Self { program, launcher, version })
    }

    /// Returns a command that starts ranks, without their program.
    pub(super) fn launcher(&self, options: &str, ranks: usize) -> Command {
        let mut launcher = Command::new(&self.launcher);
        // Containers run everything as root, which Open MPI refuses without these.
        launcher.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        launcher.args(format!("--timeout 300 {options} -n {ranks}").split_whitespace());
        launcher
    }

    /// Returns a command that starts ranks of the program, without its arguments.
    pub(super) fn launch(&self, options: &str, ranks: usize) -> Command {
        let mut launcher = self.launcher(options, ranks);
        launcher.arg(&self.program);
        launcher
    }
}

/// Compiles the program for MPICH, if it is installed.
fn build_mpich(root: &Path, folder: &Path) -> Outcome<Option<PathBuf>> {
    let tools = ["mpicc.mpich", "mpirun.mpich"];
    if !tools.iter().all(|tool| process::answers(Command::new(tool).arg("--version"))) {
        println!("MPICH is not measured: {} is missing; apt install mpich libmpich-dev", tools[0]);
        return Ok(None);
    }
    build(tools[0], root, &folder.join("mpich"), "mpi_collective").map(Some)
}

fn build(compiler: &str, root: &Path, folder: &Path, name: &str) -> Outcome<PathBuf> {
    std::fs::create_dir_all(folder)?;
    let program = folder.join(name);

    let mut compiler = Command::new(compiler);
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

impl Programs<'_> {
    /// Measures one size in rounds, in which all sides take turns. Returns a row for each way to
    /// bind ranks.
    fn compare(&self, setup: Setup<'_>, total_bytes: u64) -> Outcome<Vec<Row>> {
        let Setup { settings, ranks, has_cores, load } = setup;
        let iterations = iterations(total_bytes);
        let sample = |mut command: Command| -> Outcome<Sample> {
            Sample::parse(&process::output(&mut command)?, total_bytes)
        };

        let mut open_mpi = vec![Vec::new(); settings.len()];
        let mut mpich = Vec::new();
        let mut peerlane = vec![Vec::new(); self.options.binds.len()];
        let _running = load.begin()?;
        for _ in 0..self.options.rounds {
            for (samples, (.., options)) in open_mpi.iter_mut().zip(settings) {
                let launch = self.open_mpi.launch(options, ranks);
                samples.push(sample(self.arguments(launch, total_bytes, iterations))?);
            }
            // Its ranks spin, so each needs a core.
            if let Some(program) = self.mpich.as_ref().filter(|_| has_cores) {
                let mut command = Command::new("mpirun.mpich");
                command.args(["-n", &ranks.to_string()]).arg(program);
                mpich.push(sample(self.arguments(command, total_bytes, iterations))?);
            }
            for (samples, bind) in peerlane.iter_mut().zip(&self.options.binds) {
                samples.push(sample(self.peerlane(bind, ranks, total_bytes, iterations))?);
            }
        }

        let of_settings = settings.iter().zip(&open_mpi);
        let open_mpi = of_settings
            .map(|((name, ..), samples)| Side::new((*name).to_owned(), samples))
            .min_by(|left, right| left.median_us.total_cmp(&right.median_us))
            .ok_or("Open MPI has no setting for this machine")?;
        let mpich = (!mpich.is_empty()).then(|| Side::new("default".to_owned(), &mpich));

        let row = |(bind, samples): (&String, &Vec<Sample>)| {
            let first = &samples[0];
            Row {
                ranks,
                load,
                bind: bind.clone(),
                total_bytes,
                block_bytes: first.block_bytes,
                iterations,
                open_mpi: open_mpi.clone(),
                mpich: mpich.clone(),
                peerlane: Side::new(format!("{}, {}", first.algorithm, first.engine), samples),
                idle_us: None,
                has_cores,
            }
        };
        Ok(self.options.binds.iter().zip(&peerlane).map(row).collect())
    }

    /// Adds the arguments of the programs of MPI.
    fn arguments(&self, mut launcher: Command, bytes: u64, iterations: u32) -> Command {
        let warmup = iterations / 5;
        let name = self.collective.name();
        let sizes = format!("{name} {bytes} {bytes} 2 {iterations} {warmup}");
        launcher.args(sizes.split(' '));
        launcher
    }

    fn peerlane(&self, bind: &str, ranks: usize, bytes: u64, iterations: u32) -> Command {
        let warmup = iterations / 5;
        let options = format!(
            "bench {} --backend host --json - --ranks {ranks} --min-bytes {bytes} \
             --max-bytes {bytes} --iterations {iterations} --warmup {warmup} --bind {bind} {}",
            self.collective.name(),
            self.collective.options()
        );
        let mut program = Command::new(&self.peerlane);
        program.args(options.split_whitespace());
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
fn columns<'a>() -> [Column<'a, &'a Row>; 12] {
    // Numbers first, then what they are compared with.
    [
        ("ranks", &|row| row.ranks.to_string()),
        ("<load", &|row| row.load.name().to_owned()),
        ("total", &|row| size(row.total_bytes)),
        ("Open MPI, µs", &|row| figure(row.open_mpi.median_us, 1)),
        ("<its setting", &|row| row.open_mpi.how.clone()),
        ("MPICH, µs", &|row| figure(row.mpich.as_ref().map(|side| side.median_us), 1)),
        ("<bind", &|row| row.bind.clone()),
        ("Peerlane, µs", &|row| figure(row.peerlane.median_us, 1)),
        ("p99, µs", &|row| figure(row.peerlane.p99_us, 0)),
        ("times faster", &|row| figure(row.ratio(), 2)),
        ("× idle", &|row| figure(row.slowdown(), 2)),
        ("<goal", &|row| row.goals().cell()),
    ]
}

impl Row {
    fn name(&self) -> String {
        let Self { ranks, load, bind, total_bytes, .. } = self;
        format!("{ranks} ranks, {}, {bind}, {}", load.name(), size(*total_bytes))
    }

    /// Returns the time of the same measurement on an idle machine.
    fn idle_in(&self, rows: &[Self]) -> Option<f64> {
        let is_idle = |row: &&Self| {
            let (one, other) = (self, row);
            row.load == Load::Idle
                && (one.ranks, one.total_bytes, &one.bind)
                    == (other.ranks, other.total_bytes, &other.bind)
        };
        rows.iter().find(is_idle).map(|row| row.peerlane.median_us)
    }

    /// Returns Open MPI's time by Peerlane's.
    fn ratio(&self) -> f64 {
        self.open_mpi.median_us / self.peerlane.median_us
    }

    /// Returns the time by that on an idle machine.
    fn slowdown(&self) -> Option<f64> {
        self.idle_us.map(|idle_us| self.peerlane.median_us / idle_us)
    }

    fn goals(&self) -> Goals {
        let goals = Goals::default().at_most("× idle", self.slowdown(), SLOWDOWN_MAX);
        let is_large = self.has_cores && self.load == Load::Idle && self.total_bytes >= LARGE_BYTES;
        goals.at_least("× Open MPI", self.ratio(), if is_large { FASTER } else { 1.0 })
    }
}

impl Record {
    fn page(&self) -> String {
        let mpich = self.mpich.as_ref().map(|version| format!(", MPICH {version}"));
        let values = [
            ("head", self.machine.head(&self.collective.page().0)),
            ("mpi", format!("Open MPI {}{}", self.open_mpi, mpich.unwrap_or_default())),
            ("rounds", self.rounds.to_string()),
            ("rows", report::table(&self.rows, &columns())),
        ];
        report::page(include_str!("pages/host.md.in"), &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(total_bytes: u64, open_mpi_us: f64) -> Row {
        let side = |how: &str, median_us| Side { how: how.into(), median_us, ..Side::default() };
        let (open_mpi, peerlane) = (side("yielding", open_mpi_us), side("direct, host", 150.0));
        let (ranks, has_cores, bind) = (4, true, "core".to_owned());
        Row { ranks, has_cores, bind, total_bytes, open_mpi, peerlane, ..Row::default() }
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
        assert_eq!((sample.block_bytes, sample.median_us), (4, 1.5));
        assert!(Sample::parse(line, 16).is_err());
        assert!(Sample::parse("nothing", 8).is_err());
    }

    #[test]
    fn large_sizes_need_a_lead_and_others_must_not_be_slower() {
        let goal = |bytes, open_mpi_us| row(bytes, open_mpi_us).goals().cell();
        assert_eq!(goal(65536, 195.0), "≥ 1.3 × Open MPI");
        assert_eq!(goal(65536, 165.0), "**missed**: ≥ 1.3 × Open MPI (found 1.100)");
        assert_eq!(goal(1024, 150.0), "≥ 1 × Open MPI");
        assert_eq!(goal(1024, 75.0), "**missed**: ≥ 1 × Open MPI (found 0.500)");

        let shared = Row { has_cores: false, ..row(65536, 165.0) };
        assert_eq!(shared.goals().cell(), "≥ 1 × Open MPI", "ranks share cores");
    }

    #[test]
    fn a_load_may_double_the_time() {
        let idle = [row(1024, 150.0)];
        let busy = |us: f64| {
            let mut row = Row { load: Load::Busy, ..row(1024, 900.0) };
            row.peerlane.median_us = us;
            row.idle_us = row.idle_in(&idle);
            row.goals().cell()
        };
        assert_eq!(busy(300.0), "≤ 2 × idle, ≥ 1 × Open MPI");
        assert_eq!(busy(330.0), "**missed**: ≤ 2 × idle (found 2.200)");

        let of_auto = Row { bind: "auto".to_owned(), ..row(1024, 150.0) };
        assert_eq!(of_auto.idle_in(&idle), None);
    }

    #[test]
    fn a_row_shows_both_sides_and_the_goal() {
        assert_eq!(
            report::line(&&row(1 << 20, 300.0), &columns()),
            "| 4 | idle | 1 MiB | 300.0 | yielding | – | core | 150.0 | 0 | 2.00 | – | ≥ 1.3 × Open MPI |\n"
        );
        assert_eq!(
            report::line(&&row(1 << 20, 120.0), &columns()),
            "| 4 | idle | 1 MiB | 120.0 | yielding | – | core | 150.0 | 0 | 0.80 | – | \
             **missed**: ≥ 1.3 × Open MPI (found 0.800) |\n"
        );
    }
}
