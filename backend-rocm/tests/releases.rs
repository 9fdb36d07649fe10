//! Tests discovery with the real libraries of several releases, on a machine without a GPU.

use std::path::Path;
use std::process::ExitCode;

use libtest_mimic::{Failed, Trial};
use peerlane_hal::Error as _;

#[path = "support/releases.rs"]
mod releases;

use releases::Release;

fn main() -> ExitCode {
    releases::run(&[("discover", print_discovery)], |release| {
        let release = release.clone();
        let name = format!("ROCm {}: without a GPU the error says what is missing", release.name);
        // What a machine without a GPU reports cannot be seen where there is one.
        let is_ignored = Path::new("/dev/kfd").exists();
        vec![Trial::test(name, move || no_gpu(&release)).with_ignored_flag(is_ignored)]
    })
}

/// Runs in a process with the libraries of a release.
fn print_discovery() {
    match peerlane_rocm::discover() {
        Ok(devices) => println!("{} devices", devices.len()),
        Err(error) => println!("{}: {error}", error.kind()),
    }
}

fn no_gpu(release: &Release) -> Result<(), Failed> {
    let printed = release.run_task("discover", &[])?;
    let (begin, end) = (
        format!("unavailable: cannot start HIP {}.", release.name),
        "): hipInit failed: hipErrorNoDevice (100), no ROCm-capable device is detected; /dev/kfd \
         does not exist; check that the machine has an AMD GPU and that the kernel module amdgpu \
         is loaded (containers: --device=/dev/kfd --device=/dev/dri)\n",
    );
    assert!(printed.starts_with(&begin), "{printed}");
    assert!(printed.ends_with(end), "{printed}");
    assert!(printed.contains(&format!("/libamdhip64.so.{}.", release.name)), "{printed}");
    Ok(())
}
