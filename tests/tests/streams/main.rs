//! Starts operations on a caller's stream: order, leases, graphs, and progress without calls of the
//! host.
//!
//! The streams are threads over the host backend, so that the tests run without a device.

mod support;

mod beside;
mod capture;
mod channels;
mod counts;
mod handles;
mod immediate;
mod order;
mod overdue;
mod refused;
mod windows;
