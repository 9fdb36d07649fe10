//! Starts operations on a caller's stream: order, leases, graphs, and progress without calls of the
//! host.
//!
//! The streams are threads over the host backend, so that the tests run without a device.

#[path = "streams/support.rs"]
mod support;

#[path = "streams/beside.rs"]
mod beside;
#[path = "streams/capture.rs"]
mod capture;
#[path = "streams/order.rs"]
mod order;
#[path = "streams/overdue.rs"]
mod overdue;
#[path = "streams/refused.rs"]
mod refused;
#[path = "streams/windows.rs"]
mod windows;
