//! Defines the errors that end the program, with a text, advice and an exit code.

use std::process::ExitCode;
use std::{fmt, io};

use peerlane::hal::Error as _;
use peerlane::{Error, ErrorKind};
use peerlane_toolkit::limits::SystemError;

/// The result of a function whose error ends the program.
pub(crate) type Result<T> = std::result::Result<T, Failure>;

/// The reason why the program ends without the requested result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    text: String,
    advice: Option<String>,
    exit: Exit,
    kind: Option<ErrorKind>,
}

/// The ways in which the program ends with an error, each with its exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Exit {
    /// A closed pipe behind stdout (`peerlane … | head`), which prints nothing and is a success.
    Quiet,
    Failed,
    Usage,
}

impl Failure {
    pub(crate) fn failed(text: impl Into<String>) -> Self {
        Self { text: text.into(), advice: None, exit: Exit::Failed, kind: None }
    }

    pub(crate) fn timeout(text: impl Into<String>) -> Self {
        Self::of_kind(ErrorKind::Timeout, text.into())
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self { exit: Exit::Usage, ..Self::failed(text) }
    }

    /// Creates the error for a failed read or write of a file, a pipe or a process, which `what`
    /// names. A broken pipe is quiet.
    pub(crate) fn io(what: impl fmt::Display, error: &io::Error) -> Self {
        let system = SystemError::of_io(what.to_string(), error);
        if system.is_exhausted() {
            return Self::of_system(&system);
        }
        let failure = Self::failed(format!("{what}: {error}"));
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self { exit: Exit::Quiet, ..failure },
            _ => failure,
        }
    }

    /// Converts the error of a system call, whose text names the limit if one has run out.
    pub(crate) fn of_system(error: &SystemError) -> Self {
        Self { kind: Some(error.kind()), ..Self::failed(error.to_string()) }
    }

    fn of_kind(kind: ErrorKind, text: String) -> Self {
        // The text of a limit says how to raise it.
        let names_limit = text.contains(": raise it");
        let advice = advice(kind).filter(|_| !names_limit).map(str::to_owned);
        Self { advice, kind: Some(kind), ..Self::failed(text) }
    }

    #[must_use]
    pub(crate) fn with_advice(mut self, advice: impl Into<String>) -> Self {
        self.advice = Some(advice.into());
        self
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    pub(crate) fn kind(&self) -> Option<ErrorKind> {
        self.kind
    }

    /// Returns 0 for a closed pipe, 1 for a failure and 2 for an invalid command line.
    pub(crate) fn exit_code(&self) -> ExitCode {
        match self.exit {
            Exit::Quiet => ExitCode::SUCCESS,
            Exit::Failed => ExitCode::from(1),
            Exit::Usage => ExitCode::from(2),
        }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.exit == Exit::Quiet
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::of_kind(error.kind(), error.to_string())
    }
}

/// Returns the advice for a kind of library error whose text contains none.
fn advice(kind: ErrorKind) -> Option<&'static str> {
    match kind {
        ErrorKind::Unavailable => Some("`peerlane doctor` shows what this machine has"),
        ErrorKind::OutOfMemory => Some("lower --max-bytes or --ranks"),
        ErrorKind::PeerLost => Some("read the last messages of that rank, which show the cause"),
        ErrorKind::Timeout => Some("check that all ranks run, or raise --timeout if they are slow"),
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
    fn a_failure_prints_text_and_advice() {
        let failure = Failure::failed("port 1 is in use").with_advice("use another port");
        assert_eq!(failure.to_string(), "error: port 1 is in use\n help: use another port");
    }

    #[test]
    fn a_closed_pipe_is_a_quiet_failure() {
        let error = io::Error::from(io::ErrorKind::BrokenPipe);
        assert!(Failure::io("stdout", &error).is_quiet());
        assert!(!Failure::io("stdout", &io::Error::from(io::ErrorKind::NotFound)).is_quiet());
    }
}
