//! Tells a caller that waits with a file descriptor or a future that something has happened.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Waker;

use peerlane_toolkit::limits::SystemError;
use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;

/// A descriptor, which is created when it is first needed, and the waker of a future.
#[derive(Default)]
pub(super) struct Event {
    descriptor: OnceLock<OwnedFd>,
    waker: Mutex<Option<Waker>>,
}

impl Event {
    /// Returns the descriptor, which is readable after [`signal`](Self::signal).
    pub(super) fn descriptor(&self, of: &str) -> Result<BorrowedFd<'_>, Error> {
        if self.descriptor.get().is_none() {
            let created = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            let what = format!("cannot create a descriptor for {of}");
            let created = created.map_err(|errno| SystemError::new(what, errno))?;
            // If another thread was faster, its descriptor counts.
            let _ = self.descriptor.set(created);
        }
        Ok(self.descriptor.get().expect("set above").as_fd())
    }

    pub(super) fn set_waker(&self, waker: &Waker) {
        if self.waker().as_ref().is_some_and(|own| own.will_wake(waker)) {
            return;
        }

        // The waker is code of the caller, which may use the group, so no lock is held.
        let new = waker.clone();
        let old = self.waker().replace(new);
        drop(old);
    }

    fn waker(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the descriptor readable and wakes the future. The state of the group must not be
    /// locked, because the waker may use the group.
    pub(super) fn signal(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            // It fails only if the counter is full, and then the descriptor is readable.
            let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
        }
        let waker = self.waker().take();
        if let Some(waker) = waker {
            // A panic in code of the caller must not end a thread of the group. It has been
            // printed.
            let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
        }
    }

    /// Makes the descriptor unreadable.
    pub(super) fn clear(&self) {
        if let Some(descriptor) = self.descriptor.get() {
            // It fails if the descriptor is not readable.
            let _ = rustix::io::read(descriptor, &mut [0_u8; 8]);
        }
    }
}
