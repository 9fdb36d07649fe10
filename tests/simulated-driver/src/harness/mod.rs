//! Installs and controls the simulated driver, for tests that run a backend on it.

mod control;
mod library;
mod mesh;
mod other;
mod patch;
mod rocm;

pub use control::{Driver, install, install_all, install_from};
pub use library::{library, library_folder, without_symbols};
pub use mesh::{await_arrival, connected, flag_value};
pub use other::{Other, hear, in_own_process, tell};
pub use rocm::{Rocm, folder_of_all};
