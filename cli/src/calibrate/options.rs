//! Defines the command line of `peerlane calibrate`.

use std::path::PathBuf;

use clap::Args;
use peerlane::Algorithm;

use crate::allgather::TargetOptions;
use crate::options::SweepOptions;

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
    pub(super) algorithms: Vec<Algorithm>,
    #[command(flatten)]
    pub(super) sizes: SweepOptions,
    /// Measure each size in this number of rounds; the fastest round counts
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(super) rounds: u32,
    /// Check the calibration at sizes that it was not fitted to, and write the predicted and measured times
    /// to FILE as JSON
    #[arg(long, value_name = "FILE")]
    pub(super) check: Option<PathBuf>,
    /// Read the measurements from FILE, which an earlier run wrote with --check, instead of
    /// measuring, and fit the calibration again
    #[arg(long, value_name = "FILE", conflicts_with_all = ["backend", "ranks", "devices"])]
    pub(crate) from: Option<PathBuf>,
    /// Set the longest wait for a peer, in seconds, such as 30 or 0.5
    #[arg(long, default_value = "30", value_name = "SECONDS")]
    pub(super) timeout: String,
}
