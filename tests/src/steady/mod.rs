//! Counts what a process does in the steady state, when all of its other threads sleep.

mod counting;
mod rest;

pub use counting::{Counting, Counts};
pub use rest::come_to_rest;
