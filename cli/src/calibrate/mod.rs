//! `peerlane calibrate`: measures all-gathers and fits the links of the cost model to them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use peerlane::cost::{Calibration, Key, Links, Sample};
use peerlane::hal::LinkKind;
use peerlane::plan::Algorithm;
use peerlane::topology::Topology;
use peerlane::{cuda, host};
use serde::Serialize;

use crate::allgather::{Backend, Devices};
use crate::error::{Failure, Result};
use crate::options::{AlgorithmChoice, parse_algorithm, parse_ranks};
use crate::report::pretty_json;
use crate::units::Size;

mod check;
mod measure;

use check::Check;
use measure::{Configuration, Runs, measure, merge_equal_plans};

/// Measures, fits and writes.
///
/// # Errors
/// If something cannot be measured or written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let Measured { key, topology, mut fitted, mut others } = match &options.from {
        Some(path) => Measured::read(path)?,
        None => Measured::here(options)?,
    };
    merge_equal_plans(&mut fitted, &topology)?;
    merge_equal_plans(&mut others, &topology)?;
    let known = known(&key.backend);
    let calibration = Calibration::new(key, known, &topology, fitted)?;
    write(&options.out, &calibration)?;
    println!("{calibration}");
    let Some(path) = &options.check else { return Ok(()) };
    let check = Check::new(&calibration, &topology, &others)?;
    write(path, &check)?;
    println!("{}", check.text());
    Ok(())
}

/// All-gathers and their times: those that the links are fitted to, and others.
struct Measured {
    key: Key,
    topology: Topology,
    fitted: Vec<Sample>,
    others: Vec<Sample>,
}

impl Measured {
    /// Measures here; others only for a check.
    fn here(options: &Options) -> Result<Self> {
        let configurations = Configuration::all(&options.algorithms()?);
        let Runs { backend, ranks, samples } =
            measure(options, &configurations, options.min_bytes.0)?;
        let topology = Topology::flat(ranks)?;
        let key = Key::new(&backend, &machine(&backend), &topology);
        let mut others = Vec::new();
        if options.check.is_some() {
            // In the middle between two sizes, as factors go.
            let between = options.min_bytes.0.saturating_mul(options.factor.isqrt());
            others = measure(options, &configurations, between)?.samples;
        }
        Ok(Self { key, topology, fitted: samples, others })
    }

    /// What an earlier check has measured.
    fn read(path: &Path) -> Result<Self> {
        let what = path.display();
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
        let check: Check = serde_json::from_str(&text).map_err(|error| {
            Failure::usage(format!("{what} is no check of a calibration: {error}"))
                .with_advice("write one with `peerlane calibrate --check FILE`")
        })?;
        let topology =
            check.topology().map_err(|error| Failure::usage(format!("{what}: {error}")))?;
        let key = Key::new(check.backend(), check.machine(), &topology);
        let [fitted, others] = check.samples();
        Ok(Self { key, topology, fitted, others })
    }
}

fn write(path: &Path, what: &impl Serialize) -> Result<()> {
    fs::write(path, pretty_json(what)?)
        .map_err(|error| Failure::io(format_args!("cannot write {}", path.display()), &error))
}

/// Reads a calibration from a file.
///
/// # Errors
/// If it cannot be read, or holds for something else than `wanted`.
pub(crate) fn load(path: &Path, wanted: Option<&Key>) -> Result<Calibration> {
    let what = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
    let calibration: Calibration = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{what} is no calibration: {error}"))
            .with_advice("write one with `peerlane calibrate --out FILE`")
    })?;
    calibration.links.check().map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    if let Some(wanted) = wanted {
        calibration
            .key
            .check(wanted)
            .map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    }
    Ok(calibration)
}

/// What the ranks of a backend run on, in the system's words.
pub(crate) fn machine(backend: &str) -> String {
    if backend == "cuda"
        && let Ok(devices) = cuda::discover()
        && let Some(device) = devices.first()
    {
        return device.name.clone();
    }
    let devices = host::discover().unwrap_or_default();
    let cores = cores();
    match devices.first() {
        Some(device) => format!("{cores} cores of {}", device.name),
        None => format!("{cores} cores"),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// What is known without a measurement.
pub(crate) fn known(backend: &str) -> Links {
    if backend == "cuda" {
        return Links::default();
    }
    let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
    links.node.processors = u32::try_from(cores()).ok();
    links
}

/// Measure all-gathers and fit what the links give, for the choice of algorithms.
///
/// Runs `peerlane allgather` with several algorithms and sizes, round after round, takes the fastest of
/// the rounds, since other work only makes them slower, and fits latencies and rates so that the model predicts these times. The file holds for
/// this version, backend, machine and number of ranks; whoever loads it for something else is told what
/// differs. Keep the machine free of other work meanwhile.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The file to write
    #[arg(long, value_name = "FILE")]
    pub(super) out: PathBuf,
    /// What moves the bytes; auto takes cuda where two GPUs or more can be used, and else host
    #[arg(long, value_enum, default_value_t = Backend::Auto)]
    pub(super) backend: Backend,
    /// Processes to spawn [default: one a GPU, or 4]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    pub(super) ranks: Option<usize>,
    /// The GPUs of the ranks, in turn, as the driver numbers them [default: all]
    #[arg(long, value_name = "N,N,…")]
    pub(super) devices: Option<Devices>,
    /// The algorithms to measure
    #[arg(long, default_value = "direct,ring", value_name = "NAME,…", value_delimiter = ',')]
    #[arg(value_parser = parse_algorithm)]
    pub(super) algorithms: Vec<AlgorithmChoice>,
    /// The smallest total
    #[arg(long, default_value = "1K", value_name = "SIZE")]
    pub(super) min_bytes: Size,
    /// The largest total
    #[arg(long, default_value = "64M", value_name = "SIZE")]
    pub(super) max_bytes: Size,
    /// What each total is multiplied by to get the next
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub(super) factor: u64,
    /// How often everything is measured
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rounds: u32,
    /// Measure the sizes between those as well, and write to this file how well they are predicted and
    /// what would have been chosen
    #[arg(long, value_name = "FILE")]
    pub(super) check: Option<PathBuf>,
    /// Instead of measuring, fit anew to what `--check` of an earlier run has written
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "ranks", "devices"])]
    pub(super) from: Option<PathBuf>,
    /// The longest that anything may wait for a peer
    #[arg(long, default_value = "30", value_name = "SECONDS")]
    pub(super) timeout: String,
}

impl Options {
    /// The algorithms by name.
    ///
    /// # Errors
    /// If `auto` is among them.
    pub(super) fn algorithms(&self) -> Result<Vec<Algorithm>> {
        let named = self.algorithms.iter().map(|choice| match choice {
            AlgorithmChoice::Named(algorithm) => Ok(*algorithm),
            AlgorithmChoice::Auto => {
                Err(Failure::usage("--algorithms has auto, which is what the calibration is for")
                    .with_advice("name algorithms, such as direct,ring"))
            }
        });
        named.collect()
    }
}
