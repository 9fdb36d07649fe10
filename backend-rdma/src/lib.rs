//! The RDMA backend of Peerlane: the queue pairs of InfiniBand and RoCE network cards, between
//! hosts. One rank has one port of one card, or of up to four; ranks are processes, or threads of one.
//!
//! At run time it needs `libibverbs.so.1`, which rdma-core brings. It is not needed to build. Where it
//! or a card is missing, every call says so, with what to install.
//!
//! # How the contract maps to RDMA
//!
//! | the contract | RDMA |
//! | --- | --- |
//! | `Fabric::open` | of each card `ibv_open_device`, `ibv_alloc_pd`, a shared receive queue and its completion queue for what peers announce; a thread with a TCP socket that answers peers and hears of the devices |
//! | `Fabric::connect` | a TCP connection to the peer's thread |
//! | `Fabric::engine` | a completion queue a card; queue pairs follow when an op first names the peer, opened by a thread, so that `submit` never waits |
//! | `PeerMemory::allocate` | a memfd, then as `register` |
//! | `PeerMemory::register` | `ibv_reg_mr` with every card: any memory of the host |
//! | `PeerMemory::adopt` | memory of devices: `ibv_reg_dmabuf_mr` of its dma-buf, or `ibv_reg_mr` where a kernel module knows the address; what the device needs to see the bytes is done before a flag is stored |
//! | `PeerMemory::export`, `import` | address, length and remote key; the owner is asked whether the memory still lives |
//! | `Op::Put`, `Op::Get` | RDMA write and RDMA read, in pieces, large ones in stripes over several queue pairs; to oneself a copy by the processor |
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
//! # Queue pairs
//!
//! An engine has one queue pair to a peer unless [`Options::queue_pairs`] or
//! [`Options::further_devices`] want more, eight at most. The first takes signals and what is smaller
//! than two stripes of [`Options::stripe_bytes`]. Larger puts and gets are cut where the peer's addresses
//! are multiples of it, and stripes take turns, so what touches the same bytes goes over the same queue
//! pair. Where a small copy meets a large one, or a get a put in memory of this rank, the later one waits
//! for the earlier. A signal says on which other queue pairs bytes were put; there an empty write with
//! immediate follows them, and the peer stores the flag when all of these have come.
//!
//! Requests are posted in chains of up to 64, one doorbell each. Puts of up to
//! [`Options::inline_bytes`] travel in the request. Of each queue pair at most
//! [`Options::requests_max`] requests are posted, to each peer about [`Options::posted_bytes_max`] bytes;
//! what does not fit waits in the engine. Completion queues hold every request of every queue pair.
//!
//! # What ends a wait
//!
//! | what is waited for | ends after | as |
//! | --- | --- | --- |
//! | the peer's answer on the way to queue pairs | [`Options::open_timeout`], 10 s | `Timeout` of `completed` |
//! | an acknowledgement of a packet | [`Options::timeout_exponent`] and [`Options::retries`]: 67 ms, sent again 7 times, half a second or more | `PeerLost` |
//! | a place for a message | asked again every 0.16 ms. The peer's thread makes places also while nobody polls there; a stopped process does not, and after [`Options::stall_timeout`], 60 s without any completion, it counts as lost | `PeerLost` |
//! | the other end when an engine is dropped | 2 s | nothing |
//!
//! A port that goes down ends nothing by itself: if it comes back within the retries nothing is lost, and
//! else the error says that it is down. Devices that fail, and queues of theirs, end everything at once,
//! as `DeviceLost`.
//!
//! # Who drives it
//!
//! Whoever calls: nothing is posted and no flag of this rank stored, but by `completed` and `submit`, by
//! another engine's of the rank, or by the fabric's thread once half of the places for messages are taken.
//! `park` gives the processor away, looks for a while ([`Options::spin`]), and then sleeps on the
//! completion channels without a timer, until something completes or arrives, or the waker is used.
//! On the emulated nodes of `cargo xtask test rdma` a rank so uses 0.4 to 0.9 % of a processor
//! while a peer is late by a second, 9 % where both its fabrics may have news, and about half of
//! one in one small gather after the other. For starts on streams the executor has a progress
//! thread for the rank.
//!
//! # What is left out
//!
//! - Copies to oneself of memory of a device: its own fabric does them.
//! - One sleep for RDMA and for another fabric: who drives lanes of both sleeps on the one that hears of
//!   all that is missing. Where both may have news it looks at them in pauses, which grow with the wait up
//!   to ten milliseconds.
//! - Waits in the queue: no card waits for a word of memory.

mod device;
mod engine;
mod error;
mod fabric;
mod key;
mod memory;
mod sys;

pub use device::{
    Device, DeviceChoice, Distance, DmabufRefusal, Gid, GidKind, LinkLayer, Port, discover,
    distance, try_dmabuf,
};
pub use engine::Engine;
pub use error::{Error, VerbsStatus};
pub use fabric::{DeviceMemory, Fabric, Options, SignalBy};
pub use key::Key;
pub use memory::{Local, Memory, Remote};
