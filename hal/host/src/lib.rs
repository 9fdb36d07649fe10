//! The reference backend, whose ranks are threads or processes of one machine that share memory.
//!
//! | contract | on Linux |
//! | --- | --- |
//! | region that Peerlane allocates | a sealed memfd, mapped by each importer |
//! | region of the caller | its own pointer; only ranks of the same process can import it |
//! | remote key | process token, generation, length; the descriptor itself is sent by `SCM_RIGHTS` |
//! | put | one copy from the source directly into the peer's mapping |
//! | signal | a release store into the peer's mapping, and a futex wake if the peer sleeps |
//! | wait | an acquire load whenever the caller polls |
//! | park | polls for about the time of a wake-up, then a futex sleep on the rank's doorbell |
//!
//! The caller drives the engine: ops run inside `submit` and `completed`. The data path has no
//! thread. Its only system calls are those of a wait: `futex`, `sched_yield`, and calls that read
//! and change the affinity mask for a move to another core. One thread per process hands out
//! descriptors; it sleeps in `accept`.
//!
//! Left out on purpose: `process_vm_writev` and `pidfd_getfd` for memory of other processes, since
//! many containers refuse both, and named shared memory, since a killed process would leave it
//! behind.
//!
//! Ranks of a group trust each other. A peer that violates the protocol can change what a rank
//! reads, but only inside the regions that the rank exported.

mod cache;
mod cores;
mod device;
mod doorbell;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod options;
mod registration;
mod share;

/// Names the primitives of `doorbell/word.rs`, which `tests/tests/orderings.rs` compiles once more,
/// with those of loom.
mod sync {
    pub(crate) use std::sync::atomic::{AtomicU32, Ordering, fence};
}

pub use device::{Device, discover};
pub use engine::Engine;
pub use error::Error;
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};
pub use options::{Bind, Options};
