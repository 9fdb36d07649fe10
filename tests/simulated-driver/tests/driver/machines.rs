//! Tests other machines: without devices, with hidden devices, with an older driver, in exclusive
//! use, with an invalid configuration.

use std::process::Command;

use peerlane_simulated_driver::{
    Other, hear, in_own_process, install, install_from, library_folder, tell, without_symbols,
};

use crate::api::*;

fn ask(variables: &[(&str, &str)]) -> String {
    let mut other = Other::start("machines::look", variables);
    let told = other.hear_text();
    other.end();
    told
}

/// Tells how starting went, and the buses of the devices.
#[test]
#[ignore = "started by the other tests of this file"]
fn look() {
    install();
    if let Err(code) = cuda!(cuInit(0 => u32)) {
        return tell(format!("failed {code}").as_bytes());
    }
    let (mut count, mut buses) = (0, Vec::new());
    cuda!(cuDeviceGetCount(&mut count => &mut i32)).unwrap();
    for device in 0..count {
        let mut id = [0_u8; 13];
        cuda!(cuDeviceGetPCIBusId(&mut id => &mut [u8; 13], 13 => i32, device => i32)).unwrap();
        buses.push(String::from_utf8_lossy(&id[..12]).into_owned());
    }
    tell(buses.join(" ").as_bytes());
}

#[test]
fn no_device_is_said_when_the_driver_starts() {
    assert_eq!(ask(&[("PEERLANE_SIM_DEVICES", "0")]), "failed 100");
    assert_eq!(ask(&[("CUDA_VISIBLE_DEVICES", "")]), "failed 100");
}

#[test]
fn hidden_devices_are_not_there() {
    assert_eq!(ask(&[("PEERLANE_SIM_DEVICES", "2")]), "0000:10:00.0 0000:11:00.0");
    assert_eq!(ask(&[("CUDA_VISIBLE_DEVICES", "3,1")]), "0000:13:00.0 0000:11:00.0");
    // What is no device ends the list, and a repeated one empties it.
    assert_eq!(ask(&[("CUDA_VISIBLE_DEVICES", "1,9,2")]), "0000:11:00.0");
    for none in ["-1", "2,2", "GPU-0000"] {
        assert_eq!(ask(&[("CUDA_VISIBLE_DEVICES", none)]), "failed 100", "{none}");
    }
    let uuid = "GPU-73696d75-6c61-7465-6420-677075203032";
    assert_eq!(ask(&[("CUDA_VISIBLE_DEVICES", uuid)]), "0000:12:00.0");
}

#[test]
fn a_wrong_setting_stops_the_driver() {
    assert_eq!(ask(&[("PEERLANE_SIM_COPY_ENGINES", "none")]), "failed 999");
    assert_eq!(ask(&[("PEERLANE_SIM_FAIL", "cuInit:soon")]), "failed 999");
}

#[test]
fn calls_fail_as_the_environment_says() {
    assert_eq!(ask(&[("PEERLANE_SIM_FAIL", "cuInit:0:9999")]), "failed 9999");
    assert_eq!(ask(&[("PEERLANE_SIM_FAIL", "cuMemAlloc_v2:0:2,cuInit:0:803")]), "failed 803");
}

#[test]
fn an_older_driver_lacks_symbols() {
    in_own_process(|| {
        let folder = without_symbols(&["cuMemCreate", "cuStreamBatchMemOp_v2"]);
        install_from(&folder);
        for missing in ["cuMemCreate", "cuStreamBatchMemOp_v2"] {
            assert!(symbol(missing).is_null(), "{missing} is still there");
        }
        assert!(!symbol("cuMemRelease").is_null());
        cuda!(cuInit(0 => u32)).unwrap();
    });
}

/// Takes a device, tells so, and waits to be told to go.
#[test]
#[ignore = "started by the other tests of this file"]
fn hold() {
    install();
    cuda!(cuInit(0 => u32)).unwrap();
    let mut context = 0;
    let answer = cuda!(cuDevicePrimaryCtxRetain(&mut context => &mut usize, 1 => i32));
    tell(format!("{answer:?}").as_bytes());
    hear();
}

#[test]
fn a_device_in_exclusive_use_is_not_available() {
    let machine = std::process::id().to_string();
    let variables =
        [("PEERLANE_SIM_COMPUTE_MODE", "exclusive"), ("PEERLANE_SIM_MACHINE", &*machine)];
    let mut first = Other::start("machines::hold", &variables);
    assert_eq!(first.hear_text(), "Ok(())");
    let mut second = Other::start("machines::hold", &variables);
    assert_eq!(second.hear_text(), "Err(46)");
    second.end();
    first.kill();
    let mut third = Other::start("machines::hold", &variables);
    assert_eq!(third.hear_text(), "Ok(())");
    third.end();
}

/// The dynamic linker finds the library by the environment alone; `ld.so` can say which it takes.
#[test]
fn the_library_is_found_by_other_programs() {
    let folder = library_folder();
    let library = folder.join("libcuda.so.1");
    assert!(library.exists(), "{library:?}");
    let header = std::fs::read(&library).unwrap();
    assert_eq!(&header[..4], b"\x7fELF");
    let mut command = Command::new("true");
    let status = command.env("LD_LIBRARY_PATH", &folder).env("LD_PRELOAD", "libcuda.so.1").output();
    assert!(status.unwrap().stderr.is_empty(), "the linker does not find libcuda.so.1");
}
