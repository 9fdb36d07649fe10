//! Registration, export and import.
//!
//! What goes here: device memory, whether allocated here or the caller's own, known to HIP and to
//! HSA at the same address. An IPC handle names the base of an allocation, so the offset travels
//! beside it.

/// Makes memory reachable over ROCm; there is no value of it yet.
#[derive(Debug)]
pub enum Memory {}

/// Registered memory of this rank; there is no value of it yet.
#[derive(Debug)]
pub enum Local {}

/// Imported memory of a peer; there is no value of it yet.
#[derive(Debug)]
pub enum Remote {}
