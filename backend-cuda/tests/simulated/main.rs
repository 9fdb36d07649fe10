//! Tests the backend on the simulated driver: memory, processes, and its engine, also with the tests that all
//! engines over streams share.
//!
//! The devices of a process keep what a test did to them: what was tried once, a broken context, a library that
//! is loaded. A test that depends on this or leaves it behind runs in a process of its own.

mod backend;
mod calls;
mod capture_refused;
mod fused;
mod host_flags;
#[cfg(feature = "cudarc")]
mod interop;
mod memory;
mod no_word_operations;
mod processes;
mod reductions;
mod staged;
#[path = "../../../hal/toolkit/tests/streams/mod.rs"]
mod streams;
mod support;
mod unavailable;
