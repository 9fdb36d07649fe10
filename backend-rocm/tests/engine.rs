//! The engine of streams on the simulated driver: what every such engine is tested by, and what a start
//! costs.

#[path = "engine/backend.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod backend;
#[path = "engine/calls.rs"]
mod calls;
#[path = "../../hal/toolkit/tests/streams/mod.rs"]
mod shared;
mod support;

/// What is installed.
const RELEASE: &str = "7.2";
