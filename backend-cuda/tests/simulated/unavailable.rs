//! Tests drivers that are missing, too old, or do not start.

use std::path::Path;

use peerlane_hal::Error as _;
use peerlane_simulated_driver::{Other, tell};

/// The other process: reports what it discovers.
#[test]
#[ignore = "started by the other tests of this file"]
fn discoverer() {
    let text = match peerlane_cuda::discover() {
        Ok(devices) => format!("{} devices", devices.len()),
        Err(error @ peerlane_cuda::Error::Absent { .. }) => format!("absent: {error}"),
        Err(error) => format!("{}: {error}", error.kind()),
    };
    tell(text.as_bytes());
}

fn discover(folder: &Path, variables: &[(&str, &str)]) -> String {
    let folder = folder.to_str().expect("cargo's folders are texts");
    let variables = [&[("LD_LIBRARY_PATH", folder)], variables].concat();
    let mut other = Other::start("unavailable::discoverer", &variables);
    let text = other.hear_text();
    other.end();
    text
}

#[test]
fn a_complete_driver_is_found() {
    let folder = peerlane_simulated_driver::library_folder();
    assert_eq!(discover(&folder, &[]), "4 devices");
    assert_eq!(discover(&folder, &[("CUDA_VISIBLE_DEVICES", "2")]), "1 devices");
}

#[test]
fn an_old_driver_is_reported() {
    let folder = peerlane_simulated_driver::without_symbols(&["cuStreamGetCtx"]);
    assert_eq!(
        discover(&folder, &[]),
        "unavailable: libcuda.so.1 has no function cuStreamGetCtx: the driver is too old, expected \
         CUDA 12.0, NVIDIA driver 525, or newer"
    );
}

#[test]
fn optional_functions_may_be_missing() {
    let folder = peerlane_simulated_driver::without_symbols(&["cuMemCreate"]);
    assert_eq!(discover(&folder, &[]), "4 devices");
}

#[test]
fn a_driver_that_does_not_start_is_reported_with_advice() {
    let folder = peerlane_simulated_driver::library_folder();
    for (code, kind, expected) in [
        (34, "absent", "remove the folder of the stub from LD_LIBRARY_PATH"),
        (803, "unavailable", "load the new module, or restart the machine"),
        (999, "unavailable", "run nvidia-smi to check whether the driver works"),
        (31415, "unavailable", "unknown result code 31415"),
    ] {
        let text = discover(&folder, &[("PEERLANE_SIM_FAIL", &format!("cuInit:0:{code}"))]);
        let begin = format!("{kind}: cannot start the CUDA driver: cuInit failed: ");
        assert!(text.starts_with(&begin), "{text}");
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn no_visible_device_is_reported_with_the_variable() {
    let folder = peerlane_simulated_driver::library_folder();
    for (variable, value, expected) in [
        ("PEERLANE_SIM_DEVICES", "0", "sees no NVIDIA GPU; CUDA_VISIBLE_DEVICES is "),
        ("CUDA_VISIBLE_DEVICES", "", "sees no NVIDIA GPU; CUDA_VISIBLE_DEVICES is \"\""),
    ] {
        let text = discover(&folder, &[(variable, value)]);
        assert!(text.starts_with("absent: ") && text.contains(expected), "{text}");
    }
}

#[test]
fn a_missing_driver_is_reported_with_advice() {
    // An empty file of that name hides the real library, which may be installed.
    let folder = peerlane_simulated_driver::library_folder().with_file_name("empty");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libcuda.so.1"), b"").unwrap();
    let text = discover(&folder, &[]);
    assert!(text.starts_with("unavailable: cannot load libcuda.so.1: "), "{text}");
    assert!(text.contains("install the NVIDIA driver"), "{text}");
}
