//! What a failed check says.

use std::fmt;

use peerlane_hal as hal;

/// A broken promise, or an error where none was due, as text for people.
///
/// Not an [`Error`](std::error::Error), so that every backend's error turns into one with `?`.
#[derive(Clone, PartialEq, Eq)]
pub struct Failure {
    text: String,
    /// Only the echo of another rank's failure.
    echo: bool,
}

/// What a check returns.
pub type Outcome<T = ()> = Result<T, Failure>;

impl Failure {
    /// A failure with its text.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), echo: false }
    }

    pub(crate) fn echo(text: impl Into<String>) -> Self {
        Self { text: text.into(), echo: true }
    }

    pub(crate) fn is_echo(&self) -> bool {
        self.echo
    }

    /// The same failure, with where it happened in front.
    #[must_use]
    pub fn within(self, place: impl fmt::Display) -> Self {
        Self { text: format!("{place}: {}", self.text), echo: self.echo }
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
macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err($crate::Failure::new(format!($($text)+)));
        }
    };
}
pub(crate) use ensure;

/// Fails unless the bytes are the wanted ones; names the first that differs.
pub(crate) fn ensure_bytes(what: impl fmt::Display, seen: &[u8], wanted: &[u8]) -> Outcome {
    if seen == wanted {
        return Ok(());
    }
    ensure!(seen.len() == wanted.len(), "{what}: {} bytes, wanted {}", seen.len(), wanted.len());
    let wrong = seen.iter().zip(wanted).filter(|(seen, wanted)| seen != wanted).count();
    match seen.iter().zip(wanted).position(|(seen, wanted)| seen != wanted) {
        None => Ok(()),
        Some(at) => Err(Failure::new(format!(
            "{what}: byte {at} is {:#04x}, wanted {:#04x}; {wrong} of {} bytes are wrong",
            seen[at],
            wanted[at],
            seen.len()
        ))),
    }
}

/// Fails unless every byte is `value`.
pub(crate) fn ensure_all(what: impl fmt::Display, seen: &[u8], value: u8) -> Outcome {
    ensure_bytes(what, seen, &vec![value; seen.len()])
}
