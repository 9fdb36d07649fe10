//! Building blocks that Peerlane backends share.
//!
//! | kind of device | parts |
//! | --- | --- |
//! | GPU with streams, events and waits for 64-bit words (CUDA, HIP) | implement the traits of [`device`]; [`streams`] is the engine, [`regions`] the memory, [`peers`] the fabric |
//! | ring and doorbell, such as a DMA engine or an accelerator without streams | [`Ledger`], [`pieces`], [`Poison`], [`Parker`], and [`places`] for the checks of ops |
//! | NIC (verbs) | [`Ledger`], [`pieces`], [`Poison`], and [`handover`] for host memory of other processes |
//! | host memory | [`mapping`] and [`handover`] |
//!
//! | part | what it does |
//! | --- | --- |
//! | [`Ledger`] | issues tickets and tracks their completion, also out of order |
//! | [`pieces`] | splits copies at a size limit |
//! | [`Poison`] | remembers the first error of an engine |
//! | [`Parker`] | parks a thread until the device may have made progress |
//! | [`places`] | checks ops against their regions |
//! | [`mapping`] | maps shared host memory |
//! | [`handover`] | hands memory to other processes as file descriptors |
//! | [`device`] | traits for the driver of a GPU |
//! | [`streams`] | an engine on the streams of a GPU |
//! | [`regions`] | registration, export, import and keys of GPU memory |
//! | [`peers`] | a fabric for the GPUs of one host |
//!
//! ```
//! use peerlane_hal::Ticket;
//! use peerlane_toolkit::{Ledger, pieces};
//!
//! // A copy of 300 bytes on an engine that takes 128 at a time has three pieces.
//! let mut ledger = Ledger::with_capacity(16);
//! let ticket = ledger.issue(pieces(300, 128).len() as u32);
//! ledger.finish_part(ticket);
//! ledger.finish_part(ticket);
//! assert_eq!(ledger.completed(), Ticket::NONE);
//! ledger.finish_part(ticket);
//! assert_eq!(ledger.completed(), ticket);
//! ```

mod deferred_free;
pub mod device;
pub mod handover;
mod ledger;
pub mod mapping;
mod park;
pub mod peers;
mod pieces;
pub mod places;
mod poison;
pub mod regions;
pub mod streams;

pub use ledger::Ledger;
pub use park::Parker;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
