//! Ports Peerlane to an invented accelerator, as an example of a backend that is short enough to read.
//!
//! [`model`] is the hardware with its vendor library; begin with its manual. The other files are the port. Read them in this
//! order:
//!
//! | file | shows |
//! | --- | --- |
//! | `memory` | memory that only the device accesses: it is cleared by the vendor's calls, and its addresses begin at 0. Flags are in host memory, where the executor polls them |
//! | `key` | what a peer needs to find a region, and why it cannot find freed memory |
//! | `engine` | what `Caps` says about a device without waits and gets; a put that is longer than the ring; a counter that wraps around and completes tickets |
//! | `fabric` | ranks that are threads of a process, each with a device |
//!
//! `tests/contract.rs` runs the checks of the contract, with a harness that accesses memory of the device by the vendor's calls.
//! `tests/all_gather.rs` runs a collective, also over a network that cannot access the device, so that the bytes are staged through
//! host memory.
//!
//! What a port of real hardware adds: calls of a library that is loaded at run time, and ranks that are processes. These parts
//! are in every other backend, in the files `sys` and `device`.

mod engine;
mod fabric;
mod key;
mod memory;
pub mod model;

pub use engine::Engine;
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote, WINDOW};

/// The number of this backend in keys and addresses. Numbers from 0x8000 on are for backends outside of Peerlane.
pub const BACKEND: peerlane_hal::BackendId = peerlane_hal::BackendId(0x8002);

/// The error of this backend. The vendor's errors are those of the operating system, so `Fault` has a variant for them.
pub type Error = peerlane_toolkit::Fault;
