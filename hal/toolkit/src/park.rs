//! Parks the thread of an engine, which polls for a while, announces that it will sleep, and then sleeps.
//!
//! [`Parker`] decides on each step, and a backend does it with the means of its device: a futex, completion
//! channels, or a sleep with a time limit. Between two steps the caller checks its flags, so a flag that is
//! set before the announcement is not missed, and a flag that is set after it ends the sleep.

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

/// Ends the sleep of a thread that a [`Parker`] has parked.
pub trait Unpark: Send + Sync {
    /// Wakes the thread if it sleeps or has announced that it is about to sleep.
    fn unpark(&self);
}

impl<U: Unpark + ?Sized> Unpark for Arc<U> {
    fn unpark(&self) {
        (**self).unpark();
    }
}

/// The step that an idle thread takes next on its way to sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParkStep {
    /// The waker was called, so the thread returns from the park.
    Woken,
    /// The thread polls again without sleeping.
    Poll,
    /// The thread announces to the device and to peers that it is about to sleep.
    Announce,
    /// The thread sleeps, at most for the limit of the caller.
    Sleep,
}

/// Decides whether an idle thread polls, announces its sleep or sleeps.
///
/// ```
/// use std::time::Duration;
/// use peerlane_toolkit::{ParkStep, Parker, Unpark};
///
/// struct Device;
/// impl Unpark for Device {
///     fn unpark(&self) { /* write an event descriptor, wake a futex */ }
/// }
///
/// let mut parker = Parker::new(Device);
/// let (spin, limit) = (Duration::ZERO, Duration::from_secs(1));
/// assert_eq!(parker.step(spin, limit), ParkStep::Announce);
/// // The caller has checked its flags once more.
/// assert_eq!(parker.step(spin, limit), ParkStep::Sleep);
/// parker.waker().wake();
/// assert_eq!(parker.step(spin, limit), ParkStep::Woken);
/// ```
#[derive(Debug)]
pub struct Parker<U> {
    wakeup: Arc<Wakeup<U>>,
    polls: u32,
    idle_since: Option<Instant>,
    announced: bool,
}

/// The number of polls before the clock is first read, because reading it takes as long as a poll of host memory.
const UNTIMED_POLLS: u32 = 8;

#[derive(Debug)]
struct Wakeup<U> {
    woken: AtomicBool,
    unpark: U,
}

impl<U: Unpark + 'static> Wake for Wakeup<U> {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.unpark.unpark();
    }
}

impl<U: Unpark + 'static> Parker<U> {
    /// Creates a parker whose waker calls [`Unpark::unpark`] of the given value.
    pub fn new(unpark: U) -> Self {
        let wakeup = Arc::new(Wakeup { woken: AtomicBool::new(false), unpark });
        Self { wakeup, polls: 0, idle_since: None, announced: false }
    }

    /// Returns the value that ends the sleep of the thread.
    pub fn unpark(&self) -> &U {
        &self.wakeup.unpark
    }

    /// Returns a waker that ends the current or the next park.
    pub fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.wakeup))
    }

    /// Returns whether the next step is to sleep, unless the waker is called before.
    pub fn is_announced(&self) -> bool {
        self.announced
    }

    /// Returns the time since which the engine has been idle, or `None` as long as the clock was not read.
    pub fn idle_since(&self) -> Option<Instant> {
        self.idle_since
    }

    /// Returns whether the engine has polled without result since its last progress.
    pub fn is_idle(&self) -> bool {
        self.polls > 0 || self.idle_since.is_some()
    }

    /// Makes the next park poll before it sleeps, because the engine made progress or accepted ops. An
    /// announcement ends.
    pub fn busy(&mut self) {
        (self.polls, self.idle_since, self.announced) = (0, None, false);
    }

    /// Returns the next step of a thread that polls for the time `spin` before it sleeps for at most
    /// `limit`.
    pub fn step(&mut self, spin: Duration, limit: Duration) -> ParkStep {
        // Usually it was not called, and a load is cheaper than a swap.
        let woken = &self.wakeup.woken;
        if woken.load(Ordering::SeqCst) && woken.swap(false, Ordering::SeqCst) {
            self.busy();
            return ParkStep::Woken;
        }
        if std::mem::take(&mut self.announced) {
            return ParkStep::Sleep;
        }
        if self.polls < UNTIMED_POLLS && !spin.is_zero() && !limit.is_zero() {
            self.polls += 1;
            return ParkStep::Poll;
        }
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) < spin.min(limit) {
            return ParkStep::Poll;
        }
        self.announced = true;
        ParkStep::Announce
    }
}

const SLEEP_MIN: Duration = Duration::from_micros(5);
/// The longest time that one call of [`TimedParker::park`] blocks.
const PARK_MAX: Duration = Duration::from_millis(1);

/// Parks the thread of an engine whose device sends no event that could wake the thread.
///
/// A blocking wait of a GPU driver cannot be ended by a waker, may be illegal during a capture, or may spin
/// itself. So the parked thread polls: first without sleeping, which covers a small all-gather, then with
/// growing sleeps. Flags of this rank change without a wake-up, so each call is short and its caller checks
/// again.
#[derive(Debug)]
pub struct TimedParker {
    parker: Parker<TimedSleep>,
    spin: Duration,
    sleep_max: Duration,
    next_sleep: Duration,
}

impl TimedParker {
    /// Creates a parker that polls without sleeping for `spin` after progress and then sleeps at most
    /// `sleep_max` between polls.
    pub fn new(spin: Duration, sleep_max: Duration) -> Self {
        let parker = Parker::new(TimedSleep::default());
        Self { parker, spin, sleep_max, next_sleep: SLEEP_MIN }
    }

    /// Returns a waker that ends the current or the next park.
    pub fn waker(&self) -> Waker {
        self.parker.waker()
    }

    /// Makes the next park poll without sleeping, because the engine made progress or accepted ops.
    pub fn busy(&mut self) {
        self.parker.busy();
        self.next_sleep = SLEEP_MIN;
    }

    /// Sleeps until `has_progress` returns true, the waker is called, or a short time or `limit` has passed.
    pub fn park(&mut self, limit: Duration, has_progress: impl Fn() -> bool) {
        let start = Instant::now();
        let limit = limit.min(PARK_MAX);
        loop {
            let left = limit.saturating_sub(start.elapsed());
            match self.parker.step(self.spin, left) {
                ParkStep::Woken => return,
                _ if has_progress() || left.is_zero() => return,
                ParkStep::Poll => std::thread::yield_now(),
                ParkStep::Announce => self.parker.unpark().announce(),
                ParkStep::Sleep => {
                    self.parker.unpark().sleep(self.next_sleep.min(left));
                    self.next_sleep = (self.next_sleep * 2).min(self.sleep_max);
                }
            }
        }
    }
}

#[derive(Debug, Default)]
struct TimedSleep {
    unparked: Mutex<bool>,
    changed: Condvar,
}

impl TimedSleep {
    fn lock(&self) -> std::sync::MutexGuard<'_, bool> {
        self.unparked.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn announce(&self) {
        *self.lock() = false;
    }

    fn sleep(&self, time: Duration) {
        let unparked = self.lock();
        if !*unparked {
            // After an early or late wake-up, the caller checks everything again.
            let _ = self.changed.wait_timeout(unparked, time);
        }
    }
}

impl Unpark for TimedSleep {
    fn unpark(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parker(spin: Duration) -> TimedParker {
        TimedParker::new(spin, Duration::from_micros(200))
    }

    #[test]
    fn a_wake_before_the_sleep_is_not_lost() {
        let mut parker = parker(Duration::ZERO);
        parker.waker().wake();
        parker.park(Duration::MAX, || panic!("woken: nothing needs to be checked"));
        let start = Instant::now();
        parker.park(Duration::from_millis(1), || false);
        assert!(start.elapsed() >= Duration::from_millis(1), "the waker was called once");
    }

    #[test]
    fn a_wake_between_announcement_and_sleep_is_not_lost() {
        let mut parker = Parker::new(TimedSleep::default());
        assert_eq!(parker.step(Duration::ZERO, Duration::MAX), ParkStep::Announce);
        parker.unpark().announce();
        assert_eq!(parker.step(Duration::ZERO, Duration::MAX), ParkStep::Sleep);
        parker.waker().wake();
        // Would never end otherwise.
        parker.unpark().sleep(Duration::MAX);
        assert_eq!(parker.step(Duration::ZERO, Duration::MAX), ParkStep::Woken);
    }

    #[test]
    fn it_polls_before_it_sleeps_and_again_after_progress() {
        let mut parker = Parker::new(TimedSleep::default());
        let hour = Duration::from_secs(3600);
        assert_eq!(parker.step(hour, Duration::MAX), ParkStep::Poll);
        assert_eq!(parker.step(Duration::ZERO, Duration::MAX), ParkStep::Announce);
        assert!(parker.is_announced());
        parker.busy();
        assert_eq!(parker.step(hour, Duration::MAX), ParkStep::Poll);
        assert_eq!(parker.step(hour, Duration::ZERO), ParkStep::Announce, "the limit is short");
    }

    #[test]
    fn it_returns_when_there_is_progress_and_at_the_limit() {
        let mut parker = parker(Duration::from_micros(20));
        parker.park(Duration::MAX, || true);
        parker.park(Duration::ZERO, || false);
        let start = Instant::now();
        parker.park(Duration::MAX, || false);
        assert!(start.elapsed() >= PARK_MAX, "it stays a while");
    }
}
