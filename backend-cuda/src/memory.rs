//! Registration, export and import.
//!
//! What goes here: device memory, whether allocated here or the caller's own. Expandable
//! allocations have several segments, and each of them is exported. A fabric handle is probed by
//! allocating and exporting, because the device attribute may say yes where the allocation is
//! refused.

/// Makes memory reachable over CUDA; there is no value of it yet.
#[derive(Debug)]
pub enum Memory {}

/// Registered memory of this rank; there is no value of it yet.
#[derive(Debug)]
pub enum Local {}

/// Imported memory of a peer; there is no value of it yet.
#[derive(Debug)]
pub enum Remote {}
