//! How long whoever drives several things sleeps between two looks, where none of them wakes it for all.

use std::time::Duration;

/// A wait takes at most this part longer than without pauses.
const PART: u32 = 64;

/// The pause after so long without a move, within these limits: short at first, then a small part of the
/// wait so far.
pub(crate) fn pause(idle: Duration, limits: [Duration; 2]) -> Duration {
    let [least, most] = limits;
    (idle / PART).clamp(least, most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_wait_and_end_somewhere() {
        let limits = [50, 1000].map(Duration::from_micros);
        assert_eq!(pause(Duration::ZERO, limits), limits[0]);
        assert_eq!(pause(Duration::from_millis(32), limits), Duration::from_micros(500));
        assert_eq!(pause(Duration::MAX, limits), limits[1]);
    }
}
