//! Tests missing, old, mixed and broken runtimes, and devices that are hidden or have another order.

use std::path::Path;

use peerlane_hal::Error as _;
use peerlane_simulated_driver::{Other, Rocm, tell};

/// Runs in the other process: reports the devices and the version mismatch that it finds.
#[test]
#[ignore = "started by the other tests of this file"]
fn discoverer() {
    let text = match peerlane_rocm::discover() {
        Ok(devices) => {
            let matched = |device| match peerlane_rocm::agent(device) {
                Ok(agent) if agent.pci == device.pci => format!("{} matched", device.pci),
                Ok(agent) => format!("{} is not {}", device.pci, agent.pci),
                Err(error) => format!("{}: {error}", error.kind()),
            };
            devices.iter().map(matched).collect::<Vec<_>>().join(", ")
        }
        Err(error @ peerlane_rocm::Error::Absent { .. }) => format!("absent: {error}"),
        Err(error) => format!("{}: {error}", error.kind()),
    };
    let mismatch = peerlane_rocm::runtimes().ok().and_then(|runtimes| runtimes.mismatch());
    tell([text, mismatch.unwrap_or_default()].join("\n").trim_end().as_bytes());
}

fn discover_in(folder: &Path, variables: &[(&str, &str)]) -> String {
    let folder = folder.to_str().expect("the path is valid UTF-8");
    let variables = [&[("LD_LIBRARY_PATH", folder)], variables].concat();
    let mut other = Other::start("unavailable::discoverer", &variables);
    let text = other.hear_text();
    other.end();
    text
}

fn discover(rocm: &Rocm, variables: &[(&str, &str)]) -> String {
    discover_in(&rocm.folder(), variables)
}

fn addresses(text: &str) -> Vec<&str> {
    text.split(", ")
        .map(|it| it.strip_suffix(" matched").unwrap_or_else(|| panic!("{text}")))
        .collect()
}

#[test]
fn devices_are_matched_with_agents_in_any_order() {
    let rocm = Rocm::release("7.2");
    let same = discover(&rocm, &[]);
    let mut expected = addresses(&same);
    assert_eq!(expected.len(), 4);
    let reversed = discover(&rocm, &[("PEERLANE_SIM_HIP_ORDER", "reversed")]);
    expected.reverse();
    assert_eq!(addresses(&reversed), expected);
}

#[test]
fn devices_are_matched_if_others_are_hidden() {
    let rocm = Rocm::release("7.2");
    let all = discover(&rocm, &[]);
    let all = addresses(&all);
    for hidden in [
        &[("HIP_VISIBLE_DEVICES", "3,1")][..],
        &[("ROCR_VISIBLE_DEVICES", "3,1")],
        &[("ROCR_VISIBLE_DEVICES", "1,3"), ("HIP_VISIBLE_DEVICES", "1,0")],
    ] {
        let seen = discover(&rocm, hidden);
        assert_eq!(addresses(&seen), [all[3], all[1]], "{hidden:?}");
    }
}

#[test]
fn a_missing_device_is_explained() {
    let rocm = Rocm::release("6.4");
    for (variable, value) in [
        ("PEERLANE_SIM_DEVICES", "0"),
        ("PEERLANE_SIM_KFD", "missing"),
        ("PEERLANE_SIM_KFD", "denied"),
        ("HIP_VISIBLE_DEVICES", ""),
        ("PEERLANE_SIM_FAIL", "hipInit:0:101"),
    ] {
        let text = discover(&rocm, &[(variable, value)]);
        assert!(text.starts_with("absent: cannot start HIP 6.4."), "{variable}={value}: {text}");
        assert!(text.contains("libamdhip64.so.6.4."), "{text}");
        // The kernel driver of this machine, which is not simulated.
        let reason = if Path::new("/dev/kfd").exists() {
            "the kernel driver lists"
        } else {
            "/dev/kfd does not exist"
        };
        assert!(text.contains(reason), "{text}");
    }
}

#[test]
fn an_unknown_error_is_named_by_its_number() {
    let text = discover(&Rocm::release("7.2"), &[("PEERLANE_SIM_FAIL", "hipInit:0:4242")]);
    assert!(text.starts_with("unavailable: "), "{text}");
    assert!(
        text.ends_with(
            "hipInit failed: unknown result code 4242; run rocminfo to check whether the runtime \
             works"
        ),
        "{text}"
    );
}

#[test]
fn a_missing_function_names_the_file_and_the_release() {
    let rocm = Rocm::release("5.7").without(&["hipStreamGetDevice"]);
    let text = discover(&rocm, &[]);
    assert!(text.starts_with("unavailable: /"), "{text}");
    assert!(
        text.ends_with(
            "/libamdhip64.so.5.7.43482 has no function hipStreamGetDevice: the library is too old, \
             expected ROCm 5.7 or newer"
        ),
        "{text}"
    );
    let rocm = Rocm::release("6.4").without(&["hipStreamBatchMemOp"]);
    assert_eq!(addresses(&discover(&rocm, &[])).len(), 4);
}

#[test]
fn devices_are_found_without_an_hsa_runtime() {
    let text = discover(&Rocm::release("7.2").hsa(None), &[]);
    let first = text.split(", unavailable").next().unwrap();
    assert!(first.starts_with("unavailable: cannot find libhsa-runtime64.so: tried"), "{text}");
    assert!(first.ends_with("or let engines use streams"), "{text}");
}

#[test]
fn runtimes_of_two_releases_are_reported() {
    let text = discover(&Rocm::release("7.2").hsa(Some("6.1")), &[]);
    let mismatch = text.lines().nth(1).unwrap_or_else(|| panic!("{text}"));
    assert!(mismatch.starts_with("HIP (/"), "{mismatch}");
    assert!(
        mismatch.contains(") is from ROCm 7.2, but the HSA runtime (/")
            && mismatch.ends_with(") has the interface 1.4, expected 1.15 or newer"),
        "{mismatch}"
    );
    assert_eq!(discover(&Rocm::release("6.1").hsa(Some("7.2")), &[]).lines().count(), 1);
}

#[test]
fn a_missing_library_is_an_error_with_the_names_tried() {
    let text = discover_in(Path::new("/none"), &[("ROCM_PATH", "/opt/peerlane-none")]);
    assert!(
        text.starts_with(
            "absent: cannot find libamdhip64.so: tried libamdhip64.so.7, libamdhip64.so.6, \
             libamdhip64.so.5, libamdhip64.so; searched the loader's path and \
             /opt/peerlane-none/lib, /opt/rocm/lib; install ROCm 5.7 or newer"
        ),
        "{text}"
    );
}
