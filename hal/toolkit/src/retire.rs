//! Giving memory back where the driver then waits for every stream of the device, also for one that
//! waits for a peer: a thread of its own does it, so that no drop of a region blocks. Each device has one,
//! because a stream that never ends holds up what its device gets back for ever.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::device::{DeviceContext, MemoryCalls};

/// What is to be dropped.
type Retired = Box<dyn Send>;

/// A device of this process: whose contexts they are, and the driver's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Device(TypeId, i32);

impl Device {
    fn of<D: DeviceContext>(context: &D) -> Self {
        Self(TypeId::of::<D>(), context.device())
    }
}

/// The thread of a device, if there is one, and how much it has not dropped yet.
struct Work {
    thread: Option<Sender<Retired>>,
    left: usize,
}

static WORK: Mutex<BTreeMap<Device, Work>> = Mutex::new(BTreeMap::new());
static DONE: Condvar = Condvar::new();

fn work() -> MutexGuard<'static, BTreeMap<Device, Work>> {
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
        later(context, unused);
    }
}

/// Drops what is of the context's device, in the order in which it came, and not on this thread; on this
/// one if there is no other.
pub(super) fn later<D: DeviceContext>(context: &Arc<D>, retired: impl Send + 'static) {
    push(Device::of(&**context), retired);
}

fn push(device: Device, retired: impl Send + 'static) {
    let mut all = work();
    let work = all.entry(device).or_insert(Work { thread: None, left: 0 });
    if work.thread.is_none() {
        work.thread = start(device);
    }
    let Some(thread) = &work.thread else {
        drop(all);
        return drop(retired);
    };
    // The thread ends with the process.
    if thread.send(Box::new(retired)).is_ok() {
        work.left += 1;
    }
}

/// Waits until everything of the context's device is dropped; whether there was something, and it is
/// gone in time.
pub(super) fn settle<D: DeviceContext>(context: &D, timeout: Duration) -> bool {
    wait(Device::of(context), timeout)
}

fn wait(device: Device, timeout: Duration) -> bool {
    let left = |all: &BTreeMap<Device, Work>| all.get(&device).map_or(0, |work| work.left);
    let all = work();
    if left(&all) == 0 {
        return false;
    }
    let waited = DONE.wait_timeout_while(all, timeout, |all| left(all) > 0);
    let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
    left(&all) == 0
}

fn start(device: Device) -> Option<Sender<Retired>> {
    let (sender, receiver) = mpsc::channel::<Retired>();
    let run = move || {
        for retired in receiver {
            drop(retired);
            if let Some(work) = work().get_mut(&device) {
                work.left -= 1;
            }
            DONE.notify_all();
        }
    };
    let started = thread::Builder::new().name("peerlane-free".to_owned()).spawn(run);
    started.is_ok().then_some(sender)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// Lets whoever drops it wait.
    struct Slow(mpsc::Receiver<()>);

    impl Drop for Slow {
        fn drop(&mut self) {
            let _ = self.0.recv();
        }
    }

    fn device(number: i32) -> Device {
        Device(TypeId::of::<Slow>(), number)
    }

    #[test]
    fn what_is_slow_to_drop_holds_up_nobody() {
        let (release, held) = mpsc::channel();
        push(device(0), Slow(held));
        push(device(0), String::from("behind it"));
        assert!(!wait(device(0), Duration::from_millis(20)), "it is held");
        drop(release);
        assert!(wait(device(0), Duration::from_secs(20)), "nothing holds it");
        assert!(!wait(device(0), Duration::ZERO), "there is nothing to wait for");
    }

    #[test]
    fn a_device_that_never_ends_holds_up_no_other() {
        let (_never, held) = mpsc::channel();
        push(device(1), Slow(held));
        let (release, short) = mpsc::channel();
        push(device(2), Slow(short));
        drop(release);
        let deadline = Instant::now() + Duration::from_secs(20);
        while work()[&device(2)].left > 0 {
            assert!(Instant::now() < deadline, "it waits behind another device");
            thread::yield_now();
        }
        assert!(!wait(device(1), Duration::ZERO), "it is held");
    }
}
