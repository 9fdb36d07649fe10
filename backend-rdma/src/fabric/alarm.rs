//! Wakes a thread that sleeps in `park`.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};

use crate::error::Error;

/// Wakes the thread that sleeps in one engine's `park`, with an event descriptor.
#[derive(Debug)]
pub(crate) struct Alarm {
    event: OwnedFd,
    asleep: AtomicBool,
    rung: AtomicBool,
}

impl Alarm {
    pub(crate) fn new() -> Result<Arc<Self>, Error> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(Error::system("make an event descriptor"))?;
        let (asleep, rung) = (AtomicBool::new(false), AtomicBool::new(false));
        Ok(Arc::new(Self { event, asleep, rung }))
    }

    /// Returns the descriptor, which is readable after a wake-up.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Records whether a thread is about to sleep.
    pub(crate) fn announce(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    /// Wakes the thread if it sleeps.
    pub(crate) fn ring(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // A full counter is readable, too.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Clears the wake-ups, so that the next sleep can begin.
    pub(crate) fn quiet(&self) {
        let mut count = [0; 8];
        // Nothing to take is no error.
        let _ = rustix::io::read(&self.event, &mut count);
    }

    /// Returns whether the waker was used since the last call.
    pub(crate) fn was_used(&self) -> bool {
        // Mostly it was not, and a look is cheaper than a swap.
        self.rung.load(Ordering::SeqCst) && self.rung.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        self.ring();
    }
}
