//! Names the error of the host backend.

/// The toolkit's error: the host backend calls no driver that has errors of its own.
pub type Error = peerlane_toolkit::Fault;
