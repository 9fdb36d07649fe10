//! Peerlane runs collectives on copy engines and network adapters, so that all compute units stay
//! free for kernels, and on launches of few blocks of threads where these are faster.
//!
//! A [`Group`] connects ranks over a fabric: [`host`] for threads and processes of one machine, and
//! NVLink, XGMI and RDMA with the features `cuda`, `rocm` and `rdma`. [`from_env`] joins the ranks
//! of a launcher such as torchrun and chooses the fabrics; [`open`](mod@open) says how. A group
//! prepares [operations](Operation) such as all-gathers. An operation runs a plan, which is data
//! and is verified before a byte moves.
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
//! | you want to | start at |
//! | --- | --- |
//! | use collectives | [`Group`] and [`Operation`] |
//! | plan, verify and predict without hardware | the crate `peerlane-planning` |
//! | write an algorithm or a runtime on the hardware traits | [`hal::for_algorithm_authors`] |
//! | support another accelerator | [`hal::for_backend_authors`] |
//!
//! Features only add backends and conversions. Vendor libraries are loaded at run time; a missing
//! one is an error that names it.

#[cfg(feature = "cudarc")]
mod interop;
pub mod open;

#[cfg(feature = "cuda")]
pub use peerlane_cuda as cuda;
#[cfg(feature = "rdma")]
pub use peerlane_rdma as rdma;
#[cfg(feature = "rocm")]
pub use peerlane_rocm as rocm;
#[cfg(feature = "ucx")]
pub use peerlane_ucx as ucx;

#[cfg(feature = "cudarc")]
pub use interop::RegisterSlice;
pub use open::{Backend, OpenOptions, from_env};
pub use peerlane_collectives::element::{DType, Element, Operator, Untyped};
pub use peerlane_collectives::error::Error;
pub use peerlane_collectives::group::{
    AllToAllV, Arrival, BesideStart, BlockChunk, BlockLens, BlockPart, Buffer, Channel,
    ChannelEvent, CopyRange, Destination, Group, GroupEnd, GroupOptions, Lease, Matrix,
    MemoryRange, MessageTicket, Notification, Operation, OperationDescription, OutputPart,
    OwnedBesideStart, OwnedStart, Part, Selection, SendCounts, Started, Unreleased,
    UntypedOperation, Window,
};
pub use peerlane_collectives::plan::Algorithm;
pub use peerlane_collectives::{
    bootstrap, buffer_plan, collective, element, error, group, topology, trace,
};
pub use peerlane_hal as hal;
pub use peerlane_hal::{Deadline, DynFabric, ErrorKind, Priority, Rank};
#[cfg(feature = "host")]
pub use peerlane_host as host;

/// Defines what options and reports of groups name: links and their rates, and parts of plans.
///
/// A group plans, verifies and predicts when it prepares an operation, so its users need no more.
/// The crate `peerlane-planning` has the tools for those who choose hardware, write schedules or
/// explain a measurement: it builds plans, proves them, predicts their time and simulates them.
pub mod planning {
    pub use peerlane_collectives::cost::{Calibration, Choice, Form, Link, Links, Transfer};
    pub use peerlane_collectives::plan::{FlagOrder, LaneId, Tier};
}

/// Runs the examples of the README and of the book as tests.
#[cfg(all(doctest, feature = "host"))]
mod documentation {
    macro_rules! pages {
        ($($name:ident $page:literal)*) => {
            $(#[doc = include_str!($page)] mod $name {})*
        };
    }

    pages! {
        readme "../README.md"
        introduction "../docs/book/introduction.md"
        getting_started "../docs/book/getting-started.md"
        two_hosts "../docs/book/two-hosts.md"
        concepts "../docs/book/concepts.md"
        runtime "../docs/book/uses/runtime.md"
        c "../docs/book/uses/c.md"
        python "../docs/book/uses/python.md"
        operator "../docs/book/uses/operator.md"
        porter "../docs/PORTING.md"
        backends "../docs/book/backends/README.md"
        host "../docs/book/backends/host.md"
        cuda "../docs/book/backends/cuda.md"
        rocm "../docs/book/backends/rocm.md"
        rdma "../docs/book/backends/rdma.md"
        ucx "../docs/book/backends/ucx.md"
        troubleshooting "../docs/book/troubleshooting.md"
        migration "../docs/book/migration.md"
        performance "../docs/book/performance.md"
        comparison "../docs/book/comparison.md"
        reference "../docs/book/reference.md"
    }
}
