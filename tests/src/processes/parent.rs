//! The rank's side: who started it, and for what.

use std::fmt;
use std::io::Write;
use std::process::ExitCode;
use std::str::FromStr;

use rustix::process::{Signal, set_parent_process_death_signal};

use crate::failure::{Failure, Outcome};

/// The role of a process that was started by a test.
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
    /// The parent, if this process was started to play a role; `None` in the test program itself.
    pub fn find() -> Option<Self> {
        let role = std::env::var(ROLE).ok()?;
        // A test that is interrupted leaves no rank behind.
        let _ = set_parent_process_death_signal(Some(Signal::KILL));
        Some(Self { role })
    }

    /// What this process is to play.
    pub fn role(&self) -> &str {
        &self.role
    }

    /// A value that the parent gave.
    ///
    /// # Errors
    /// If it gave none, or one that cannot be read.
    pub fn value<T: FromStr>(&self, name: &str) -> Outcome<T> {
        let text = std::env::var(variable(name)).unwrap_or_default();
        text.parse().map_err(|_| Failure::new(format!("{name} is {text:?}")))
    }

    /// The exit code of this process after its story; a failure is said.
    pub fn ended(&self, story: Outcome) -> ExitCode {
        match story {
            Ok(()) => ExitCode::SUCCESS,
            Err(failure) => {
                self.say(format_args!("broken: {failure}"));
                ExitCode::FAILURE
            }
        }
    }

    /// Says a line.
    pub fn say(&self, line: impl fmt::Display) {
        let mut output = std::io::stdout().lock();
        // A rank without a parent is about to end.
        let _ = writeln!(output, "{line}").and_then(|()| output.flush());
    }

    /// Waits for a line.
    ///
    /// # Errors
    /// If the parent is gone.
    pub fn hear(&self) -> Outcome<String> {
        let mut line = String::new();
        match std::io::stdin().read_line(&mut line) {
            Ok(bytes) if bytes > 0 => Ok(line.trim_end().to_owned()),
            _ => Err(Failure::new("the parent is gone")),
        }
    }

    /// Says that it has come to `place`, and waits until the parent lets it go on.
    ///
    /// # Errors
    /// If the parent is gone.
    pub fn halt(&self, place: impl fmt::Display) -> Outcome {
        self.say(format_args!("at {place}"));
        self.hear().map(drop)
    }
}
