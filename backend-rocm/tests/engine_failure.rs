//! Tests engines over streams whose runtime fails.

#[path = "support/backend.rs"]
#[allow(dead_code, unused_imports, reason = "this program uses a part of it")]
mod backend;
#[path = "../../hal/toolkit/tests/streams/failure.rs"]
#[allow(dead_code, reason = "this program uses a part of it")]
mod failure;
mod support;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "this program uses a part of it")]
mod world;

/// Release of ROCm that is emulated.
const RELEASE: &str = "7.2";
