//! Reads calibration files, and describes the machine on which a calibration is valid.

use std::path::Path;

use peerlane::hal::LinkKind;
use peerlane::{cuda, host};
use peerlane_planning::cost::{Calibration, Key, Links};

use crate::error::{Failure, Result};
use crate::printable::file_name;
use crate::ranks::affinity::cores;
use crate::text_file;

/// Reads a calibration file, and rejects one that was made for another machine than `expected`.
pub(crate) fn load(path: &Path, expected: Option<&Key>) -> Result<Calibration> {
    let what = file_name(path);
    let text = text_file::read(path)?;
    let calibration: Calibration = serde_json::from_str(&text).map_err(|error| {
        Failure::usage(format!("{what} is not a file of `peerlane calibrate --out`: {error}"))
            .with_advice("create one with `peerlane calibrate --out FILE`")
    })?;
    for links in calibration.links() {
        links.check().map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    }

    if let Some(expected) = expected {
        calibration
            .key
            .check(expected)
            .map_err(|error| Failure::usage(format!("{what}: {error}")))?;
    }

    Ok(calibration)
}

/// Returns the name of the GPU or the processor on which the ranks of a backend run.
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

/// Returns the properties of a backend's links that are known without a measurement.
pub(crate) fn known(backend: &str) -> Links {
    if backend == "cuda" {
        return Links::default();
    }
    let mut links = Links::of_kinds(LinkKind::SharedMemory, LinkKind::Rdma);
    links.node.processors = u32::try_from(cores()).ok();
    links
}

/// Returns the links of a calibration with engines of the kind that `--engine` names, or of each
/// kind without the option; at least one.
pub(crate) fn of_engine(calibration: &Calibration, engine: Option<&str>) -> Result<Vec<Links>> {
    let is_named = |links: &&Links| engine.is_none_or(|engine| links.engine == engine);
    let found: Vec<_> = calibration.links().filter(is_named).cloned().collect();
    if !found.is_empty() {
        return Ok(found);
    }

    let known: Vec<_> = calibration.links().map(|links| &*links.engine).collect();
    let text = format!(
        "--engine is {:?}, expected a kind of the calibration: {}",
        engine.unwrap_or_default(),
        known.join(" or ")
    );
    Err(Failure::usage(text))
}
