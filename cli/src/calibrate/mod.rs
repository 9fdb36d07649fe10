//! Implements `peerlane calibrate`, which measures all-gathers and fits the links of the cost model
//! to them.

use std::collections::HashSet;
use std::path::Path;

use peerlane::topology::Topology;
use peerlane_planning::cost::{Key, Sample};
use peerlane_planning::schedule::Shape;
use serde::Serialize;

use crate::calibration::{known, machine};
use crate::error::{Failure, Result};
use crate::printable::file_name;
use crate::report::{pretty_json, print};
use crate::text_file;

mod check;
mod measure;
mod options;

use check::Check;
use measure::{Configuration, Runs, measure, merge_equal_plans};
pub(crate) use options::Options;

/// The maximum number of measured times in a file.
const POINTS_MAX: usize = 4096;
/// The maximum number of blocks of all measured times in a file. A fit predicts each of them some
/// thousand times.
const BLOCKS_MAX: usize = 1 << 16;
/// The maximum number of cells that the plans of a file copy, which take about 700 MiB.
const CELLS_MAX: u64 = 1 << 22;

pub(crate) fn run(options: &Options) -> Result<()> {
    let SampleSet { key, topology, mut fitted, mut others } = match &options.from {
        Some(path) => SampleSet::read(path)?,
        None => SampleSet::here(options)?,
    };
    merge_equal_plans(&mut fitted, &topology)?;
    merge_equal_plans(&mut others, &topology)?;
    let known = known(&key.backend);
    let calibration = peerlane_planning::calibrate(key, known, &topology, fitted)?;
    write(&options.out, &calibration)?;
    print(&format!("{calibration}\n"))?;
    let Some(path) = &options.check else { return Ok(()) };
    let check = Check::new(&calibration, &topology, &others)?;
    write(path, &check)?;
    print(&format!("{}\n", check.text()))
}

/// The samples to which the links are fitted, and other samples for the check.
struct SampleSet {
    key: Key,
    topology: Topology,
    fitted: Vec<Sample>,
    others: Vec<Sample>,
}

impl SampleSet {
    /// Measures all-gathers on this machine, with further sizes if a check is requested.
    fn here(options: &Options) -> Result<Self> {
        let configurations = Configuration::all(options)?;
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

    /// Reads the samples from the file of an earlier `--check`.
    fn read(path: &Path) -> Result<Self> {
        let what = file_name(path);
        let text = text_file::read(path)?;
        let check: Check = serde_json::from_str(&text).map_err(|error| {
            Failure::usage(format!("{what} is not a file of `peerlane calibrate --check`: {error}"))
                .with_advice("create one with `peerlane calibrate --check FILE`")
        })?;
        let topology: Topology = check
            .topology
            .parse()
            .map_err(|error: peerlane::Error| Failure::usage(format!("{what}: {error}")))?;
        let key = Key::new(&check.backend, &check.machine, &topology);
        let [fitted, others] = check.samples();
        check_work(&topology, fitted.iter().chain(&others))
            .map_err(|text| Failure::usage(format!("{what}: {text}")))?;

        Ok(Self { key, topology, fitted, others })
    }
}

/// Checks that the samples of a file can be fitted in seconds, and that their plans fit into
/// memory.
fn check_work<'s>(
    topology: &Topology,
    samples: impl Iterator<Item = &'s Sample> + Clone,
) -> std::result::Result<(), String> {
    let (count, ranks) = (samples.clone().count(), topology.ranks());
    if count > POINTS_MAX || count.saturating_mul(ranks) > BLOCKS_MAX {
        return Err(format!(
            "{count} points of {ranks} ranks, expected at most {POINTS_MAX} points, and {BLOCKS_MAX} blocks of all points \
             together"
        ));
    }

    // Equal plans are made once.
    let shapes: HashSet<_> = samples.map(|sample| (sample.algorithm, sample.shape())).collect();
    let cells = |shape: &Shape| (ranks as u64).pow(2).saturating_mul(shape.chunks.into());
    let cells = shapes.iter().map(|(_, shape)| cells(shape)).fold(0, u64::saturating_add);
    if cells > CELLS_MAX {
        return Err(format!(
            "the plans of all points copy {cells} cells, expected at most {CELLS_MAX}; lower `chunks`"
        ));
    }
    Ok(())
}

fn write(path: &Path, what: &impl Serialize) -> Result<()> {
    text_file::write(path, &pretty_json(what)?)
        .map_err(|error| Failure::io(format_args!("cannot write {}", file_name(path)), &error))
}
