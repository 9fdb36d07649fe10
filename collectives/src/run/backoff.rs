//! Decides how long a thread that polls several engines sleeps between two polls.
//!
//! A park is woken by its own engine and fabric. No single park covers several engines, so the
//! thread that polls them spins while progress is recent and then naps, longer the longer nothing
//! has happened.

use std::time::{Duration, Instant};

/// A thread polls without sleeping for this long after the last progress, a few times the latency
/// of a small message.
const SPIN: Duration = Duration::from_micros(100);
const NAP_MIN: Duration = Duration::from_micros(50);
/// A nap lasts at most 1/16 of the wait so far, so that a wait ends at most 1/16 later.
const WAIT_FRACTION: u32 = 16;
/// A nap may last as long as this number of polls if polls are slow, so that a long wait never uses
/// much of a processor.
const POLLS_PER_NAP: u32 = 32;
/// A single slow poll may have been interrupted by the scheduler, so a nap after slow polls is
/// limited to this time.
const SLOW_NAP_MAX: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Backoff {
    nap_max: Duration,
    idle_since: Option<Instant>,
}

impl Backoff {
    pub(crate) fn new(nap_max: Duration) -> Self {
        Self { nap_max, idle_since: None }
    }

    pub(crate) fn reset(&mut self) {
        self.idle_since = None;
    }

    /// Returns how long to sleep after a poll without progress; `None` means to poll again at once.
    pub(crate) fn nap(&mut self, polled_at: Instant) -> Option<Duration> {
        self.nap_at(polled_at, Instant::now())
    }

    fn nap_at(&mut self, polled_at: Instant, now: Instant) -> Option<Duration> {
        let idle = now - *self.idle_since.get_or_insert(polled_at);
        (idle >= SPIN).then(|| nap_after(idle, now - polled_at, self.nap_max))
    }
}

fn nap_after(idle: Duration, poll: Duration, nap_max: Duration) -> Duration {
    let slow = (poll * POLLS_PER_NAP).min(SLOW_NAP_MAX);
    (idle / WAIT_FRACTION).clamp(NAP_MIN, nap_max.max(slow))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);
    const MICRO: Duration = Duration::from_micros(1);

    #[test]
    fn naps_grow_with_the_wait_up_to_the_limit() {
        assert_eq!(nap_after(Duration::ZERO, MICRO, 10 * MILLI), NAP_MIN);
        assert_eq!(nap_after(16 * MILLI, MICRO, 10 * MILLI), MILLI);
        assert_eq!(nap_after(Duration::from_secs(9), MICRO, 10 * MILLI), 10 * MILLI);
    }

    #[test]
    fn a_long_wait_uses_little_of_a_slow_processor() {
        for poll in [MICRO, 50 * MICRO, MILLI, 2 * MILLI] {
            // An engine announces that it will sleep in one park and sleeps in the next: two polls
            // a nap.
            let (mut waited, mut polled) = (Duration::ZERO, Duration::ZERO);

            while waited < Duration::from_secs(2) {
                let nap = nap_after(waited, poll, 10 * MILLI);
                (waited, polled) = (waited + 2 * poll + nap, polled + 2 * poll);
            }

            assert!(polled * 7 < waited, "polls of {poll:?}: {polled:?} of {waited:?}");
        }
    }

    #[test]
    fn an_interrupted_poll_does_not_cause_a_long_nap() {
        let nap = nap_after(Duration::from_secs(60), Duration::from_secs(1), 10 * MILLI);
        assert_eq!(nap, SLOW_NAP_MAX);
    }

    #[test]
    fn progress_ends_the_back_off() {
        let mut backoff = Backoff::new(MILLI);
        let begin = Instant::now();

        assert_eq!(backoff.nap_at(begin, begin + MICRO), None);
        assert_eq!(
            backoff.nap_at(begin + MICRO, begin + SPIN),
            Some(NAP_MIN),
            "the wait continues"
        );

        backoff.reset();
        assert_eq!(backoff.nap_at(begin + SPIN, begin + SPIN), None);
    }
}
