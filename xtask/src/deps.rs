//! `cargo xtask deps`: licences, bans, advisories, and the oldest Rust that dependencies accept.

use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::Metadata;
use cargo_metadata::semver::Version;

use crate::ci::Verdict;
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// Everything about dependencies, one after the other.
pub(crate) fn run() -> Outcome {
    deny()?;
    for verdict in [advisories()?, oldest_rust()?] {
        if let Verdict::Skipped(why) = verdict {
            println!("skipped: {why}");
        }
    }
    Ok(())
}

/// What deny.toml allows, without a network.
pub(crate) fn deny() -> Outcome {
    if !process::answers(&mut cargo(["deny", "--version"])) {
        return Err("cargo-deny is missing; run `cargo install --locked cargo-deny`".into());
    }
    let mut command = cargo(["deny", "--workspace", "--all-features", "check"]);
    process::run(command.args(["bans", "licenses", "sources"]))
}

/// Known faults of dependencies; skipped where no database of them was fetched.
pub(crate) fn advisories() -> Outcome<Verdict> {
    if !advisory_databases().is_some_and(|folder| holds_a_folder(&folder)) {
        let why = "no advisory database; `cargo deny fetch db` gets one where there is a network";
        return Ok(Verdict::Skipped(why.to_owned()));
    }
    let mut command = cargo(["deny", "--workspace", "--all-features", "--offline"]);
    process::run(command.args(["check", "advisories"]))?;
    Ok(Verdict::Passed)
}

/// Where cargo-deny keeps its databases unless deny.toml says otherwise.
fn advisory_databases() -> Option<PathBuf> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")));
    Some(home?.join("advisory-dbs"))
}

/// A fetch that failed leaves a lock file, but no folder.
fn holds_a_folder(folder: &Path) -> bool {
    folder.read_dir().is_ok_and(|entries| entries.flatten().any(|entry| entry.path().is_dir()))
}

/// No dependency may want a newer Rust than the workspace promises; where that Rust is installed,
/// the workspace is checked with it.
pub(crate) fn oldest_rust() -> Outcome<Verdict> {
    let metadata = workspace::load()?;
    let promised = promised_rust(&metadata)?;
    let packages = metadata.packages.iter();
    let wanted = packages.map(|package| (package.name.as_str(), package.rust_version.clone()));
    let newer = newer_than(&promised, wanted);
    if !newer.is_empty() {
        let packages = newer.join("\n       ");
        return Err(
            format!("the workspace promises Rust {promised}, but\n       {packages}").into()
        );
    }
    println!("no dependency wants a newer Rust than {promised}");

    let toolchain = format!("{}.{}", promised.major, promised.minor);
    if !process::answers(Command::new("rustup").args(["run", &toolchain, "cargo", "--version"])) {
        let why = format!(
            "declared versions agree; to compile with it: rustup toolchain install {toolchain}"
        );
        return Ok(Verdict::Skipped(why));
    }
    let mut command = Command::new("rustup");
    command.args(["run", &toolchain, "cargo", "check", "--workspace", "--all-targets", "--locked"]);
    process::run(command.env_remove("RUSTC").env_remove("CARGO"))?;
    Ok(Verdict::Passed)
}

fn promised_rust(metadata: &Metadata) -> Outcome<Version> {
    let mut members = metadata.workspace_packages().into_iter();
    let promised = members.find_map(|member| member.rust_version.clone());
    promised.ok_or_else(|| "no member of the workspace states a rust-version".into())
}

fn newer_than<'a>(
    promised: &Version,
    wanted: impl Iterator<Item = (&'a str, Option<Version>)>,
) -> Vec<String> {
    wanted
        .filter_map(|(name, version)| Some((name, version.filter(|version| version > promised)?)))
        .map(|(name, version)| format!("{name} wants Rust {version}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_newer_rust_is_a_finding() {
        let wanted = [
            ("old", Some(Version::new(1, 60, 0))),
            ("same", Some(Version::new(1, 88, 0))),
            ("silent", None),
            ("new", Some(Version::new(1, 90, 0))),
        ];
        let newer = newer_than(&Version::new(1, 88, 0), wanted.into_iter());
        assert_eq!(newer, ["new wants Rust 1.90.0"]);
    }
}
