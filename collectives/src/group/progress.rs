//! The progress thread, which drives lanes of starts on streams if their engines need polling.
//!
//! A rank has at most one, started when a start on a stream needs it; a start that its caller waits for is driven by the
//! caller. It ends with the group, and sleeps while no start is open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerlane_hal::ErrorKind;

use crate::error::Error;
use crate::group::shared::{Shared, Watched};
use crate::group::watch::Watch;
use crate::run::backoff::Backoff;
use crate::run::executor::Executor;

/// The longest nap: a graph may be replayed at any time, and its network lanes should then start soon.
const NAP_MAX: Duration = Duration::from_millis(1);

type Driven = (Arc<Watch>, Arc<Mutex<Executor>>);

impl Shared {
    /// Makes the thread drive the operation of `watch` while it has open starts.
    ///
    /// # Errors
    /// [`Other`](ErrorKind::Other) if the system cannot create a thread.
    pub(crate) fn drive_beside(self: &Arc<Self>, watch: &Watch) -> Result<(), Error> {
        watch.mark_beside();
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_none() {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("peerlane-progress".to_owned());
            *progress = Some(thread.spawn(move || shared.make_progress()).map_err(|error| {
                let text = format!("cannot start the progress thread: {error}");
                Error::new(ErrorKind::Other, text).with_source(error)
            })?);
        }
        Ok(())
    }

    /// Wakes the thread, if there is one, after a start was opened.
    pub(crate) fn wake_progress(&self) {
        if self.progress_sleeps.load(Ordering::SeqCst) {
            // The thread holds the lock from its look until it sleeps.
            drop(self.state());
            self.progress_wanted.notify_all();
        }
    }

    /// Returns the thread, to be joined after the group is closed.
    pub(crate) fn take_progress(&self) -> Option<JoinHandle<()>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn make_progress(&self) {
        let mut driven: Vec<Driven> = Vec::new();
        let mut backoff = Backoff::new(NAP_MAX);
        while self.pick(&mut driven) {
            let polled_at = Instant::now();
            let progressed = self.drive_picked(&driven);
            // What is dropped meanwhile ends here, and not with the next start.
            driven.clear();
            if progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                std::thread::sleep(nap);
            } else {
                std::thread::yield_now();
            }
        }
    }

    /// Waits until there is something to drive; returns false at the end of the group.
    fn pick(&self, driven: &mut Vec<Driven>) -> bool {
        let mut state = self.state();
        loop {
            // Before the look: a start that is opened behind the look finds it, and wakes the thread.
            self.progress_sleeps.store(true, Ordering::SeqCst);
            // After an abort nothing is driven any more; it is released.
            if state.control.record().is_none() {
                let wanted = state.watched.iter().filter(|watched| watched.watch.is_beside());
                driven.extend(wanted.map(Watched::driven));
            }
            if state.closed.is_some() || !driven.is_empty() {
                self.progress_sleeps.store(false, Ordering::SeqCst);
                return state.closed.is_none();
            }
            let (slept, _) = self
                .progress_wanted
                .wait_timeout(state, self.timeout)
                .unwrap_or_else(PoisonError::into_inner);
            state = slept;
        }
    }

    /// Drives each operation once, and returns whether one made progress.
    fn drive_picked(&self, driven: &[Driven]) -> bool {
        let mut moved = false;
        for (watch, executor) in driven {
            // Who holds it drives it.
            let Ok(mut executor) = executor.try_lock() else { continue };
            match executor.drive() {
                Ok(further) => {
                    moved |= further;
                    self.close_done(watch, &executor);
                }
                Err(error) => {
                    drop(executor);
                    self.raise(watch.broken(&error));
                }
            }
        }
        moved
    }
}
