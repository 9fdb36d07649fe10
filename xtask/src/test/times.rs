//! Measures how long each test of a program takes.
//!
//! Programs with the standard harness say it. Of other programs the runner knows when each result was printed; their time is
//! right if they run one test at a time, as those do that start processes.

use std::fs::File;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The arguments by which the standard harness prints the time of each test.
pub(super) const ARGUMENTS: [&str; 2] = ["-Zunstable-options", "--report-time"];
/// The variable by which the standard harness of a stable Rust accepts them.
pub(super) const ACCEPTS: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// Returns whether a program of tests accepts [`ARGUMENTS`].
pub(super) fn are_reported(program: &Command) -> bool {
    let help = Command::new(program.get_program()).arg("--help").stdin(Stdio::null()).output();
    help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--report-time"))
}

/// A test and the time that it took.
pub(super) type Timed = (Duration, String);

/// Reads the output of a program while it runs.
pub(super) struct Watch {
    log: File,
    line: Vec<u8>,
    /// When the last result was printed.
    last: Instant,
    timed: Vec<Timed>,
}

impl Watch {
    pub(super) fn new(log: File) -> Self {
        Self { log, line: Vec::new(), last: Instant::now(), timed: Vec::new() }
    }

    /// Reads what was printed since the last look.
    pub(super) fn look(&mut self) {
        let mut printed = Vec::new();
        // What cannot be read now is read by the next look, or printed without times.
        let _ = self.log.read_to_end(&mut printed);
        for byte in printed {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
            let (result, reported) = split(&line);
            if let Some(name) = name(result) {
                let took = reported.unwrap_or_else(|| self.last.elapsed());
                self.timed.push((took, name.to_owned()));
                self.last = Instant::now();
            }
        }
    }

    /// Returns the tests that ended, in the order of their ends.
    pub(super) fn finish(mut self) -> Vec<Timed> {
        self.look();
        self.timed
    }
}

/// Returns an output without the times that [`ARGUMENTS`] add to its results.
pub(super) fn without(output: &str) -> String {
    output.lines().map(|line| format!("{}\n", split(line).0)).collect()
}

/// Splits the reported time off the line of a result.
fn split(line: &str) -> (&str, Option<Duration>) {
    let split = || {
        let (result, time) = line.strip_suffix("s>")?.rsplit_once(" <")?;
        name(result)?;
        Some((result, Some(Duration::try_from_secs_f64(time.parse().ok()?).ok()?)))
    };
    split().unwrap_or((line, None))
}

/// Returns the name of the test whose result a line is.
fn name(line: &str) -> Option<&str> {
    let (name, result) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let ran = result.ends_with("ok") || result.ends_with("FAILED");
    ran.then(|| name.trim_end())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reported_times_are_read_and_removed() {
        let output = "running 3 tests\ntest a::b ... ok <1.250s>\ntest c ... FAILED <0.001s>\ntest d ... ignored\n";
        let without_times =
            "running 3 tests\ntest a::b ... ok\ntest c ... FAILED\ntest d ... ignored\n";
        assert_eq!(without(output), without_times);
        let log = std::env::temp_dir().join(format!("peerlane-times-{}", std::process::id()));
        std::fs::write(&log, output).unwrap();
        let timed = Watch::new(File::open(&log).unwrap()).finish();
        std::fs::remove_file(log).unwrap();
        let expected = [(1250, "a::b"), (1, "c")]
            .map(|(millis, name)| (Duration::from_millis(millis), name.to_owned()));
        assert_eq!(timed, expected);
    }
}
