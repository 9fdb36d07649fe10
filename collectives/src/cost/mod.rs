//! What a plan costs: time, bytes, flags and memory, predicted from the rates of the links.

mod links;

pub use links::{Link, Links, Node, Reach, picoseconds, transfer_picoseconds};
