//! Tests the backends of this repository: harnesses for the [conformance suite](peerlane_conformance), ranks that are processes,
//! simulations of whole operations, and counts of what a start allocates.

mod harness;
pub mod processes;
pub mod simulation;
pub mod steady;

use std::io::Write as _;

pub use harness::cuda::CudaHarness;
pub use harness::gpu::{Gpu, GpuDriver, GpuHarness};
pub use harness::rdma::RdmaHarness;
pub use harness::rocm::RocmHarness;
pub use harness::staged::{StagedFabric, StagedHarness, StagedMemory};
pub use peerlane_conformance::*;

/// Says that a test, by its name, or a part of one could not run here, and why. `cargo xtask test` counts the test as ignored and
/// lists the reason.
pub fn not_covered(what: &str, why: &str) {
    // The standard harness would capture the output of `eprintln!`.
    let _ = writeln!(std::io::stderr(), "not covered: {what}: {why}");
}
