//! The hardware abstraction layer of Peerlane, with traits for peer memory and copy engines.
//!
//! | trait | what it does |
//! | --- | --- |
//! | [`Fabric`] | reaches peers: connects them, and creates memory and engines |
//! | [`PeerMemory`] | registers memory of this rank, and imports memory of peers by their [`RemoteKey`] |
//! | [`CopyEngine`] | runs [`Op`]s in order: put, get, signal, wait and reduce |
//! | [`StreamOrdered`] | orders an engine against a stream of the caller, if the backend has streams |
//!
//! The [`contract`] states what every backend promises. A [`DynFabric`] is a fabric of any backend,
//! chosen at run time.
//!
//! - To support an accelerator, read [`for_backend_authors`].
//! - To write an algorithm or a runtime on these traits, read [`for_algorithm_authors`].
//! - To run collectives, use the crate `peerlane`.
//!
//! The crate `peerlane-host` is the reference backend, whose ranks are threads or processes of one
//! machine. The crate `peerlane-toolkit` holds the parts that backends share.

#[cfg(not(target_os = "linux"))]
compile_error!("Peerlane runs on Linux only");

#[doc(hidden)]
pub mod collective_error;
mod command;
mod deadline;
mod dynamic;
mod dynamic_engine;
mod dynamic_error;
mod element;
mod engine;
mod error;
mod fabric;
mod fused;
mod key;
mod memory;
mod rank;
mod reduction;
pub mod wire;

pub use command::{
    Command, Commands, Direction, FlagValues, FusedCommands, RegionFlag, RegionOffset, Regions,
    StartValues,
};
pub use deadline::Deadline;
pub use dynamic::{DynFabric, DynKey};
pub use dynamic_engine::{BoundRegions, DynEngine};
pub use dynamic_error::DynError;
pub use element::{DType, ElementKind, UnknownName};
pub use engine::{
    At, Caps, CaptureState, CopyEngine, Flag, FusedEngine, FusedOps, FusedStarts, Mark, Op,
    Reducer, Rows, SharedQueues, Stream, StreamOrdered, Ticket, stream_of,
};
pub use error::{Error, ErrorKind};
pub use fabric::{EngineOffer, EngineRequirements, Fabric, Link, LinkKind, Priority};
pub use fused::{FusedLimits, FusedProgress, Launch, ProgressReader, SLOT_FACTOR};
pub use key::{BackendId, Envelope, Generation, KEY_MAGIC, KEY_VERSION, KeyError, RemoteKey};
pub use memory::{DmaBuf, DynImport, DynRegion, Flush, PeerMemory, Region, Role, Space};
pub use rank::Rank;
pub use reduction::{NoReduction, Operator, Reduction};

#[doc = include_str!("../CONTRACT.md")]
pub mod contract {}

#[doc = include_str!("../guide/backend-authors.md")]
pub mod for_backend_authors {}

#[doc = include_str!("../guide/algorithm-authors.md")]
pub mod for_algorithm_authors {}
