//! Giving the processor away until a device has come further.
//!
//! A driver's own blocking waits cannot be ended by a waker, may not be legal during a capture, or look
//! without a pause themselves. So a sleeper looks at what tells of the oldest work: first without a
//! pause, which covers a small all-gather, then with naps that grow. Flags of this rank change without
//! anybody who wakes; each call is therefore short, and its caller looks again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

/// How long a sleeper looks without a pause after something moved.
const SPIN: Duration = Duration::from_micros(20);
const NAP_MIN: Duration = Duration::from_micros(5);
/// The longest nap where the device waits for flags by itself.
const NAP_MAX: Duration = Duration::from_micros(200);
/// The longest stay in one call.
const PARK_MAX: Duration = Duration::from_millis(1);

/// What a waker rings.
#[derive(Debug, Default)]
struct Bell {
    rung: AtomicBool,
    sleeping: Mutex<()>,
    changed: Condvar,
}

impl Bell {
    fn answer(&self) -> bool {
        self.rung.swap(false, Ordering::AcqRel)
    }

    /// Sleeps, unless it was rung.
    fn nap(&self, time: Duration) {
        let sleeping = self.sleeping.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !self.rung.load(Ordering::Acquire) {
            // Woken early or late, the caller looks at everything again.
            let _ = self.changed.wait_timeout(sleeping, time);
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::Release);
        // Under the lock, so that a sleeper has either seen the bell or is already asleep.
        drop(self.sleeping.lock());
        self.changed.notify_all();
    }
}

/// One sleeper.
#[derive(Debug)]
pub struct Parker {
    bell: Arc<Bell>,
    spin: Duration,
    nap_max: Duration,
    /// The next nap; `None` while it is worth looking without one.
    nap: Option<Duration>,
}

impl Default for Parker {
    /// For an engine whose device waits for flags by itself.
    fn default() -> Self {
        Self::new(SPIN, NAP_MAX)
    }
}

impl Parker {
    /// A sleeper that looks without a pause for `spin` after something moved, and naps for `nap_max` at
    /// most between two looks.
    pub fn new(spin: Duration, nap_max: Duration) -> Self {
        Self { bell: Arc::default(), spin, nap_max, nap: None }
    }

    /// What ends a sleep, the present or the next.
    pub fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.bell))
    }

    /// Something moved, or was submitted: more may move soon.
    pub fn busy(&mut self) {
        self.nap = None;
    }

    /// Returns when `moved`, when the bell is rung, at `limit`, or after a while.
    pub fn park(&mut self, limit: Duration, moved: impl Fn() -> bool) {
        let start = Instant::now();
        let limit = limit.min(PARK_MAX);
        if self.nap.is_none() {
            while start.elapsed() < limit.min(self.spin) {
                if self.bell.answer() || moved() {
                    return;
                }
                std::thread::yield_now();
            }
        }
        loop {
            let left = limit.saturating_sub(start.elapsed());
            if self.bell.answer() || moved() || left.is_zero() {
                return;
            }
            let nap = self.nap.unwrap_or(NAP_MIN);
            self.bell.nap(nap.min(left));
            self.nap = Some((nap * 2).min(self.nap_max));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_before_the_sleep_is_not_lost() {
        let mut parker = Parker { nap: Some(NAP_MAX), ..Parker::default() };
        parker.waker().wake();
        parker.park(Duration::MAX, || panic!("rung: there is nothing to look at"));
        let start = Instant::now();
        parker.park(Duration::from_millis(1), || false);
        assert!(start.elapsed() >= Duration::from_millis(1), "the bell was rung once");
    }

    #[test]
    fn it_returns_when_something_moved_and_at_the_limit() {
        let mut parker = Parker::default();
        parker.park(Duration::MAX, || true);
        parker.park(Duration::ZERO, || false);
        let start = Instant::now();
        parker.park(Duration::MAX, || false);
        assert!(start.elapsed() >= PARK_MAX, "it stays a while");
    }
}
