//! Supports tests of all crates.

mod launchers;
mod not_covered;
mod stopwatch;

pub use launchers::LAUNCHER_VARIABLES;
pub use not_covered::not_covered;
pub use stopwatch::{Elapsed, Stopwatch};
