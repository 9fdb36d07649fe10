//! Drivers that are missing, too old or do not start, and devices that are not there or not free.

use peerlane_conformance::processes::Child;
use peerlane_conformance::{Failure, GpuDriver, Outcome};

use crate::Fault;
use crate::cast::{Player, finish, patience, says};

pub(crate) fn faults() -> Vec<Fault> {
    vec![
        Fault::new("no_driver", no_driver),
        Fault::new("no_visible_device", |driver| {
            let player = opener(driver, 0)?.variable("CUDA_VISIBLE_DEVICES", "");
            refused(player, "unavailable: ", &["no NVIDIA GPU", "CUDA_VISIBLE_DEVICES is \"\""])
        }),
        Fault::new("no_such_device", |driver| {
            refused(opener(driver, 99)?, "invalid argument: ", &["99", "less than"])
        }),
        Fault::simulated("no_device", |driver| {
            let player = opener(driver, 0)?.variable("PEERLANE_SIM_DEVICES", "0");
            refused(player, "unavailable: ", &["no NVIDIA GPU", "CUDA_VISIBLE_DEVICES is not set"])
        }),
        Fault::simulated("old_driver", |driver| {
            let folder = peerlane_simulated_driver::without_symbols(&["cuStreamIsCapturing"]);
            let holds = ["has no cuStreamIsCapturing", "too old", "CUDA 12.0"];
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

fn opener(driver: GpuDriver, device: u32) -> Outcome<Player> {
    Ok(Player::new(driver, "open")?.value("DEVICE", device))
}

fn refused(player: Player, begins: &str, holds: &[&str]) -> Outcome {
    let mut child = player.start()?;
    let text = child.hear(patience())?;
    says("the process", &text, begins, holds)?;
    let_go(child)
}

fn let_go(mut child: Child) -> Outcome {
    child.tell("enough")?;
    finish(vec![child])
}

/// A file of the library's name that is none stands for a library that is missing, which would be
/// looked for further on.
fn no_driver(driver: GpuDriver) -> Outcome {
    let folder = std::env::temp_dir().join(format!("peerlane-no-driver-{}", std::process::id()));
    let made = std::fs::create_dir_all(&folder);
    made.and_then(|()| std::fs::write(folder.join("libcuda.so.1"), b""))
        .map_err(|error| Failure::new(format!("{folder:?}: {error}")))?;
    let player = opener(driver, 0)?.driver_from(&folder);
    let holds = ["libcuda.so.1", "NVIDIA driver", "backend host"];
    let outcome = refused(player, "unavailable: cannot load ", &holds);
    let _ = std::fs::remove_dir_all(&folder);
    outcome
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
