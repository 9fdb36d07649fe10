//! Frees device memory in a thread per device, so that dropping a region never blocks.
//!
//! Some drivers wait in a free for every stream of the device, including a stream that waits for a peer. Each
//! device has its own thread, because a stream that never ends delays what its device frees without limit.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::device::{DeviceContext, MemoryCalls};
use crate::limits::spawn;

type Garbage = Box<dyn Send>;

/// A device of this process, identified by its backend's context type and the driver's device number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Device(TypeId, i32);

impl Device {
    fn of<D: DeviceContext>(context: &D) -> Self {
        Self(TypeId::of::<D>(), context.device())
    }
}

struct Queue {
    thread: Option<Sender<Garbage>>,
    pending: usize,
}

static QUEUES: Mutex<BTreeMap<Device, Queue>> = Mutex::new(BTreeMap::new());
static DONE: Condvar = Condvar::new();

type Queues = MutexGuard<'static, BTreeMap<Device, Queue>>;

fn queues() -> Queues {
    QUEUES.lock().unwrap_or_else(PoisonError::into_inner)
}

struct DeferredFree<D: MemoryCalls, F: FnOnce(&D)> {
    context: Arc<D>,
    free: Option<F>,
}

impl<D: MemoryCalls, F: FnOnce(&D)> Drop for DeferredFree<D, F> {
    fn drop(&mut self) {
        // An error means that the device is lost, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        if let Some(free) = self.free.take() {
            free(&self.context);
        }
    }
}

/// Frees device memory now, or later in the device's thread if the driver would block.
pub(super) fn free<D: MemoryCalls>(context: &Arc<D>, free: impl FnOnce(&D) + Send + 'static) {
    let deferred = DeferredFree { context: Arc::clone(context), free: Some(free) };
    if context.frees_wait() {
        drop_later(context, deferred);
    }
}

/// Drops an object in the thread of its device, in the order of the calls. Drops it at once if that thread
/// cannot be started.
pub(super) fn drop_later<D: DeviceContext>(context: &Arc<D>, garbage: impl Send + 'static) {
    push(Device::of(&**context), garbage);
}

fn push(device: Device, garbage: impl Send + 'static) {
    let mut all = queues();
    let queue = all.entry(device).or_insert(Queue { thread: None, pending: 0 });
    if queue.thread.is_none() {
        queue.thread = start(device);
    }
    let Some(thread) = &queue.thread else {
        drop(all);
        return drop(garbage);
    };
    // The thread ends with the process.
    if thread.send(Box::new(garbage)).is_ok() {
        queue.pending += 1;
    }
}

/// Waits until the device's thread has dropped all its objects. Returns false if there were none or if the time ran
/// out.
pub(super) fn wait<D: DeviceContext>(context: &D, timeout: Duration) -> bool {
    wait_for_device(queues(), Device::of(context), timeout)
}

fn wait_for_device(all: Queues, device: Device, timeout: Duration) -> bool {
    let left = |all: &BTreeMap<Device, Queue>| all.get(&device).map_or(0, |queue| queue.pending);
    if left(&all) == 0 {
        return false;
    }
    let waited = DONE.wait_timeout_while(all, timeout, |all| left(all) > 0);
    let (all, _) = waited.unwrap_or_else(PoisonError::into_inner);
    left(&all) == 0
}

fn start(device: Device) -> Option<Sender<Garbage>> {
    let (sender, receiver) = mpsc::channel::<Garbage>();
    let run = move || {
        for garbage in receiver {
            drop(garbage);
            if let Some(queue) = queues().get_mut(&device) {
                queue.pending -= 1;
            }
            DONE.notify_all();
        }
    };
    spawn("peerlane-free", run).is_ok().then_some(sender)
}

#[cfg(test)]
mod tests {
    use std::thread;
    use std::time::Instant;

    use super::*;

    /// A test object whose drop blocks until the sender is dropped.
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
        let waited = wait_for_device(queues(), device(0), Duration::from_millis(20));
        assert!(!waited, "it is held");

        // The thread of the device can note that it has dropped the objects only when the wait releases the lock.
        let all = queues();
        drop(release);
        assert!(wait_for_device(all, device(0), Duration::from_secs(20)), "nothing holds it");
        let waited = wait_for_device(queues(), device(0), Duration::ZERO);
        assert!(!waited, "there is nothing to wait for");
    }

    #[test]
    fn a_device_that_never_ends_holds_up_no_other() {
        let (_never, held) = mpsc::channel();
        push(device(1), Slow(held));
        let (release, short) = mpsc::channel();
        push(device(2), Slow(short));
        drop(release);
        let deadline = Instant::now() + Duration::from_secs(20);
        while queues()[&device(2)].pending > 0 {
            assert!(Instant::now() < deadline, "it waits behind another device");
            thread::yield_now();
        }
        assert!(!wait_for_device(queues(), device(1), Duration::ZERO), "it is held");
    }
}
