//! The Rust side: for tests that run a backend on the simulated driver.

mod control;
mod library;
mod patch;

pub use control::{Driver, install, install_from};
pub use library::{library, library_folder, without_symbols};
