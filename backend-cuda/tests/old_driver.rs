//! Tests a driver without batched memory operations.
//!
//! A process can load only one driver, so this is a separate test program.

#[path = "engine/backend.rs"]
#[allow(dead_code, unused_imports, reason = "each test program uses a part")]
mod backend;
mod support;
#[path = "../../hal/toolkit/tests/streams/word_by_word.rs"]
mod word_by_word;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod world;

use peerlane_simulated_driver::{Driver, install_from, without_symbols};

fn driver() -> (Driver, ()) {
    let symbols =
        ["cuStreamBatchMemOp_v2", "cuStreamCreateWithPriority", "cuStreamGetCaptureInfo_v2"];
    (install_from(&without_symbols(&symbols)), ())
}
