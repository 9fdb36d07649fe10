//! How long whoever drives several things sleeps between two looks, where none of them wakes it for all.

use std::time::Duration;

/// The longest, however long nothing has moved.
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// A wait takes at most this part longer than without pauses.
const PART: u32 = 64;

/// The pause after so long without a move: short at first, then a small part of the wait so far.
pub(crate) fn pause(idle: Duration, least: Duration) -> Duration {
    (idle / PART).clamp(least, PAUSE_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_and_end_somewhere() {
        let least = Duration::from_micros(50);
        assert_eq!(pause(Duration::ZERO, least), least);
        assert_eq!(pause(Duration::from_millis(32), least), Duration::from_micros(500));
        assert_eq!(pause(Duration::MAX, least), PAUSE_MAX);
    }
}
