//! How a rank sleeps until a flag may have changed, and how others wake it.
//!
//! A bell is two words in a small shared region of the sleeping rank. A sleeper announces itself,
//! looks at its flags once more, and sleeps on the count of rings; a writer stores its flag, and
//! rings only if somebody is announced. Sequentially consistent fences on both sides make it
//! impossible that the writer misses the sleeper and the sleeper misses the flag. So a signal costs
//! a system call only when somebody really sleeps.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::task::{Wake, Waker};
use std::time::Duration;

use rustix::thread::futex;

use crate::host::memory::Registration;

/// Two words on cache lines of their own.
#[repr(C, align(64))]
struct Words {
    rings: AtomicU32,
    _line: [u32; 15],
    sleepers: AtomicU32,
}

/// A rank's bell, one's own or a peer's.
#[derive(Debug)]
pub(in crate::host) struct Bell(Arc<Registration>);

impl Bell {
    pub(in crate::host) const BYTES: u64 = size_of::<Words>() as u64;

    /// The bell in a region of [`BYTES`](Self::BYTES) that was zero when it was made.
    pub(in crate::host) fn of(region: Arc<Registration>) -> Arc<Self> {
        Arc::new(Self(region))
    }

    fn words(&self) -> &Words {
        // SAFETY: the region is a page-aligned mapping of at least `BYTES` (`Fabric::open_with`
        // allocates it, `memory::open` checks what a peer hands over), it lives as long as `self`,
        // and everyone touches it as these atomics.
        unsafe { self.0.base().cast().as_ref() }
    }

    /// Wakes whoever sleeps here; called after the flag was stored.
    pub(super) fn ring_if_awaited(&self) {
        // Orders the caller's store before the look for sleepers.
        fence(Ordering::SeqCst);
        let words = self.words();
        if words.sleepers.load(Ordering::Relaxed) > 0 {
            words.rings.fetch_add(1, Ordering::SeqCst);
            // Nobody left to wake is no error.
            let _ = futex::wake(&words.rings, futex::Flags::empty(), i32::MAX.cast_unsigned());
        }
    }
}

/// Ends a park from another thread of this process.
struct Alarm {
    bell: Arc<Bell>,
    rung: AtomicBool,
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        self.bell.ring_if_awaited();
    }
}

/// The parking place of one engine: spin for a while, announce, look again, sleep.
pub(super) struct Parker {
    alarm: Arc<Alarm>,
    spin: Duration,
    /// Since when the engine has had nothing to do.
    idle_since: Option<std::time::Instant>,
    /// The count of rings at the announcement, while announced.
    announced: Option<u32>,
}

impl Parker {
    /// Looks at the clock are dear next to a look at a flag, so a step spins a little.
    const SPINS_A_STEP: u32 = 4;

    pub(super) fn new(bell: Arc<Bell>, spin: Duration) -> Self {
        let alarm = Arc::new(Alarm { bell, rung: AtomicBool::new(false) });
        Self { alarm, spin, idle_since: None, announced: None }
    }

    pub(super) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.alarm))
    }

    /// One step: the caller looks at its flags between two of them, which is what makes the
    /// announcement safe.
    pub(super) fn park(&mut self, limit: Duration) {
        if self.alarm.rung.swap(false, Ordering::SeqCst) {
            return self.busy();
        }
        if let Some(rings) = self.announced {
            self.sleep(rings, limit);
            return self.withdraw();
        }
        let now = std::time::Instant::now();
        let idle_since = *self.idle_since.get_or_insert(now);
        if now.duration_since(idle_since) < self.spin.min(limit) {
            for _ in 0..Self::SPINS_A_STEP {
                std::hint::spin_loop();
            }
            return;
        }
        let words = self.alarm.bell.words();
        words.sleepers.fetch_add(1, Ordering::SeqCst);
        // Orders the announcement before the caller's next look at a flag.
        fence(Ordering::SeqCst);
        self.announced = Some(words.rings.load(Ordering::SeqCst));
    }

    /// Something moved: the next park spins again.
    pub(super) fn busy(&mut self) {
        self.idle_since = None;
        self.withdraw();
    }

    fn sleep(&self, rings: u32, limit: Duration) {
        // A ring of the alarm before this look is seen here, one after it moves the count.
        if self.alarm.rung.swap(false, Ordering::SeqCst) {
            return;
        }
        let limit = rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        };
        // Woken, rung before, interrupted or out of time: the caller looks in any case.
        let rings_word = &self.alarm.bell.words().rings;
        let _ = futex::wait(rings_word, futex::Flags::empty(), rings, Some(&limit));
    }

    fn withdraw(&mut self) {
        if self.announced.take().is_some() {
            self.alarm.bell.words().sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

impl Drop for Parker {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl std::fmt::Debug for Parker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let announced = self.announced.is_some();
        f.debug_struct("Parker").field("spin", &self.spin).field("announced", &announced).finish()
    }
}
