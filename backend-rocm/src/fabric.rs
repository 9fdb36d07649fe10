//! The way to reach peers.
//!
//! What goes here: one device and the peers reached from it. XGMI or PCI Express is told by
//! `hsa_amd_agent_memory_pool_get_info` and reported as [`LinkKind`](peerlane_hal::LinkKind).

/// What peers are reached through; there is no value of it yet.
#[derive(Debug)]
pub enum Fabric {}
