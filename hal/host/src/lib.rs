//! The reference backend: ranks as threads or processes of one machine, over shared memory.
//!
//! How the contract maps to Linux:
//!
//! | contract | here |
//! | --- | --- |
//! | region that Peerlane allocates | a sealed memfd, mapped by each importer |
//! | region of the caller | its own pointer; only ranks of the same process can import it |
//! | remote key | process token, generation, size; the descriptor itself travels by `SCM_RIGHTS` |
//! | put | one copy from the source straight into the peer's mapping |
//! | signal | a release store into the peer's mapping, and a futex wake if somebody sleeps there |
//! | wait | an acquire load whenever the caller polls |
//! | park | a short spin, then a futex sleep on the rank's bell |
//!
//! The engine is driven by its caller: ops run inside `submit` and `completed`. There is no thread
//! on the data path, and no system call but the futex ones. One thread a process hands out
//! descriptors; it sleeps in `accept`.
//!
//! Left out on purpose: `process_vm_writev` and `pidfd_getfd` for memory of other processes (many
//! containers refuse both), and named shared memory (a killed process would leave it behind).
//!
//! Ranks of a group trust each other: a peer that writes outside the protocol can change what a
//! rank reads, though never outside the regions that it exported.

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;

pub use device::{Device, discover};
pub use engine::Engine;
pub use error::Error;
pub use fabric::{Fabric, Options};
pub use key::Key;
pub use memory::{Local, Memory, Remote};
