//! Connects the life cycle of a group, its work that is under way, and the driver that looks after
//! both.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank, SharedQueues};

use super::call::{self, Patience};
use super::control::SizedStart;
use super::driver::{Driver, DynWork, GroupWork, InExchange, Watch};
use super::identity::Identity;
use super::life::{Close, Closed, LifeCycle, Underway};
use crate::bootstrap::{AbortRecord, Bootstrap};

const FINISH_PAUSE: Duration = Duration::from_micros(50);

/// What runs a group on this rank, shared by the group and all that is prepared in it.
pub(super) struct Runtime {
    pub(super) life: Arc<LifeCycle>,
    pub(super) work: Arc<GroupWork>,
    pub(super) driver: Arc<Driver>,
    watch: Arc<Watch>,
    /// The groups that were split from this one.
    children: Mutex<Vec<Weak<Self>>>,
}

impl Runtime {
    pub(super) fn new(
        bootstrap: Box<dyn Bootstrap>,
        timeout: Duration,
        identity: Identity,
        driver: &Arc<Driver>,
    ) -> Arc<Self> {
        let life = LifeCycle::new(bootstrap, timeout, identity);
        let work = GroupWork::new(Arc::clone(&life));
        let runtime = Arc::new(Self {
            life,
            watch: Watch::new(Arc::clone(&work)),
            work,
            driver: Arc::clone(driver),
            children: Mutex::default(),
        });

        let underway = Arc::downgrade(&runtime);
        runtime.life.begin(underway);
        runtime
    }

    /// Has the driver look after the group until its [end](Self::end).
    pub(super) fn join_driver(&self) {
        self.driver.add(Arc::clone(&self.watch));
    }

    /// Adds work to the list of the group, which keeps it until it is removed.
    pub(super) fn add_work(&self, work: Arc<DynWork>, queues: Option<SharedQueues>) {
        self.life.add_queues(queues);
        self.work.add(work);
    }

    /// Notes that the host has made a start of work, which may be on a stream.
    pub(super) fn note_start(&self, is_on_stream: bool, timeout: Duration) {
        self.work.order.refusal.clear();
        self.work.order.enter_thread();
        self.driver.wake_progress();

        let is_unchecked = is_on_stream && self.work.is_unchecked();
        if is_unchecked || timeout < self.life.timeout {
            // The watchdog may sleep past it.
            self.driver.wake_watchdog();
        }
    }

    /// Wakes the watchdog if it may sleep although a thread waits, or messages are on a stream.
    pub(super) fn note_wait(&self) {
        if self.work.is_unchecked() {
            self.driver.wake_watchdog();
        }
    }

    /// Waits until the starts and messages of the host are complete, also of those that another
    /// thread moves on.
    pub(super) fn finish_open(&self, deadline: Deadline) {
        let mut patience = Patience::new(self.life.bootstrap.rank());
        self.work.order.set_finishes(true);
        loop {
            self.work.drive_open(None);
            // A start whose executor another thread holds is open, but was not driven.
            if !self.work.has_open() || self.life.check().is_err() || deadline.has_passed() {
                break;
            }
            if patience.look().0 {
                self.work.tell_call();
            }
            std::thread::sleep(FINISH_PAUSE);
        }
        self.work.order.set_finishes(false);
    }

    /// Notes the begin of an exchange, whose call the watchdog tells if it takes long.
    pub(super) fn begin_exchange(&self, label: &str) -> InExchange<'_> {
        let exchange = self.work.order.begin_exchange(label, self.life.bootstrap.rank());
        self.driver.wake_watchdog();
        exchange
    }

    pub(super) fn add_child(&self, child: &Arc<Self>) {
        let mut children = self.children();
        children.retain(|child| child.strong_count() > 0);
        children.push(Arc::downgrade(child));
    }

    fn children(&self) -> MutexGuard<'_, Vec<Weak<Self>>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_children(&self) -> Vec<Arc<Self>> {
        self.children().iter().filter_map(Weak::upgrade).collect()
    }

    /// Waits for the open starts and messages of all subgroups.
    pub(super) fn finish_children(&self, deadline: Deadline) {
        for child in self.live_children() {
            child.finish_children(deadline);
            child.finish_open(deadline);
        }
    }

    /// Returns whether this group or a subgroup has a channel on this rank.
    pub(super) fn has_channels(&self) -> bool {
        self.work.has_channels() || self.live_children().iter().any(|child| child.has_channels())
    }

    /// Ends the groups that were split from this one, which is being closed like this.
    pub(super) fn end_children(&self, how: Close) {
        let children = std::mem::take(&mut *self.children());
        for child in children.iter().filter_map(Weak::upgrade) {
            child.end_children(how);

            let life = &child.life;
            let is_open = life.check().is_ok();
            let dropped =
                "the group that its group was split from was dropped without a call of `close`";
            let record = AbortRecord::lost(life.bootstrap.rank(), dropped);
            // If nobody can be told, there is nobody left.
            let _ = match how {
                _ if !is_open => Ok(()),
                Close::Together => life.bootstrap.leave(Deadline::after(life.timeout)),
                Close::Alone => life.bootstrap.abort(&record.encode()),
            };

            child.end(Closed { how, with_parent: true, has_left: true });
            if is_open && how == Close::Alone {
                life.adopt(record);
            }
        }
    }

    /// Closes the group on this rank, releases what its work waits for, and disconnects it.
    pub(super) fn end(&self, closed: Closed) {
        self.life.close(closed);
        self.driver.remove(&self.watch);
        self.watch.release_closed();
        // Operations, arrays and handles of the end may outlive the group, but its connections and
        // its port do not.
        self.life.bootstrap.disconnect();
    }
}

impl Underway for Runtime {
    fn waits(&self) -> Vec<Rank> {
        self.work.waits()
    }

    fn copies_with_others(&self) -> bool {
        self.work.copies_with_others()
    }

    fn waits_elsewhere(&self) -> Vec<u32> {
        self.driver.blocked_on(&self.work)
    }

    fn newest_start(&self, record: &AbortRecord) -> Option<SizedStart> {
        self.work.newest_start(record)
    }

    fn call_in_words(&self) -> Option<String> {
        self.work.call_in_words()
    }

    fn note_outlasting(&self) {
        self.work.note_outlasting();
    }

    fn receive_order(&self, from: Rank, message: call::Message) {
        self.work.receive_order(from, message);
    }

    fn tell_change(&self) {
        self.driver.wake_watchdog();
        self.work.tell_change();
    }
}
