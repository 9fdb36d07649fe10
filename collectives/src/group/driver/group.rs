//! Keeps the work of one group that is under way, for the threads that look after it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::Rank;

use super::list::List;
use super::order::Order;
use super::work::{DynWork, greatest_of_starts};
use crate::bootstrap::AbortRecord;
use crate::group::call;
use crate::group::control::SizedStart;
use crate::group::life::LifeCycle;
use crate::group::tracker::StartTracker;
use crate::run::buffers::TierBuffers;
use crate::sleeper::Announcement;

/// The work of a group that is under way on this rank.
pub(in crate::group) struct GroupWork {
    pub(in crate::group) life: Arc<LifeCycle>,
    pub(in crate::group) order: Order,
    /// Operations enter when they are prepared, and channels when they are opened.
    pub(super) list: List<DynWork>,
    /// Announces that the watchdog may sleep, so that work on a stream or a wait that begins wakes
    /// it.
    pub(super) watchdog_sleeps: Announcement,
    /// Whether the options of the group ask for a thread that moves on all that is open.
    is_for_thread: AtomicBool,
    /// The buffers of operations that were dropped while peers or graphs of this rank may still
    /// write to them. They stay allocated as long as the group has handles.
    quarantine: Mutex<Vec<TierBuffers>>,
}

impl GroupWork {
    pub(in crate::group) fn new(life: Arc<LifeCycle>) -> Arc<Self> {
        Arc::new(Self {
            life,
            order: Order::default(),
            list: List::default(),
            watchdog_sleeps: Announcement::default(),
            is_for_thread: AtomicBool::new(false),
            quarantine: Mutex::default(),
        })
    }

    /// Adds work to the list, which keeps it until it is removed.
    pub(in crate::group) fn add(&self, work: Arc<DynWork>) {
        self.list.add(work);
    }

    pub(in crate::group) fn remove(&self, work: &DynWork) {
        self.list.remove(work);
    }

    /// Returns whether the progress thread moves on all that is open in the group.
    pub(in crate::group) fn is_for_thread(&self) -> bool {
        self.is_for_thread.load(Ordering::Relaxed)
    }

    pub(in crate::group) fn move_by_thread(&self) {
        self.is_for_thread.store(true, Ordering::Relaxed);
    }

    /// Returns whether the watchdog may sleep, so that the caller must wake it. The caller has
    /// stored before that work on a stream or a wait begins.
    pub(in crate::group) fn is_unchecked(&self) -> bool {
        self.watchdog_sleeps.is_made()
    }

    /// Keeps buffers allocated after the drop of their operation.
    pub(in crate::group) fn quarantine(&self, buffers: TierBuffers) {
        self.quarantine.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }

    pub(in crate::group) fn has_open(&self) -> bool {
        self.list.any(|work| work.is_open())
    }

    /// Returns whether something is open that no waiting thread moves on.
    pub(super) fn has_unmoved(&self) -> bool {
        self.list.any(|work| work.is_open() && !work.is_blocked())
    }

    pub(in crate::group) fn has_channels(&self) -> bool {
        self.list.any(|work| work.is_channel())
    }

    /// Returns the ranks that the work waits for.
    pub(in crate::group) fn waits(&self) -> Vec<Rank> {
        self.picked(|_| true).iter().flat_map(|work| work.waits()).collect()
    }

    /// Returns whether copies of the work complete only while all ranks take part.
    pub(in crate::group) fn copies_with_others(&self) -> bool {
        self.list.any(|work| work.copies_with_others())
    }

    /// Returns the ranks that a thread waits for in a call of this group, by their numbers in the
    /// first group.
    pub(super) fn blocked_on(&self) -> Vec<Rank> {
        let blocked = self.picked(|work| work.is_blocked());
        let starts = blocked.iter().flat_map(|work| work.waits());
        let ranks = self.life.bootstrap.missing().into_iter().chain(starts);
        ranks.map(|rank| self.life.identity.first(rank)).collect()
    }

    fn picked(&self, is_picked: impl Fn(&DynWork) -> bool) -> Vec<Arc<DynWork>> {
        let mut picked = Vec::new();
        self.list.pick(&mut picked, is_picked);
        picked
    }

    /// Returns the newest start of the operation that a record is about.
    pub(in crate::group) fn newest_start(&self, record: &AbortRecord) -> Option<SizedStart> {
        greatest_of_starts(&self.list, |tracker| tracker.start_of(record))
    }

    pub(in crate::group) fn note_outlasting(&self) {
        self.list.each(|work| work.tracker().into_iter().for_each(StartTracker::note_outlasting));
    }

    /// Wakes the threads that wait for the work, and tells those that have asked for it.
    pub(in crate::group) fn tell_change(&self) {
        self.list.each(|work| work.wake());
        self.picked(|work| work.is_observed()).iter().for_each(|work| work.tell());
    }

    /// Returns what this rank does or did last, as the words after "rank 1".
    pub(in crate::group) fn call_in_words(&self) -> Option<String> {
        self.order.call_in_words(&self.list)
    }

    /// Tells all ranks which call this rank is in.
    pub(in crate::group) fn tell_call(&self) {
        self.order.tell_call(&self.life, &self.list);
    }

    pub(in crate::group) fn receive_order(&self, from: Rank, message: call::Message) {
        self.order.receive(&self.life, &self.list, (from, message));
    }

    /// Tells all ranks about an exchange that takes long, and returns the time until the next look.
    pub(super) fn look_at_exchange(&self) -> Option<Duration> {
        let (is_long, left) = self.order.look_at_exchange()?;
        if is_long {
            self.tell_call();
        }
        Some(left)
    }

    /// Moves on what is open, except for work that a thread waits for, and returns whether
    /// something is left.
    pub(in crate::group) fn drive_open(&self, except: Option<&DynWork>) -> bool {
        let is_picked = |work: &DynWork| {
            let is_except = except.is_some_and(|except| std::ptr::addr_eq(except, work));
            work.is_open() && !work.is_blocked() && !is_except
        };

        let (mut last, mut is_left) = (None, false);
        while let Some((number, work)) = self.list.next(last, is_picked) {
            last = Some(number);
            if work.is_observed() {
                // The progress thread drives it, and tells its caller without a lock.
                is_left = true;
                continue;
            }
            match work.drive() {
                Ok(driven) => is_left |= driven.is_open,
                Err(record) => self.life.begin_raise(record),
            }
        }
        is_left
    }

    /// Adds the work that the progress thread moves on, or all that is open.
    pub(super) fn pick_for_thread(&self, all: bool, picked: &mut Vec<Arc<DynWork>>) {
        // After an end nothing is driven any more; it is released.
        if !self.life.is_aborted() {
            let all = all || self.is_for_thread();
            self.list.pick(picked, |work| work.is_for_thread(all));
        }
    }

    /// Moves work on, and returns whether some of it has moved.
    pub(super) fn drive_picked(&self, picked: &[Arc<DynWork>]) -> bool {
        let mut has_progressed = false;
        for work in picked {
            match work.drive() {
                Ok(driven) => has_progressed |= driven.has_progressed,
                Err(record) => self.life.begin_raise(record),
            }
        }
        has_progressed
    }

    /// Runs `body` while the list is locked.
    #[cfg(test)]
    pub(in crate::group) fn run_locked(&self, body: impl Fn()) {
        self.list.any(|_| {
            body();
            true
        });
    }
}
