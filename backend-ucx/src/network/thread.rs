//! Polls the worker of a rank while none of its threads does.
//!
//! UCX moves bytes only within calls, also those that peers send. A peer must not wait for a rank
//! that computes, so a thread takes over when nobody has driven the worker for a while. While
//! engines drive it, the thread only looks from time to time, and costs next to nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_toolkit::{Fault, WakeupEvent, limits};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::Core;
use crate::error::Error;

/// The time after which the thread takes over from engines that have stopped to drive the worker.
const LOOK_MIN: Duration = Duration::from_millis(2);
/// The longest time between two looks while engines sleep until the worker has events.
const LOOK_MAX: Duration = Duration::from_millis(32);
/// The longest sleep until the worker has events. An event that is missed costs this.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// The thread that drives the worker of a rank, which ends when this is dropped.
#[derive(Debug)]
pub(super) struct DrivingThread {
    stop: Arc<EndOfThread>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct EndOfThread {
    is_set: AtomicBool,
    event: Arc<WakeupEvent>,
}

impl DrivingThread {
    pub(super) fn start(core: &Arc<Core>) -> Result<Self, Error> {
        let event = WakeupEvent::new()?;
        event.set_asleep(true);
        let stop = Arc::new(EndOfThread { is_set: AtomicBool::new(false), event });
        let (core, of_thread) = (Arc::clone(core), Arc::clone(&stop));
        let thread = limits::spawn("peerlane-ucx", move || core.serve(&of_thread));
        Ok(Self { stop, thread: Some(thread.map_err(Fault::from)?) })
    }
}

impl Drop for DrivingThread {
    fn drop(&mut self) {
        self.stop.is_set.store(true, Ordering::SeqCst);
        self.stop.event.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Core {
    fn serve(&self, stop: &EndOfThread) {
        let (mut drives, mut look) = (0, LOOK_MIN);
        while !stop.is_set.load(Ordering::SeqCst) {
            let seen = std::mem::replace(&mut drives, self.drives.load(Ordering::Relaxed));
            if seen != drives {
                look = LOOK_MIN;
                sleep(stop, look);
                continue;
            }
            if self.asleep.load(Ordering::SeqCst) > 0 {
                // Engines that sleep wake by themselves.
                sleep(stop, look);
                look = (2 * look).min(LOOK_MAX);
                continue;
            }

            look = LOOK_MIN;
            let mut driver = self.lock();
            // An error is the one that the next call of an engine meets.
            let has_progressed = self.drive_worker(&mut driver).unwrap_or(false);
            let is_armed =
                !has_progressed && driver.worker().and_then(|worker| worker.arm()).unwrap_or(true);
            drop(driver);
            if is_armed {
                self.sleep_until_event(&[stop.event.fd()], SLEEP_MAX);
            }
        }
    }
}

/// Sleeps for a while, or until the thread is to end.
fn sleep(stop: &EndOfThread, limit: Duration) {
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    let mut fds = [PollFd::from_borrowed_fd(stop.event.fd(), PollFlags::IN)];
    let _ = poll(&mut fds, Some(&limit));
}
