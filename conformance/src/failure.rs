//! Describes why a check failed.

use std::fmt;

use peerlane_hal as hal;

/// A broken sentence of the contract, or an unexpected error, as text.
///
/// It does not implement [`Error`](std::error::Error), so that `?` converts the error of every
/// backend.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure {
    text: String,
    /// True if this only reports that another rank failed.
    echo: bool,
}

/// The result of a check.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// Creates a failure with its text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), echo: false }
    }

    /// Creates a failure that only reports another rank's failure.
    pub(crate) fn echo(text: impl Into<String>) -> Self {
        Self { text: text.into(), echo: true }
    }

    pub(crate) fn is_echo(&self) -> bool {
        self.echo
    }

    /// Puts the place where the failure happened in front of its text.
    #[must_use]
    pub fn within(self, place: impl fmt::Display) -> Self {
        Self { text: format!("{place}: {}", self.text), echo: self.echo }
    }

    /// Puts advice on a new line behind the text of the failure.
    #[must_use]
    pub(crate) fn followed_by(self, advice: impl fmt::Display) -> Self {
        Self { text: format!("{}\n{advice}", self.text), echo: self.echo }
    }
}

impl<E: hal::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self::new(format!("{error} ({})", error.kind()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Fails the check with a formatted text unless the condition holds.
#[macro_export]
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::Failure::new(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

/// Fails unless the bytes are the expected ones; names the first that differs.
///
/// # Errors
/// If a byte or the length differs.
pub fn ensure_bytes(what: impl fmt::Display, seen: &[u8], expected: &[u8]) -> Outcome {
    if seen == expected {
        return Ok(());
    }
    ensure!(
        seen.len() == expected.len(),
        "{what}: found {} bytes, expected {} bytes",
        seen.len(),
        expected.len()
    );
    let wrong = seen.iter().zip(expected).filter(|(seen, expected)| seen != expected).count();
    match seen.iter().zip(expected).position(|(seen, expected)| seen != expected) {
        None => Ok(()),
        Some(at) => Err(Failure::new(format!(
            "{what}: byte {at} is {:#04x}, expected {:#04x}; {wrong} of {} bytes are wrong",
            seen[at],
            expected[at],
            seen.len()
        ))),
    }
}

/// Fails unless every byte is `value`.
///
/// # Errors
/// If a byte differs.
pub fn ensure_all(what: impl fmt::Display, seen: &[u8], value: u8) -> Outcome {
    ensure_bytes(what, seen, &vec![value; seen.len()])
}
