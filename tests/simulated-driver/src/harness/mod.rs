//! Installs and controls the simulated driver, for tests that run a backend on it.

mod control;
mod library;
mod other;
mod patch;
mod rocm;

pub use control::{Driver, install, install_from};
pub use library::{library, library_folder, without_symbols};
pub use other::{Other, hear, tell};
pub use rocm::{Rocm, folder_of_all};
