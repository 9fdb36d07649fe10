//! Opens fabrics with drivers that are missing, too old or do not start, and with devices that are
//! missing or in use.

use peerlane_tests::{Failure, GpuDriver, Outcome};

use crate::faults::Fault;
use crate::faults::opener::{let_go, no_library, opener, refused};
use crate::faults::processes::patience;

pub(crate) fn faults() -> Vec<Fault> {
    vec![
        Fault::new("no_driver", |driver| {
            let holds = ["libcuda.so.1", "NVIDIA driver", "backend host"];
            no_library(driver, "libcuda.so.1", "unavailable: cannot load ", &holds)
        }),
        Fault::new("no_visible_device", |driver| {
            let player = opener(driver, 0)?.variable("CUDA_VISIBLE_DEVICES", "");
            refused(player, "unavailable: ", &["no NVIDIA GPU", "CUDA_VISIBLE_DEVICES is \"\""])
        }),
        Fault::new("no_such_device", |driver| {
            refused(opener(driver, 99)?, "invalid argument: ", &["99", "does not exist"])
        }),
        Fault::simulated("no_device", |driver| {
            let player = opener(driver, 0)?.variable("PEERLANE_SIM_DEVICES", "0");
            refused(player, "unavailable: ", &["no NVIDIA GPU", "CUDA_VISIBLE_DEVICES is not set"])
        }),
        Fault::simulated("old_driver", |driver| {
            let folder = peerlane_simulated_driver::without_symbols(&["cuStreamIsCapturing"]);
            let holds = ["has no function cuStreamIsCapturing", "too old", "CUDA 12.0"];
            refused(opener(driver, 0)?.driver_from(folder), "unavailable: ", &holds)
        }),
        Fault::simulated("driver_does_not_start", |driver| {
            let player = opener(driver, 0)?.variable("PEERLANE_SIM_FAIL", "cuInit:0:9999");
            refused(player, "unavailable: ", &["cuInit", "9999"])
        }),
        Fault::simulated("exclusive_device", |driver| taken(driver, "exclusive")),
        Fault::simulated("prohibited_device", |driver| {
            let player = opener(driver, 1)?.variable("PEERLANE_SIM_COMPUTE_MODE", "prohibited");
            refused(player, "unavailable: ", &["device 1 (", "prohibited"])
        }),
    ]
}

/// Two processes want a device that takes one.
fn taken(driver: GpuDriver, mode: &str) -> Outcome {
    let machine = format!("taken-{}", std::process::id());
    let player = || {
        let player = opener(driver, 2)?.variable("PEERLANE_SIM_COMPUTE_MODE", mode);
        Ok::<_, Failure>(player.variable("PEERLANE_SIM_MACHINE", &machine))
    };
    let mut first = player()?.start()?;
    first.expect("opened device 2", patience())?;
    refused(player()?, "unavailable: ", &["device 2 (", "exclusive compute mode"])?;
    let_go(first)?;
    // It is free again.
    let mut third = player()?.start()?;
    third.expect("opened device 2", patience())?;
    let_go(third)
}
