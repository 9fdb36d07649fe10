//! The oldest release: no batched memory operations, no copies that keep compute units free.
//!
//! A process can load only one, so this is a program of its own.

#[path = "engine/backend.rs"]
#[allow(dead_code, unused_imports, reason = "a part of it is used here")]
mod backend;
mod support;
#[path = "../../hal/toolkit/tests/streams/word_by_word.rs"]
mod word_by_word;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "a part of it is used here")]
mod world;

use backend::driver;

/// What is installed.
const RELEASE: &str = "5.7";
