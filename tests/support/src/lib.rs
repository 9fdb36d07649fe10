//! Supports tests of all crates.

mod child;
mod launchers;
mod not_covered;
mod port;
mod stopwatch;

pub use child::ends_in_child;
pub use launchers::LAUNCHER_VARIABLES;
pub use not_covered::not_covered;
pub use port::ReservedPort;
pub use stopwatch::{Elapsed, Stopwatch};
