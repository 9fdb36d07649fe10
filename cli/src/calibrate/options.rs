//! The command line of `peerlane calibrate`.

use std::path::PathBuf;

use clap::Args;
use peerlane::plan::Algorithm;

use crate::allgather::{AlgorithmChoice, Backend, Devices, parse_algorithm, parse_ranks};
use crate::error::{Failure, Result};
use crate::size::Size;

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
