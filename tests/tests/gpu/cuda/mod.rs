//! Wraps CUDA as the user of a rank calls it: memory, streams and graphs, through cudarc.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

pub(crate) mod gpu;
pub(crate) mod memory;
pub(crate) mod segments;
pub(crate) mod stream;

use std::path::PathBuf;

pub(crate) use peerlane_cuda::{Context, Fabric, Local, Options};

use peerlane::Element;
use peerlane::group::OperationBuilder;
use peerlane_tests::GpuDriver;

use crate::support::machine::Machine;

/// Whether the engines run reductions.
pub(crate) const REDUCES: bool = true;

/// Returns whether the tests of these engines also show what all vendors have in common.
pub(crate) fn shows_all(_: GpuDriver, _: &str) -> bool {
    true
}

/// The kinds of engines that there are.
pub(crate) const ENGINES: &[&str] = &["streams"];

/// The kind of engines that make fused starts, which the driver lets a device have for itself only.
pub(crate) const FUSED: Option<&str> = Some("kernels");

/// Has copy engines execute an operation whose starts could be fused.
pub(crate) fn on_streams<T: Element>(builder: OperationBuilder<'_, T>) -> OperationBuilder<'_, T> {
    builder.engine("streams")
}

/// Why there are no such engines here.
pub(crate) fn missing_engine(_: &str) -> Option<String> {
    None
}

/// Machines of this vendor on which the engine goes other ways.
pub(crate) const MACHINES: &[Machine] =
    &[Machine::With("COPY_ENGINES", "2"), Machine::Without("cuStreamBatchMemOp_v2")];

/// How many devices there are.
pub(crate) fn devices() -> usize {
    peerlane_cuda::discover().map_or(0, |devices| devices.len())
}

/// How ranks open the fabric.
pub(crate) fn options(device: u32) -> Options {
    Options { device, ..Options::default() }
}

/// A folder with a simulated driver that lacks a symbol.
pub(crate) fn folder_without(symbol: &'static str) -> PathBuf {
    peerlane_simulated_driver::without_symbols(&[symbol])
}
