//! Learns from the last waits of a rank how long it polls before it sleeps, and whether it yields
//! its core.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cores::Mover;

/// The time of a wake-up before one was measured.
const WAKEUP_FIRST: Duration = Duration::from_micros(50);
/// The shortest time to poll, which covers a small operation.
const SPIN_MIN: Duration = Duration::from_micros(50);
/// The longest time to poll, a few time slices of the scheduler.
const SPIN_MAX: Duration = Duration::from_millis(10);
/// A yield that took this long gave the core to a thread that computes: one that waits gives it
/// back sooner, and time slices are longer.
const SLOW_YIELD: Duration = Duration::from_micros(500);
/// Slow yields take at most this fraction of the time.
const SLOW_FRACTION: u64 = 32;
/// The longest time in milliseconds that ranks keep away from a core after a slow yield.
const PAUSE_MAX_MS: u64 = 1000;

/// What the engines of a rank have learned from their waits.
#[derive(Debug)]
pub(crate) struct Patience {
    /// The time from a wake-up to the moment at which the woken rank runs, in nanoseconds.
    wakeup_ns: AtomicU64,
    /// The length of the last pause after a slow yield, and the time of its end, in milliseconds.
    pause_ms: AtomicU64,
    pause_end_ms: AtomicU64,
    pub(crate) mover: Mutex<Mover>,
}

impl Patience {
    pub(crate) fn new(mover: Mover) -> Self {
        let wakeup_ns = AtomicU64::new(WAKEUP_FIRST.as_nanos() as u64);
        let (pause_ms, pause_end_ms) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { wakeup_ns, pause_ms, pause_end_ms, mover: Mutex::new(mover) }
    }

    /// Takes in the time of a wake-up. A longer time counts at once, shorter ones little by little.
    pub(super) fn learn_wakeup(&self, took: Duration) {
        let (last, took) = (self.wakeup_ns.load(Ordering::Relaxed), took.as_nanos() as u64);
        let next = if took > last { took } else { (last * 7 + took) / 8 };
        self.wakeup_ns.store(next, Ordering::Relaxed);
    }

    /// Returns how long a rank polls before it sleeps.
    ///
    /// Polling for about as long as a wake-up takes costs at most a small multiple of the better of
    /// the two choices, to poll on or to sleep at once. On an idle core a wake-up takes the time to
    /// leave a sleep state, and beside a process that computes a time slice.
    pub(super) fn spin(&self) -> Duration {
        let wakeup = Duration::from_nanos(self.wakeup_ns.load(Ordering::Relaxed));
        (wakeup * 2).clamp(SPIN_MIN, SPIN_MAX)
    }

    /// Takes in the time of a yield that ended at a time. After a slow one, returns the time until
    /// which ranks keep away from the core. Times are milliseconds of one clock.
    pub(super) fn learn_yield(&self, took: Duration, now_ms: u64) -> Option<u64> {
        if took < SLOW_YIELD {
            return None;
        }

        // A pause is twice as long as the last one if yields are slow again soon after it.
        let last_ms = self.pause_ms.load(Ordering::Relaxed);
        let is_again = now_ms < self.pause_end_ms.load(Ordering::Relaxed) + last_ms;
        let slow_ms = (took.as_millis() as u64).max(1) * SLOW_FRACTION;
        let pause_ms = if is_again { slow_ms.max(last_ms * 2) } else { slow_ms }.min(PAUSE_MAX_MS);

        self.pause_ms.store(pause_ms, Ordering::Relaxed);
        self.pause_end_ms.store(now_ms + pause_ms, Ordering::Relaxed);
        Some(now_ms + pause_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Bind;

    const MICRO: Duration = Duration::from_micros(1);
    const MILLI: Duration = Duration::from_millis(1);

    fn patience() -> Patience {
        Patience::new(Mover::new(Bind::Auto, 1))
    }

    #[test]
    fn a_rank_polls_for_twice_the_time_of_a_wake_up() {
        let patience = patience();
        assert_eq!(patience.spin(), 100 * MICRO);
        patience.learn_wakeup(3 * MILLI);
        assert_eq!(patience.spin(), 6 * MILLI, "a slow one counts at once");
        (0..100).for_each(|_| patience.learn_wakeup(5 * MICRO));
        assert_eq!(patience.spin(), SPIN_MIN);
        patience.learn_wakeup(1000 * MILLI);
        assert_eq!(patience.spin(), SPIN_MAX);
    }

    #[test]
    fn ranks_keep_away_from_a_core_for_a_while_after_a_slow_yield() {
        let patience = patience();
        assert_eq!(patience.learn_yield(100 * MICRO, 50), None);
        assert_eq!(patience.learn_yield(4 * MILLI, 100), Some(100 + 128));
        // Slow again soon after that, so the pause is longer.
        assert_eq!(patience.learn_yield(4 * MILLI, 230), Some(230 + 256));
        assert_eq!(patience.learn_yield(4 * MILLI, 490), Some(490 + 512));
        assert_eq!(patience.learn_yield(4 * MILLI, 1010), Some(1010 + PAUSE_MAX_MS));
        // Long after it, the first length counts again.
        assert_eq!(patience.learn_yield(MILLI, 9000), Some(9000 + 32));
    }
}
