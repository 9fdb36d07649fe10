//! Building blocks that Peerlane backends share.
//!
//! | kind of device | parts |
//! | --- | --- |
//! | GPU with streams, events and waits for 64-bit words (CUDA, HIP) | implement the traits of [`device`]; [`streams`] is the engine, [`regions`] the memory, [`peers`] the fabric |
//! | ring and doorbell, such as a DMA engine or an accelerator without streams | [`TicketCounter`], [`pieces`], [`Poison`], [`Parker`], and [`op_checks`] for the checks of ops |
//! | NIC (verbs) | [`TicketCounter`], [`pieces`], [`Poison`], and [`handover`] for host memory of other processes |
//! | host memory | [`mapping`] and [`handover`] |
//!
//! | part | what it does |
//! | --- | --- |
//! | [`TicketCounter`] | issues tickets and tracks their completion, also out of order |
//! | [`pieces`] | splits copies at a size limit |
//! | [`Poison`] | remembers the first error of an engine |
//! | [`Parker`] | parks a thread until the device may have made progress |
//! | [`op_checks`] | checks ops against their regions |
//! | [`mapping`] | maps shared host memory |
//! | [`handover`] | hands memory to other processes as file descriptors |
//! | [`device`] | traits for the driver of a GPU |
//! | [`streams`] | an engine on the streams of a GPU |
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
pub mod handover;
pub mod mapping;
pub mod op_checks;
mod park;
pub mod peers;
mod pieces;
mod poison;
pub mod regions;
pub mod streams;
mod tickets;

pub use park::Parker;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
pub use tickets::TicketCounter;
