//! Peerlane moves bytes between the memories of peers on the engines that are made for it, and
//! leaves the compute units to compute.
//!
//! A [`Group`] is a number of ranks that have found each other by a [`bootstrap`] and reach each
//! other over a fabric: [`host`] for threads and processes of one machine; NVLink, XGMI and RDMA
//! behind the features `cuda`, `rocm` and `rdma`. What a group does is a [`plan`], which is data,
//! and is [verified](verify) before it runs.
//!
//! ```
//! # #[cfg(feature = "host")]
//! # fn main() -> Result<(), peerlane::Error> {
//! use peerlane::bootstrap::{Bootstrap, in_process};
//! use peerlane::{Group, host};
//!
//! // Two ranks, each on a thread of its own.
//! in_process::run(2, |bootstrap| {
//!     let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
//!     let mut group = Group::open(bootstrap, fabric)?;
//!     let mut gather = group.all_gather::<f32>(3).prepare()?;
//!     gather.input_mut()?.fill(group.rank().0 as f32);
//!     gather.run()?;
//!     assert_eq!(gather.output()?, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
//!     group.close()
//! })?;
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "host"))]
//! # fn main() {}
//! ```
//!
//! - You use collectives: start at [`Group`].
//! - You write an algorithm or a runtime on top: [`hal::for_algorithm_authors`].
//! - You bring up an accelerator: [`hal::for_backend_authors`].
//!
//! No feature changes what another part does, and vendor libraries are needed at run time only.

#[cfg(feature = "cuda")]
pub use peerlane_cuda as cuda;
#[cfg(feature = "rdma")]
pub use peerlane_rdma as rdma;
#[cfg(feature = "rocm")]
pub use peerlane_rocm as rocm;

pub use peerlane_collectives::element::{DType, Element};
pub use peerlane_collectives::error::Error;
pub use peerlane_collectives::group::{
    AllGather, Destination, Gathered, Group, GroupOptions, Lease, Place, Started, Window,
};
pub use peerlane_collectives::{
    bootstrap, collective, cost, element, error, group, layout, plan, schedule, simulate, topology,
    trace, verify,
};
pub use peerlane_hal as hal;
pub use peerlane_hal::{Deadline, ErrorKind, Rank};
#[cfg(feature = "host")]
pub use peerlane_host as host;

/// Runs the examples of the README.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../README.md")]
mod readme {}
