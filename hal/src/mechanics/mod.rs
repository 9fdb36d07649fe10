//! What every backend does alike, once: counting tickets, cutting copies at a limit, staying
//! poisoned after the first error, and, with the feature `handover`, handing memory to other
//! processes and memory of the host that they map.

#[cfg(feature = "handover")]
pub mod handover;
mod ledger;
#[cfg(feature = "handover")]
pub mod mapping;
mod pieces;
mod poison;

pub use ledger::Ledger;
pub use pieces::{Piece, pieces};
pub use poison::Poison;
