//! Locks that ignore poisoning, and waits that do not occupy a core.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// Polls without a pause, and polls with a yield in between.
const SPINS: u32 = 64;
const YIELDS: u32 = 256;
const SLEEP: Duration = Duration::from_micros(30);

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

/// Waits longer each time it is used.
#[derive(Debug, Default)]
pub(crate) struct Backoff(u32);

impl Backoff {
    pub(crate) fn rest(&mut self) {
        self.0 = self.0.saturating_add(1);
        if self.0 < SPINS {
            std::hint::spin_loop();
        } else if self.0 < SPINS + YIELDS {
            std::thread::yield_now();
        } else {
            std::thread::sleep(SLEEP);
        }
    }
}
