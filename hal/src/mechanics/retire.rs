//! Giving memory back where the driver then waits for every stream of the device, also for one that
//! waits for a peer: a thread of its own does it, so that no drop of a region blocks.

use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::mechanics::device::MemoryCalls;

/// What is to be dropped.
type Retired = Box<dyn Send>;

/// The thread, once it runs, and how much it has not dropped yet.
struct Work {
    thread: Option<Sender<Retired>>,
    left: usize,
}

static WORK: Mutex<Work> = Mutex::new(Work { thread: None, left: 0 });
static DONE: Condvar = Condvar::new();

fn work() -> MutexGuard<'static, Work> {
    WORK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Something that is freed when it is dropped.
struct Unused<D: MemoryCalls, F: FnOnce(&D)> {
    context: Arc<D>,
    free: Option<F>,
}

impl<D: MemoryCalls, F: FnOnce(&D)> Drop for Unused<D, F> {
    fn drop(&mut self) {
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        if let Some(free) = self.free.take() {
            free(&self.context);
        }
    }
}

/// Frees with the device current: now, or later where that waits.
pub(super) fn free<D: MemoryCalls>(context: &Arc<D>, free: impl FnOnce(&D) + Send + 'static) {
    let unused = Unused { context: Arc::clone(context), free: Some(free) };
    if context.frees_wait() {
        later(unused);
    }
}

/// Drops it in the order in which it came, and not on this thread; on this one if there is no other.
pub(super) fn later(retired: impl Send + 'static) {
    let mut work = work();
    if work.thread.is_none() {
        work.thread = start();
    }
    let Some(thread) = &work.thread else {
        drop(work);
        return drop(retired);
    };
    // The thread ends with the process.
    if thread.send(Box::new(retired)).is_ok() {
        work.left += 1;
    }
}

/// Waits until everything is dropped; whether there was something, and it is gone in time.
pub(super) fn settle(timeout: Duration) -> bool {
    let work = work();
    if work.left == 0 {
        return false;
    }
    let waited = DONE.wait_timeout_while(work, timeout, |work| work.left > 0);
    let (work, _) = waited.unwrap_or_else(PoisonError::into_inner);
    work.left == 0
}

fn start() -> Option<Sender<Retired>> {
    let (sender, receiver) = mpsc::channel::<Retired>();
    let run = move || {
        for retired in receiver {
            drop(retired);
            work().left -= 1;
            DONE.notify_all();
        }
    };
    let started = thread::Builder::new().name("peerlane-free".to_owned()).spawn(run);
    started.is_ok().then_some(sender)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets whoever drops it wait.
    struct Slow(mpsc::Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    #[test]
    fn what_is_slow_to_drop_holds_up_nobody() {
        let (release, held) = mpsc::channel();
        later(Slow(held));
        later(String::from("behind it"));
        assert!(!settle(Duration::from_millis(20)), "it is held");
        drop(release);
        assert!(settle(Duration::from_secs(20)), "nothing holds it");
        assert!(!settle(Duration::ZERO), "there is nothing to wait for");
    }
}
