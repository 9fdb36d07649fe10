//! Implements `peerlane calibrate`, which measures all-gathers and fits the links of the cost model
//! to them.

use std::fs;
use std::path::Path;

use peerlane::planning::cost::{Key, Sample};
use peerlane::topology::Topology;
use serde::Serialize;

use crate::calibration::{known, machine};
use crate::error::{Failure, Result};
use crate::report::pretty_json;
use crate::text_file;

mod check;
mod measure;
mod options;

use check::Check;
use measure::{Configuration, Runs, measure, merge_equal_plans};
pub(crate) use options::Options;

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
    println!("{calibration}");
    let Some(path) = &options.check else { return Ok(()) };
    let check = Check::new(&calibration, &topology, &others)?;
    write(path, &check)?;
    println!("{}", check.text());
    Ok(())
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
        let configurations = Configuration::all(&options.algorithms);
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
        let what = path.display();
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
        Ok(Self { key, topology, fitted, others })
    }
}

fn write(path: &Path, what: &impl Serialize) -> Result<()> {
    fs::write(path, pretty_json(what)?)
        .map_err(|error| Failure::io(format_args!("cannot write {}", path.display()), &error))
}
