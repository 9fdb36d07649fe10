//! Wraps HIP as the user of a rank calls it: memory, streams and graphs.

#![allow(dead_code, unused_imports, reason = "each test program uses a part")]

pub(crate) mod gpu;
pub(crate) mod memory;
pub(crate) mod segments;
pub(crate) mod stream;

use std::path::PathBuf;

use peerlane::Element;
use peerlane::group::OperationBuilder;
pub(crate) use peerlane_rocm::{Context, EngineKind, Fabric, Local, Options};
use peerlane_simulated_driver::Rocm;
use peerlane_tests::GpuDriver;

use crate::support::machine::Machine;

/// The kind of engines that make fused starts.
pub(crate) const FUSED: Option<&str> = None;

/// Returns the operation as it is, because no starts are fused.
pub(crate) fn on_streams<T: Element>(builder: OperationBuilder<'_, T>) -> OperationBuilder<'_, T> {
    builder
}

/// Whether the engines run reductions.
pub(crate) const REDUCES: bool = false;

/// Returns whether the tests of these engines also show what all vendors have in common. On the simulated driver,
/// streams of CUDA do.
pub(crate) fn shows_all(driver: GpuDriver, engine: &str) -> bool {
    driver == GpuDriver::Device || engine != "streams"
}

/// The kinds of engines that there are.
pub(crate) const ENGINES: &[&str] = &["streams", "sdma"];

/// Why there are no such engines here.
pub(crate) fn missing_engine(engine: &str) -> Option<String> {
    let runtimes = peerlane_rocm::runtimes().ok().filter(|_| engine == "sdma")?;
    runtimes.hsa.err()
}

/// Which of them a rank has; streams unless it is told.
const KIND: &str = "PEERLANE_TEST_ENGINE";

/// Machines of this vendor on which the engine goes other ways.
pub(crate) const MACHINES: &[Machine] = &[
    // What runtimes got wrong: copies without compute units that copy nothing, or are not there, and
    // batches of memory operations that run in parallel.
    Machine::With("NO_CU", "drop"),
    Machine::With("NO_CU", "refuse"),
    Machine::With("BATCH_ORDER", "parallel"),
    Machine::With("HIP_ORDER", "reversed"),
    Machine::Without("hipStreamBatchMemOp"),
    Machine::Release("6.4"),
    Machine::Release("6.1"),
    Machine::Release("5.7"),
];

/// How many devices there are.
pub(crate) fn devices() -> usize {
    peerlane_rocm::discover().map_or(0, |devices| devices.len())
}

/// How ranks open the fabric.
pub(crate) fn options(device: u32) -> Options {
    let engine = match std::env::var(KIND).as_deref() {
        Ok("sdma") => EngineKind::Sdma,
        _ => EngineKind::Streams,
    };
    Options { device, engine, ..Options::default() }
}

/// A folder with a simulated installation that lacks a symbol.
pub(crate) fn folder_without(symbol: &'static str) -> PathBuf {
    Rocm::release("7.2").without(&[symbol]).folder()
}
