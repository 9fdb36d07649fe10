//! When to give up. No call of Peerlane waits without one.

use std::time::{Duration, Instant};

/// A point in time after which a wait is an error of kind [`Timeout`](crate::ErrorKind::Timeout).
///
/// Passed by value through nested calls, so that a timeout bounds the whole and not each step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// The longest timeout that is told apart from for ever: one year.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

    /// `timeout` from now, at most [`TIMEOUT_MAX`](Self::TIMEOUT_MAX).
    pub fn after(timeout: Duration) -> Self {
        let timeout = timeout.min(Self::TIMEOUT_MAX);
        Self { at: Instant::now() + timeout, timeout }
    }

    /// The time that is left; zero once the deadline has passed.
    pub fn remaining(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        Instant::now() >= self.at
    }

    /// The timeout that the deadline was made from, for error texts.
    pub const fn timeout(self) -> Duration {
        self.timeout
    }

    /// The point in time itself.
    pub const fn at(self) -> Instant {
        self.at
    }
}
