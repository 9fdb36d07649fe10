//! The parts that Peerlane backends share.
//!
//! | part | serves | holds |
//! | --- | --- | --- |
//! | [`Ledger`], [`pieces`], [`Poison`], [`Parker`] | any engine | tickets that finish out of order, copies split at a limit, the first error, parking |
//! | [`handover`], [`mapping`] | backends whose ranks are processes of one host | file descriptors over a socket, mapped host memory |
//! | [`device`] | GPUs with in-order queues, events and waits for 64-bit words | the driver calls, as traits |
//! | [`streams`] | the same | the engine on streams |
//! | [`regions`] | the same | registration, export, import and keys of memory |
//! | [`peers`] | the same | the fabric of one host |
//! | [`places`] | engines that resolve ops to addresses | checks of ops against their regions |
//!
//! ```
//! use peerlane_hal::Ticket;
//! use peerlane_toolkit::{Ledger, pieces};
//!
//! // A copy of 300 bytes on an engine that takes 128 at a time has three parts.
//! let mut ledger = Ledger::with_capacity(16);
//! let ticket = ledger.issue(pieces(300, 128).len() as u32);
//! ledger.finish_part(ticket);
//! ledger.finish_part(ticket);
//! assert_eq!(ledger.completed(), Ticket::NONE);
//! ledger.finish_part(ticket);
//! assert_eq!(ledger.completed(), ticket);
//! ```

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
mod retire;
pub mod streams;

pub use ledger::Ledger;
pub use park::Parker;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
