//! Runs the threads that a group shares with the groups split from it.
//!
//! The watchdog thread [looks](Shared::look) after each group. The progress thread drives what no caller drives: lanes of starts
//! on streams whose engines need polling, starts that are observed by a future or a descriptor, and everything if the caller
//! wants that. It is started when it is first needed. Both threads sleep while they have nothing to do.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use peerlane_toolkit::limits;

use crate::error::Error;
use crate::group::shared::Shared;
use crate::group::work::Work;
use crate::run::backoff::Backoff;
use crate::sleeper::{Announcement, Sleeper};

/// A replayed graph should not wait long for its network transfers, so the progress thread sleeps at most this long.
const NAP_MAX: Duration = Duration::from_millis(1);
/// The longest sleep of a thread that nobody wakes.
const SLEEP_MAX: Duration = Duration::from_secs(60);

thread_local! {
    /// The families whose groups a thread has opened or used for starts.
    ///
    /// It is destroyed before the last destructors of a thread run, which may use groups. Then no family is known, and a wait drives
    /// only its own family.
    static OF_THREAD: RefCell<Vec<Weak<Family>>> = const { RefCell::new(Vec::new()) };
    static OF_THREAD_COUNT: Cell<usize> = const { Cell::new(0) };
    static LAST_OF_THREAD: Cell<*const Family> = const { Cell::new(std::ptr::null()) };
    /// The sleeper of the thread if a family has started it. It can be read in the last destructors
    /// of a thread, unlike `thread::current`.
    static SLEEPER: Cell<*const Sleeper> = const { Cell::new(std::ptr::null()) };
}

fn others_of_thread(own: &Family) -> Vec<Arc<Family>> {
    let others = OF_THREAD.try_with(|families| {
        let families = families.borrow();
        let others = families.iter().filter_map(Weak::upgrade);
        others.filter(|other| !std::ptr::eq(&**other, own)).collect()
    });
    others.unwrap_or_default()
}

/// While it exists, the progress thread drives all that is open in a family.
pub(super) struct DrivesAll(Arc<Family>);

impl Drop for DrivesAll {
    fn drop(&mut self) {
        self.0.drives_all.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A group and the groups split from it, with the threads that they share.
#[derive(Default)]
pub(crate) struct Family {
    groups: RwLock<Vec<Arc<Shared>>>,
    has_several: AtomicBool,
    /// How many callers have the progress thread drive all that is open.
    drives_all: AtomicUsize,
    subgroups: AtomicU32,
    closed: AtomicBool,
    watchdog: Sleeper,
    progress: Sleeper,
    progress_sleeps: Announcement,
    threads: Mutex<Threads>,
}

#[derive(Default)]
struct Threads {
    watchdog: Option<JoinHandle<()>>,
    progress: Option<JoinHandle<()>>,
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

    /// Drives what is open in the other groups of the family and of this thread, and returns whether something is left.
    pub(super) fn drive_others(&self, own: &Shared) -> bool {
        let family = self.has_several.load(Ordering::Relaxed) && self.drive_but(Some(own));
        let others = || others_of_thread(self).iter().filter(|other| other.drive_but(None)).count();
        family | (OF_THREAD_COUNT.get() > 1 && others() > 0)
    }

    fn drive_but(&self, own: Option<&Shared>) -> bool {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        let is_own = |group: &Shared| own.is_some_and(|own| std::ptr::eq(group, own));
        let others = groups.iter().filter(|group| !is_own(group));
        // Every group is driven.
        others.filter(|group| group.drive_own()).count() > 0
    }

    /// Returns the ranks of a group for which threads of this rank wait in other groups.
    pub(super) fn blocked_on(&self, own: &Shared) -> Vec<u32> {
        let groups = self.groups.read().unwrap_or_else(PoisonError::into_inner);
        let others = groups.iter().filter(|group| !std::ptr::eq(&***group, own));
        others.flat_map(|group| group.blocked_on()).filter_map(|rank| own.number_of(rank)).collect()
    }

    /// Notes that this thread uses the family, so that a wait of the thread for another family drives it.
    pub(super) fn enter_thread(self: &Arc<Self>) {
        if LAST_OF_THREAD.replace(Arc::as_ptr(self)) == Arc::as_ptr(self) {
            return;
        }
        let noted = OF_THREAD.try_with(|families| {
            let mut families = families.borrow_mut();
            families.retain(|family| family.strong_count() > 0);
            if !families.iter().any(|family| family.as_ptr() == Arc::as_ptr(self)) {
                families.push(Arc::downgrade(self));
            }
            families.len()
        });
        OF_THREAD_COUNT.set(noted.unwrap_or(0));
    }

    /// Has the progress thread drive what is open in other groups while this thread waits for a message.
    pub(super) fn drive_meanwhile(self: &Arc<Self>, own: &Shared) -> Result<Vec<DrivesAll>, Error> {
        if !self.has_several.load(Ordering::Relaxed) && OF_THREAD_COUNT.get() < 2 {
            return Ok(Vec::new());
        }
        let mut families = others_of_thread(self);
        families.push(Arc::clone(self));
        families.retain(|family| {
            let groups = family.groups.read().unwrap_or_else(PoisonError::into_inner);
            groups.iter().any(|group| !std::ptr::eq(&**group, own) && group.has_open())
        });
        families.iter().map(Self::drive_all).collect()
    }

    /// Has the progress thread drive all that is open.
    pub(super) fn drive_all(self: &Arc<Self>) -> Result<DrivesAll, Error> {
        self.start_progress()?;
        self.drives_all.fetch_add(1, Ordering::SeqCst);
        self.wake_progress();
        Ok(DrivesAll(Arc::clone(self)))
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

    fn threads(&self) -> MutexGuard<'_, Threads> {
        self.threads.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn wake_watchdog(&self) {
        self.watchdog.wake();
    }

    pub(super) fn wake_progress(&self) {
        if self.progress_sleeps.is_made() {
            self.progress.wake();
        }
    }

    pub(super) fn end_threads(&self) {
        self.closed.store(true, Ordering::Release);
        self.watchdog.wake();
        self.progress.wake();

        let Threads { watchdog, progress } = std::mem::take(&mut *self.threads());
        for (thread, sleeper) in [(watchdog, &self.watchdog), (progress, &self.progress)] {
            // A waker of the caller can drop the group on one of the threads, which then ends by
            // itself.
            let Some(thread) = thread.filter(|_| !std::ptr::eq(SLEEPER.get(), sleeper)) else {
                continue;
            };

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
        SLEEPER.set(&self.watchdog);
        let mut groups = Vec::new();
        while !self.closed.load(Ordering::Acquire) {
            self.list(&mut groups);
            let pauses = groups.drain(..).map(|group| group.look());
            let pause = pauses.min().unwrap_or(SLEEP_MAX);
            self.watchdog.sleep(pause.min(SLEEP_MAX));
        }
    }

    fn make_progress(&self) {
        SLEEPER.set(&self.progress);
        let (mut groups, mut picked): (Vec<Arc<Shared>>, Vec<Arc<dyn Work>>) = Default::default();
        let mut backoff = Backoff::new(NAP_MAX);
        while !self.closed.load(Ordering::Acquire) {
            // Before the look: a start that is opened behind the look finds it, and wakes the thread.
            self.progress_sleeps.make();
            self.list(&mut groups);
            let (mut is_idle, mut progressed) = (true, false);
            let polled_at = Instant::now();
            for group in groups.drain(..) {
                let all = self.drives_all.load(Ordering::SeqCst) > 0;
                group.pick_for_thread(all, &mut picked);
                is_idle &= picked.is_empty();
                progressed |= group.drive_picked(&picked);
                // What is dropped meanwhile ends here, and not with the next start.
                picked.clear();
            }
            if is_idle {
                self.progress.sleep(SLEEP_MAX);
                continue;
            }
            self.progress_sleeps.withdraw();
            if progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                thread::sleep(nap);
            } else {
                thread::yield_now();
            }
        }
    }
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Error> {
    Ok(limits::spawn(format!("peerlane-{name}"), body)?)
}
