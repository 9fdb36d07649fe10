//! Tests the backends of this repository: harnesses for the [conformance suite](peerlane_conformance), ranks that are processes,
//! and simulations of whole operations.

mod harness;
pub mod processes;
pub mod simulation;

pub use harness::cuda::CudaHarness;
pub use harness::gpu::{Gpu, GpuDriver, GpuHarness};
pub use harness::rdma::RdmaHarness;
pub use harness::rocm::RocmHarness;
pub use harness::staged::{StagedFabric, StagedHarness, StagedMemory};
pub use peerlane_conformance::*;
