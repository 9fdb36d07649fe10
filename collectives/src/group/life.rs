//! Keeps the life of a group on a rank: whether it is open, why it has ended, and who knows so.
//!
//! The decision why a group ends is made in [`control`](super::control). The life cycle passes it
//! the notices of the bootstrap and the reports of this rank, and passes on what it decides. It
//! knows the work of the group only as [`Underway`].

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank, SharedQueues};

use super::call;
use super::control::{Action, Control, RankState, Sight, SizedStart};
use super::event::Event;
use super::identity::Identity;
use crate::bootstrap::{AbortRecord, Bootstrap, Cause, Listener, Notice, ProcessState};
use crate::error::Error;

/// The life cycle of a group on a rank.
pub(super) struct LifeCycle {
    pub(super) bootstrap: Box<dyn Bootstrap>,
    pub(super) timeout: Duration,
    pub(super) identity: Identity,
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the group has ended or was closed, so that a check costs one load.
    aborted: AtomicBool,
    has_left: AtomicBool,
    ends: Mutex<Vec<Weak<Event>>>,
    underway: OnceLock<Weak<dyn Underway>>,
}

struct State {
    control: Control,
    closed: Option<Closed>,
}

/// What a life cycle asks of the work of its group, and tells it.
pub(super) trait Underway: Send + Sync {
    /// Returns the ranks that the work waits for.
    fn waits(&self) -> Vec<Rank>;

    /// Returns whether copies of the work complete only while all ranks take part.
    fn copies_with_others(&self) -> bool;

    /// Returns the ranks of this group that threads of this rank wait for in other groups.
    fn waits_elsewhere(&self) -> Vec<u32>;

    /// Returns the newest start of the operation that a record is about.
    fn newest_start(&self, record: &AbortRecord) -> Option<SizedStart>;

    /// Returns what this rank does or did last, as the words after "rank 1".
    fn call_in_words(&self) -> Option<String>;

    /// Keeps the starts complete whose completion the caller knows, because the group ends.
    fn note_outlasting(&self);

    /// Compares the calls of another rank with those of this one.
    fn receive_order(&self, from: Rank, message: call::Message);

    /// Tells all threads that look after the work or wait for it that the life cycle has changed.
    fn tell_change(&self);
}

/// The state of a group on a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum GroupState {
    /// The ranks can make collective calls.
    Open,
    /// All ranks have agreed to close the group, and this one has still connections to others.
    Leaving,
    /// The group was closed by all ranks, and this rank holds nothing of it but what operations and
    /// handles keep.
    Closed,
    /// The group ended by the loss of a rank, by an error, or because this rank dropped it.
    Ended,
}

/// How a group came to its end on this rank, unless a record says that it was lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Closed {
    pub(super) how: Close,
    /// Whether the group ended because the one that it was split from was closed or dropped.
    pub(super) with_parent: bool,
    /// Whether this rank has left, so that it holds no connection any more.
    pub(super) has_left: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Close {
    /// All ranks have agreed to close the group.
    Together,
    /// This rank has dropped the group.
    Alone,
}

impl LifeCycle {
    pub(super) fn new(
        bootstrap: Box<dyn Bootstrap>,
        timeout: Duration,
        identity: Identity,
    ) -> Arc<Self> {
        let control = Control::new(bootstrap.rank(), bootstrap.ranks(), bootstrap.relay());
        Arc::new(Self {
            bootstrap,
            timeout,
            identity,
            state: Mutex::new(State { control, closed: None }),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            has_left: AtomicBool::new(false),
            ends: Mutex::default(),
            underway: OnceLock::new(),
        })
    }

    /// Begins to receive the notices of the bootstrap, for a group with this work.
    pub(super) fn begin(self: &Arc<Self>, underway: Weak<dyn Underway>) {
        // A life begins once.
        let _ = self.underway.set(underway);
        self.bootstrap.listen(Arc::new(NoticeListener(Arc::downgrade(self))));
    }

    fn underway(&self) -> Option<Arc<dyn Underway>> {
        self.underway.get().and_then(Weak::upgrade)
    }

    fn receive(&self, notice: Notice) {
        if matches!(notice, Notice::Left { .. }) {
            self.has_left.store(true, Ordering::Release);
        }

        // Before this group is locked, because it locks others.
        let underway = self.underway();
        let elsewhere = match (&underway, &notice) {
            (Some(underway), Notice::Message { .. }) => underway.waits_elsewhere(),
            _ => Vec::new(),
        };

        let mut state = self.state();
        if let Some(underway) = &underway
            && matches!(notice, Notice::Abort { .. } | Notice::Lost { .. })
        {
            // Under the lock, so that no start is complete only because the group has ended.
            underway.note_outlasting();
        }

        let own = |record: &AbortRecord| {
            let state = self.rank_state(record);
            // A rank that waits for nothing here may be held up by a wait in another group.
            let is_idle = state.waits.is_empty();
            if is_idle { RankState { waits: elsewhere.clone(), ..state } } else { state }
        };
        let sight = ThroughBootstrap(&*self.bootstrap);
        let action = state.control.receive(Instant::now(), notice, own, &sight);
        self.after_change(state, action);
    }

    /// Returns what this rank says of itself when another one asks.
    fn rank_state(&self, record: &AbortRecord) -> RankState {
        let mut waits: BTreeSet<Rank> = self.bootstrap.missing().into_iter().collect();
        waits.extend(self.underway().into_iter().flat_map(|underway| underway.waits()));
        self.rank_state_of(waits.into_iter().map(|rank| rank.0).collect(), record)
    }

    fn rank_state_of(&self, waits: Vec<u32>, record: &AbortRecord) -> RankState {
        let underway = self.underway();
        let copies_with_others =
            waits.is_empty() && underway.as_ref().is_some_and(|it| it.copies_with_others());
        RankState {
            waits,
            copies_with_others,
            start: underway.as_ref().and_then(|underway| underway.newest_start(record)),
            call: underway.and_then(|underway| underway.call_in_words()),
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

    /// Tells everybody that the state has changed, and does what the control has decided.
    fn after_change(&self, state: MutexGuard<'_, State>, action: Option<Action>) {
        if state.control.record().is_some() {
            self.aborted.store(true, Ordering::Release);
        }
        self.changed.notify_all();
        drop(state);

        let underway = self.underway();
        if let Some(underway) = &underway {
            underway.tell_change();
        }
        if self.is_aborted() {
            self.tell_end();
        }

        let unreachable = match (action, underway) {
            // Without its own message back, this rank ends the group alone after a timeout.
            (Some(Action::Broadcast(message)), _) => {
                let _ = self.bootstrap.broadcast(&message);
                return;
            }
            (Some(Action::Order { from, message }), Some(underway)) => {
                return underway.receive_order(from, message);
            }
            (None | Some(Action::Order { .. }), _) => return,
            (Some(Action::Abort(record)), _) => {
                self.bootstrap.abort(&record.encode()).is_err().then_some(record)
            }
        };
        if let Some(record) = unreachable {
            self.adopt(record);
        }
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Control, Instant) -> Option<Action>) {
        let mut state = self.state();
        let action = change(&mut state.control, Instant::now());
        self.after_change(state, action);
    }

    /// Ends the group on this rank alone, which is disconnected, unless it has learned of another
    /// end before.
    pub(super) fn adopt(&self, record: AbortRecord) {
        self.change(|control, now| {
            control.adopt(now, record);
            None
        });
    }

    /// Returns the time until the control has something to do, or `None` if it waits for nothing.
    pub(super) fn until_tick(&self) -> Option<Duration> {
        self.state().control.until_tick(Instant::now())
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

    fn state(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sleep<'s>(&self, state: MutexGuard<'s, State>, limit: Duration) -> MutexGuard<'s, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    /// Returns whether the group has ended or was closed.
    pub(super) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    pub(super) fn check(&self) -> Result<(), Error> {
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

    /// Returns whether the group is open, or was closed by all ranks, after which no rank writes to
    /// the memory of another one.
    pub(super) fn is_well(&self) -> bool {
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

    /// Returns how this rank has closed or dropped the group, if it has.
    pub(super) fn closed(&self) -> Option<Close> {
        self.state().closed.map(|closed| closed.how)
    }

    pub(super) fn record(&self) -> Option<AbortRecord> {
        self.state().control.record().cloned()
    }

    pub(super) fn has_record(&self) -> bool {
        self.state().control.record().is_some()
    }

    pub(super) fn has_any_left(&self) -> bool {
        self.has_left.load(Ordering::Acquire)
    }

    pub(super) fn has_left(&self, rank: Rank) -> bool {
        self.state().control.has_left(rank)
    }

    /// Returns the number in this group of a rank of the first group.
    pub(super) fn number_of(&self, rank: Rank) -> Option<u32> {
        let mut first_ranks = self.identity.first_ranks.iter();
        Some(Rank::at(first_ranks.position(|first| *first == rank)?).0)
    }

    /// Determines which rank is to blame for an error of this rank's engine. Returns the cause,
    /// that rank, and a text for the abort record.
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

    /// Ends the group if an engine has failed in what `name` names, and returns the error for the
    /// caller.
    pub(super) fn fail(&self, name: &str, error: Error) -> Error {
        // After a timeout or an invalid argument the engine can go on, so the group does not end.
        if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::InvalidArgument)
            || self.check().is_err()
        {
            return self.check().err().unwrap_or(error);
        }

        let (cause, peer, text) = self.cause_of_engine(&error);
        self.raise(AbortRecord {
            cause,
            by: Some(self.bootstrap.rank()),
            operation: name.to_owned(),
            phase: "engine".to_owned(),
            ..AbortRecord::timeout(Some(peer), format!("{name}: {text}"))
        });
        self.check().err().unwrap_or(error)
    }

    /// Ends the group, and waits until the bootstrap has delivered the record.
    pub(super) fn raise(&self, record: AbortRecord) {
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

    pub(super) fn raise_overdue(&self, waits: Vec<u32>, record: AbortRecord) {
        self.begin_overdue(waits, record);
        self.wait_ended();
    }

    /// Asks all ranks why a deadline has passed. The watchdog ends the group when they have
    /// answered.
    pub(super) fn begin_overdue(&self, waits: Vec<u32>, record: AbortRecord) {
        if self.check().is_err() {
            return;
        }
        let own = self.rank_state_of(waits, &record);
        self.change(|control, now| control.overdue(now, own, record));
    }

    fn wait_ended(&self) {
        if self.check().is_ok() {
            self.wait_until(|control| control.record().is_some());
        }
    }

    /// Waits until all live ranks know of the end, and returns its error.
    pub(super) fn wait_acknowledged(&self) -> Error {
        self.wait_until(Control::is_acknowledged);
        match self.check() {
            Err(error) => error,
            Ok(()) => Error::new(ErrorKind::Aborted, "the operation was aborted"),
        }
    }

    /// Waits until the group has a record, which comes back from the bootstrap after an abort.
    pub(super) fn wait_record(&self, deadline: Deadline) {
        let mut state = self.state();
        while state.control.record().is_none() && !deadline.has_passed() {
            state = self.sleep(state, deadline.remaining());
        }
    }

    /// Returns the reason why the group has ended if that is the cause of an error of an exchange.
    pub(super) fn cause(&self, error: Error) -> Error {
        let kinds = [ErrorKind::Timeout, ErrorKind::PeerLost, ErrorKind::Aborted];
        if !kinds.contains(&error.kind()) {
            return self.identity.name(error);
        }

        // The bootstrap delivers the notice a moment after the error.
        let limit = self.state().control.relay_timeout();
        self.wait_record(Deadline::after(limit));
        self.check().err().unwrap_or_else(|| self.identity.name(error))
    }

    /// Signals `event` when the group has ended or was closed.
    pub(super) fn add_end(&self, event: &Arc<Event>) {
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

    pub(super) fn set_timeout(&self, timeout: Duration) {
        self.state().control.set_timeout(timeout);
    }

    pub(super) fn add_exchange(&self, took: Duration) {
        self.state().control.add_exchange(took);
    }

    pub(super) fn add_queues(&self, queues: Option<SharedQueues>) {
        self.state().control.add_queues(queues);
    }

    /// Notes how this rank closes or drops the group, unless it has done so before.
    pub(super) fn close(&self, closed: Closed) {
        self.state().closed.get_or_insert(closed);
        self.aborted.store(true, Ordering::Release);
        self.change(|_, _| None);
    }

    /// Notes that this rank has left the group that it has closed.
    pub(super) fn note_left(&self) {
        if let Some(closed) = &mut self.state().closed {
            closed.has_left = true;
        }
    }
}

impl Closed {
    pub(super) fn new(how: Close) -> Self {
        Self { how, with_parent: false, has_left: false }
    }
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

struct NoticeListener(Weak<LifeCycle>);

impl Listener for NoticeListener {
    fn notice(&self, notice: Notice) {
        if let Some(life) = self.0.upgrade() {
            life.receive(notice);
        }
    }

    fn exchange_timed_out(&self, missing: &[Rank], error: Error) -> Error {
        let Some(life) = self.0.upgrade() else { return error };
        let waits = missing.iter().map(|rank| rank.0).collect();
        let record = AbortRecord::timeout(error.peer(), error.to_string());
        let record = AbortRecord { by: Some(life.bootstrap.rank()), ..record };

        life.raise_overdue(waits, record);
        life.check().err().unwrap_or(error)
    }
}
