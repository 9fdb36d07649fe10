//! Registration, export and import of device memory: `peerlane_toolkit::regions` over the calls of
//! CUDA, which stand here.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | that Peerlane allocates | physical memory with a descriptor, mapped by each importer |
//! | of `cudaMalloc` | its legacy IPC handle; the caller's offset travels beside it |
//! | that the caller mapped, such as expandable segments | a descriptor for every segment |
//! | that Peerlane allocates, where a peer's device does not reach this one | host memory with a descriptor, mapped by each importer and registered with its driver |
//! | of the host, that another fabric has allocated; of the host as flags | the descriptor that it was allocated with; the caller's own not at all |
//! | of a stream-ordered pool | not at all; it can be put from, and received into by oneself |
//!
//! Ranks of one process share addresses: an import there only lets the importer's device reach them.

mod calls;
mod cards;
mod ipc;
mod pointers;
mod segments;

use peerlane_toolkit::regions;

use crate::device::Context;

pub(crate) use segments::try_fabric;

/// Registers memory of this rank's device and imports that of its peers.
pub type Memory = regions::Memory<Context>;

/// Registered memory of this rank.
pub type Local = regions::Local<Context>;

/// Imported memory of a peer.
pub type Remote = regions::Remote<Context>;
