//! Lets threads wait, with a deadline, for changes of a shared value.

use peerlane_hal::Deadline;

use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Protects a value by a mutex, and wakes waiting threads when the value changes.
///
/// A panic of another thread, for example in a listener, does not make the value unusable: every
/// change under the lock is complete before foreign code runs.
pub(crate) struct Monitor<T> {
    value: Mutex<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Condvar::new() }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls `change` with the locked value, wakes all waiting threads, and returns the result of
    /// `change`.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());

        // The lock is free by now, so that the threads do not wake only to wait for it.
        self.changed.notify_all();
        result
    }

    /// Waits until `find` returns a result for the value, or returns `None` when the deadline has
    /// passed.
    pub(crate) fn wait<R>(
        &self,
        deadline: Deadline,
        mut find: impl FnMut(&mut T) -> Option<R>,
    ) -> Option<R> {
        let mut value = self.lock();
        loop {
            // Before the deadline is checked, so that a result that is there is found in any case.
            if let Some(found) = find(&mut value) {
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
