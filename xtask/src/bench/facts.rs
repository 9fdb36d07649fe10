//! Where and with what something was measured.

use std::process::Command;

use super::openmpi::OpenMpi;
use peerlane_rxe_vm::process::{self, Outcome};

/// What a reader needs to judge a figure.
#[derive(Debug, serde::Serialize)]
pub(super) struct Facts {
    pub(super) command: String,
    pub(super) date: String,
    pub(super) peerlane: String,
    pub(super) open_mpi: String,
    pub(super) rustc: String,
    pub(super) kernel: String,
    pub(super) cpu: String,
    pub(super) cores: usize,
}

/// The same without a peer.
#[derive(Debug, Default, serde::Serialize)]
pub(super) struct Machine {
    pub(super) command: String,
    pub(super) date: String,
    pub(super) peerlane: String,
    pub(super) rustc: String,
    pub(super) kernel: String,
    pub(super) cpu: String,
    pub(super) cores: usize,
}

impl Machine {
    /// Asks the machine.
    pub(super) fn ask() -> Outcome<Self> {
        Ok(Self {
            command: command(std::env::args().skip(1)),
            date: line_of(Command::new("date").args(["-u", "+%Y-%m-%d %H:%M UTC"]))?,
            peerlane: peerlane(),
            rustc: line_of(Command::new("rustc").arg("--version"))?,
            kernel: line_of(Command::new("uname").arg("-sr"))?,
            cpu: processor(&std::fs::read_to_string("/proc/cpuinfo")?),
            cores: std::thread::available_parallelism()?.get(),
        })
    }
}

impl Facts {
    /// Asks the machine.
    pub(super) fn collect() -> Outcome<Self> {
        let Machine { command, date, peerlane, rustc, kernel, cpu, cores } = Machine::ask()?;
        let open_mpi = OpenMpi::version()?;
        Ok(Self { command, date, peerlane, open_mpi, rustc, kernel, cpu, cores })
    }
}

fn command(arguments: impl Iterator<Item = String>) -> String {
    ["cargo".to_owned(), "xtask".to_owned()]
        .into_iter()
        .chain(arguments)
        .collect::<Vec<_>>()
        .join(" ")
}

fn line_of(command: &mut Command) -> Outcome<String> {
    Ok(process::output(command)?.trim().to_owned())
}

/// The version and, in a checkout with a history, the commit.
fn peerlane() -> String {
    let version = env!("CARGO_PKG_VERSION");
    let mut git = Command::new("git");
    git.args(["describe", "--always", "--dirty", "--exclude", "*"]);
    match git.output() {
        Ok(output) if output.status.success() => {
            format!("{version} at {}", String::from_utf8_lossy(&output.stdout).trim())
        }
        _ => version.to_owned(),
    }
}

fn processor(cpuinfo: &str) -> String {
    let named = |line: &str| Some(line.strip_prefix("model name")?.split_once(": ")?.1.to_owned());
    cpuinfo.lines().find_map(named).unwrap_or_else(|| "unknown".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_is_named() {
        assert_eq!(
            processor("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n"),
            "Some CPU @ 2 GHz"
        );
        assert_eq!(processor("processor\t: 0\n"), "unknown");
    }

    #[test]
    fn the_command_is_as_a_person_types_it() {
        let arguments = ["bench", "host"].map(str::to_owned);
        assert_eq!(command(arguments.into_iter()), "cargo xtask bench host");
    }
}
