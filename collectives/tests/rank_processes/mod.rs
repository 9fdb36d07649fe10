//! Ranks that are processes of a test program: the program starts itself again, to run its test `rank_process` alone.

use std::env;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

const PLACE: &str = "PEERLANE_TEST_PLACE";

/// Returns what this process was started with, if it is a rank.
pub(crate) fn place() -> Option<String> {
    env::var(PLACE).ok()
}

/// Starts a rank, and returns its process and the lines that it prints.
pub(crate) fn start(place: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", "rank_process", "--nocapture"]).env(PLACE, place);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    (process, lines)
}

/// Returns the rest of the next line that begins with `what`.
pub(crate) fn said(lines: &mut Lines<BufReader<ChildStdout>>, what: &str) -> String {
    let line = lines.find_map(|line| line.ok()?.strip_prefix(what).map(str::to_owned));
    line.unwrap_or_else(|| panic!("a rank ended without {what:?}"))
}
