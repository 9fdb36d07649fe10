//! `cargo xtask header`: generates the C header of `capi` with cbindgen, or checks that it is up to date.

use std::process::Command;

use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome};

const HEADER: &str = "capi/include/peerlane.h";

pub(crate) fn run(check: bool) -> Outcome {
    if !process::answers(Command::new("cbindgen").arg("--version")) {
        return Err("cbindgen is missing; run `cargo install --locked cbindgen@0.29.4`".into());
    }
    let root = workspace::members()?.workspace_root;
    let mut command = Command::new("cbindgen");
    command.args(["--quiet", "--config", "cbindgen.toml"]).current_dir(root.join("capi"));
    let header = process::output(&mut command)?;
    let file = root.join(HEADER);
    if !check {
        return Ok(std::fs::write(file, header)?);
    }
    if std::fs::read_to_string(&file).is_ok_and(|found| found == header) {
        return Ok(());
    }
    Err(format!("{HEADER} is not up to date; run `cargo xtask header`").into())
}
