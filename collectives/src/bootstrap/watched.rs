//! A value that threads wait for, each until its own deadline.
//!
//! A thread that panics elsewhere, a listener say, does not make the value unusable: every change
//! under the lock is complete before foreign code runs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use peerlane_hal::Deadline;

pub(super) struct Watched<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Watched<T> {
    pub(super) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    /// The value, to look at.
    pub(super) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the value and wakes all who wait.
    pub(super) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Waits until `look` finds something; `None` once the deadline has passed without.
    pub(super) fn wait<R>(
        &self,
        deadline: Deadline,
        mut look: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut value = self.lock();
        loop {
            if let Some(found) = look(&mut value) {
                return Some(found);
            }
            let remaining = deadline.remaining();
            if remaining.is_zero() {
                return None;
            }
            let woken = self.changed.wait_timeout(value, remaining);
            value = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
