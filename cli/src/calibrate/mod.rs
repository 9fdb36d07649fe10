//! `peerlane calibrate`: measures all-gathers and fits the links of the cost model to them.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use peerlane::Algorithm;
use peerlane::hal::LinkKind;
use peerlane::planning::cost::{Calibration, Key, Links, Sample};
use peerlane::topology::Topology;
use peerlane::{cuda, host};
use serde::Serialize;

use crate::allgather::TargetOptions;
use crate::error::{Failure, Result};
use crate::options::{AlgorithmChoice, SweepOptions, parse_algorithm};
use crate::report::pretty_json;

mod check;
mod measure;

use check::Check;
use measure::{Configuration, Runs, measure, merge_equal_plans};

/// Measures all-gathers, fits the links and writes the files.
///
/// # Errors
/// If a configuration cannot be measured, or a file cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let SampleSet { key, topology, mut fitted, mut others } = match &options.from {
        Some(path) => SampleSet::read(path)?,
        None => SampleSet::here(options)?,
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

/// Measured all-gathers: the samples to fit, and the others.
struct SampleSet {
    key: Key,
    topology: Topology,
    fitted: Vec<Sample>,
    others: Vec<Sample>,
}

impl SampleSet {
    /// Measures on this machine; the other samples are needed only for a check.
    fn here(options: &Options) -> Result<Self> {
        let configurations = Configuration::all(&options.algorithms()?);
        let Runs { backend, ranks, samples } =
            measure(options, &configurations, options.sizes.min_bytes.0)?;
        let topology = Topology::flat(ranks)?;
        let key = Key::new(&backend, &machine(&backend), &topology);
        let mut others = Vec::new();
        if options.check.is_some() {
            // The geometric mean of two neighbouring sizes.
            let between = options.sizes.min_bytes.0.saturating_mul(options.sizes.factor.isqrt());
            others = measure(options, &configurations, between)?.samples;
        }
        Ok(Self { key, topology, fitted: samples, others })
    }

    /// Reads the samples of an earlier check.
    fn read(path: &Path) -> Result<Self> {
        let what = path.display();
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
        let check: Check = serde_json::from_str(&text).map_err(|error| {
            Failure::usage(format!("{what} is not a file of `peerlane calibrate --check`: {error}"))
                .with_advice("create one with `peerlane calibrate --check FILE`")
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
/// If the file cannot be read, or was made for another key than `expected`.
pub(crate) fn load(path: &Path, expected: Option<&Key>) -> Result<Calibration> {
    let what = path.display();
    let text = fs::read_to_string(path)
        .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
    let calibration: Calibration = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{what} is not a file of `peerlane calibrate --out`: {error}"))
            .with_advice("create one with `peerlane calibrate --out FILE`")
    })?;
    calibration.links.check().map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    if let Some(expected) = expected {
        calibration
            .key
            .check(expected)
            .map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    }
    Ok(calibration)
}

/// Returns the device or the cores on which the ranks of a backend run.
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

/// Returns the links of a backend that are known without a measurement.
pub(crate) fn known(backend: &str) -> Links {
    if backend == "cuda" {
        return Links::default();
    }
    let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
    links.node.processors = u32::try_from(cores()).ok();
    links
}

/// Measure all-gathers and fit the links of the cost model to them
///
/// Runs `peerlane allgather` with several algorithms and sizes, round by round. The fastest of the
/// rounds counts, because other work on the machine only makes a round slower. Latencies and rates
/// are fitted so that the model predicts these times. The file is valid for this version, backend,
/// machine and number of ranks; loading it for another fails with the difference. Keep the machine
/// free of other work during the measurement.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Write the calibration to FILE, as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) out: PathBuf,
    #[command(flatten)]
    pub(super) target: TargetOptions,
    /// Measure these algorithms, such as direct,ring
    #[arg(long, default_value = "direct,ring", value_name = "NAME,…", value_delimiter = ',')]
    #[arg(value_parser = parse_algorithm)]
    pub(super) algorithms: Vec<AlgorithmChoice>,
    #[command(flatten)]
    pub(super) sizes: SweepOptions,
    /// Measure each size in this number of rounds; the fastest round counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rounds: u32,
    /// Check the predictions of the calibration: also measure sizes between those of the fit, and
    /// write predicted times, measured times and chosen algorithms to FILE as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) check: Option<PathBuf>,
    /// Read the measurements from FILE, which an earlier run wrote with --check, instead of
    /// measuring, and fit the calibration again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "ranks", "devices"])]
    pub(super) from: Option<PathBuf>,
    /// Set the longest wait for a peer, in seconds, such as 30 or 0.5
    #[arg(long, default_value = "30", value_name = "SECONDS")]
    pub(super) timeout: String,
}

impl Options {
    /// Returns the algorithms to measure.
    ///
    /// # Errors
    /// If `auto` is among them.
    pub(super) fn algorithms(&self) -> Result<Vec<Algorithm>> {
        let named = self.algorithms.iter().map(|choice| match choice {
            AlgorithmChoice::Named(algorithm) => Ok(*algorithm),
            AlgorithmChoice::Auto => Err(Failure::usage(
                "--algorithms contains auto, which cannot be measured: auto chooses by a \
                 calibration",
            )
            .with_advice("give algorithms by name, such as direct,ring")),
        });
        named.collect()
    }
}
