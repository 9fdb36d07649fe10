//! What ends the program: a text for people, what to do about it, and the exit code.

use std::process::ExitCode;
use std::{fmt, io};

use peerlane::{Error, ErrorKind};

/// The result of everything that can end the program.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// Why the program ends without having done what was asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    text: String,
    advice: Option<String>,
    exit: Exit,
}

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    /// The reader of our output went away (`peerlane … | head`): nothing is wrong, nothing is said.
    Quiet,
    /// Something failed.
    Failed,
    /// The command line asks for something that cannot be.
    Usage,
}

impl Failure {
    /// Something failed.
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self { text: text.into(), advice: None, exit: Exit::Failed }
    }

    /// The command line asks for something that cannot be.
    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { text: text.into(), advice: None, exit: Exit::Usage }
    }

    /// Reading or writing `what` failed.
    pub(crate) fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let failure = Self::failed(format!("{what}: {error}"));
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self { exit: Exit::Quiet, ..failure },
            _ => failure,
        }
    }

    /// A backend refused something.
    pub(crate) fn of_backend(error: impl peerlane::hal::Error) -> Self {
        Self::of_kind(error.kind(), error.to_string())
    }

    fn of_kind(kind: ErrorKind, text: String) -> Self {
        Self { text, advice: advice(kind).map(str::to_owned), exit: Exit::Failed }
    }

    /// The same, saying what to do about it.
    #[must_use]
    pub(crate) fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    /// What happened, without the advice.
    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// The exit code: 0 ok, 1 failed, 2 usage.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self.exit {
            Exit::Quiet => ExitCode::SUCCESS,
            Exit::Failed => ExitCode::from(1),
            Exit::Usage => ExitCode::from(2),
        }
    }

    /// Whether there is something to say.
    pub(crate) fn is_quiet(&self) -> bool {
        self.exit == Exit::Quiet
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::of_kind(error.kind(), error.to_string())
    }
}

/// What usually helps, where the error's own text cannot know it.
fn advice(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::OutOfMemory => Some("lower --max-bytes or --ranks"),
        ErrorKind::PeerLost => Some("see what that rank said last; here nothing is wrong"),
        ErrorKind::Timeout => {
            Some("see whether that rank runs; raise --timeout if it is only slow")
        }
        ErrorKind::Mismatch => Some("start all ranks with the same program and the same options"),
        _ => None,
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error: {}", self.text)?;
        match &self.advice {
            Some(advice) => write!(f, "\n help: {advice}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_says_what_and_what_to_do() {
        let failure = Failure::failed("port 1 is in use").with_advice("take another");
        assert_eq!(failure.to_string(), "error: port 1 is in use\n help: take another");
    }

    #[test]
    fn a_closed_pipe_is_quiet() {
        let error = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(Failure::io("stdout", &error).is_quiet());
        assert!(!Failure::io("stdout", &io::Error::from(io::ErrorKind::NotFound)).is_quiet());
    }
}
