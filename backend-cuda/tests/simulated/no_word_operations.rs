//! Tests a device without 64-bit memory operations.

use peerlane_cuda::{Fabric, Options, SignalBy};
use peerlane_hal::{Error as _, ErrorKind, Fabric as _, Rank};
use peerlane_simulated_driver::in_own_process;

use crate::streams::failure::alone;
use crate::support::driver;

/// Without them an engine cannot be created, unless signals are copies.
#[test]
fn a_device_without_memory_operations_is_reported() {
    in_own_process(|| {
        let (driver, _turn) = driver();
        let fabric = alone(0);
        driver.set("WORDS_64", "off");
        let error = fabric
            .engine(Default::default())
            .expect_err("does not support 64-bit memory operations");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.to_string().contains("64-bit memory operations"), "{error}");

        driver.set("WORDS_64", "on");
        let forced = Options { signal: Some(SignalBy::Copy), ..Options::default() };
        Fabric::open_with(Rank(0), 1, forced).unwrap().engine(Default::default()).unwrap();
    });
}
