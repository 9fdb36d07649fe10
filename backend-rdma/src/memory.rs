//! Registration, export and import.
//!
//! What goes here: host memory, or device memory through dma-buf. As
//! [`Role::Flags`](peerlane_hal::Role::Flags) a region also gets slots in the flag table, because
//! an immediate has 32 bits and no address.

/// Makes memory reachable over RDMA; there is no value of it yet.
#[derive(Debug)]
pub enum Memory {}

/// Registered memory of this rank; there is no value of it yet.
#[derive(Debug)]
pub enum Local {}

/// Imported memory of a peer; there is no value of it yet.
#[derive(Debug)]
pub enum Remote {}
