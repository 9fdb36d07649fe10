//! Engines whose runtime fails.

#[path = "engine/backend.rs"]
#[allow(dead_code, unused_imports, reason = "a part of it is used here")]
mod backend;
#[path = "../../hal/toolkit/tests/streams/failure.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod failure;
mod support;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod world;

/// What is installed.
const RELEASE: &str = "7.2";
