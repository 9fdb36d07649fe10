//! `peerlane calibrate`: measures all-gathers and writes what the links give.

use std::fs;
use std::path::Path;

use peerlane::cost::{Calibration, Key, Links, Sample};
use peerlane::hal::LinkKind;
use peerlane::topology::Topology;
use peerlane::{cuda, host};
use serde::Serialize;

use crate::error::{Failure, Result};

mod alike;
mod check;
mod measure;
mod options;

use check::Check;
use measure::{Runs, Way, measure};
pub(crate) use options::Options;

/// Measures, fits and writes.
///
/// # Errors
/// If something cannot be measured or written.
pub(crate) fn run(options: &Options) -> Result<()> {
    let Measured { key, topology, mut fitted, mut others } = match &options.from {
        Some(path) => Measured::read(path)?,
        None => Measured::here(options)?,
    };
    alike::pool(&mut fitted, &topology)?;
    alike::pool(&mut others, &topology)?;
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
        let ways = Way::all(&options.algorithms()?);
        let Runs { backend, ranks, samples } = measure(options, &ways, options.min_bytes.0)?;
        let topology = Topology::flat(ranks)?;
        let key = Key::new(&backend, &machine(&backend), &topology);
        let mut others = Vec::new();
        if options.check.is_some() {
            // In the middle between two sizes, as factors go.
            let between = options.min_bytes.0.saturating_mul(options.factor.isqrt());
            others = measure(options, &ways, between)?.samples;
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
    let json =
        serde_json::to_string_pretty(what).map_err(|error| Failure::failed(error.to_string()))?;
    fs::write(path, json + "\n")
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
