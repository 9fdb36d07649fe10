//! Defines the deadline that bounds every call of Peerlane that waits.

use std::io;
use std::time::{Duration, Instant};

/// The shortest timeout of a call, because sockets take a timeout of zero as none.
const CALL_TIMEOUT_MIN: Duration = Duration::from_millis(1);

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

    /// Repeats a system call that a signal interrupts, each time with the time that is left.
    ///
    /// The program can handle signals, such as those of a profiler, and the system may pick any thread for them. So
    /// they interrupt every call that waits, and a call with a timeout even if the handler has the flag
    /// `SA_RESTART`. Signals neither shorten nor extend the wait: `call` gets the time until the deadline as its
    /// timeout, but at least one millisecond.
    ///
    /// Linux counts the timeouts of sockets in clock ticks, and a signal in the last tick ends them early. So a call
    /// that fails with [`WouldBlock`](io::ErrorKind::WouldBlock) before the deadline is repeated too; `call` must wait,
    /// and not use a non-blocking descriptor.
    ///
    /// ```
    /// use std::io::Read as _;
    /// use std::os::unix::net::UnixStream;
    /// use std::time::Duration;
    /// use peerlane::Deadline;
    ///
    /// let (mut here, _there) = UnixStream::pair()?;
    /// let deadline = Deadline::after(Duration::from_millis(20));
    /// let read = deadline.retry_interrupted(|timeout| {
    ///     here.set_read_timeout(Some(timeout))?;
    ///     here.read(&mut [0])
    /// });
    /// assert!(read.is_err() && deadline.has_passed());
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the error of `call`, or [`TimedOut`](io::ErrorKind::TimedOut) if a signal interrupts it after the
    /// deadline. Never returns [`Interrupted`](io::ErrorKind::Interrupted).
    pub fn retry_interrupted<T>(
        self,
        mut call: impl FnMut(Duration) -> io::Result<T>,
    ) -> io::Result<T> {
        loop {
            match call(self.remaining().max(CALL_TIMEOUT_MIN)) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    // Otherwise, frequent signals would repeat the shortest timeout for ever.
                    if self.has_passed() {
                        return Err(io::ErrorKind::TimedOut.into());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && !self.has_passed() => {}
                result => return result,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interrupted() -> io::Error {
        io::ErrorKind::Interrupted.into()
    }

    #[test]
    fn an_interrupted_call_is_repeated_with_the_time_that_is_left() {
        let timeout = Duration::from_millis(60);
        let deadline = Deadline::after(timeout);
        let mut timeouts = Vec::new();
        let error = deadline.retry_interrupted(|left| -> io::Result<()> {
            timeouts.push(left);
            // A signal arrives long before the timeout.
            std::thread::sleep(Duration::from_millis(5).min(left));
            Err(interrupted())
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(deadline.has_passed());
        // Every sleep takes at least as long as asked.
        assert!(timeouts.len() <= 13 && timeouts[0] <= timeout, "{timeouts:?}");
        for pair in timeouts.windows(2) {
            let expected = pair[0].saturating_sub(Duration::from_millis(5)).max(CALL_TIMEOUT_MIN);
            assert!(pair[1] <= expected, "{timeouts:?}");
        }
    }

    #[test]
    fn an_interrupted_call_returns_its_result() {
        let deadline = Deadline::after(Duration::from_secs(60));
        let mut calls = 0;
        let result = deadline.retry_interrupted(|_| {
            calls += 1;
            if calls < 1000 { Err(interrupted()) } else { Ok(7) }
        });
        assert_eq!((result.unwrap(), calls), (7, 1000));
    }

    #[test]
    fn other_errors_are_returned_at_once() {
        let deadline = Deadline::after(Duration::from_secs(60));
        let mut calls = 0;
        let error = deadline.retry_interrupted(|_| -> io::Result<()> {
            calls += 1;
            Err(io::ErrorKind::ConnectionReset.into())
        });
        assert_eq!((error.unwrap_err().kind(), calls), (io::ErrorKind::ConnectionReset, 1));
    }

    #[test]
    fn a_timeout_that_ends_early_is_repeated() {
        let deadline = Deadline::after(Duration::from_secs(60));
        let mut calls = 0;
        let result = deadline.retry_interrupted(|_| {
            calls += 1;
            if calls < 3 { Err(io::ErrorKind::WouldBlock.into()) } else { Ok(7) }
        });
        assert_eq!((result.unwrap(), calls), (7, 3));
    }

    #[test]
    fn a_call_after_the_deadline_is_made_once_with_the_shortest_timeout() {
        use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
        for (kind, expected) in [(Interrupted, TimedOut), (WouldBlock, WouldBlock)] {
            let deadline = Deadline::after(Duration::ZERO);
            let mut timeouts = Vec::new();
            let error = deadline.retry_interrupted(|left| -> io::Result<()> {
                timeouts.push(left);
                Err(kind.into())
            });
            assert_eq!(error.unwrap_err().kind(), expected);
            assert_eq!(timeouts, [CALL_TIMEOUT_MIN]);
        }
    }
}
