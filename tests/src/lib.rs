//! The conformance suite of Peerlane: every bold sentence of the [contract](peerlane_hal::contract)
//! is a check of the same name, and any backend runs them all.
//!
//! # For porters
//!
//! A backend says how it is opened by implementing [`Harness`], and a test program without the
//! standard test harness (`harness = false` in its `[[test]]`) runs the [`Suite`]:
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use peerlane_conformance::{Harness, Suite};
//! use peerlane_hal::Rank;
//! use peerlane_host as host;
//!
//! struct MyBackend;
//!
//! impl Harness for MyBackend {
//!     type Fabric = host::Fabric;
//!
//!     fn name(&self) -> &str {
//!         "my-backend"
//!     }
//!
//!     fn open(&self, rank: Rank, ranks: usize) -> Result<host::Fabric, host::Error> {
//!         host::Fabric::open(rank, ranks)
//!     }
//! }
//!
//! fn main() -> ExitCode {
//!     Suite::new().with(MyBackend).run()
//! }
//! ```
//!
//! The tests are then called `my-backend::wait::a_wait_acquires_what_any_writer_published` and so
//! on; they can be filtered and listed like any others. All ranks of a check are threads of one
//! process, each with a fabric of its own.
//!
//! - Regions that only a device can load and store: replace [`Harness::write`] and
//!   [`Harness::read`] by copies of the vendor, and [`Harness::own_memory`] by the vendor's
//!   allocation.
//! - Hardware or a library that is absent: [`Harness::open`] answers with an error of kind
//!   `Unavailable`. The checks are then ignored with that error as the reason; on a machine that is
//!   there to test the backend, [`Harness::required`] makes it a failure.
//! - A check that needs an ability which [`Caps`](peerlane_hal::Caps) denies is ignored, and the
//!   reason printed at the end. Sizes and lengths follow from the limits in `Caps`.
//! - Bring the checks up in the order of the list. [`middleware::TraceLayer`] writes down what a
//!   failing one asked for; [`middleware::DelayLayer`] shakes the timing.
//!
//! # Layers over engines
//!
//! The crate `peerlane-layers`, here as [`middleware`], holds engines that trace, delay, throttle, take
//! abilities away and fail on purpose, over any fabric. The suite runs over them as well, and whole groups can be opened on a
//! [`middleware::Wrapped`] fabric.

mod board;
pub mod checks;
mod cuda;
mod data;
mod driver;
mod failure;
mod gpu;
mod harness;
mod host;
mod layered;
pub mod processes;
mod rdma;
mod rocm;
pub mod simulation;
mod staged;
mod suite;
mod world;

pub use cuda::CudaHarness;
/// The layers, and a harness that has one.
pub mod middleware {
    pub use peerlane_layers::*;

    pub use crate::layered::Layered;
}

pub use failure::{Failure, Outcome};
pub use gpu::{Gpu, GpuDriver, GpuHarness};
pub use harness::{
    EngineOf, ErrorOf, FabricOf, Harness, HostMemory, KeyOf, LocalOf, MemoryOf, OwnMemory, RemoteOf,
};
pub use host::HostHarness;
pub use rdma::RdmaHarness;
pub use rocm::RocmHarness;
pub use staged::{StagedFabric, StagedHarness, StagedMemory};
pub use suite::{Suite, run_bounded};
