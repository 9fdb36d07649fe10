//! `cargo xtask test aarch64`: runs tests of the host backend as programs for AArch64, under QEMU.
//!
//! QEMU translates the programs and passes system calls on. So the tests show layouts, alignment,
//! atomic instructions and system calls of that architecture. On x86-64 they do not show its weaker
//! order of memory accesses, because the translated code has the order of the processor that runs
//! it; the models of loom cover that. For this and for its duration, it is no part of the gate.

use std::process::Command;

use super::programs::Program;
use super::run_programs;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";
/// The folder with the dynamic linker and the C library for AArch64.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";
/// How to install what is missing.
const INSTALL: &str = "apt install qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross";

/// Lists each package with a test program of it, and the prefixes of the names of the tests that
/// run; with no prefix, all run.
///
/// All groups would take more than 8 minutes, and those that begin processes cannot run: the kernel
/// does not know how to run a program for AArch64 that another one starts.
const PROGRAMS: [(&str, &str, &[&str]); 5] = [
    ("peerlane-hal", "--lib", &[]),
    ("peerlane-toolkit", "--lib", &[]),
    ("peerlane-host", "--lib", &[]),
    ("peerlane-collectives", "--lib", &[]),
    ("peerlane-collectives", "--test=groups", &["all_gather::", "channel::", "files::", "order::"]),
];

/// Lists the tests that do not run: the package, the test, and the reason.
const LEFT_OUT: [(&str, &str, &str); 4] = [
    (
        "peerlane-toolkit",
        "handover::exchange::tests::descriptors_that_the_kernel_drops_are_no_fault_of_the_peer",
        "QEMU does not tell that descriptors were dropped",
    ),
    (
        "peerlane-toolkit",
        "limits::process::tests::the_used_address_space_is_read",
        "QEMU keeps no limit of the address space",
    ),
    (
        "peerlane-toolkit",
        "mapping::tests::pages_on_demand_are_allocated_by_their_first_use",
        "QEMU ignores MADV_POPULATE_WRITE",
    ),
    (
        "peerlane-toolkit",
        "mapping::tests::what_cannot_be_shared_is_refused_with_what_was_expected",
        "QEMU opens the folder of the libraries in place of the root",
    ),
];

/// Runs the tests, one program after the other.
pub(super) fn run() -> Outcome {
    check()?;

    // Built first, so that the limit of a program is for its tests alone.
    for (package, selection, _) in PROGRAMS {
        process::run(test(package, selection).arg("--no-run"))?;
    }

    let programs = PROGRAMS.map(|(package, selection, names)| {
        let mut command = test(package, selection);
        let of_package = LEFT_OUT.iter().filter(|(of, _, _)| *of == package);
        command.arg("--").args(names).args(of_package.flat_map(|(_, name, _)| ["--skip", name]));
        Program::of_command(&format!("{package} {selection} for AArch64"), command)
    });
    let outcome = run_programs(programs.into(), 1);
    for (package, name, reason) in LEFT_OUT {
        println!("not run: {package} {name}: {reason}");
    }
    outcome
}

/// Checks that what the tests need is installed.
fn check() -> Outcome {
    for tool in [EMULATOR, LINKER] {
        if !process::answers(Command::new(tool).arg("--version")) {
            return Err(format!("{tool} is missing; run `{INSTALL}`").into());
        }
    }

    let mut libraries = Command::new("rustc");
    let folder = process::output(libraries.args(["--print", "target-libdir", "--target", TARGET]))?;
    if !std::path::Path::new(folder.trim()).exists() {
        return Err(
            format!("the standard library is missing; run `rustup target add {TARGET}`").into()
        );
    }
    Ok(())
}

/// Returns the command that builds and runs test programs of a package under QEMU.
fn test(package: &str, selection: &str) -> Command {
    let mut command = cargo(["test", "--target", TARGET, "--package", package, selection]);
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER);
    let runner = format!("{EMULATOR} -L {LIBRARIES}");
    command.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", runner);
    command
}
