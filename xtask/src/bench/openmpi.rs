//! The peer: Open MPI's MPI_Allgather between the same number of processes.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Sample;
use super::host::Repeats;
use peerlane_rxe_vm::process::{self, Outcome};

/// A way of running Open MPI. Each size is measured in all that apply, and its best one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Setting {
    pub(super) name: &'static str,
    flags: &'static [&'static str],
    /// Waiting ranks spin. Where ranks outnumber cores that takes a time slice a wait, and Open MPI
    /// refuses to start without being told to oversubscribe.
    spins: bool,
}

const SETTINGS: [Setting; 3] = [
    Setting { name: "default", flags: &[], spins: true },
    Setting { name: "unbound", flags: &["--bind-to", "none"], spins: true },
    Setting {
        name: "yielding",
        flags: &["--bind-to", "none", "--oversubscribe", "--mca", "mpi_yield_when_idle", "1"],
        spins: false,
    },
];

/// The settings that make sense for so many ranks on so many cores.
pub(super) fn settings(ranks: usize, cores: usize) -> impl Iterator<Item = Setting> {
    SETTINGS.into_iter().filter(move |setting| !setting.spins || ranks <= cores)
}

/// The compiled peer program.
#[derive(Debug)]
pub(super) struct OpenMpi {
    program: PathBuf,
}

impl OpenMpi {
    /// Compiles the peer into `folder`.
    pub(super) fn build(root: &Path, folder: &Path) -> Outcome<Self> {
        for tool in ["mpicc", "mpirun"] {
            if !process::answers(Command::new(tool).arg("--version")) {
                let hint = "apt install openmpi-bin libopenmpi-dev";
                return Err(format!("{tool} is missing; {hint}").into());
            }
        }
        std::fs::create_dir_all(folder)?;
        let program = folder.join("openmpi_allgather");
        let mut compiler = Command::new("mpicc");
        compiler.args(["-O2", "-Wall", "-Wextra", "-o"]).arg(&program);
        process::run(compiler.arg(root.join("xtask/peers/openmpi_allgather.c")))?;
        Ok(Self { program })
    }

    /// What `mpirun` calls itself, such as `4.1.4`.
    pub(super) fn version() -> Outcome<String> {
        let printed = process::output(Command::new("mpirun").arg("--version"))?;
        let first = printed.lines().next().unwrap_or_default();
        Ok(first.rsplit(' ').next().unwrap_or(first).to_owned())
    }

    /// Measures one size.
    pub(super) fn measure(
        &self,
        setting: Setting,
        ranks: usize,
        total_bytes: u64,
        repeats: Repeats,
    ) -> Outcome<Sample> {
        let mut launcher = Command::new("mpirun");
        // Containers run everything as root; Open MPI wants to be told that this is meant.
        launcher.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        launcher.args(["--timeout", "300"]).args(setting.flags);
        launcher.arg("-n").arg(ranks.to_string()).arg(&self.program);
        let total = total_bytes.to_string();
        launcher.args([&total, &total, "2"]);
        launcher.arg(repeats.iterations.to_string()).arg(repeats.warmup.to_string());
        Sample::parse(&process::output(&mut launcher)?, total_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spinning_is_tried_only_where_every_rank_has_a_core() {
        let names = |ranks| settings(ranks, 2).map(|setting| setting.name).collect::<Vec<_>>();
        assert_eq!(names(2), ["default", "unbound", "yielding"]);
        assert_eq!(names(4), ["yielding"]);
    }
}
