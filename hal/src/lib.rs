//! The hardware abstraction layer of Peerlane: bytes move between the memories of peers on the
//! engines that are made for it, and the compute units are left to compute.
//!
//! Four traits carry everything: a [`Fabric`] is a way to reach peers; its [`PeerMemory`] registers
//! memory and imports a peer's by a [`RemoteKey`]; its [`CopyEngine`] is an in-order queue of four
//! [`Op`]s: put, get, signal, wait. What they promise is the [`contract`].
//!
//! - You bring up an accelerator: read [`for_backend_authors`].
//! - You write an algorithm or a runtime on top: read [`for_algorithm_authors`].
//! - You want to gather shards: take the crate `peerlane`, which has it ready.
//!
//! The crate `peerlane-host` is the reference backend: ranks as threads or processes of one machine. The crate
//! `peerlane-toolkit` holds the parts that backends share.

#[cfg(not(target_os = "linux"))]
compile_error!("Peerlane runs on Linux only");

mod deadline;
mod engine;
mod error;
mod fabric;
mod held;
mod key;
mod memory;
mod rank;
pub mod wire;

pub use deadline::Deadline;
pub use engine::{At, Caps, CopyEngine, Flag, Op, Ticket};
pub use error::{Error, ErrorKind};
pub use fabric::{Demand, Fabric, Link, LinkKind};
pub use held::{DmaBuf, Flush, Held};
pub use key::{BackendId, Envelope, Generation, KEY_MAGIC, KEY_VERSION, KeyError, RemoteKey};
pub use memory::{PeerMemory, Region, Role, Space};
pub use rank::Rank;

#[doc = include_str!("../CONTRACT.md")]
pub mod contract {}

#[doc = include_str!("../guide/backend-authors.md")]
pub mod for_backend_authors {}

#[doc = include_str!("../guide/algorithm-authors.md")]
pub mod for_algorithm_authors {}
