//! Opens fabrics with runtimes that are missing, too old or do not start, with devices that are
//! missing or in use, and in containers that share nothing. Each error must name the library's file
//! and release.

use peerlane_simulated_driver::Rocm;
use peerlane_tests::{GpuDriver, Outcome};

use crate::faults::Fault;
use crate::faults::opener::{no_library, opener, refused};
use crate::faults::processes::{Player, finish, ranks, says, words};

/// Of the simulated runtime that is installed.
const FILE: &str = "/libamdhip64.so.7.2.";
const RELEASE: &str = "HIP 7.2.";

pub(crate) fn faults() -> Vec<Fault> {
    let mut faults = vec![
        Fault::new("no_driver", |driver| {
            let holds =
                ["/libamdhip64.so.7", "check that LD_LIBRARY_PATH does not mix two ROCm releases"];
            no_library(driver, "libamdhip64.so.7", "unavailable: ", &holds)
        }),
        Fault::new("no_such_device", |driver| {
            refused(opener(driver, 99)?, "invalid argument: ", &["99", "does not exist"])
        }),
        Fault::simulated("old_runtime", |driver| {
            let folder = Rocm::release("5.7").without(&["hipStreamGetDevice"]).folder();
            let holds =
                ["/libamdhip64.so.5.7.", "has no function hipStreamGetDevice", "ROCm 5.7 or newer"];
            refused(opener(driver, 0)?.driver_from(folder), "unavailable: ", &holds)
        }),
        Fault::simulated("hsa_of_an_older_release_lacks_a_function", |driver| {
            let rocm = Rocm::release("7.2").hsa(Some("6.1")).without(&["hsa_amd_signal_create"]);
            let player = opener(driver, 0)?.driver_from(rocm.folder()).value("ENGINE", "sdma");
            // The simulated runtimes are one file, which has the first one's name.
            engine_refused(
                player,
                &["/libamdhip64.so.7.2.", "has no function hsa_amd_signal_create"],
            )
        }),
        Fault::simulated("ipc_refused_in_a_container", ipc_refused),
    ];
    // What the kernel shows and what hides it; why, the text says from this machine's own kernel.
    for (name, variable, value) in [
        ("no_driver_node", "PEERLANE_SIM_KFD", "missing"),
        ("no_permission", "PEERLANE_SIM_KFD", "denied"),
        ("no_device", "PEERLANE_SIM_DEVICES", "0"),
        ("no_visible_device", "HIP_VISIBLE_DEVICES", ""),
    ] {
        faults.push(Fault::simulated(name, move |driver| {
            let player = opener(driver, 0)?.variable(variable, value);
            refused(player, "unavailable: ", &[RELEASE, FILE, "cannot start", "/dev/kfd"])
        }));
    }
    faults.push(Fault::simulated("runtime_does_not_start", |driver| {
        let player = opener(driver, 0)?.variable("PEERLANE_SIM_FAIL", "hipInit:0:9999");
        let holds = [RELEASE, FILE, "hipInit", "unknown result code 9999"];
        refused(player, "unavailable: ", &holds)
    }));
    faults
}

/// A fabric is opened, and its first engine refused.
fn engine_refused(player: Player, holds: &[&str]) -> Outcome {
    refused(player.value("ENGINES", 1), "unavailable: ", holds)
}

/// Ranks that share no memory say which runtime refused, and what containers need.
fn ipc_refused(driver: GpuDriver) -> Outcome {
    let (_hub, mut children) = ranks(driver, "gather", 2, |_, player| {
        player.variable("PEERLANE_SIM_LEGACY_IPC", "refused").variable("PEERLANE_SIM_VMM", "off")
    })?;
    let holds = [RELEASE, FILE, "--ipc=host", "hipIpcOpenMemHandle"];
    for (rank, text) in words(&mut children)?.iter().enumerate() {
        says(&format!("rank {rank}"), text, "closed: ", &holds)?;
    }
    finish(children)
}
