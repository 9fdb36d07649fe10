//! The measured side: the program `peerlane`, as a user builds it.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Sample;
use super::host::Repeats;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The release build of the program.
#[derive(Debug)]
pub(super) struct Peerlane {
    program: PathBuf,
}

impl Peerlane {
    /// Builds it.
    pub(super) fn build(target: &Path) -> Outcome<Self> {
        process::run(&mut cargo(["build", "--release", "--package", "peerlane-cli"]))?;
        Ok(Self { program: target.join("release/peerlane") })
    }

    /// Its file.
    pub(super) fn file(&self) -> &Path {
        &self.program
    }

    /// Runs it with these arguments.
    pub(super) fn run(&self, arguments: impl IntoIterator<Item = String>) -> Outcome {
        process::run(Command::new(&self.program).args(arguments))
    }

    /// Measures one size, and what as many bare copies take.
    pub(super) fn measure(
        &self,
        ranks: usize,
        total_bytes: u64,
        repeats: Repeats,
    ) -> Outcome<Sample> {
        let (ranks, total) = (ranks.to_string(), total_bytes.to_string());
        let mut program = Command::new(&self.program);
        program.args(["allgather", "--backend", "host", "--limit", "--json", "-"]);
        program.args(["--ranks", &ranks, "--min-bytes", &total, "--max-bytes", &total]);
        program.arg("--iterations").arg(repeats.iterations.to_string());
        program.arg("--warmup").arg(repeats.warmup.to_string());
        Sample::parse(&process::output(&mut program)?, total_bytes)
    }
}
