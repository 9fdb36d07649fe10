//! Supports tests of all crates.

mod stopwatch;

pub use stopwatch::{Elapsed, Stopwatch};
