//! Building blocks for Peerlane backends, such as shared checks, parking, memory handover and a GPU
//! engine.
//!
//! | kind of device | parts |
//! | --- | --- |
//! | GPU with a driver like CUDA or HIP | implement the traits of [`device`]; [`streams`] is the engine, [`regions`] the memory, [`peers`] the fabric |
//! | queue or ring with a doorbell, such as a DMA engine, or a GPU whose driver has less than CUDA | [`EngineState`], [`TicketCounter`], [`pieces`], and [`TimedParker`] or [`Parker`] |
//! | network (verbs, UCX) | [`EngineState`], [`TicketCounter`], [`pieces`], [`Loopback`], [`EventParker`], and [`handover`] for the numbers of regions |
//! | host memory | [`EngineState`], [`TicketCounter`], [`Parker`], [`mapping`] and [`handover`] |
//!
//! | part | what it does |
//! | --- | --- |
//! | [`EngineState`] | checks slices, and remembers the first error and the release |
//! | [`TicketCounter`] | issues tickets and tracks their completion, also out of order |
//! | [`Poison`] | remembers the first error, for a device that several engines share |
//! | [`pieces`] | splits copies at a size limit |
//! | [`Parker`], [`TimedParker`], [`EventParker`] | park a thread until the device may have made progress |
//! | [`Loopback`] | runs the ops of a rank on its own memory |
//! | [`Fault`] | the errors that are the same for every backend |
//! | [`PerProcess`] | holds values of the process, of which a forked child gets its own |
//! | [`limits`] | names the limit that has run out when a system call fails, and starts threads |
//! | [`mapping`] | maps shared host memory |
//! | [`handover`] | hands memory to other processes as file descriptors |
//! | [`DeadlineSocket`] | reads and writes a socket until a deadline |
//! | [`device`] | traits for the driver of a GPU |
//! | [`streams`] | an engine on the streams of a GPU |
//! | [`fused`] | programs of starts that one launch runs |
//! | [`regions`] | registration, export, import and keys of GPU memory |
//! | [`peers`] | a fabric for the GPUs of one host |
//!
//! ```
//! use peerlane_hal::Ticket;
//! use peerlane_toolkit::{TicketCounter, pieces};
//!
//! // A copy of 300 bytes on an engine that takes 128 at a time has three pieces.
//! let mut tickets = TicketCounter::with_capacity(16);
//! let ticket = tickets.issue(pieces(300, 128).len() as u32);
//! tickets.finish_op(ticket);
//! tickets.finish_op(ticket);
//! assert_eq!(tickets.completed(), Ticket::NONE);
//! tickets.finish_op(ticket);
//! assert_eq!(tickets.completed(), ticket);
//! ```

mod deferred_free;
pub mod device;
mod event_park;
mod fault;
pub mod fused;
pub mod handover;
pub mod limits;
mod loopback;
pub mod mapping;
mod park;
pub mod peers;
mod per_process;
mod pieces;
mod poison;
pub mod regions;
mod socket;
pub mod streams;
mod submit;
mod tickets;

pub use event_park::{EventParker, Sleepers, WakeupEvent};
pub use fault::Fault;
pub use loopback::{Loopback, LoopbackOp};
pub use park::{ParkStep, Parker, TimedParker, Unpark};
pub use per_process::PerProcess;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
pub use socket::DeadlineSocket;
pub use submit::{
    EngineRegion, EngineState, PeerRegion, PeerSet, RegionBounds, check_capabilities,
    check_elements,
};
pub use tickets::TicketCounter;
