//! Defines the deadline that bounds every call of Peerlane that waits.

use std::time::{Duration, Instant};

/// A point in time at which a wait fails with [`Timeout`](crate::ErrorKind::Timeout).
///
/// It is passed by value through nested calls, so one timeout bounds all of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// The longest timeout, which is one year. Longer timeouts are reduced to it.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

    /// Creates a deadline `timeout` from now, at most [`TIMEOUT_MAX`](Self::TIMEOUT_MAX).
    pub fn after(timeout: Duration) -> Self {
        let timeout = timeout.min(Self::TIMEOUT_MAX);
        Self { at: Instant::now() + timeout, timeout }
    }

    /// Returns the time until the deadline, or zero if it has passed.
    pub fn remaining(self) -> Duration {
        self.at.saturating_duration_since(Instant::now())
    }

    /// Returns whether the deadline has passed.
    pub fn has_passed(self) -> bool {
        Instant::now() >= self.at
    }

    /// Returns the timeout with which the deadline was created, for error texts.
    pub const fn timeout(self) -> Duration {
        self.timeout
    }

    /// Returns the deadline as a point in time.
    pub const fn at(self) -> Instant {
        self.at
    }
}
