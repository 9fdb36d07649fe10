//! Tests the engine on the simulated driver: the tests shared by all stream engines, and the cost of a start.

#[path = "backend.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod backend;
mod calls;
#[path = "../../../hal/toolkit/tests/streams/mod.rs"]
mod shared;
#[path = "../support/mod.rs"]
mod support;
