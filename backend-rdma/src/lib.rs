//! The RDMA backend of Peerlane: the queue pairs of InfiniBand and RoCE network cards, between
//! hosts. One rank has one port of one card; ranks are processes, or threads of one.
//!
//! At run time it needs `libibverbs.so.1`, which rdma-core brings. It is not needed to build. Where it
//! or a card is missing, every call says so, with what to install.
//!
//! # How the contract maps to RDMA
//!
//! | the contract | RDMA |
//! | --- | --- |
//! | `Fabric::open` | `ibv_open_device`, `ibv_alloc_pd`; a shared receive queue and its completion queue for what peers announce; a thread with a TCP socket that answers peers |
//! | `Fabric::connect` | a TCP connection to the peer's thread |
//! | `Fabric::engine` | a completion queue; queue pairs follow, one a peer, when an op first names the peer |
//! | `PeerMemory::allocate` | a memfd, then as `register` |
//! | `PeerMemory::register` | `ibv_reg_mr`: any memory of the host |
//! | `PeerMemory::export`, `import` | address, length and remote key; the owner is asked whether the memory still lives |
//! | `Op::Put`, `Op::Get` | RDMA write and RDMA read, in pieces; to oneself a copy by the processor |
//! | `Op::Signal` | a message behind the bytes on the same queue pair, whose completion lets the peer store the flag: with a put before it in the slice one RDMA write with immediate, otherwise a send or an empty write with immediate. Where the receiving card says that it writes in order, a write of the flag ([`SignalBy`]). To oneself a store after all completions |
//! | a signal or put behind a get | is posted with a fence, because a lost answer to a read is read again |
//! | `Op::Wait` | not queued: the executor polls the flag |
//! | `completed` | `ibv_poll_cq` of the engine's queue, and of the rank's for what peers announced; posts what there is room for |
//! | `park` | sleeps on both completion channels; a flag that another engine of the rank stored, and the waker, ring an event descriptor |
//! | `release` | the queue pairs go to the error state, and what they held completes as flushed |
//! | `fork`, `join` | no caller computes on a network card: the stream is uninhabited |
//!
//! A failed completion poisons the engine: a wrong remote key is `InvalidKey`, a peer that does not
//! answer any more is `PeerLost`, with rank, address and device. To go on, open a new group.
//!
//! # What is left out
//!
//! - Memory of devices (dma-buf), and so the flush that it needs.
//! - One put over several queue pairs or several cards: an engine has one queue pair a peer, and lanes
//!   are engines.
//! - Waits in the queue: no card waits for a word of memory.

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod sys;

pub use device::{Device, DeviceChoice, Gid, GidKind, LinkLayer, Port, discover};
pub use engine::Engine;
pub use error::{Error, VerbsStatus};
pub use fabric::{Fabric, Options, SignalBy};
pub use key::Key;
pub use memory::{Local, Memory, Remote};
