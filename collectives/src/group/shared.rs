//! The state that a group's handles, its watchdog and its bootstrap share.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use crate::bootstrap::{Bootstrap, Listener, Notice};
use crate::error::Error;
use crate::group::abort::AbortRecord;
use crate::group::watch::Watch;
use crate::run::buffers::Kept;
use crate::run::executor::Executor;

/// How long a rank waits until the others know of an abort, before it releases its own waits.
pub(super) const TELL_TIMEOUT: Duration = Duration::from_millis(1500);

/// The pause between two polls of starts that are driven while no caller waits for them.
const FINISH_PAUSE: Duration = Duration::from_micros(50);

pub(crate) struct Shared {
    pub(crate) bootstrap: Box<dyn Bootstrap>,
    pub(crate) timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// Mirrors `state.record.is_some()`, for the hot path.
    aborted: AtomicBool,
    left: Vec<AtomicBool>,
    left_count: AtomicUsize,
    /// The number of operations with an open start.
    open: AtomicUsize,
    /// Memory of operations of an aborted group; see [`quarantine`](Self::quarantine).
    quarantined: Mutex<Vec<Kept>>,
    pub(super) progress: Mutex<Option<JoinHandle<()>>>,
    pub(super) progress_sleeps: AtomicBool,
    /// With `state`.
    pub(super) progress_wanted: Condvar,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) record: Option<AbortRecord>,
    told: bool,
    /// How the group ended, if it has.
    pub(super) closed: Option<Closed>,
    pub(super) watched: Vec<Watched>,
}

/// How a group ended on this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// Together with all ranks; nothing is open.
    Together,
    /// Without the other ranks.
    Alone,
}

#[derive(Clone)]
pub(super) struct Watched {
    pub(super) watch: Arc<Watch>,
    executor: Arc<Mutex<Executor>>,
    pub(super) wakers: Vec<Waker>,
}

impl Watched {
    pub(super) fn driven(&self) -> (Arc<Watch>, Arc<Mutex<Executor>>) {
        (Arc::clone(&self.watch), Arc::clone(&self.executor))
    }

    /// Returns the executor, unless another thread drives it.
    pub(super) fn free_executor(&self) -> Option<MutexGuard<'_, Executor>> {
        match self.executor.try_lock() {
            Ok(executor) => Some(executor),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

impl Shared {
    pub(crate) fn new(bootstrap: Box<dyn Bootstrap>, timeout: Duration) -> Arc<Self> {
        let left = (0..bootstrap.ranks()).map(|_| AtomicBool::new(false)).collect();
        let shared = Arc::new(Self {
            bootstrap,
            timeout,
            state: Mutex::default(),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            left,
            left_count: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            quarantined: Mutex::default(),
            progress: Mutex::default(),
            progress_sleeps: AtomicBool::new(false),
            progress_wanted: Condvar::new(),
        });
        shared.bootstrap.listen(Self::listener(Arc::downgrade(&shared)));
        shared
    }

    fn listener(shared: Weak<Self>) -> Listener {
        Arc::new(move |notice| {
            if let Some(shared) = shared.upgrade() {
                shared.hear(notice);
            }
        })
    }

    fn hear(&self, notice: Notice) {
        match notice {
            Notice::Abort { from, record } => self.keep(AbortRecord::decode(&record, from)),
            Notice::Lost { rank, how } => self.keep(AbortRecord::lost(rank, &how)),
            Notice::Told => self.state().told = true,
            Notice::Left { rank } => {
                if let Some(left) = self.left.get(rank.index())
                    && !left.swap(true, Ordering::AcqRel)
                {
                    self.left_count.fetch_add(1, Ordering::Release);
                }
            }
        }
        self.wake();
    }

    fn keep(&self, record: AbortRecord) {
        self.state().record.get_or_insert(record);
        self.aborted.store(true, Ordering::Release);
    }

    fn wake(&self) {
        self.changed.notify_all();
        for watched in &self.state().watched {
            watched.wakers.iter().for_each(Waker::wake_by_ref);
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the group was aborted or closed, without taking a lock.
    pub(crate) fn is_aborted(&self) -> bool {
        self.aborted.load(Ordering::Acquire)
    }

    /// # Errors
    /// The abort record, or that the group is closed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.is_aborted() {
            return Ok(());
        }
        let state = self.state();
        match &state.record {
            Some(record) => Err(record.to_error(self.bootstrap.rank())),
            None => Err(Error::new(ErrorKind::Aborted, "the group was closed before")),
        }
    }

    /// Returns the abort record, if there is one.
    pub(crate) fn record(&self) -> Option<AbortRecord> {
        self.state().record.clone()
    }

    pub(crate) fn somebody_left(&self) -> bool {
        self.left_count.load(Ordering::Acquire) > 0
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.left.get(rank.index()).is_some_and(|left| left.load(Ordering::Acquire))
    }

    /// Ends the group with `record`, or with the one that another rank wrote first.
    pub(crate) fn raise(&self, record: AbortRecord) {
        if self.check().is_err() {
            return;
        }
        let told = self.bootstrap.abort(&record.encode()).is_ok();
        let deadline = Deadline::after(TELL_TIMEOUT);
        if !(told && self.wait_while(deadline, |state| state.record.is_none())) {
            // Nobody decides the race any more: the own view has to do.
            self.keep(record);
            self.state().told = true;
            self.wake();
        }
    }

    /// Returns the reason of a failed exchange: the abort record if the group has ended, or `error`.
    pub(crate) fn cause(&self, error: Error) -> Error {
        let kinds = [ErrorKind::Timeout, ErrorKind::PeerLost, ErrorKind::Aborted];
        if !kinds.contains(&error.kind()) {
            return error;
        }
        // The bootstrap knows of the end a moment before its listener hears of it.
        self.wait_while(Deadline::after(TELL_TIMEOUT), |state| state.record.is_none());
        self.check().err().unwrap_or(error)
    }

    /// Returns the error of the abort record, after every live rank has received it or cannot be reached.
    pub(crate) fn wait_until_told(&self) -> Error {
        let deadline = Deadline::after(TELL_TIMEOUT);
        if !self.wait_while(deadline, |state| state.record.is_some() && !state.told) {
            // Later calls need not wait for the same silent rank.
            self.state().told = true;
        }
        match self.check() {
            Err(error) => error,
            Ok(()) => Error::new(ErrorKind::Aborted, "the operation was aborted"),
        }
    }

    /// Waits while `waiting` is true, and returns whether it ended before the deadline.
    pub(super) fn wait_while(&self, deadline: Deadline, waiting: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state();
        while waiting(&state) {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            state = self.sleep(state, left);
        }
        true
    }

    /// Sleeps until the state changes, at most for `limit`.
    pub(super) fn sleep<'s>(
        &self,
        state: MutexGuard<'s, State>,
        limit: Duration,
    ) -> MutexGuard<'s, State> {
        self.changed.wait_timeout(state, limit).unwrap_or_else(PoisonError::into_inner).0
    }

    pub(crate) fn enter(
        &self,
        watch: &Arc<Watch>,
        executor: &Arc<Mutex<Executor>>,
        wakers: Vec<Waker>,
    ) {
        let (watch, executor) = (Arc::clone(watch), Arc::clone(executor));
        self.state().watched.push(Watched { watch, executor, wakers });
    }

    /// Removes an operation, whose executor the caller has locked.
    pub(crate) fn remove(&self, watch: &Arc<Watch>) {
        if watch.due().is_some() {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        self.state().watched.retain(|watched| !Arc::ptr_eq(&watched.watch, watch));
    }

    /// Keeps memory of two fabrics until the group and all handles are dropped.
    ///
    /// After an abort, peers may still write to it, and a registration does not always keep its memory.
    pub(crate) fn quarantine<'k>(&self, kept: impl Iterator<Item = &'k Kept>) {
        let mut quarantined = self.quarantined.lock().unwrap_or_else(PoisonError::into_inner);
        quarantined.extend(kept.cloned());
    }

    /// Ends the watchdog; operations can no longer start.
    pub(crate) fn close(&self, how: Closed) {
        self.state().closed.get_or_insert(how);
        self.aborted.store(true, Ordering::Release);
        self.wake();
        self.progress_wanted.notify_all();
    }

    /// Records that start `epoch` of an operation is open. The caller has locked its executor.
    pub(crate) fn open(&self, watch: &Watch, epoch: u64, deadline: Deadline) {
        if watch.due().is_none() {
            self.open.fetch_add(1, Ordering::Relaxed);
        }
        watch.open(epoch, deadline);
        self.wake_progress();
        if deadline.timeout() < self.timeout {
            // The watchdog may sleep past it. It holds the lock from its look at the deadlines until it
            // sleeps, so behind the lock it is either asleep or still to look.
            drop(self.state());
            self.changed.notify_all();
        }
    }

    /// Closes the complete starts of the locked `executor`, and returns the last one. After an abort, completion means nothing.
    pub(crate) fn close_done(&self, watch: &Watch, executor: &Executor) -> u64 {
        let done = executor.done();
        if done > watch.closed() && !self.is_aborted() {
            let was_open = watch.due().is_some();
            watch.close(done);
            if was_open && watch.due().is_none() {
                self.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
        done
    }

    /// Drives the open starts of all operations except `own`, and returns whether some are not complete. Peers may wait for them
    /// in another order than this rank.
    pub(crate) fn drive_others(&self, own: &Arc<Watch>) -> bool {
        self.open.load(Ordering::Relaxed) > 1 && self.drive_open(|watch| !Arc::ptr_eq(watch, own))
    }

    /// Drives all open starts until they are complete, before this rank blocks.
    pub(crate) fn finish_open(&self, deadline: Deadline) {
        while self.open.load(Ordering::Relaxed) > 0
            && self.drive_open(|_| true)
            && self.check().is_ok()
            && !deadline.has_passed()
        {
            std::thread::sleep(FINISH_PAUSE);
        }
    }

    fn drive_open(&self, picked: impl Fn(&Arc<Watch>) -> bool) -> bool {
        let (mut unfinished, mut broken) = (false, None);
        for watched in &self.state().watched {
            if watched.watch.due().is_none() || !picked(&watched.watch) {
                continue;
            }
            let Some(mut executor) = watched.free_executor() else { continue };
            match executor.drive() {
                Ok(_) => {
                    unfinished |= self.close_done(&watched.watch, &executor) < executor.started()
                }
                Err(error) => broken = Some(watched.watch.broken(&error)),
            }
        }
        if let Some(record) = broken {
            self.raise(record);
        }
        unfinished
    }
}
