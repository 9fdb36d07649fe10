//! `cargo xtask deps`: checks licences, bans, advisories, and the oldest Rust that all dependencies
//! accept.

use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::semver::Version;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// Begins the line that says why a step was skipped.
pub(crate) const SKIPPED: &str = "skipped: ";

/// Result of a step that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The step ran.
    Passed,
    /// The step cannot run here, for this reason.
    Skipped(String),
}

impl Verdict {
    /// Prints why a step was skipped.
    pub(crate) fn print(self) {
        if let Self::Skipped(why) = self {
            println!("{SKIPPED}{why}");
        }
    }
}

/// Runs all checks of dependencies.
pub(crate) fn run() -> Outcome {
    deny()?;
    for verdict in [advisories()?, oldest_rust()?] {
        verdict.print();
    }
    Ok(())
}

/// Checks bans, licences and sources by deny.toml; needs no network.
pub(crate) fn deny() -> Outcome {
    if !process::answers(&mut cargo(["deny", "--version"])) {
        return Err("cargo-deny is missing; run `cargo install --locked cargo-deny`".into());
    }
    let mut command = cargo(["deny", "--workspace", "--all-features", "check"]);
    process::run(command.args(["bans", "licenses", "sources"]))
}

/// Checks for known vulnerabilities of dependencies. Skipped if no advisory database was fetched.
pub(crate) fn advisories() -> Outcome<Verdict> {
    let databases = advisory_databases().and_then(|folder| folder.read_dir().ok());
    // A failed fetch leaves only a lock file.
    if !databases.is_some_and(|mut all| all.any(|it| it.is_ok_and(|it| it.path().is_dir()))) {
        let why = "no advisory database; `cargo deny fetch db` gets one where there is a network";
        return Ok(Verdict::Skipped(why.to_owned()));
    }
    let mut command = cargo(["deny", "--workspace", "--all-features", "--offline"]);
    process::run(command.args(["check", "advisories"]))?;
    Ok(Verdict::Passed)
}

/// Returns the folder in which cargo-deny keeps its databases by default.
fn advisory_databases() -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    Some(home?.join("advisory-dbs"))
}

/// The other supported architecture.
const AARCH64: &str = "aarch64-unknown-linux-gnu";

/// Checks that no dependency needs a newer Rust than the workspace supports, and compiles the
/// libraries and programs with that Rust for the other architecture, if both are installed.
pub(crate) fn oldest_rust() -> Outcome<Verdict> {
    let metadata = workspace::load()?;
    let mut members = metadata.workspace_packages().into_iter();
    let promised = members.find_map(|member| member.rust_version.clone());
    let promised = promised.ok_or("no member of the workspace states a rust-version")?;
    let packages = metadata.packages.iter();
    let needed = packages.map(|package| (package.name.as_str(), package.rust_version.clone()));
    let newer = newer_than(&promised, needed);
    if !newer.is_empty() {
        let packages = newer.join("\n       ");
        return Err(
            format!("the workspace supports Rust {promised}, but\n       {packages}").into()
        );
    }
    println!("no dependency needs a newer Rust than {promised}");

    let toolchain = format!("{}.{}", promised.major, promised.minor);
    if !process::answers(Command::new("rustup").args(["run", &toolchain, "cargo", "--version"])) {
        let why = format!(
            "declared versions agree; to compile with it: rustup toolchain install {toolchain}"
        );
        return Ok(Verdict::Skipped(why));
    }
    let mut libraries = Command::new("rustup");
    libraries.args(["run", &toolchain, "rustc", "--print", "target-libdir", "--target", AARCH64]);
    let libraries = process::output(&mut libraries)?;
    let is_installed = Path::new(libraries.trim()).is_dir();

    let mut command = Command::new("rustup");
    command.args([
        "run",
        &toolchain,
        "cargo",
        "check",
        "--workspace",
        "--all-features",
        "--locked",
    ]);
    // What users compile. Tests and tools of this repository need the current Rust only.
    command.args(["--lib", "--bins", "--exclude", "xtask"]);
    if is_installed {
        command.args(["--target", AARCH64]);
    }
    // The variable replaces the flags of `.cargo/config.toml`, so the enums are those of a release,
    // and matches need the arms for builds without `peerlane_workspace`.
    command.env("RUSTFLAGS", "-D warnings").env_remove("RUSTC").env_remove("CARGO");
    process::run(&mut command)?;

    if is_installed {
        // These have code for one architecture.
        let mut here = Command::new("rustup");
        here.args(["run", &toolchain, "cargo", "check", "--locked"]);
        here.args(["--package", "peerlane-hal", "--package", "peerlane-host"]);
        process::run(here.env_remove("RUSTC").env_remove("CARGO"))?;
    }
    Ok(match is_installed {
        true => Verdict::Passed,
        false => Verdict::Skipped(format!(
            "it compiles here; to compile for the other architecture: rustup target add --toolchain {toolchain} {AARCH64}"
        )),
    })
}

/// Compares the API of the published libraries with that of the last release, if
/// cargo-semver-checks is installed.
pub(crate) fn semver() -> Outcome<Verdict> {
    if !process::answers(&mut cargo(["semver-checks", "--version"])) {
        let why = "to check the API: cargo install --locked cargo-semver-checks";
        return Ok(Verdict::Skipped(why.to_owned()));
    }

    let metadata = workspace::members()?;
    let release = metadata.workspace_metadata["last-release"].as_str();
    let release = release.ok_or("Cargo.toml has no workspace.metadata.last-release")?;
    let commit = format!("{release}^{{commit}}");
    if !process::answers(Command::new("git").args(["cat-file", "-e", &commit])) {
        let why = format!("the history of this clone does not contain {release}");
        return Ok(Verdict::Skipped(why));
    }

    let mut command = cargo(["semver-checks", "--workspace", "--baseline-rev", release]);
    process::run(&mut command)?;
    Ok(Verdict::Passed)
}

fn newer_than<'a>(
    promised: &Version,
    needed: impl Iterator<Item = (&'a str, Option<Version>)>,
) -> Vec<String> {
    needed
        .filter_map(|(name, version)| Some((name, version.filter(|version| version > promised)?)))
        .map(|(name, version)| format!("{name} needs Rust {version}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_newer_rust_is_a_finding() {
        let needed = [
            ("old", Some(Version::new(1, 60, 0))),
            ("same", Some(Version::new(1, 88, 0))),
            ("silent", None),
            ("new", Some(Version::new(1, 90, 0))),
        ];
        let newer = newer_than(&Version::new(1, 88, 0), needed.into_iter());
        assert_eq!(newer, ["new needs Rust 1.90.0"]);
    }
}
