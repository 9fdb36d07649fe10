//! Ranks as processes: a test program starts itself again, once a rank.
//!
//! A rank and the program that started it speak in lines: the rank says what it does on its standard
//! output and may wait for an answer on its standard input. So the parent knows exactly where a rank
//! is when it kills it. A rank ends with its parent.

mod chapter;
mod child;
mod gated;
mod leftovers;
mod parent;

pub use chapter::hear_out;
pub use child::Child;
pub use gated::{Gated, LEAVE};
pub use leftovers::{leftovers, named_files};
pub use parent::Parent;
