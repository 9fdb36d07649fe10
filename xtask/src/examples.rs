//! Builds and tests the packages under examples, which are a workspace of their own, for
//! `cargo xtask examples`.

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

pub(crate) fn run() -> Outcome {
    let metadata = workspace::members()?;
    let folder = metadata.workspace_root.join("examples");
    process::run(cargo(["fmt", "--all", "--check"]).current_dir(&folder))?;

    // Not the target folder of this workspace: cargo gives the shared library of the simulated
    // driver the same name in both, so that each build would replace the file of the other one.
    let target = metadata.target_directory.join("examples");
    let mut test = cargo(["test", "--workspace", "--locked"]);
    process::run(test.current_dir(&folder).env("CARGO_TARGET_DIR", target))
}
