//! Tests the engine on the simulated driver: the tests shared by all stream engines, and the cost of a start.

#[path = "engine/backend.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod backend;
#[path = "engine/calls.rs"]
mod calls;
#[path = "../../hal/toolkit/tests/streams/mod.rs"]
mod shared;
mod support;
