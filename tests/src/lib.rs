//! Tests the backends of this repository: harnesses for the [conformance suite](peerlane_conformance), ranks that are processes,
//! simulations of whole operations, and counts of what a start allocates.

mod harness;
pub mod processes;
pub mod simulation;
pub mod steady;

pub use harness::cuda::CudaHarness;
pub use harness::gpu::{Gpu, GpuDriver, GpuHarness};
pub use harness::rdma::RdmaHarness;
pub use harness::rocm::RocmHarness;
pub use harness::staged::{StagedFabric, StagedHarness, StagedMemory};
pub use peerlane_conformance::*;
