//! The state that a group shares between its handles and its background threads.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank, SharedQueues};

use crate::bootstrap::{AbortRecord, Bootstrap, Cause, Listener, Notice, ProcessState};
use crate::error::Error;
use crate::group::call::Patience;
use crate::group::control::{Action, Control, RankState, Sight, SizedStart};
use crate::group::event::Event;
use crate::group::family::Family;
use crate::group::identity::Identity;
use crate::group::order::Order;
use crate::group::refusal::Refusal;
use crate::group::tracker::StartTracker;
use crate::group::watchdog::{self, Watch};
use crate::group::work::Work;
use crate::run::buffers::TierBuffers;
use crate::run::executor::Executor;
use crate::run::lane::differing_start;
use crate::sleeper::Announcement;

const FINISH_PAUSE: Duration = Duration::from_micros(50);

pub(crate) struct Shared {
    pub(crate) bootstrap: Box<dyn Bootstrap>,
    pub(crate) timeout: Duration,
    pub(super) family: Arc<Family>,
    pub(super) identity: Identity,
    pub(super) watch: Mutex<Watch>,
    state: Mutex<State>,
    changed: Condvar,
    aborted: AtomicBool,
    has_left: AtomicBool,
    /// How much of the work is open.
    open: AtomicUsize,
    pub(super) watchdog_sleeps: Announcement,
    pub(super) refusal: Refusal,
    pub(super) order: Order,
    ends: Mutex<Vec<Weak<Event>>>,
    /// The groups that were split from this one.
    children: Mutex<Vec<Weak<Shared>>>,
    /// After an abort, peers may still write to the buffers of an operation, so the buffers stay allocated; see
    /// [`quarantine`](Self::quarantine).
    quarantined: Mutex<Vec<TierBuffers>>,
}

pub(super) struct State {
    pub(super) control: Control,
    pub(super) closed: Option<Closed>,
    pub(super) work: Vec<Arc<dyn Work>>,
}

/// The state of a group on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupState {
    /// The ranks can make collective calls.
    Open,
    /// All ranks have agreed to close the group, and this one has still connections to others.
    Leaving,
    /// The group was closed by all ranks, and this rank holds nothing of it but what operations and handles keep.
    Closed,
    /// The group ended by the loss of a rank, by an error, or because this rank dropped it.
    Ended,
}

/// How a group came to its end on this rank, unless a record says that it was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed {
    pub(crate) how: Close,
    /// Whether the group ended because the one that it was split from was closed or dropped.
    with_parent: bool,
    /// Whether this rank has left, so that it holds no connection any more.
    has_left: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Close {
    /// All ranks have agreed to close the group.
    Together,
    /// This rank has dropped the group.
    Alone,
}

impl Shared {
    pub(crate) fn new(
        bootstrap: Box<dyn Bootstrap>,
        timeout: Duration,
        family: Arc<Family>,
        identity: Identity,
    ) -> Arc<Self> {
        let control = Control::new(bootstrap.rank(), bootstrap.ranks(), bootstrap.relay());
        let shared = Arc::new(Self {
            bootstrap,
            timeout,
            family,
            identity,
            watch: Mutex::new(Watch::new()),
            state: Mutex::new(State { control, closed: None, work: Vec::new() }),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            watchdog_sleeps: Announcement::default(),
            refusal: Refusal::default(),
            order: Order::default(),
            ends: Mutex::default(),
            children: Mutex::default(),
            quarantined: Mutex::default(),
        });
        shared.bootstrap.listen(Arc::new(GroupListener(Arc::downgrade(&shared))));
        shared
    }

    fn receive(&self, notice: Notice) {
        if matches!(notice, Notice::Left { .. }) {
            self.has_left.store(true, Ordering::Release);
        }
        // Before this group is locked, because it locks others.
        let elsewhere = match notice {
            Notice::Message { .. } => self.family.blocked_on(self),
            _ => Vec::new(),
        };
        let mut state = self.state();
        let work = std::mem::take(&mut state.work);
        if matches!(notice, Notice::Abort { .. } | Notice::Lost { .. }) {
            trackers(&work).for_each(StartTracker::note_outlasting);
        }
        let own = |record: &AbortRecord| {
            let state = self.rank_state(&work, record);
            // A rank that waits for nothing here may be held up by a wait in another group.
            let is_idle = state.waits.is_empty();
            if is_idle { RankState { waits: elsewhere.clone(), ..state } } else { state }
        };
        let sight = ThroughBootstrap(&*self.bootstrap);
        let action = state.control.receive(Instant::now(), notice, own, &sight);
        state.work = work;
        self.after_change(state, action);
    }

    /// Ends the group on this rank alone, which is disconnected, unless it has learned of another end before.
    pub(super) fn adopt(&self, record: AbortRecord) {
        self.change(|control, now| {
            control.adopt(now, record);
            None
        });
    }

    /// Returns the ranks for which a thread waits in a call of this group, by their numbers in the first group.
    pub(super) fn blocked_on(&self) -> Vec<Rank> {
        let state = self.state();
        let starts = state.work.iter().flat_map(|work| work.blocked_on());
        let ranks = self.bootstrap.missing().into_iter().chain(starts);
        ranks.map(|rank| self.identity.first(rank)).collect()
    }

    /// Returns the number in this group of a rank of the first group.
    pub(super) fn number_of(&self, rank: Rank) -> Option<u32> {
        let mut first_ranks = self.identity.first_ranks.iter();
        Some(Rank::at(first_ranks.position(|first| *first == rank)?).0)
    }

    /// Returns the abort record of a start that an engine's error has ended.
    pub(crate) fn broken(&self, tracker: &StartTracker, error: &Error) -> AbortRecord {
        if error.kind() == ErrorKind::Mismatch
            && let Some(record) = tracker.first_mismatch()
        {
            return record;
        }
        let (cause, peer, text) = self.cause_of_engine(error);
        tracker.record(cause, Some(peer), "engine", &format!("because {text}"))
    }

    /// Determines which rank is to blame for an error of this rank's engine. Returns the cause, that rank, and a text for
    /// the abort record.
    pub(super) fn cause_of_engine(&self, error: &Error) -> (Cause, Rank, String) {
        let me = self.bootstrap.rank();
        let lost = error.peer().filter(|_| error.kind() == ErrorKind::PeerLost);
        let lost = lost.and_then(|fabric_rank| self.number_of(fabric_rank)).map(Rank);
        if let Some(peer) = lost.filter(|peer| *peer != me) {
            let text = format!("the engine of rank {me} lost rank {peer}: {error}");
            return (Cause::PeerLost, peer, text);
        }
        let is_lost = error.kind() == ErrorKind::DeviceLost;
        let cause = if is_lost { Cause::DeviceLost } else { Cause::EngineFailed };
        (cause, me, format!("the engine of rank {me} failed: {error}"))
    }

    fn rank_state(&self, work: &[Arc<dyn Work>], record: &AbortRecord) -> RankState {
        let exchange = self.bootstrap.missing().into_iter();
        let ranks: BTreeSet<Rank> =
            exchange.chain(work.iter().flat_map(|work| work.waits())).collect();
        RankState {
            waits: ranks.into_iter().map(|rank| rank.0).collect(),
            start: newest_start(work, record),
            call: self.call_in_words(work),
            seen: self.seen(),
        }
    }

    /// Returns the other ranks whose processes this rank sees, and whether they are stopped.
    fn seen(&self) -> Vec<(u32, bool)> {
        let seen = Rank::all(self.bootstrap.ranks()).filter_map(|rank| {
            match self.bootstrap.process(rank) {
                ProcessState::Running => Some((rank.0, false)),
                ProcessState::Stopped => Some((rank.0, true)),
                // The end of a process is reported by its connection.
                ProcessState::Ended | ProcessState::Unknown => None,
            }
        });
        seen.filter(|(rank, _)| *rank != self.bootstrap.rank().0).collect()
    }

    fn after_change(&self, state: MutexGuard<'_, State>, action: Option<Action>) {
        if state.control.record().is_some() {
            self.aborted.store(true, Ordering::Release);
        }
        self.changed.notify_all();
        self.family.wake_watchdog();
        state.work.iter().for_each(|work| work.wake());
        let observed: Vec<_> =
            state.work.iter().filter(|work| work.is_observed()).cloned().collect();
        drop(state);
        observed.iter().for_each(|work| work.tell());
        if self.is_aborted() {
            self.tell_end();
        }
        let unreachable = match action {
            None => return,
            // Without its own message back, this rank ends the group alone after a timeout.
            Some(Action::Broadcast(message)) => {
                let _ = self.bootstrap.broadcast(&message);
                return;
            }
            Some(Action::Order { from, message }) => return self.receive_order(from, message),
            Some(Action::Abort(record)) => {
                self.bootstrap.abort(&record.encode()).is_err().then_some(record)
            }
        };
        if let Some(record) = unreachable {
            let mut state = self.state();
            state.control.adopt(Instant::now(), record);
            self.after_change(state, None);
        }
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Control, Instant) -> Option<Action>) {
        let mut state = self.state();
        let action = change(&mut state.control, Instant::now());
        self.after_change(state, action);
    }

    /// Does what is due in the control of the group.
    pub(super) fn tick(&self) {
        self.change(|control, now| control.tick(now, &ThroughBootstrap(&*self.bootstrap)));
    }

    fn wait_until(&self, done: impl Fn(&Control) -> bool) {
        let mut state = self.state();
        while !done(&state.control) {
            let now = Instant::now();
            match state.control.next_tick() {
                Some(at) if at <= now => {
                    drop(state);
                    self.tick();
                    state = self.state();
                }
                Some(at) => state = self.sleep(state, at - now),
                None => return,
            }
        }
    }

    /// Lets the watchdog look after the group, and returns the time until the next look.
    pub(super) fn look(&self) -> Duration {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).look(self)
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.is_aborted() {
            return Ok(());
        }
        let state = self.state();
        if let Some(record) = state.control.record() {
            return Err(self.identity.name(record.to_error(self.bootstrap.rank())));
        }
        let text = match state.closed {
            Some(Closed { with_parent: true, .. }) => {
                "the group that this one was split from has been closed or dropped"
            }
            _ => "the group was closed before",
        };
        Err(self.identity.name(Error::new(ErrorKind::Aborted, text)))
    }

    /// Returns whether the group is open, or was closed by all ranks, after which no rank writes to the memory of another one.
    pub(crate) fn is_well(&self) -> bool {
        if self.check().is_ok() {
            return true;
        }
        let state = self.state();
        let is_together = state.closed.is_some_and(|closed| closed.how == Close::Together);
        is_together && state.control.record().is_none()
    }

    /// Returns the state of the group on this rank.
    pub(super) fn group_state(&self) -> GroupState {
        let state = self.state();
        match state.closed {
            _ if state.control.record().is_some() => GroupState::Ended,
            None => GroupState::Open,
            Some(Closed { how: Close::Alone, .. }) => GroupState::Ended,
            Some(Closed { has_left: false, .. }) => GroupState::Leaving,
            Some(Closed { has_left: true, .. }) => GroupState::Closed,
        }
    }

    pub(crate) fn watch_replays(&self, tracker: &StartTracker) {
        tracker.mark_captured();
        self.family.wake_watchdog();
    }

    pub(crate) fn record(&self) -> Option<AbortRecord> {
        self.state().control.record().cloned()
    }

    pub(crate) fn has_any_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.state().control.has_left(rank)
    }

    pub(crate) fn raise(&self, record: AbortRecord) {
        self.begin_raise(record);
        self.wait_ended();
    }

    /// Ends the group, but does not wait until the bootstrap has delivered the record.
    pub(super) fn begin_raise(&self, record: AbortRecord) {
        if self.check().is_err() {
            return;
        }
        if record.cause == Cause::Mismatch {
            // The other rank tells how it started the operation.
            return self.begin_overdue(Vec::new(), record);
        }
        self.change(|control, now| control.abort(now, record));
    }

    fn wait_ended(&self) {
        if self.check().is_ok() {
            self.wait_until(|control| control.record().is_some());
        }
    }

    pub(crate) fn raise_overdue(&self, waits: Vec<u32>, record: AbortRecord) {
        self.begin_overdue(waits, record);
        self.wait_ended();
    }

    /// Asks all ranks why a deadline has passed. The watchdog ends the group when they have answered.
    pub(super) fn begin_overdue(&self, waits: Vec<u32>, record: AbortRecord) {
        if self.check().is_err() {
            return;
        }
        let state = self.state();
        let (start, call) = (newest_start(&state.work, &record), self.call_in_words(&state.work));
        drop(state);
        let own = RankState { waits, start, call, seen: self.seen() };
        self.change(|control, now| control.overdue(now, own, record));
    }

    pub(crate) fn raise_late(&self, tracker: &StartTracker, timeout: Duration) {
        self.begin_late(tracker, timeout);
        self.wait_ended();
    }

    pub(super) fn begin_late(&self, tracker: &StartTracker, timeout: Duration) {
        self.set_timeout(timeout);
        let waits = tracker.missing_writers().into_iter().map(|rank| rank.0).collect();
        self.begin_overdue(waits, tracker.overdue(timeout));
    }

    pub(crate) fn add_end(&self, event: &Arc<Event>) {
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.retain(|event| event.strong_count() > 0);
        ends.push(Arc::downgrade(event));
        drop(ends);
        if self.is_aborted() {
            self.tell_end();
        }
    }

    fn tell_end(&self) {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner));
        // Not under the lock: a waker may run code of the caller.
        ends.iter().filter_map(Weak::upgrade).for_each(|event| event.signal());
    }

    pub(super) fn add_child(&self, child: &Arc<Self>) {
        let mut children = self.children();
        children.retain(|child| child.strong_count() > 0);
        children.push(Arc::downgrade(child));
    }

    fn children(&self) -> MutexGuard<'_, Vec<Weak<Self>>> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the open starts and messages of all subgroups.
    pub(super) fn finish_children(&self, deadline: Deadline) {
        let children: Vec<_> = self.children().iter().filter_map(Weak::upgrade).collect();
        for child in children {
            child.finish_children(deadline);
            child.finish_open(deadline);
        }
    }

    /// Ends the groups that were split from this one, which is being closed like this.
    pub(super) fn end_children(&self, how: Close) {
        let children = std::mem::take(&mut *self.children());
        for child in children.iter().filter_map(Weak::upgrade) {
            child.end_children(how);
            let is_open = child.check().is_ok();
            let dropped =
                "the group that its group was split from was dropped without a call of `close`";
            let record = AbortRecord::lost(child.bootstrap.rank(), dropped);
            // If nobody can be told, there is nobody left.
            let _ = match how {
                _ if !is_open => Ok(()),
                Close::Together => child.bootstrap.leave(Deadline::after(child.timeout)),
                Close::Alone => child.bootstrap.abort(&record.encode()),
            };

            child.close_as(Closed { how, with_parent: true, has_left: true });
            child.family.remove(&child);
            watchdog::release_closed(&child);
            child.bootstrap.disconnect();
            if is_open && how == Close::Alone {
                child.adopt(record);
            }
        }
    }

    pub(crate) fn set_timeout(&self, timeout: Duration) {
        self.state().control.set_timeout(timeout);
    }

    pub(crate) fn add_exchange(&self, took: Duration) {
        self.state().control.add_exchange(took);
    }

    pub(crate) fn cause(&self, error: Error) -> Error {
        let kinds = [ErrorKind::Timeout, ErrorKind::PeerLost, ErrorKind::Aborted];
        if !kinds.contains(&error.kind()) {
            return self.identity.name(error);
        }
        // The bootstrap delivers the notice a moment after the error.
        let mut state = self.state();
        let deadline = Deadline::after(state.control.relay_timeout());
        while state.control.record().is_none() && !deadline.has_passed() {
            state = self.sleep(state, deadline.remaining());
        }
        drop(state);
        self.check().err().unwrap_or_else(|| self.identity.name(error))
    }

    pub(crate) fn wait_acknowledged(&self) -> Error {
        self.wait_until(Control::is_acknowledged);
        match self.check() {
            Err(error) => error,
            Ok(()) => Error::new(ErrorKind::Aborted, "the operation was aborted"),
        }
    }

    pub(super) fn sleep<'s>(
        &self,
        state: MutexGuard<'s, State>,
        limit: Duration,
    ) -> MutexGuard<'s, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Adds work to the list, which keeps it until it is removed.
    pub(super) fn enter(&self, work: Arc<dyn Work>, queues: Option<SharedQueues>) {
        let mut state = self.state();
        state.control.add_queues(queues);
        state.work.push(work);
    }

    /// The caller must hold the lock of the operation's executor.
    pub(crate) fn remove(&self, tracker: &Arc<StartTracker>) {
        if tracker.due().is_some() {
            self.count_closed();
        }
        self.order.note_dropped(tracker.last_call());
        let is_of = |work: &Arc<dyn Work>| {
            work.tracker().is_some_and(|other| std::ptr::eq(other, &**tracker))
        };
        self.state().work.retain(|work| !is_of(work));
    }

    /// Removes work from the list.
    pub(super) fn remove_work<W: Work>(&self, work: &Arc<W>) {
        let address = Arc::as_ptr(work).cast::<()>();
        self.state().work.retain(|other| Arc::as_ptr(other).cast::<()>() != address);
    }

    /// After an abort, peers may still write to the buffers of an operation, and so may graphs of this rank that are
    /// still running.
    pub(crate) fn quarantine(&self, buffers: TierBuffers) {
        let mut quarantined = self.quarantined.lock().unwrap_or_else(PoisonError::into_inner);
        quarantined.push(buffers);
    }

    /// Returns whether this group or a subgroup has a channel on this rank.
    pub(super) fn has_channels(&self) -> bool {
        let is_kept = self.state().work.iter().any(|work| work.is_channel());
        let children: Vec<_> = self.children().iter().filter_map(Weak::upgrade).collect();
        is_kept || children.iter().any(|child| child.has_channels())
    }

    /// Wakes the watchdog if it sleeps, so that it checks the messages of channels.
    pub(super) fn watch_messages(&self) {
        if self.watchdog_sleeps.is_made() {
            self.family.wake_watchdog();
        }
    }

    pub(super) fn close(&self, how: Close) {
        self.close_as(Closed { how, with_parent: false, has_left: false });
    }

    /// Notes that this rank has left the group that it has closed.
    pub(super) fn note_left(&self) {
        if let Some(closed) = &mut self.state().closed {
            closed.has_left = true;
        }
    }

    fn close_as(&self, closed: Closed) {
        self.state().closed.get_or_insert(closed);
        self.aborted.store(true, Ordering::Release);
        self.change(|_, _| None);
    }

    /// The caller must hold the lock of the operation's executor.
    pub(crate) fn open(&self, tracker: &StartTracker, epoch: u64, deadline: Deadline) {
        if tracker.due().is_none() {
            self.count_open();
        }
        tracker.open(epoch, deadline);
        self.refusal.clear();
        self.family.enter_thread();
        self.order.enter_thread();
        self.family.wake_progress();
        let unchecked = tracker.is_on_stream() && self.watchdog_sleeps.is_made();
        if unchecked || deadline.timeout() < self.timeout {
            // The watchdog may sleep past it.
            self.family.wake_watchdog();
        }
    }

    /// Notes that a thread begins to wait for a start, without a timer that ends its sleep.
    pub(crate) fn note_wait(&self) {
        if self.watchdog_sleeps.is_made() {
            self.family.wake_watchdog();
        }
    }

    /// Marks the starts as complete that the executor has completed, and returns how many that are.
    ///
    /// After an abort, the completion of an operation means nothing, so no start is marked as complete.
    ///
    /// # Errors
    /// [`Mismatch`](peerlane_hal::ErrorKind::Mismatch) if another rank has made the start with other lengths or places; the start
    /// stays open then, because copies of that rank may still be on their way.
    pub(crate) fn close_done(
        &self,
        tracker: &StartTracker,
        executor: &Executor,
    ) -> Result<u64, Error> {
        let done = executor.done();
        if done > tracker.closed() && !self.is_aborted() {
            if tracker.compares_starts() && tracker.mismatch(done, false).is_some() {
                return Err(differing_start());
            }
            let was_open = tracker.due().is_some();
            tracker.close(done);
            if was_open && tracker.due().is_none() {
                self.count_closed();
            }
        }
        Ok(done)
    }

    /// Counts work as open, so that threads that wait move it on.
    pub(super) fn count_open(&self) {
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_closed(&self) {
        self.open.fetch_sub(1, Ordering::Relaxed);
    }

    /// Peers may wait for open operations in another order than this rank, so this rank also makes progress on the
    /// others.
    pub(crate) fn drive_others(&self, own: &StartTracker) -> bool {
        let others = self.open.load(Ordering::Relaxed) > 1 && self.drive_open(Some(own));
        let groups = self.family.drive_others(self);
        others || groups
    }

    /// Makes progress on all open starts and messages of the family, and returns whether some are left.
    pub(crate) fn drive_all(&self) -> bool {
        let groups = self.family.drive_others(self);
        self.drive_own() || groups
    }

    pub(super) fn has_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    /// Has the progress thread drive a start, whose completion its caller is then told.
    pub(crate) fn observe(&self, tracker: &StartTracker) -> Result<(), Error> {
        if !tracker.is_observed() {
            self.family.start_progress()?;
            tracker.observe();
            self.family.wake_progress();
        }
        Ok(())
    }

    /// Makes progress on the open starts and messages of this group, and returns whether some are left.
    pub(super) fn drive_own(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0 && self.drive_open(None)
    }

    pub(crate) fn finish_open(&self, deadline: Deadline) {
        let mut patience = Patience::new(self.bootstrap.rank());
        self.order.set_finishes(true);
        loop {
            self.drive_own();
            // A start whose executor another thread holds is open, but was not driven.
            if !self.has_open() || self.check().is_err() || deadline.has_passed() {
                break;
            }
            if patience.look().0 {
                self.tell_call();
            }
            std::thread::sleep(FINISH_PAUSE);
        }
        self.order.set_finishes(false);
    }

    /// Moves on what is open, except for the starts of one operation, and returns whether something
    /// is left.
    fn drive_open(&self, except: Option<&StartTracker>) -> bool {
        let is_picked = |work: &Arc<dyn Work>| {
            let is_except =
                |other: &StartTracker| except.is_some_and(|own| std::ptr::eq(own, other));
            work.is_open() && !work.tracker().is_some_and(is_except)
        };

        let (mut next, mut is_left) = (0, false);
        loop {
            // Nothing is driven under the lock of the list. Work that is removed meanwhile moves
            // others forward, which are then driven at the next call.
            let state = self.state();
            let rest = state.work.get(next..).unwrap_or_default();
            let Some(index) = rest.iter().position(is_picked) else { return is_left };
            let work = Arc::clone(&rest[index]);
            drop(state);
            next += index + 1;

            if work.is_observed() {
                // The progress thread drives it, and tells its caller without a lock.
                is_left = true;
                continue;
            }
            match work.drive(self) {
                Ok(driven) => is_left |= driven.is_open,
                Err(record) => self.begin_raise(record),
            }
        }
    }

    pub(crate) fn drive_by_thread(&self, tracker: &StartTracker) -> Result<(), Error> {
        tracker.mark_driven_by_thread();
        self.family.start_progress()
    }

    /// Adds the work that the progress thread moves on, or all that is open.
    pub(super) fn pick_for_thread(&self, all: bool, picked: &mut Vec<Arc<dyn Work>>) {
        let state = self.state();
        // After an abort nothing is driven any more; it is released.
        if state.control.record().is_none() && state.closed.is_none() {
            picked.extend(state.work.iter().filter(|work| work.is_for_thread(all)).cloned());
        }
    }

    /// Moves work on, and returns whether some of it has moved.
    pub(super) fn drive_picked(&self, picked: &[Arc<dyn Work>]) -> bool {
        let mut has_progressed = false;
        for work in picked {
            match work.drive(self) {
                Ok(driven) => has_progressed |= driven.has_progressed,
                Err(record) => self.begin_raise(record),
            }
        }
        has_progressed
    }
}

/// An operation whose starts use several plans is tracked several times.
fn newest_start(work: &[Arc<dyn Work>], record: &AbortRecord) -> Option<SizedStart> {
    trackers(work).filter_map(|tracker| tracker.start_of(record)).max()
}

/// Returns what is known of the starts of operations.
pub(super) fn trackers(work: &[Arc<dyn Work>]) -> impl Iterator<Item = &StartTracker> {
    work.iter().filter_map(|work| work.tracker())
}

/// What this rank sees of the processes of others through its bootstrap.
struct ThroughBootstrap<'b>(&'b dyn Bootstrap);

impl Sight for ThroughBootstrap<'_> {
    fn process(&self, rank: Rank) -> ProcessState {
        self.0.process(rank)
    }

    fn relay(&self) -> ProcessState {
        self.0.relay_process()
    }
}

struct GroupListener(Weak<Shared>);

impl Listener for GroupListener {
    fn notice(&self, notice: Notice) {
        if let Some(shared) = self.0.upgrade() {
            shared.receive(notice);
        }
    }

    fn exchange_timed_out(&self, missing: &[Rank], error: Error) -> Error {
        let Some(shared) = self.0.upgrade() else { return error };
        let waits = missing.iter().map(|rank| rank.0).collect();
        let record = AbortRecord::timeout(error.peer(), error.to_string());
        let record = AbortRecord { by: Some(shared.bootstrap.rank()), ..record };
        shared.raise_overdue(waits, record);
        shared.check().err().unwrap_or(error)
    }
}
