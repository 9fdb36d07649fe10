//! Runs the threads that a group shares with the groups split from it.
//!
//! The watchdog thread [looks](Shared::look) after each group. The progress thread drives lanes of starts on streams whose
//! engines need polling. A family has at most one, started when a start on a stream needs it; a start that its caller waits
//! for is driven by the caller. Both threads sleep while they have nothing to do.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerlane_hal::ErrorKind;

use crate::error::Error;
use crate::group::shared::{Driven, Shared};
use crate::run::backoff::Backoff;

/// A replayed graph should not wait long for its network transfers, so the progress thread sleeps at most this long.
const NAP_MAX: Duration = Duration::from_millis(1);
/// The longest sleep of a thread that nobody wakes.
const SLEEP_MAX: Duration = Duration::from_secs(60);

/// A group and the groups split from it, with the threads that they share.
#[derive(Default)]
pub(crate) struct Family {
    groups: RwLock<Vec<Arc<Shared>>>,
    has_several: AtomicBool,
    subgroups: AtomicU32,
    closed: AtomicBool,
    watchdog: Sleeper,
    progress: Sleeper,
    progress_sleeps: AtomicBool,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    watchdog: Option<JoinHandle<()>>,
    progress: Option<JoinHandle<()>>,
}

/// Lets a thread sleep until another one wakes it. If the thread is awake, its next sleep ends at once.
#[derive(Default)]
struct Sleeper {
    woken: Mutex<bool>,
    changed: Condvar,
}

impl Sleeper {
    fn wake(&self) {
        *self.woken.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn sleep(&self, limit: Duration) {
        let woken = self.woken.lock().unwrap_or_else(PoisonError::into_inner);
        let slept = self.changed.wait_timeout_while(woken, limit, |woken| !*woken);
        *slept.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

impl Family {
    pub(super) fn add(&self, group: &Arc<Shared>) {
        self.change(|groups| groups.push(Arc::clone(group)));
    }

    pub(super) fn remove(&self, group: &Arc<Shared>) {
        self.change(|groups| groups.retain(|other| !Arc::ptr_eq(other, group)));
    }

    fn change(&self, change: impl FnOnce(&mut Vec<Arc<Shared>>)) {
        let mut groups = self.groups.write().unwrap_or_else(PoisonError::into_inner);
        change(&mut groups);
        self.has_several.store(groups.len() > 1, Ordering::Relaxed);
        drop(groups);
        self.watchdog.wake();
    }

    /// Drives what is open in the other groups of the family, and returns whether something is left.
    pub(super) fn drive_others(&self, own: &Shared) -> bool {
        if !self.has_several.load(Ordering::Relaxed) {
            return false;
        }
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        let others = groups.iter().filter(|group| !std::ptr::eq(&***group, own));
        // Every group is driven.
        others.filter(|group| group.drive_own()).count() > 0
    }

    /// Returns a number that this rank has given to no other subgroup.
    pub(super) fn next_subgroup(&self) -> u32 {
        self.subgroups.fetch_add(1, Ordering::Relaxed)
    }

    pub(super) fn start_watchdog(self: &Arc<Self>) -> Result<(), Error> {
        let family = Arc::clone(self);
        let thread = spawn("watchdog", move || family.watch())?;
        self.threads().watchdog = Some(thread);
        Ok(())
    }

    pub(super) fn start_progress(self: &Arc<Self>) -> Result<(), Error> {
        let mut threads = self.threads();
        if threads.progress.is_none() {
            let family = Arc::clone(self);
            threads.progress = Some(spawn("progress", move || family.make_progress())?);
        }
        Ok(())
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake_watchdog(&self) {
        self.watchdog.wake();
    }

    pub(super) fn wake_progress(&self) {
        if self.progress_sleeps.load(Ordering::SeqCst) {
            self.progress.wake();
        }
    }

    pub(super) fn end_threads(&self) {
        self.closed.store(true, Ordering::Release);
        self.watchdog.wake();
        self.progress.wake();
        let Threads { watchdog, progress } = std::mem::take(&mut *self.threads());
        for thread in [watchdog, progress].into_iter().flatten() {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }

    /// Clears `groups` and fills it with all groups, which allocates nothing if they fit.
    fn list(&self, groups: &mut Vec<Arc<Shared>>) {
        let all = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        groups.clone_from(&all);
    }

    fn watch(&self) {
        let mut groups = Vec::new();
        while !self.closed.load(Ordering::Acquire) {
            self.list(&mut groups);
            let pauses = groups.drain(..).map(|group| group.look());
            let pause = pauses.min().unwrap_or(SLEEP_MAX);
            self.watchdog.sleep(pause.min(SLEEP_MAX));
        }
    }

    fn make_progress(&self) {
        let (mut groups, mut driven): (Vec<Arc<Shared>>, Vec<Driven>) = Default::default();
        let mut backoff = Backoff::new(NAP_MAX);
        while !self.closed.load(Ordering::Acquire) {
            // Before the look: a start that is opened behind the look finds it, and wakes the thread.
            self.progress_sleeps.store(true, Ordering::SeqCst);
            self.list(&mut groups);
            let (mut is_idle, mut progressed) = (true, false);
            let polled_at = Instant::now();
            for group in groups.drain(..) {
                group.pick_driven(&mut driven);
                is_idle &= driven.is_empty();
                progressed |= group.drive_picked(&driven);
                // What is dropped meanwhile ends here, and not with the next start.
                driven.clear();
            }
            if is_idle {
                self.progress.sleep(SLEEP_MAX);
                continue;
            }
            self.progress_sleeps.store(false, Ordering::SeqCst);
            if progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                std::thread::sleep(nap);
            } else {
                std::thread::yield_now();
            }
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    let thread = std::thread::Builder::new().name(format!("peerlane-{name}"));
    thread.spawn(body).map_err(|error| {
        Error::new(ErrorKind::Other, format!("cannot start the {name} thread: {error}"))
            .with_source(error)
    })
}
