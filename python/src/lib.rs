//! The native module of the Python package `peerlane`: groups, windows, operations and views of
//! memory.
//!
//! The package in `peerlane/` has the interface for users. This module converts arguments, errors
//! and memory, detaches from the interpreter while a call waits, and lets Ctrl-C end every wait.

use pyo3::prelude::*;

mod arrays;
mod call;
mod group;
mod hub;
mod immediate;
mod memory;
mod operation;
mod tensors;
mod window;

#[pymodule]
mod _native {
    #[pymodule_export]
    use super::arrays::{Borrowed, buffer, from_dlpack};
    #[pymodule_export]
    use super::group::{Exchange, Goal, Group};
    #[pymodule_export]
    use super::hub::Hub;
    #[pymodule_export]
    use super::immediate::StartedCall;
    #[pymodule_export]
    use super::memory::{Memory, element_types};
    #[pymodule_export]
    use super::operation::Operation;
    #[pymodule_export]
    use super::window::Window;

    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
