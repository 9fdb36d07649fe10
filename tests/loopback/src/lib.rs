//! A backend for loopback, whose device is a queue in this process so far.
//!
//! | file | begins as | becomes |
//! | --- | --- | --- |
//! | `device` | shared memory of this machine | the vendor's devices, allocations and addresses |
//! | `memory`, `key` | registrations that other processes map by a file descriptor | the vendor's registration, export and import |
//! | `engine` | a queue whose ops the caller runs | the vendor's queue, doorbell and completion |
//! | `fabric` | ranks of this machine, by the keys of a region of each | what the vendor needs to reach a rank |
//!
//! Replace one file at a time, and run the contract suite after each: `cargo test --test contract`.

mod device;
mod engine;
mod fabric;
mod key;
mod memory;

pub use device::{Device, discover};
pub use engine::Engine;
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};

/// The number of this backend in keys and addresses. Numbers from 0x8000 on are for backends
/// outside of Peerlane.
pub const BACKEND: peerlane_hal::BackendId = peerlane_hal::BackendId(0x8000);

/// The error of this backend, which has the kinds that need no vendor. Wrap it in an enum when the
/// vendor's codes come.
pub type Error = peerlane_toolkit::Fault;
