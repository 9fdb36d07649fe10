//! Defines the error type of the host backend.

/// The error of the host backend, which is the toolkit's because no vendor library is called.
pub type Error = peerlane_toolkit::Fault;
