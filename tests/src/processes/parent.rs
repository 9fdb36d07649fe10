//! Connects a rank that runs as a process with the test that started it, from the rank's side.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::str::FromStr;

use rustix::process::{Signal, set_parent_process_death_signal};

use peerlane_conformance::{Failure, Outcome};

/// Environment variable with the role of a process that a test started.
pub(super) const ROLE: &str = "PEERLANE_TEST_ROLE";

pub(super) fn variable(name: &str) -> String {
    format!("PEERLANE_TEST_{name}")
}

/// The test that started this process.
#[derive(Debug)]
pub struct Parent {
    role: String,
}

impl Parent {
    /// Returns the parent if a test started this process with a role; `None` in the test program
    /// itself.
    pub fn find() -> Option<Self> {
        let role = std::env::var(ROLE).ok()?;
        // Ends the rank with its parent, so that an interrupted test leaves no process.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        Some(Self { role })
    }

    /// Returns the role of this process.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// Returns a value that the parent passed.
    ///
    /// # Errors
    /// If it passed none, or one that cannot be parsed.
    pub fn value<T: FromStr>(&self, name: &str) -> Outcome<T> {
        let text = std::env::var(variable(name)).unwrap_or_default();
        text.parse().map_err(|_| {
            Failure::new(format!(
                "cannot parse the value of {name} from the parent process: {text:?}"
            ))
        })
    }

    /// Returns the exit code of this process; prints a failure.
    pub fn exit_code(&self, outcome: Outcome) -> ExitCode {
        match outcome {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                self.print_line(format_args!("broken: {failure}"));
                ExitCode::FAILURE
            }
        }
    }

    /// Prints a line for the parent.
    pub fn print_line(&self, line: impl fmt::Display) {
        let mut output = std::io::stdout().lock();
        // The write fails if the parent has ended; then this process is about to be killed.
        let _ = writeln!(output, "{line}").and_then(|()| output.flush());
    }

    /// Waits for a line of the parent.
    ///
    /// # Errors
    /// If the parent has ended.
    pub fn read_line(&self) -> Outcome<String> {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(bytes) if bytes > 0 => Ok(line.trim_end().to_owned()),
            _ => Err(Failure::new("the parent process has ended")),
        }
    }

    /// Prints that the rank has reached `place`, and waits until the parent lets it continue.
    ///
    /// # Errors
    /// If the parent has ended.
    pub fn halt(&self, place: impl fmt::Display) -> Outcome {
        self.print_line(format_args!("at {place}"));
        self.read_line().map(drop)
    }
}
