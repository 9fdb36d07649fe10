//! Reads the packages of the workspace from cargo.

use cargo_metadata::{Metadata, MetadataCommand};

use peerlane_rxe_vm::process::Outcome;

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
