//! The RDMA backend of Peerlane, which moves bytes between hosts over queue pairs of InfiniBand and RoCE
//! NICs. A rank uses one port of one NIC, or of up to four. Ranks are processes, or threads of one.
//!
//! It loads `libibverbs.so.1`, a part of rdma-core, at run time and does not need it to build. If the
//! library or a NIC is missing, every call returns an error that names what to install.
//!
//! # How the contract maps to RDMA
//!
//! | the contract | RDMA |
//! | --- | --- |
//! | `Fabric::open` | for each NIC `ibv_open_device`, `ibv_alloc_pd`, a shared receive queue and its completion queue for the messages of peers; a thread with a TCP socket that answers peers and receives the events of the devices |
//! | `Fabric::connect` | a TCP connection to the peer's thread |
//! | `Fabric::engine` | a completion queue per NIC; a thread opens the queue pairs to a peer when an op first names it, so that `submit` never waits |
//! | `PeerMemory::allocate` | a memfd, then as `register` |
//! | `PeerMemory::register` | `ibv_reg_mr` with every NIC, for any host memory |
//! | `PeerMemory::adopt` | device memory: `ibv_reg_dmabuf_mr` of its dma-buf, or `ibv_reg_mr` if a kernel module knows the address; if the device needs a flush to see the bytes, it runs before a flag is stored |
//! | `PeerMemory::export`, `import` | address, length and remote key; `import` asks the owner whether the memory still exists |
//! | `Op::Put`, `Op::Get` | RDMA write and RDMA read, in pieces; large ones in stripes over several queue pairs; to this rank a copy by the processor |
//! | `Op::Signal` | a message after the bytes on the same queue pair; the peer stores the flag when the message completes there. After a put of the same slice it is one RDMA write with immediate, otherwise a send or an empty write with immediate. If the receiving NIC reports that it writes in order, a write of the flag ([`SignalBy`]). To this rank a store after all earlier completions |
//! | a signal or put after a get | posted with a fence, because a NIC repeats a read whose answer was lost |
//! | `Op::Wait` | not queued: the executor polls the flag |
//! | `completed` | `ibv_poll_cq` of the engine's completion queues and of the rank's receive completion queues; posts what the limits allow |
//! | `park` | sleeps on both completion channels; the waker, and a flag stored by another engine of the rank, write to an event descriptor |
//! | `release` | moves the queue pairs to the error state, which completes their requests as flushed |
//! | `fork`, `join` | unreachable: no stream runs on a NIC, so the stream type is uninhabited |
//!
//! A failed completion poisons the engine. A wrong remote key is `InvalidKey`; a peer that no longer
//! answers is `PeerLost`, with rank, address and device. To continue, open a new group.
//!
//! # Queue pairs
//!
//! An engine has one queue pair to a peer unless [`Options::queue_pairs`] or
//! [`Options::further_devices`] ask for more, at most eight. The first, the *primary*, takes signals and
//! copies of less than two stripes of [`Options::stripe_bytes`]. Larger puts and gets are cut where the
//! peer's addresses are multiples of a stripe, and consecutive stripes rotate over the queue pairs, so
//! that bytes at one remote address always use the same queue pair. A later copy waits for an earlier one
//! if a small copy overlaps a large one, or a get overlaps a put in memory of this rank. A signal names
//! the other queue pairs that carried bytes. On each of these a *marker*, an empty write with immediate,
//! follows the bytes, and the peer stores the flag when all markers have arrived.
//!
//! Requests are posted in chains of up to 64, with one doorbell each. Puts of up to
//! [`Options::inline_bytes`] are sent inline. At most [`Options::requests_max`] requests are posted to
//! each queue pair, and about [`Options::posted_bytes_max`] bytes to each peer; the rest waits in the
//! engine. Completion queues have room for every request of every queue pair.
//!
//! # Timeouts
//!
//! | waits for | ends after | error |
//! | --- | --- | --- |
//! | the peer's answer while queue pairs open | [`Options::open_timeout`], 10 s | `Timeout` of `completed` |
//! | an acknowledgement of a packet | [`Options::timeout_exponent`] and [`Options::retries`]: 67 ms, 7 retries, half a second or more in total | `PeerLost` |
//! | a receive buffer for a message | a retry every 0.16 ms. The peer's fabric thread posts buffers even if no engine polls there. A stopped process does not; after [`Options::stall_timeout`], 60 s without a completion, it counts as lost | `PeerLost` |
//! | the token of a client of the service, the rest of its request, and the client to take its response | 10 s | none: the client is closed |
//! | the peer to close its queue pairs when an engine is dropped | 2 s | none |
//!
//! A port that goes down is no error by itself: nothing is lost if it returns within the retries, and
//! otherwise the error says that the port is down. A failed device, or a failed queue of a device, fails
//! every call at once with `DeviceLost`.
//!
//! # Progress
//!
//! The caller drives the backend. Requests are posted and flags of this rank are stored only by `completed`
//! and `submit` of any engine of the rank, and by the fabric's thread once half of the receive buffers are
//! used. `park` yields the processor while it polls for a short time ([`Options::spin`]), then sleeps on
//! the completion channels without a timer until something completes or arrives, or the waker is used.
//! On the emulated nodes of `cargo xtask test rdma` a rank uses 0.4 to 0.9 % of a processor while a peer
//! is late by a second, 9 % if it waits for flags of two fabrics, and about half of a processor in a
//! series of small all-gathers. For starts on streams the executor runs a progress thread for the rank.
//!
//! # What is left out
//!
//! - Self copies of device memory: the device's own fabric does them.
//! - One sleep for RDMA and another fabric: an executor with lanes of both parks on the engine whose
//!   wake-ups cover everything that its lanes wait for. If both fabrics may progress, it polls with a
//!   back-off that grows to ten milliseconds.
//! - Queued waits: no NIC can wait for a word of memory.

// Imports go one way: fabric, engine, memory, connection, registration, nic, key and options, device, sys, error.
mod connection;
mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod nic;
mod options;
mod registration;
mod sys;

pub use device::{
    Device, DeviceChoice, Distance, DmabufRefusal, Gid, GidKind, LinkLayer, Port, discover,
    distance, probe_dmabuf,
};
pub use engine::Engine;
pub use error::{Error, VerbsStatus};
pub use fabric::Fabric;
pub use key::Key;
pub use memory::{Local, Memory, Remote};
pub use options::{DeviceMemory, Options, SignalBy};
