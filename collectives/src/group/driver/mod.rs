//! Runs the threads that look after the work of groups.
//!
//! A driver lists the groups of a process, each with its work that is under way. The watchdog
//! thread looks after each group. The progress thread moves on what no caller moves: lanes of
//! starts on streams whose engines need polling, starts that are observed by a future or a
//! descriptor, and everything if the caller wants that. It is started when it is first needed. Both
//! threads sleep while they have nothing to do.
//!
//! A process has one driver, which its first group creates and its last one ends. Ranks that are
//! threads of one process have one each, so that no rank moves the work of another: their groups
//! use the driver of the thread that opens them.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod.rs` | the driver, and its threads |
//! | `list.rs` | the list of what threads look after, and their sleep |
//! | `work.rs` | what the threads know of operations and channels |
//! | `group.rs` | the work of one group |
//! | `order.rs` | how ranks find that they make calls in different orders |
//! | `watchdog.rs` | deadlines, and the release of waits after the end of a group |

mod group;
mod list;
mod order;
mod watchdog;
mod work;

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use peerlane_toolkit::{PerProcess, limits};
use rustix::thread::gettid;

pub(super) use group::GroupWork;
use list::{List, Rest};
pub(super) use order::InExchange;
pub(super) use watchdog::Watch;
pub(super) use work::{Driven, DynWork, OpenCount, Overdue, Work};

use super::caller::Caller;
use crate::bootstrap::Bootstrap;
use crate::error::Error;
use crate::run::backoff::Backoff;

/// A replayed graph should not wait long for its network transfers, so the progress thread sleeps
/// at most this long.
const NAP_MAX: Duration = Duration::from_millis(1);

/// The longest sleep of a thread that nobody wakes.
const SLEEP_MAX: Duration = Duration::from_secs(60);

/// Looks after the work of groups on threads of its own.
pub(super) struct Driver {
    /// The process that has created the driver. Its threads do not exist in a forked child, and its
    /// locks may be held there for ever, so a child does not touch it.
    process: u32,
    groups: List<Watch>,
    open: Arc<OpenCount>,
    /// How many callers have the progress thread move on all that is open.
    drives_all: AtomicUsize,
    subgroups: AtomicU32,
    has_ended: AtomicBool,
    watchdog: Worker,
    progress: Worker,
}

/// A thread of a driver.
#[derive(Default)]
struct Worker {
    rest: Rest,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The number of the thread, by which it finds out that it would join itself. It is known in
    /// the last destructors of a thread too, unlike `thread::current`.
    id: AtomicI32,
}

/// Keeps a driver running until this is dropped.
pub(super) struct Membership(Arc<Driver>);

/// While it exists, the progress thread moves on all that is open.
pub(super) struct DrivesAll(Arc<Driver>);

impl Drop for DrivesAll {
    fn drop(&mut self) {
        self.0.drives_all.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A driver with the number of groups that keep it running.
struct Listed {
    /// The thread whose groups use the driver, or `None` if those of the process do.
    of: Option<Caller>,
    driver: Weak<Driver>,
    members: usize,
}

/// Returns the drivers of this process.
fn drivers() -> MutexGuard<'static, Vec<Listed>> {
    static DRIVERS: PerProcess<Mutex<Vec<Listed>>> = PerProcess::new();
    DRIVERS.value_or_create(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

impl Membership {
    /// Returns the driver for a group of the ranks that a bootstrap connects, and keeps it running.
    ///
    /// The group uses the driver of this thread if the thread has a driver, or if other ranks of
    /// the group are threads of this process. Otherwise it uses the driver of the process.
    pub(super) fn of_group(bootstrap: &dyn Bootstrap) -> Self {
        let thread = Some(Caller::current());
        let mut listed = drivers();
        let is_of_thread =
            bootstrap.shares_process() || listed.iter().any(|listed| listed.of == thread);
        let of = thread.filter(|_| is_of_thread);

        for known in &mut *listed {
            if known.of == of
                && let Some(driver) = known.driver.upgrade()
            {
                known.members += 1;
                return Self(driver);
            }
        }

        let driver = Arc::new(Driver::new());
        listed.push(Listed { of, driver: Arc::downgrade(&driver), members: 1 });
        Self(driver)
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.0
    }
}

impl Clone for Membership {
    fn clone(&self) -> Self {
        let mut listed = drivers();
        let own = listed.iter_mut().find(|listed| listed.is(&self.0));
        own.into_iter().for_each(|own| own.members += 1);
        Self(Arc::clone(&self.0))
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.0.is_of_parent() {
            return;
        }

        let mut listed = drivers();
        let Some(index) = listed.iter().position(|listed| listed.is(&self.0)) else { return };
        listed[index].members -= 1;
        if listed[index].members > 0 {
            return;
        }

        // The next group of the process creates another driver, also while this one ends.
        listed.remove(index);
        drop(listed);
        self.0.end();
    }
}

impl Listed {
    fn is(&self, driver: &Arc<Driver>) -> bool {
        ptr::eq(self.driver.as_ptr(), Arc::as_ptr(driver))
    }
}

impl Driver {
    fn new() -> Self {
        Self {
            process: std::process::id(),
            groups: List::default(),
            open: Arc::default(),
            drives_all: AtomicUsize::new(0),
            subgroups: AtomicU32::new(0),
            has_ended: AtomicBool::new(false),
            watchdog: Worker::default(),
            progress: Worker::default(),
        }
    }

    /// Returns whether this process was forked from the one that has created the driver.
    pub(super) fn is_of_parent(&self) -> bool {
        self.process != std::process::id()
    }

    pub(super) fn open_count(&self) -> &Arc<OpenCount> {
        &self.open
    }

    pub(super) fn add(&self, group: Arc<Watch>) {
        self.groups.add(group);
        self.watchdog.rest.wake();
    }

    /// Removes a group, if it is still there. A thread that moves its work now ends with that.
    pub(super) fn remove(&self, group: &Watch) {
        self.groups.remove(group);
    }

    /// Returns a number that this rank has given to no other subgroup.
    pub(super) fn next_subgroup(&self) -> u32 {
        self.subgroups.fetch_add(1, Ordering::Relaxed)
    }

    /// Moves on what is open, except for `own` and for work that a thread waits for, and returns
    /// whether something is left.
    ///
    /// Peers may wait for open work in another order than this rank.
    pub(super) fn drive_others(&self, own: Option<&DynWork>) -> bool {
        // Only this count says whether there is other work, because the list can be long.
        if self.open.get() <= usize::from(own.is_some()) {
            return false;
        }

        let (mut last, mut is_left) = (None, false);
        while let Some((number, group)) = self.groups.next(last, |_| true) {
            last = Some(number);
            is_left |= group.work.drive_open(own);
        }
        is_left
    }

    /// Returns the ranks of a group that threads of this rank wait for in other groups.
    pub(super) fn blocked_on(&self, own: &GroupWork) -> Vec<u32> {
        let mut others = Vec::new();
        self.groups.pick(&mut others, |group| !ptr::eq(&*group.work, own));
        let ranks = others.iter().flat_map(|group| group.work.blocked_on());
        ranks.filter_map(|rank| own.life.number_of(rank)).collect()
    }

    /// Has the progress thread move on what is open in other groups while this thread waits for a
    /// message in its own.
    ///
    /// What is open in its own group was started meanwhile by another thread, which moves it on.
    pub(super) fn drive_meanwhile(self: &Arc<Self>, own: &GroupWork) -> Option<DrivesAll> {
        let is_left = |group: &Watch| !ptr::eq(&*group.work, own) && group.work.has_unmoved();
        if self.open.get() == 0 || !self.groups.any(is_left) {
            return None;
        }

        // If there is no room for the thread, peers that wait for other groups come late to this
        // call, at worst after its deadline.
        self.start_progress().ok()?;
        self.drives_all.fetch_add(1, Ordering::SeqCst);
        self.wake_progress();
        Some(DrivesAll(Arc::clone(self)))
    }

    pub(super) fn start_watchdog(self: &Arc<Self>) -> Result<(), Error> {
        let driver = Arc::clone(self);
        self.watchdog.start("watchdog", move || driver.watch())
    }

    pub(super) fn start_progress(self: &Arc<Self>) -> Result<(), Error> {
        let driver = Arc::clone(self);
        self.progress.start("progress", move || driver.make_progress())
    }

    pub(super) fn wake_watchdog(&self) {
        self.watchdog.rest.wake();
    }

    pub(super) fn wake_progress(&self) {
        self.progress.rest.wake_if_asleep();
    }

    /// Ends and joins the threads.
    fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
        self.watchdog.end();
        self.progress.end();
    }

    fn watch(&self) {
        self.watchdog.note_thread();
        let mut groups = Vec::new();
        while !self.has_ended.load(Ordering::Acquire) {
            self.groups.pick(&mut groups, |_| true);
            let pauses = groups.drain(..).map(|group| group.look());
            let pause = pauses.min().unwrap_or(SLEEP_MAX);
            self.watchdog.rest.sleep(pause.min(SLEEP_MAX));
        }
    }

    fn make_progress(&self) {
        self.progress.note_thread();
        let (mut groups, mut picked): (Vec<Arc<Watch>>, Vec<Arc<DynWork>>) = Default::default();
        let mut backoff = Backoff::new(NAP_MAX);
        while !self.has_ended.load(Ordering::Acquire) {
            // Before the look: a start that is opened behind the look finds it, and wakes the
            // thread.
            self.progress.rest.announce();
            let all = self.drives_all.load(Ordering::SeqCst) > 0;
            self.groups.pick(&mut groups, |_| true);

            let (mut is_idle, mut has_progressed) = (true, false);
            let polled_at = Instant::now();
            for group in groups.drain(..) {
                group.work.pick_for_thread(all, &mut picked);
                is_idle &= picked.is_empty();
                has_progressed |= group.work.drive_picked(&picked);
                // What is dropped meanwhile ends here, and not with the next start.
                picked.clear();
            }

            if is_idle {
                self.progress.rest.sleep(SLEEP_MAX);
                continue;
            }
            self.progress.rest.withdraw();

            if has_progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                thread::sleep(nap);
            } else {
                thread::yield_now();
            }
        }
    }
}

impl Worker {
    /// Starts the thread if it does not run.
    fn start(&self, name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let mut thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_none() {
            *thread = Some(limits::spawn(format!("peerlane-{name}"), body)?);
        }
        Ok(())
    }

    /// Notes that the calling thread is this one.
    fn note_thread(&self) {
        self.id.store(gettid().as_raw_pid(), Ordering::Relaxed);
    }

    fn is_current(&self) -> bool {
        self.id.load(Ordering::Relaxed) == gettid().as_raw_pid()
    }

    fn end(&self) {
        self.rest.wake();

        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // A waker of the caller can drop the last group on the thread, which then ends by itself.
        if let Some(thread) = thread.filter(|_| !self.is_current()) {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use peerlane_hal::Rank;

    use super::*;
    use crate::bootstrap::{AbortRecord, in_process};
    use crate::group::identity::Identity;
    use crate::group::life::{Close, Closed};
    use crate::group::runtime::Runtime;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Work that is due at a time, or work on a stream whose first release waits for the test.
    #[derive(Default)]
    struct Scripted {
        due: Option<Instant>,
        release: Option<[Barrier; 2]>,
        is_released: AtomicBool,
        /// The group that the caller drops when it is told that something has changed.
        drops: Mutex<Option<Arc<Runtime>>>,
    }

    impl Work for Scripted {
        fn is_open(&self) -> bool {
            true
        }

        fn is_observed(&self) -> bool {
            true
        }

        fn tell(&self) {
            let drops = self.drops.lock().unwrap().take();
            if let Some(group) = drops {
                assert_eq!(thread::current().name(), Some("peerlane-watchdog"));
                group.end(Closed::new(Close::Alone));
                self.is_released.store(true, Ordering::SeqCst);
            }
        }

        fn drive(&self) -> Result<Driven, AbortRecord> {
            Ok(Driven { has_progressed: false, is_open: true })
        }

        fn waits(&self) -> Vec<Rank> {
            Vec::new()
        }

        fn due(&self) -> Option<Instant> {
            self.due
        }

        fn judge(&self) -> Option<Overdue> {
            let record = AbortRecord::timeout(None, "the work is overdue".to_owned());
            Some(Overdue::Late { timeout: TIMEOUT, waits: Vec::new(), record })
        }

        fn stream_timeout(&self) -> Option<Duration> {
            self.release.is_some().then_some(TIMEOUT)
        }

        fn check_streams(&self) -> Option<Overdue> {
            None
        }

        fn is_captured(&self) -> bool {
            false
        }

        fn release(&self) -> bool {
            if let Some([begins, ends]) = &self.release
                && !self.is_released.swap(true, Ordering::SeqCst)
            {
                begins.wait();
                ends.wait();
            }
            true
        }
    }

    /// Runs a group of one rank with work in a driver.
    fn runtime(driver: &Arc<Driver>, work: &Arc<Scripted>) -> Arc<Runtime> {
        let bootstrap = in_process::group(1).unwrap().remove(0);
        let first_ranks = Rank::all(1).collect();
        let identity = Identity { label: None, first_ranks, is_first: true };
        let runtime = Runtime::new(Box::new(bootstrap), TIMEOUT, identity, driver);
        runtime.add_work(Arc::clone(work) as _, None);
        runtime.join_driver();
        runtime
    }

    #[test]
    fn a_release_that_takes_long_delays_no_deadline_of_other_groups() {
        let bootstrap = in_process::group(1).unwrap().remove(0);
        let membership = Membership::of_group(&bootstrap);
        let driver = membership.driver();
        driver.start_watchdog().unwrap();

        // The release of the first group begins, and does not return before the others have ended.
        let release = Some([Barrier::new(2), Barrier::new(2)]);
        let slow = Arc::new(Scripted { release, ..Default::default() });
        let ended = runtime(driver, &slow);
        ended.life.begin_raise(AbortRecord::timeout(None, "it has ended".to_owned()));
        let [begins, ends] = slow.release.as_ref().unwrap();
        begins.wait();

        let due = Instant::now() + Duration::from_millis(100);
        let others: Vec<_> = (0..8)
            .map(|_| runtime(driver, &Arc::new(Scripted { due: Some(due), ..Default::default() })))
            .collect();
        for other in &others {
            other.life.wait_record(peerlane_hal::Deadline::after(TIMEOUT));
            assert_eq!(other.life.record().unwrap().text, "the work is overdue");
        }

        // The release goes on only now, so none of the others has waited for it.
        ends.wait();
        others.iter().for_each(|other| other.end(Closed::new(Close::Together)));
        ended.end(Closed::new(Close::Together));
    }

    #[test]
    fn a_waker_can_drop_the_group_on_the_thread_of_the_watchdog() {
        let bootstrap = in_process::group(1).unwrap().remove(0);
        let membership = Membership::of_group(&bootstrap);
        membership.driver().start_watchdog().unwrap();

        let due = Some(Instant::now() + Duration::from_millis(50));
        let work = Arc::new(Scripted { due, ..Default::default() });
        let mut drops = work.drops.lock().unwrap();
        *drops = Some(runtime(membership.driver(), &work));
        drop(drops);

        let deadline = peerlane_hal::Deadline::after(TIMEOUT);
        while !work.is_released.load(Ordering::SeqCst) {
            assert!(!deadline.has_passed(), "the drop does not return");
            thread::sleep(Duration::from_millis(1));
        }
    }
}
