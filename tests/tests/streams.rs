//! Starts on a caller's stream: order, leases, graphs, and what happens when nobody looks.
//!
//! The streams are threads over the host backend, so that all of it runs where no device is.

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
