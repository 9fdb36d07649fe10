//! Where the workspace is and what is in it.

use cargo_metadata::{Metadata, MetadataCommand};

use peerlane_rxe_vm::process::Outcome;

/// The workspace with all its dependencies, as the lock file pins them.
pub(crate) fn load() -> Outcome<Metadata> {
    let mut command = MetadataCommand::new();
    command.other_options(["--locked".to_owned()]);
    command.exec().map_err(|error| format!("cargo metadata: {error}").into())
}

/// The members only; needs neither a network nor the dependencies' sources.
pub(crate) fn members() -> Outcome<Metadata> {
    MetadataCommand::new()
        .no_deps()
        .exec()
        .map_err(|error| format!("cargo metadata: {error}").into())
}
