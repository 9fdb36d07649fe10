//! Tests the backend on the simulated driver: memory, processes, releases, faults of runtimes, and its engine over
//! streams, also with the tests that all such engines share.
//!
//! A process loads one release of ROCm, and its devices keep what a test did to them. A test that needs another
//! release or depends on what was tried on a device runs in a process of its own.

mod backend;
mod calls;
mod descriptors;
mod mapped;
mod memory;
mod old_release;
mod processes;
mod runtime_faults;
#[path = "../../../hal/toolkit/tests/streams/mod.rs"]
mod streams;
mod support;
mod unavailable;
