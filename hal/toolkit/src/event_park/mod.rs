//! Parks the thread of an engine whose device reports events by descriptors.
//!
//! The threads of a rank sleep until one of its flags may have changed. Whoever stores a flag wakes
//! them all.

mod spin;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::limits::SystemError;
use crate::{Fault, ParkStep, Parker, Unpark};
use spin::SpinPolicy;

/// The largest number of descriptors of a device.
const FDS_MAX: usize = 15;

/// An event descriptor that ends the sleep of one thread.
#[derive(Debug)]
pub struct WakeupEvent {
    event: OwnedFd,
    asleep: AtomicBool,
}

impl WakeupEvent {
    /// Creates the event of a thread that does not sleep.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn new() -> Result<Arc<Self>, Fault> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| SystemError::new("create an event descriptor", errno))?;
        Ok(Arc::new(Self { event, asleep: AtomicBool::new(false) }))
    }

    /// Returns the descriptor, which is readable after [`notify`](Self::notify).
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Says whether the thread sleeps or is about to, so that it has to be notified.
    pub fn set_asleep(&self, asleep: bool) {
        self.asleep.store(asleep, Ordering::SeqCst);
    }

    /// Ends the sleep of the thread, if it sleeps or is about to.
    pub fn notify(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            // If the counter is full, the write fails, but the descriptor is readable.
            let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
        }
    }

    /// Resets the descriptor, so that an old notification does not end the next sleep.
    pub fn clear(&self) {
        let mut count = [0; 8];
        // An empty counter is no error.
        let _ = rustix::io::read(&self.event, &mut count);
    }
}

impl Unpark for WakeupEvent {
    fn unpark(&self) {
        self.notify();
    }
}

/// The threads of a rank that sleep until a flag of the rank may have changed.
#[derive(Debug, Default)]
pub struct Sleepers {
    threads: Mutex<Vec<Weak<WakeupEvent>>>,
    asleep: AtomicUsize,
}

impl Sleepers {
    /// Wakes all threads that sleep or are about to. A caller that has stored a flag calls it.
    pub fn wake(&self) {
        // Orders the store of the flag before the check for sleepers, which register before they
        // check the flag.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) == 0 {
            return;
        }

        let threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.iter().filter_map(Weak::upgrade).for_each(|wakeup| wakeup.notify());
    }

    fn add(&self, wakeup: &Arc<WakeupEvent>) {
        let mut threads = self.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|wakeup| wakeup.strong_count() > 0);
        threads.push(Arc::downgrade(wakeup));
    }
}

/// Polls for a while, announces the sleep, polls once more, and then puts the thread of an engine
/// to sleep on descriptors.
#[derive(Debug)]
pub struct EventParker {
    parker: Parker<Arc<WakeupEvent>>,
    spin: SpinPolicy,
    sleepers: Arc<Sleepers>,
}

impl EventParker {
    /// Creates the parker of an engine, which polls for the time `spin` before it sleeps, or for a
    /// time that it learns from the waits.
    ///
    /// # Errors
    /// The error of the system call that creates an event descriptor.
    pub fn new(sleepers: &Arc<Sleepers>, spin: Option<Duration>) -> Result<Self, Fault> {
        let wakeup = WakeupEvent::new()?;
        sleepers.add(&wakeup);
        let sleepers = Arc::clone(sleepers);
        Ok(Self { parker: Parker::new(wakeup), spin: SpinPolicy::new(spin), sleepers })
    }

    /// Returns a waker that ends the current or the next park.
    pub fn waker(&self) -> Waker {
        self.parker.waker()
    }

    /// Returns the event that ends the sleep of the thread.
    pub fn wakeup(&self) -> Arc<WakeupEvent> {
        Arc::clone(self.parker.unpark())
    }

    /// Returns whether the next step is to sleep, unless the waker is called before.
    pub fn is_announced(&self) -> bool {
        self.parker.is_announced()
    }

    /// Makes one step towards sleep, and returns it.
    ///
    /// After [`Announce`](ParkStep::Announce), the caller requests the events of its device; after
    /// [`Sleep`](ParkStep::Sleep), it calls [`sleep`](Self::sleep). Flags are checked between two
    /// steps, so that one that is set before the announcement is not missed.
    pub fn step(&mut self, limit: Duration) -> ParkStep {
        let (idle_since, announced) = (self.parker.idle_since(), self.parker.is_announced());
        let step = self.parker.step(self.spin.duration(), limit);
        match step {
            ParkStep::Woken => self.end_wait(idle_since, announced),
            // The peer may be a thread or process that needs this core.
            ParkStep::Poll if self.spin.yields() => std::thread::yield_now(),
            ParkStep::Poll => std::hint::spin_loop(),
            ParkStep::Announce => {
                self.sleepers.asleep.fetch_add(1, Ordering::SeqCst);
                self.parker.unpark().set_asleep(true);
                // Orders the announcement before the next check of a flag, as `Sleepers::wake` does
                // for the other side.
                fence(Ordering::SeqCst);
            }
            ParkStep::Sleep => {}
        }

        step
    }

    /// Sleeps until one of the descriptors is readable, the waker is called or `limit` has passed.
    /// Returns a mask with a bit for each descriptor that is readable, the lowest for the first.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn sleep<'a>(
        &self,
        device_fds: impl Iterator<Item = BorrowedFd<'a>>,
        limit: Duration,
    ) -> Result<u32, Fault> {
        let slept = self.poll(device_fds, limit);
        self.withdraw();
        slept
    }

    /// Ends an announced sleep without sleeping, because the device has events already.
    pub fn cancel_sleep(&self) {
        self.withdraw();
    }

    fn poll<'a>(
        &self,
        device_fds: impl Iterator<Item = BorrowedFd<'a>>,
        limit: Duration,
    ) -> Result<u32, Fault> {
        let limit = (limit < Duration::MAX).then(|| Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        });

        let wakeup = self.parker.unpark().fd();
        let (mut device_fds, mut count) = (device_fds.take(FDS_MAX), 1);
        let mut fds: [PollFd<'_>; 1 + FDS_MAX] = std::array::from_fn(|at| {
            let fd = if at == 0 { None } else { device_fds.next() };
            count += usize::from(fd.is_some());
            PollFd::from_borrowed_fd(fd.unwrap_or(wakeup), PollFlags::IN)
        });
        match poll(&mut fds[..count], limit.as_ref()) {
            // Woken, interrupted or timed out: the caller checks its flags in every case.
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(SystemError::new("sleep on event descriptors", errno).into()),
        }

        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        if is_ready(&fds[0]) {
            self.parker.unpark().clear();
        }
        let ready = fds[1..count].iter().zip(0_u32..).filter(|(fd, _)| is_ready(fd));
        Ok(ready.map(|(_, at)| 1 << at).sum())
    }

    fn withdraw(&self) {
        self.parker.unpark().set_asleep(false);
        self.sleepers.asleep.fetch_sub(1, Ordering::SeqCst);
    }

    /// Makes the next park poll before it sleeps, because the engine made progress or accepted ops.
    pub fn record_progress(&mut self) {
        let (idle_since, announced) = (self.parker.idle_since(), self.parker.is_announced());
        self.parker.busy();
        self.end_wait(idle_since, announced);
    }

    fn end_wait(&mut self, since: Option<Instant>, announced: bool) {
        if let Some(since) = since {
            self.spin.record_wait(since.elapsed());
        }
        if announced {
            self.withdraw();
        }
    }
}

impl Drop for EventParker {
    fn drop(&mut self) {
        if self.parker.is_announced() {
            self.withdraw();
        }
    }
}
