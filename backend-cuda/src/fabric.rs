//! The way to reach peers.
//!
//! What goes here: one context and the peers reached from it. NVLink or PCI Express is told by
//! `cuDeviceGetP2PAttribute` and reported as [`LinkKind`](peerlane_hal::LinkKind).

/// What peers are reached through; there is no value of it yet.
#[derive(Debug)]
pub enum Fabric {}
