//! The way to reach peers.
//!
//! What goes here: one port of one card. The link's rate comes from `ibv_query_port` and is
//! reported in [`Link`](peerlane_hal::Link).

/// What peers are reached through; there is no value of it yet.
#[derive(Debug)]
pub enum Fabric {}
