//! Tests the oldest release: without batched memory operations, and without copies that use no compute
//! units.
//!
//! A process can load only one release, so this is a separate program.

#[path = "support/backend.rs"]
#[allow(dead_code, unused_imports, reason = "this program uses a part of it")]
mod backend;
mod support;
#[path = "../../hal/toolkit/tests/streams/word_by_word.rs"]
mod word_by_word;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "this program uses a part of it")]
mod world;

use backend::driver;

/// Release of ROCm that is emulated.
const RELEASE: &str = "5.7";
