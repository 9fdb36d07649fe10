//! Runs the built program without a launcher, and finds and signals its ranks.

use std::fs;
use std::io;
use std::process::{Command, Output, Stdio};

use peerlane_test_support::LAUNCHER_VARIABLES;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

/// Result of a run of the program.
#[derive(Debug)]
pub(crate) struct Ended {
    /// Exit code; `None` if a signal ended the program.
    pub(crate) code: Option<i32>,
    /// Content of stdout.
    pub(crate) stdout: String,
    /// Content of stderr.
    pub(crate) stderr: String,
}

/// Returns the program with these arguments and piped outputs.
pub(crate) fn command(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_peerlane"));
    command.args(words.split_whitespace()).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    for variable in LAUNCHER_VARIABLES {
        command.env_remove(variable);
    }
    // Real GPUs are used only by the tests that request them.
    command.env("CUDA_VISIBLE_DEVICES", "");
    command
}

/// Runs the program to its end.
pub(crate) fn run(words: &str) -> Ended {
    end(&mut command(words))
}

/// Runs a command to its end.
pub(crate) fn end(command: &mut Command) -> Ended {
    ended(command.output())
}

/// Returns the result of a program that has ended.
pub(crate) fn ended(output: io::Result<Output>) -> Ended {
    let output = output.expect("the program starts");
    Ended {
        code: output.status.code(),
        stdout: String::from_utf8(output.stdout).expect("the output is text"),
        stderr: String::from_utf8(output.stderr).expect("the output is text"),
    }
}

impl Ended {
    /// Returns the JSON lines of a run that succeeded.
    pub(crate) fn rows(&self) -> Vec<Value> {
        assert_eq!(self.code, Some(0), "{self:?}");
        let row = |line| serde_json::from_str(line).expect("every line is JSON");
        self.stdout.lines().map(row).collect()
    }

    /// Returns stderr of a run that failed with `code`.
    pub(crate) fn error(&self, code: i32) -> &str {
        assert_eq!(self.code, Some(code), "{self:?}");
        let forbidden = ["panicked", "RUST_BACKTRACE"];
        assert!(!forbidden.iter().any(|word| self.stderr.contains(word)), "{self:?}");
        &self.stderr
    }
}

/// Returns the children of `parent`, ordered by the rank in their environment.
pub(crate) fn ranks_of(parent: u32) -> Vec<u32> {
    let mut ranks: Vec<(String, u32)> = fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|process| parent_of(*process) == Some(parent))
        .filter_map(|process| Some((variable(process, "RANK=")?, process)))
        .collect();
    ranks.sort();
    ranks.into_iter().map(|(_, process)| process).collect()
}

fn parent_of(process: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name, in parentheses, may contain any character.
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

/// Returns what follows `name` in the environment of a process, such as `RANK=`.
pub(crate) fn variable(process: u32, name: &str) -> Option<String> {
    let environment = fs::read(format!("/proc/{process}/environ")).ok()?;
    let environment = String::from_utf8(environment).ok()?;
    environment.split('\0').find_map(|pair| pair.strip_prefix(name)).map(str::to_owned)
}

/// Returns whether a process has used enough processor time to be past its start.
pub(crate) fn has_moved_bytes(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
    let ticks = |index| fields.split_whitespace().nth(index).and_then(|ticks| ticks.parse().ok());
    ticks(11).unwrap_or(0_u64) + ticks(12).unwrap_or(0) >= 15
}

/// Sends a signal to a process.
pub(crate) fn signal(process: u32, signal: Signal) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}
