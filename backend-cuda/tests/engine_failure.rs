//! Tests engines whose driver fails.

#[path = "engine/backend.rs"]
#[allow(dead_code, unused_imports, reason = "each test program uses a part")]
mod backend;
#[path = "../../hal/toolkit/tests/streams/failure.rs"]
mod failure;
mod support;
#[path = "../../hal/toolkit/tests/streams/world.rs"]
#[allow(dead_code, reason = "each test program uses a part")]
mod world;

use failure::{DEVICES, alone};
use peerlane_cuda::{Fabric, Options, SignalBy};
use peerlane_hal::{Error as _, ErrorKind, Fabric as _, Rank};
use support::driver;

/// Without 64-bit memory operations an engine cannot be created, unless signals are copies.
#[test]
fn a_device_without_memory_operations_is_reported() {
    let (driver, _turn) = driver();
    driver.set("DEVICES", DEVICES);
    let fabric = alone(0);
    driver.set("WORDS_64", "off");
    let error =
        fabric.engine(Default::default()).expect_err("does not support 64-bit memory operations");
    driver.set("WORDS_64", "on");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("64-bit memory operations"), "{error}");
    let forced = Options { signal: Some(SignalBy::Copy), ..Options::default() };
    Fabric::open_with(Rank(0), 1, forced).unwrap().engine(Default::default()).unwrap();
}
