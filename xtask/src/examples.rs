//! `cargo xtask examples`: builds and tests the packages under examples, which are a workspace of their own.

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

pub(crate) fn run() -> Outcome {
    let metadata = workspace::members()?;
    let folder = metadata.workspace_root.join("examples");
    process::run(cargo(["fmt", "--all", "--check"]).current_dir(&folder))?;
    let mut test = cargo(["test", "--workspace", "--locked"]);
    // The target folder of the workspace has many of their dependencies.
    process::run(test.current_dir(&folder).env("CARGO_TARGET_DIR", metadata.target_directory))
}
