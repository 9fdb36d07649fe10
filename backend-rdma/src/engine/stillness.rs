//! Detects a peer that makes no progress.

use std::time::{Duration, Instant};

/// Tracks how long a peer has made no progress: the completion count at the last change, and its time.
#[derive(Debug, Default)]
pub(super) struct Stillness(Option<(u64, Instant)>);

impl Stillness {
    /// Stops the clock: no request is posted.
    pub(super) fn end(&mut self) {
        self.0 = None;
    }

    /// Returns the time left, or `None` after `limit` without progress. `done` counts all completions.
    pub(super) fn left(&mut self, done: u64, now: Instant, limit: Duration) -> Option<Duration> {
        let lasting = self.0.filter(|(before, _)| *before == done);
        let (_, since) = *self.0.insert(lasting.unwrap_or((done, now)));
        limit.checked_sub(now.duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_lasts_from_the_first_look_to_the_next_completion() {
        let (limit, start) = (Duration::from_secs(60), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let left = |seconds| Some(Duration::from_secs(seconds));
        let mut still = Stillness::default();
        assert_eq!(still.left(5, after(0), limit), left(60));
        assert_eq!(still.left(5, after(59), limit), left(1));
        assert_eq!(still.left(6, after(61), limit), left(60), "something was complete");
        assert_eq!(still.left(6, after(122), limit), None);
        still.end();
        assert_eq!(still.left(6, after(200), limit), left(60));
    }
}
