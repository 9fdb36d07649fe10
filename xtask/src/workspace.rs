//! Reads the packages of the workspace from cargo, and builds its program.

use std::path::{Path, PathBuf};

use cargo_metadata::{Metadata, MetadataCommand};

use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// Returns the workspace with all dependencies that the lock file pins.
pub(crate) fn load() -> Outcome<Metadata> {
    let mut command = MetadataCommand::new();
    command.other_options(["--locked".to_owned()]);
    command.exec().map_err(|error| format!("cargo metadata: {error}").into())
}

/// Returns the members only, which needs neither a network nor the sources of dependencies.
pub(crate) fn members() -> Outcome<Metadata> {
    MetadataCommand::new()
        .no_deps()
        .exec()
        .map_err(|error| format!("cargo metadata: {error}").into())
}

/// Builds the program `peerlane`, optimised or not, and returns its file.
pub(crate) fn build_program(target: &Path, optimised: bool) -> Outcome<PathBuf> {
    let profile = if optimised { "release" } else { "dev" };
    let mut build = cargo(["build", "--package", "peerlane-cli", "--profile", profile]);
    process::run(&mut build)?;
    Ok(target.join(if optimised { "release" } else { "debug" }).join("peerlane"))
}
