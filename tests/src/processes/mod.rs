//! Runs ranks as processes: a test program starts itself again for each rank.
//!
//! A rank and the program that started it exchange lines: the rank prints what it does on its
//! standard output, and may wait for an answer on its standard input. So the parent knows which
//! step a rank has reached when it kills it. A rank ends with its parent.

mod child;
mod gated;
mod leftovers;
pub mod nodes;
mod parent;

pub use child::{Child, finish_all};
pub use gated::{Gated, LEAVE};
pub use leftovers::{leftovers, named_files};
pub use parent::Parent;

/// Returns bytes as the text of a line.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the bytes of a text that [`hex`] has made.
///
/// # Panics
/// If the text is another one.
pub fn unhex(text: &str) -> Vec<u8> {
    let digits = |at| u8::from_str_radix(&text[at..at + 2], 16).expect("hex");
    (0..text.len()).step_by(2).map(digits).collect()
}
