//! CUDA as the owner of a rank sees it: memory, streams and graphs by the crate that users have.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

pub(crate) mod gpu;
pub(crate) mod memory;
pub(crate) mod segments;
pub(crate) mod stream;

use std::path::PathBuf;

pub(crate) use peerlane_cuda::{Context, Fabric, Local, Options};

use crate::support::machine::Machine;

/// The kinds of engines that there are.
pub(crate) const ENGINES: &[&str] = &["streams"];

/// Why there are no such engines here.
pub(crate) fn missing_engine(_: &str) -> Option<String> {
    None
}

/// Machines on which the engine goes other ways.
pub(crate) const MACHINES: &[Machine] = &[
    // Everything through memory of the host; and some of it, between two islands.
    Machine::With("P2P", "off"),
    Machine::With("P2P_ISLAND", "2"),
    // Puts that are on their way for long, and end in any order.
    Machine::With("PEER_JITTER_US", "2000"),
    Machine::With("PEER_WRITES", "drop"),
    Machine::With("COPY_ENGINES", "1"),
    Machine::With("COPY_ENGINES", "2"),
    Machine::Without("cuStreamBatchMemOp_v2"),
];

/// How ranks open the fabric.
pub(crate) fn options(device: u32) -> Options {
    Options { device, ..Options::default() }
}

/// A folder with a simulated driver that lacks a symbol.
pub(crate) fn folder_without(symbol: &'static str) -> PathBuf {
    peerlane_simulated_driver::without_symbols(&[symbol])
}
