//! Locks that ignore poisoning, and waits that do not occupy a core.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

/// Polls without a pause, and polls with a yield in between.
const SPINS: u32 = 64;
const YIELDS: u32 = 256;
/// The shortest and the longest pause between two polls.
const PAUSES: (Duration, Duration) = (Duration::from_micros(30), Duration::from_micros(500));
/// The part of the time waited so far that a pause may add.
const PAUSE_DIVISOR: u32 = 8;

/// Locks a mutex, also after a panic: the data is valid between any two calls.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for reading, like [`lock`].
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing, like [`lock`].
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits longer each time it is used, but never adds much to the time waited before.
#[derive(Debug, Default)]
pub(crate) struct Backoff {
    polls: u32,
    /// When it first slept.
    asleep_since: Option<Instant>,
}

impl Backoff {
    pub(crate) fn rest(&mut self) {
        self.polls = self.polls.saturating_add(1);
        if self.polls < SPINS {
            std::hint::spin_loop();
        } else if self.polls < SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            // Many queues wait at the same time, and each poll costs a switch of threads.
            let waited = self.asleep_since.get_or_insert_with(Instant::now).elapsed();
            std::thread::sleep((waited / PAUSE_DIVISOR).clamp(PAUSES.0, PAUSES.1));
        }
    }
}
