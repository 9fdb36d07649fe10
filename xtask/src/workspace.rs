//! Reads the packages of the workspace from cargo, and builds its program.

use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand};

use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The crate that users depend on, which re-exports the others.
pub(crate) const FACADE: &str = "peerlane";

/// Returns the workspace with all dependencies that the lock file pins.
pub(crate) fn load() -> Outcome<Metadata> {
    Ok(MetadataCommand::new().other_options(["--locked".to_owned()]).exec()?)
}

/// Returns the members only, which needs neither a network nor the sources of dependencies.
pub(crate) fn members() -> Outcome<Metadata> {
    Ok(MetadataCommand::new().no_deps().exec()?)
}

/// Builds the program `peerlane`, optimised or not, and returns its file.
pub(crate) fn build_program(target: &Path, optimised: bool) -> Outcome<PathBuf> {
    let profile = if optimised { "release" } else { "dev" };
    let mut build = cargo(["build", "--package", "peerlane-cli", "--profile", profile]);
    process::run(&mut build)?;
    Ok(target.join(if optimised { "release" } else { "debug" }).join("peerlane"))
}

/// Builds an example of a package, optimised, and returns its file.
pub(crate) fn build_example(target: &Path, package: &str, example: &str) -> Outcome<PathBuf> {
    let mut build = cargo(["build", "--release", "--package", package, "--example", example]);
    process::run(&mut build)?;
    Ok(target.join("release/examples").join(example))
}
