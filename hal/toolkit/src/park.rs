//! Parks a thread until the device may have made progress.
//!
//! A blocking wait of the driver cannot be ended by a waker, may be illegal during a capture, or may spin
//! itself. So the parked thread polls the oldest work: first without sleeping, which covers a small
//! all-gather, then with growing sleeps. Flags of this rank change without a wake-up, so each call is short
//! and its caller checks again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

/// Time to poll without sleeping after progress.
const SPIN: Duration = Duration::from_micros(20);
const SLEEP_MIN: Duration = Duration::from_micros(5);
/// Longest sleep where the device waits for flags itself.
const SLEEP_MAX: Duration = Duration::from_micros(200);
/// Longest time in one call.
const PARK_MAX: Duration = Duration::from_millis(1);

/// The state that a waker sets.
#[derive(Debug, Default)]
struct Wakeup {
    woken: AtomicBool,
    sleeping: Mutex<()>,
    changed: Condvar,
}

impl Wakeup {
    fn take(&self) -> bool {
        self.woken.swap(false, Ordering::AcqRel)
    }

    /// Sleeps for at most `time`, unless it was woken.
    fn sleep(&self, time: Duration) {
        let sleeping = self.sleeping.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        if !self.woken.load(Ordering::Acquire) {
            // After an early or late wake-up, the caller checks everything again.
            let _ = self.changed.wait_timeout(sleeping, time);
        }
    }
}

impl Wake for Wakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        // Under the lock, so that a parked thread either has seen `woken` or already sleeps.
        drop(self.sleeping.lock());
        self.changed.notify_all();
    }
}

/// Parks the thread that drives an engine.
#[derive(Debug)]
pub struct Parker {
    wakeup: Arc<Wakeup>,
    spin: Duration,
    sleep_max: Duration,
    /// The next sleep; `None` while polling without sleep is worthwhile.
    sleep: Option<Duration>,
}

impl Default for Parker {
    /// Creates a parker for an engine whose device waits for flags itself.
    fn default() -> Self {
        Self::new(SPIN, SLEEP_MAX)
    }
}

impl Parker {
    /// Creates a parker that polls without sleeping for `spin` after progress, and then sleeps for at most
    /// `sleep_max` between two polls.
    pub fn new(spin: Duration, sleep_max: Duration) -> Self {
        Self { wakeup: Arc::default(), spin, sleep_max, sleep: None }
    }

    /// Returns a waker that ends the present or the next park.
    pub fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.wakeup))
    }

    /// Notes progress or a submission: more progress may follow soon.
    pub fn busy(&mut self) {
        self.sleep = None;
    }

    /// Sleeps until `moved` returns true, the waker is called, `limit` has passed, or a short time has
    /// passed.
    pub fn park(&mut self, limit: Duration, moved: impl Fn() -> bool) {
        let start = Instant::now();
        let limit = limit.min(PARK_MAX);
        if self.sleep.is_none() {
            while start.elapsed() < limit.min(self.spin) {
                if self.wakeup.take() || moved() {
                    return;
                }
                std::thread::yield_now();
            }
        }
        loop {
            let left = limit.saturating_sub(start.elapsed());
            if self.wakeup.take() || moved() || left.is_zero() {
                return;
            }
            let sleep = self.sleep.unwrap_or(SLEEP_MIN);
            self.wakeup.sleep(sleep.min(left));
            self.sleep = Some((sleep * 2).min(self.sleep_max));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wake_before_the_sleep_is_not_lost() {
        let mut parker = Parker { sleep: Some(SLEEP_MAX), ..Parker::default() };
        parker.waker().wake();
        parker.park(Duration::MAX, || panic!("woken: there is nothing to look at"));
        let start = Instant::now();
        parker.park(Duration::from_millis(1), || false);
        assert!(start.elapsed() >= Duration::from_millis(1), "the waker was called once");
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
