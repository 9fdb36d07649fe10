//! Measures all-gathers by running this program as `peerlane allgather`.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::ops::RangeInclusive;
use std::process::{Command, Stdio};

use peerlane::topology::Topology;
use peerlane_planning::cost::Sample;
use peerlane_planning::plan::{Algorithm, FlagOrder, Lane};
use peerlane_planning::schedule::{Shape, plans};

use super::options::Options;
use crate::error::{Failure, Result};
use crate::report::{Row, print_error};

/// The engines, the algorithm and the number of outputs of one run of `peerlane allgather`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Configuration {
    /// The kind of engines.
    pub(super) engine: String,
    pub(super) algorithm: Algorithm,
    pub(super) outputs: u32,
}

pub(super) struct Runs {
    pub(super) backend: String,
    pub(super) ranks: usize,
    pub(super) samples: Vec<Sample>,
}

/// Runs all configurations in turn, round by round, from total size `min_bytes` on.
pub(super) fn measure(
    options: &Options,
    configurations: &[Configuration],
    min_bytes: u64,
) -> Result<Runs> {
    let mut times = BTreeMap::<(Configuration, u64, u32), Vec<f64>>::new();
    let (mut backend, mut ranks) = (String::new(), 0);
    for round in 0..options.rounds {
        for configuration in configurations {
            print_error(format_args!(
                "round {} of {}: {}",
                round + 1,
                options.rounds,
                configuration.text()
            ));
            for row in rows(options, configuration, min_bytes..=options.sizes.max_bytes.0)? {
                (backend, ranks) = (row.backend.clone(), row.ranks);
                let run = (configuration.clone(), row.block_bytes, row.chunks);
                times.entry(run).or_default().push(row.median_us * 1e-6);
            }
        }
    }

    let samples = times.into_iter().map(|((configuration, block_bytes, chunks), times)| Sample {
        seconds: fastest(&times),
        ..configuration.sample(&backend, block_bytes, chunks)
    });
    let samples = samples.collect();

    Ok(Runs { backend, ranks, samples })
}

impl Configuration {
    /// Returns the configurations with engines of all kinds that the ranks offer, which a short run
    /// tells.
    pub(super) fn all(options: &Options) -> Result<Vec<Self>> {
        let (engine, algorithm) = ("auto".to_owned(), options.algorithms[0]);
        let any = Self { engine, algorithm, outputs: 1 };
        let least = options.sizes.min_bytes.0;
        let rows = rows(options, &any, least..=least)?;
        let kinds = rows.into_iter().next().map(|row| row.kinds).unwrap_or_default();

        let mut configurations = Vec::new();
        for engine in kinds {
            for &algorithm in &options.algorithms {
                let of = |outputs| Self { engine: engine.clone(), algorithm, outputs };
                configurations.extend([1, 2].map(of));
            }
        }
        Ok(configurations)
    }

    /// Returns the sample of one all-gather without its time.
    pub(super) fn sample(&self, backend: &str, block_bytes: u64, chunks: u32) -> Sample {
        let Self { engine, algorithm, outputs } = self.clone();
        // Engines of devices enqueue adjacent flags in one batch, so their plans keep flags
        // together.
        let flags = if backend == "host" { FlagOrder::Prompt } else { FlagOrder::Batched };
        let (in_place, tiers, seconds) = (false, false, 0.0);
        Sample { engine, algorithm, chunks, in_place, outputs, flags, tiers, block_bytes, seconds }
    }

    fn text(&self) -> String {
        format!("{} by {}, outputs {}", self.algorithm, self.engine, self.outputs)
    }
}

fn rows(
    options: &Options,
    configuration: &Configuration,
    bytes: RangeInclusive<u64>,
) -> Result<Vec<Row>> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find the file of this program", &error))?;
    let mut command = Command::new(program);
    command
        .args(arguments(options, configuration, &bytes))
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let output =
        command.output().map_err(|error| Failure::io("cannot start peerlane allgather", &error))?;
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::failed(format!(
            "cannot measure {}: {}",
            configuration.text(),
            stderr.trim()
        )));
    }

    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let rows = lines.map(|line| {
        serde_json::from_str(line).map_err(|error| {
            Failure::failed(format!("peerlane allgather wrote {line:?}, expected a row: {error}"))
        })
    });

    rows.collect()
}

fn arguments(
    options: &Options,
    configuration: &Configuration,
    bytes: &RangeInclusive<u64>,
) -> Vec<String> {
    let mut arguments: Vec<String> = [
        "allgather",
        "--backend",
        options.target.backend.name(),
        "--algorithm",
        configuration.algorithm.name(),
        "--engine",
        &configuration.engine,
        "--min-bytes",
        &bytes.start().to_string(),
        "--max-bytes",
        &bytes.end().to_string(),
        "--factor",
        &options.sizes.factor.to_string(),
        "--timeout",
        &options.timeout,
        "--json",
        "-",
    ]
    .map(str::to_owned)
    .into();

    arguments.extend(["--outputs".to_owned(), configuration.outputs.to_string()]);
    if let Some(ranks) = options.target.ranks {
        arguments.extend(["--ranks".to_owned(), ranks.to_string()]);
    }

    for device in &options.target.devices {
        arguments.extend(["--devices".to_owned(), device.to_string()]);
    }

    arguments
}

/// Returns the time of the fastest of repeated rounds, because other work on the machine can only
/// make a round slower.
fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}

type Lanes = Vec<Vec<Lane>>;

/// Sets the time of all samples of equal plans to the shortest of them.
///
/// Between two ranks, for instance, direct and ring have the same plan, so a measurement of one is
/// a measurement of the other.
pub(super) fn merge_equal_plans(samples: &mut [Sample], topology: &Topology) -> Result<()> {
    let mut known = HashMap::<(Algorithm, Shape), Lanes>::new();
    for sample in &*samples {
        let (algorithm, shape) = (sample.algorithm, sample.shape());
        if let Entry::Vacant(place) = known.entry((algorithm, shape)) {
            let plans = plans(algorithm, topology, shape)?;
            place.insert(plans.into_iter().map(|plan| plan.lanes).collect());
        }
    }

    let lanes = |sample: &Sample| &known[&(sample.algorithm, sample.shape())];
    let alike = |one: &Sample, other: &Sample| {
        (one.block_bytes, one.shape(), &one.engine)
            == (other.block_bytes, other.shape(), &other.engine)
            && lanes(one) == lanes(other)
    };

    let fastest = samples.iter().map(|sample| {
        let alike = samples.iter().filter(|other| alike(sample, other));
        alike.map(|other| other.seconds).fold(sample.seconds, f64::min)
    });
    let fastest: Vec<f64> = fastest.collect();
    samples.iter_mut().zip(fastest).for_each(|(sample, seconds)| sample.seconds = seconds);

    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::measure::Configuration;
    use super::*;

    fn pooled(ranks: usize, algorithms: &[(Algorithm, u32, f64)]) -> Vec<f64> {
        let sample = |&(algorithm, outputs, seconds): &(Algorithm, u32, f64)| Sample {
            seconds,
            ..Configuration { engine: String::new(), algorithm, outputs }.sample("host", 1024, 1)
        };
        let mut samples: Vec<Sample> = algorithms.iter().map(sample).collect();
        merge_equal_plans(&mut samples, &Topology::flat(ranks).unwrap()).unwrap();
        samples.iter().map(|sample| sample.seconds).collect()
    }

    #[test]
    fn equal_plans_get_the_same_time() {
        use Algorithm::{Direct, Pull, Ring};
        let measured = [(Direct, 1, 3.0), (Pull, 1, 1.0), (Ring, 1, 2.0), (Ring, 2, 1.5)];
        assert_eq!(pooled(2, &measured), [2.0, 1.0, 2.0, 1.5]);
        assert_eq!(pooled(3, &measured), [3.0, 1.0, 2.0, 1.5]);
    }
}
