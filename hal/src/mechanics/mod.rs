//! What every backend does alike, once: counting tickets, cutting copies at a limit, staying
//! poisoned after the first error, and, with the feature `handover`, handing memory to other
//! processes and memory of the host that they map.
//!
//! With it comes what drivers of accelerators do alike: `device` has their calls, `streams` the engine
//! that is made of their streams, `regions` what memory becomes, `peers` how ranks of one host reach it.

#[cfg(feature = "handover")]
pub mod device;
#[cfg(feature = "handover")]
pub mod handover;
mod ledger;
#[cfg(feature = "handover")]
pub mod mapping;
mod park;
#[cfg(feature = "handover")]
pub mod peers;
mod pieces;
#[cfg(feature = "handover")]
pub mod places;
mod poison;
#[cfg(feature = "handover")]
pub mod regions;
#[cfg(feature = "handover")]
mod retire;
#[cfg(feature = "handover")]
pub mod streams;

pub use ledger::Ledger;
pub use park::Parker;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
