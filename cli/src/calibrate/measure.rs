//! Measuring: this program itself, as `peerlane allgather`.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use clap::ValueEnum;
use peerlane::cost::Sample;
use peerlane::plan::{Algorithm, FlagOrder};

use super::options::Options;
use crate::error::{Failure, Result};
use crate::report::Row;

/// One way to run an all-gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Way {
    pub(super) algorithm: Algorithm,
    pub(super) outputs: u32,
}

/// What was measured, and between how many ranks.
pub(super) struct Runs {
    pub(super) backend: String,
    pub(super) ranks: usize,
    pub(super) samples: Vec<Sample>,
}

/// Measures all `ways` in turn, round after round, from the smallest total on.
///
/// # Errors
/// If one cannot be measured.
pub(super) fn measure(options: &Options, ways: &[Way], min_bytes: u64) -> Result<Runs> {
    let mut times = BTreeMap::<(Way, u64, u32), Vec<f64>>::new();
    let (mut backend, mut ranks) = (String::new(), 0);
    for round in 0..options.rounds {
        for way in ways {
            eprintln!("round {} of {}: {}", round + 1, options.rounds, way.text());
            for row in rows(options, way, min_bytes)? {
                (backend, ranks) = (row.backend.clone(), row.ranks);
                let run = (*way, row.shard_bytes, row.parts);
                times.entry(run).or_default().push(row.median_us * 1e-6);
            }
        }
    }
    let samples = times.into_iter().map(|((way, shard_bytes, parts), times)| Sample {
        seconds: fastest(&times),
        ..way.sample(&backend, shard_bytes, parts)
    });
    let samples = samples.collect();
    Ok(Runs { backend, ranks, samples })
}

impl Way {
    /// Each algorithm with one output and with two.
    pub(super) fn all(algorithms: &[Algorithm]) -> Vec<Self> {
        let ways = algorithms
            .iter()
            .flat_map(|&algorithm| [1, 2].map(|outputs| Self { algorithm, outputs }));
        ways.collect()
    }

    /// What a run is that [`arguments`] asks for and has this many parts; without its time.
    pub(super) fn sample(self, backend: &str, shard_bytes: u64, parts: u32) -> Sample {
        let Self { algorithm, outputs } = self;
        // Devices take neighbouring flags in one batch, and plans for them keep flags together.
        let flags = if backend == "host" { FlagOrder::Prompt } else { FlagOrder::Batched };
        let (in_place, tiers, seconds) = (false, false, 0.0);
        Sample { algorithm, parts, in_place, outputs, flags, tiers, shard_bytes, seconds }
    }

    fn text(self) -> String {
        format!("{}, outputs {}", self.algorithm, self.outputs)
    }
}

fn rows(options: &Options, way: &Way, min_bytes: u64) -> Result<Vec<Row>> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::io("cannot find this program's own file", &error))?;
    let mut command = Command::new(program);
    command.args(arguments(options, way, min_bytes)).stdin(Stdio::null()).stderr(Stdio::piped());
    let output =
        command.output().map_err(|error| Failure::io("cannot start peerlane allgather", &error))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Failure::failed(format!("{} cannot be measured: {}", way.text(), said.trim())));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let lines = text.lines().filter(|line| line.starts_with('{'));
    let rows = lines.map(|line| {
        serde_json::from_str(line).map_err(|error| {
            Failure::failed(format!("peerlane allgather said {line:?}, which is no row: {error}"))
        })
    });
    rows.collect()
}

fn arguments(options: &Options, way: &Way, min_bytes: u64) -> Vec<String> {
    let backend = options.backend.to_possible_value();
    let backend = backend.map_or("auto".to_owned(), |value| value.get_name().to_owned());
    let mut arguments: Vec<String> = [
        "allgather",
        "--backend",
        &backend,
        "--algorithm",
        way.algorithm.name(),
        "--min-bytes",
        &min_bytes.to_string(),
        "--max-bytes",
        &options.max_bytes.0.to_string(),
        "--factor",
        &options.factor.to_string(),
        "--timeout",
        &options.timeout,
        "--json",
        "-",
    ]
    .map(str::to_owned)
    .into();
    arguments.extend(["--outputs".to_owned(), way.outputs.to_string()]);
    if let Some(ranks) = options.ranks {
        arguments.extend(["--ranks".to_owned(), ranks.to_string()]);
    }
    if let Some(devices) = &options.devices {
        arguments.extend(["--devices".to_owned(), devices.to_string()]);
    }
    arguments
}

/// Other work on the machine makes a round slower, and nothing makes it faster.
fn fastest(times: &[f64]) -> f64 {
    times.iter().copied().fold(f64::INFINITY, f64::min)
}
