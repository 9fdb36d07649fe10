//! Lets a thread sleep until another one has work for it, without a lock on the way of the work.

use std::time::Duration;

use crate::sync::{AtomicBool, Condvar, Mutex, Ordering, PoisonError, fence};

/// Announces that a thread may be about to sleep, so that others wake it only then.
///
/// The thread [announces](Self::make) its sleep, looks for work, and sleeps if it finds none. Another thread stores the work and
/// then looks for [the announcement](Self::is_made). The fences of both exclude that neither sees what the other has stored,
/// whatever the ordering of the stores.
#[derive(Default)]
pub(crate) struct Announcement(AtomicBool);

impl Announcement {
    pub(crate) fn make(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn withdraw(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// Returns whether the thread may be about to sleep. The caller has stored work before, and must wake the thread then.
    pub(crate) fn is_made(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed)
    }
}

/// Lets a thread sleep until another one wakes it. If the thread is awake, its next sleep ends at once.
#[derive(Default)]
pub(crate) struct Sleeper {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Sleeper {
    pub(crate) fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    pub(crate) fn sleep(&self, limit: Duration) {
        let mut woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        if !*woken {
            // A sleep that ends early only makes the thread look once more.
            let slept = self.changed.wait_timeout(woken, limit);
            woken = slept.unwrap_or_else(PoisonError::into_inner).0;
        }
        *woken = false;
    }
}
