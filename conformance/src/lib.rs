//! Checks backends against the [contract](peerlane_hal::contract): every bold sentence is a check of
//! the same name, which any backend can run.
//!
//! # Testing a new backend
//!
//! Implement [`Harness`], which opens the backend's fabric. Run the [`Suite`] in a test program
//! without the standard test harness (`harness = false` in its `[[test]]`):
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
//! The tests have names such as `my-backend::wait::a_wait_acquires_what_any_writer_published`, and
//! can be filtered and listed like other tests. All ranks of a check are threads of one process; each
//! has its own fabric. A failure names the sentence of the contract that does not hold, the rank that
//! found it, and what was expected and found. Its last line begins with `next:` and says what the author
//! of a backend should look at first, namely the usual cause in a new backend.
//!
//! - If only a device can load and store a region, replace [`Harness::write`] and [`Harness::read`] by
//!   the vendor's copies, and [`Harness::own_memory`] by the vendor's allocation.
//! - If hardware or a library is absent, return an error of kind `Unavailable` from [`Harness::open`].
//!   The checks are then ignored, with that error as the reason. On a machine that exists to test the
//!   backend, return true from [`Harness::required`], which makes absence a failure.
//! - A check that needs an ability which [`Caps`](peerlane_hal::Caps) lacks is ignored, and the reason
//!   is printed at the end. Sizes and lengths are derived from the limits in `Caps`.
//! - Make the checks pass in the order of the list. [`middleware::TraceLayer`] records the ops that a
//!   failing check submitted; [`middleware::DelayLayer`] varies the timing.
//!
//! # Layers over engines
//!
//! The crate `peerlane-layers`, re-exported as [`middleware`], holds engines that trace, delay,
//! throttle, remove abilities and fail on purpose, over any fabric. The suite runs over them too, and
//! whole groups can be opened on a [`middleware::Wrapped`] fabric.

pub mod checks;
mod data;
mod engine;
mod failure;
mod harness;
mod ranks;
mod suite;

/// Re-exports the layers, and a harness with a layer over its fabric.
pub mod middleware {
    pub use peerlane_layers::*;

    pub use crate::harness::erased::Erased;
    pub use crate::harness::layered::Layered;
}

pub use data::{POISON, pattern};
pub use failure::{Failure, Outcome, ensure_all, ensure_bytes};
pub use harness::host::HostHarness;
pub use harness::{
    EngineOf, ErrorOf, FabricOf, Harness, HostMemory, KeyOf, LocalOf, MemoryOf, OwnMemory, RemoteOf,
};
pub use suite::{Suite, run_bounded};
