//! Ranks that are processes of this program: it starts itself again, to run only the test that is a rank.

use std::env;
use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};

const PLACE: &str = "PEERLANE_TEST_PLACE";

/// Returns the words that this process was started with, or `None` if no test has started it.
pub(crate) fn place() -> Option<Vec<String>> {
    let place = env::var(PLACE).ok()?;
    Some(place.split(' ').map(str::to_owned).collect())
}

/// Starts a process that runs `test` with the words of `place`, and returns it and the lines that it prints.
pub(crate) fn start(test: &str, place: &str) -> (Child, Lines<BufReader<ChildStdout>>) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture"]).env(PLACE, place);
    let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let lines = BufReader::new(process.stdout.take().unwrap()).lines();
    (process, lines)
}

/// Returns the rest of the next line that begins with `what`.
pub(crate) fn said(lines: &mut Lines<BufReader<ChildStdout>>, what: &str) -> String {
    let line = lines.find_map(|line| line.ok()?.strip_prefix(what).map(str::to_owned));
    line.unwrap_or_else(|| panic!("a rank ended without {what:?}"))
}
