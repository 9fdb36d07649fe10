//! Serves the C library and the Python package: operations of any element type, reports as JSON, and the detection of forks.

mod fork;
mod operation;
mod report;

pub use fork::check_process;
pub use operation::{AnyOperation, Request};
