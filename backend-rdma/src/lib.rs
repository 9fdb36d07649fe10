//! The RDMA backend of Peerlane: the queue pairs of InfiniBand and RoCE network cards, between
//! hosts.
//!
//! **Not built yet.** The crate holds the files that every backend has, each with what goes into
//! it, and [`discover`], which says so. [`Memory`], [`Key`], [`Engine`] and [`Fabric`] have no
//! values, so no program can believe that it moves bytes with them.
//!
//! At run time the backend will need `libibverbs.so.1`, which rdma-core brings. It is not needed to
//! build.
//!
//! # How the contract will map to RDMA
//!
//! | the contract | RDMA |
//! | --- | --- |
//! | `Fabric::open` | `ibv_open_device`, `ibv_alloc_pd`, one completion queue for the engine |
//! | `Fabric::connect` | one reliable queue pair a peer, brought to ready-to-send with the number, address and GID of the peer's |
//! | `PeerMemory::allocate` | page-aligned host memory, then as `register` |
//! | `PeerMemory::register` | `ibv_reg_mr`; `ibv_reg_dmabuf_mr` with the base and the offset for device memory |
//! | `PeerMemory::export`, `import` | address, length and rkey; nothing is opened on the other side |
//! | `Op::Put` | RDMA write; with a signal to the same peer behind it, one RDMA write with immediate |
//! | `Op::Signal` | RDMA write with immediate: a slot of the flag table and the low bits of the value; to oneself, a store after all completions |
//! | `Op::Wait` | not queued: the executor polls the flag, which this backend stores after the flush |
//! | `completed` | `ibv_poll_cq`, which also takes arrivals and gives receive credits back |
//! | `release` | the queue pairs go to the error state, and what they held completes as flushed |
//! | `fork`, `join` | no caller computes on a network card: the stream is uninhabited |

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod sys;

pub use device::{Device, discover};
pub use engine::Engine;
pub use error::Error;
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};
