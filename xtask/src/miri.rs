//! `cargo xtask miri`: interprets unit tests with Miri, which finds undefined behaviour, data races
//! and leaks.
//!
//! Code runs a thousand times slower under Miri, which supports few system calls. It therefore runs
//! only the unit tests of libraries that need no device, without those of [`LEFT_OUT`].

use std::process::Command;

use crate::deps::Verdict;
use peerlane_rxe_vm::process::{self, Outcome};

/// The nightly Rust whose Miri runs the tests. `.ci/run` reads it here and installs it.
const TOOLCHAIN: &str = "nightly-2026-03-15";

/// The folder of the standard libraries that Miri interprets, each of which is built once.
const SYSROOTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/miri-sysroot");

/// The options of Miri. Calls that would leave the interpreter, such as opening a file, return an
/// error. Insta looks for its settings in a folder that cannot be opened, because Miri starts no
/// process that would tell the folder of the workspace.
const FLAGS: &str = "-Zmiri-isolation-error=hide -Zmiri-env-set=INSTA_WORKSPACE_ROOT=/";

/// The packages whose unit tests run. That of the plans forbids unsafe code and starts no threads,
/// so there is nothing to find.
const PACKAGES: [&str; 4] =
    ["peerlane-hal", "peerlane-toolkit", "peerlane-collectives", "peerlane-capi"];

/// Lists the tests that Miri does not run: the package, the test or a module with its `::`, and the
/// reason.
const LEFT_OUT: [(&str, &str, &str); 14] = [
    ("peerlane-capi", "handle::tests::no_handle_is_given_twice", LONG),
    ("peerlane-hal", "reduction::tests::f16_and_bf16_are_converted_as_by_the_crate_half", LONG),
    (
        "peerlane-hal",
        "reduction::tests::every_type_and_operator_gives_the_bits_of_a_plain_loop",
        LONG,
    ),
    ("peerlane-toolkit", "deferred_free::", "Miri refuses threads that end with the process"),
    ("peerlane-toolkit", "per_process::", "Miri cannot fork"),
    (
        "peerlane-toolkit",
        "fault::tests::errors_name_the_peer_and_the_reason",
        "Miri does not know the texts of all system errors",
    ),
    ("peerlane-toolkit", "fused::tests::other_programs_are_refused", LONG),
    ("peerlane-toolkit", "handover::", "sockets and files"),
    ("peerlane-toolkit", "limits::", "files, and limits of the process"),
    ("peerlane-toolkit", "mapping::", "memfd and shared mappings"),
    ("peerlane-toolkit", "peers::address::", "files"),
    ("peerlane-toolkit", "regions::key::tests::no_change_of_a_byte_panics", LONG),
    ("peerlane-collectives", "group::", "no planning; needs a backend"),
    ("peerlane-collectives", "run::", "no planning; needs a backend"),
];
const LONG: &str = "takes more than half a minute under Miri";

/// Runs the tests, or skips them where the toolchain is not installed.
pub(crate) fn run() -> Outcome<Verdict> {
    if !process::answers(&mut miri(["--version"])) {
        let why = format!(
            "to run it: rustup toolchain install {TOOLCHAIN} --profile minimal --component miri --component rust-src"
        );
        return Ok(Verdict::Skipped(why));
    }
    process::output(&mut miri(["setup", "--print-sysroot"]))?;
    process::run(&mut tests())?;
    for (package, name, reason) in LEFT_OUT {
        println!("not run: {package} {name}: {reason}");
    }
    Ok(Verdict::Passed)
}

/// Returns the command that runs the tests.
fn tests() -> Command {
    let mut command = miri(["test", "--locked", "--no-fail-fast", "--lib"]);
    command.args(PACKAGES.iter().flat_map(|package| ["--package", package])).arg("--");
    command.args(LEFT_OUT.iter().flat_map(|(_, name, _)| ["--skip", name]));
    command
}

/// Returns a `cargo miri` command of the toolchain.
fn miri<const N: usize>(arguments: [&str; N]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN, "cargo", "miri"]).args(arguments);
    command.env("MIRI_SYSROOT", format!("{SYSROOTS}/{TOOLCHAIN}"));
    command.env("MIRIFLAGS", FLAGS).env_remove("RUSTC").env_remove("CARGO");
    command
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;
    use crate::workspace;

    #[test]
    fn the_command_names_packages_and_what_is_left_out() {
        let line = process::line(&tests());
        let begin = "rustup run nightly-2026-03-15 cargo miri test --locked --no-fail-fast --lib \
                     --package peerlane-hal --package peerlane-toolkit";
        assert!(line.starts_with(begin), "{line}");
        assert!(
            line.contains(" --package peerlane-capi -- --skip handle::tests::no_handle"),
            "{line}"
        );
        assert!(line.ends_with(" --skip group:: --skip run::"), "{line}");
    }

    #[test]
    fn the_script_of_the_gate_finds_the_toolchain() {
        let line = format!("const TOOLCHAIN: &str = \"{TOOLCHAIN}\";");
        assert_eq!(include_str!("miri.rs").lines().filter(|found| *found == line).count(), 1);
        let script = include_str!("../../.ci/run");
        assert!(
            script.contains(r#"'s/^const TOOLCHAIN: &str = "\(.*\)";$/\1/p' xtask/src/miri.rs"#)
        );
    }

    #[test]
    fn what_is_left_out_exists() {
        let metadata = workspace::members().unwrap();
        let sources = |name: &str| -> PathBuf {
            let package = metadata.packages.iter().find(|package| package.name.as_str() == name);
            let manifest = &package.unwrap_or_else(|| panic!("no package {name}")).manifest_path;
            manifest.with_file_name("src").into()
        };
        for package in PACKAGES {
            assert!(sources(package).is_dir(), "{package}");
        }
        for (package, name, _) in LEFT_OUT {
            assert!(PACKAGES.contains(&package), "{package} has no tests under Miri");
            assert!(exists(&sources(package), name), "{package} has no test or module {name}");
        }
        let hal = sources("peerlane-hal");
        for missing in
            ["wire::tests::what_was_lost", "wires::tests::what_was_written_is_read", "wires::"]
        {
            assert!(!exists(&hal, missing), "{missing}");
        }
        assert!(exists(&hal, "wire::tests::what_was_written_is_read"));
    }

    /// Returns whether the sources have a test, or a module if the name ends with `::`.
    fn exists(sources: &Path, name: &str) -> bool {
        let (module, test) = name.rsplit_once("::").expect("a module");
        let module = module.strip_suffix("::tests").unwrap_or(module).replace("::", "/");
        let files = ["", "/mod", "/tests"].map(|file| format!("{module}{file}.rs"));
        let texts = files.iter().filter_map(|file| fs::read_to_string(sources.join(file)).ok());
        let text: String = texts.collect();
        match test {
            "" => !text.is_empty(),
            _ => {
                let begin = format!("fn {test}() {{");
                text.split("#[test]\n").skip(1).any(|one| one.trim_start().starts_with(&begin))
            }
        }
    }
}
