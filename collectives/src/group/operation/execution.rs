//! Moves the starts of an operation on, and finds out when they are overdue.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind, Rank};

use crate::bootstrap::AbortRecord;
use crate::error::Error;
use crate::group::driver::{Driven, OpenCount, Overdue, Work};
use crate::group::life::LifeCycle;
use crate::group::tracker::StartTracker;
use crate::run::executor::Executor;
use crate::run::lane::differing_start;

/// An operation with the executor of one of its plans.
pub(super) struct Execution {
    pub(super) tracker: Arc<StartTracker>,
    executor: Mutex<Executor>,
    wakers: Box<[Waker]>,
    /// Whether bytes of an engine move only while all ranks take part.
    is_polled: bool,
    life: Arc<LifeCycle>,
    open: Arc<OpenCount>,
}

impl Execution {
    pub(super) fn new(
        tracker: Arc<StartTracker>,
        executor: Executor,
        life: Arc<LifeCycle>,
        open: Arc<OpenCount>,
    ) -> Self {
        let wakers = executor.lanes().iter().map(|lane| lane.queue.waker()).collect();
        let is_polled = executor.is_polled();
        Self { tracker, executor: Mutex::new(executor), wakers, is_polled, life, open }
    }

    pub(super) fn executor(&self) -> MutexGuard<'_, Executor> {
        // A panic inside is a bug of an engine; the drop releases the lanes.
        self.executor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the executor, or `None` while another thread uses it.
    fn free_executor(&self) -> Option<MutexGuard<'_, Executor>> {
        match self.executor.try_lock() {
            Ok(executor) => Some(executor),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Makes the next start of the executor, whose lock the caller holds, and returns its epoch.
    ///
    /// Without a deadline, the caller polls the start a few times and then sets its deadline.
    pub(super) fn begin(&self, executor: &mut Executor, deadline: Option<Deadline>) -> u64 {
        let epoch = executor.start();
        if executor.has_handles() {
            // A captured start may have been dropped before all its chunks had departed.
            self.tracker.set_missing_part(None);
        }
        if self.tracker.due().is_none() {
            self.open.add();
        }

        match deadline {
            Some(deadline) => self.tracker.open(epoch, deadline),
            None => self.tracker.open_before_polls(epoch),
        }
        epoch
    }

    /// Submits what the executor can submit, and marks as complete what its engines have completed.
    /// Returns whether it made progress, and how many starts are complete.
    ///
    /// # Errors
    /// Those of the engines and of [`close_done`](Self::close_done).
    pub(super) fn advance(&self, executor: &mut Executor) -> Result<(bool, u64), Error> {
        let has_progressed = executor.drive()?;
        Ok((has_progressed, self.close_done(executor)?))
    }

    /// Marks the starts as complete that the executor has completed, and returns how many that are.
    ///
    /// After an abort, the completion of an operation means nothing, so no start is marked as
    /// complete.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch) if another rank has made the start with other lengths or
    /// places; the start stays open then, because copies of that rank may still be on their way.
    pub(super) fn close_done(&self, executor: &Executor) -> Result<u64, Error> {
        let tracker = &self.tracker;
        let done = executor.done();
        if done > tracker.closed() && !self.life.is_aborted() {
            if tracker.compares_starts() && tracker.mismatch(done, false).is_some() {
                return Err(differing_start());
            }

            let was_open = tracker.due().is_some();
            tracker.close(done);
            if was_open && tracker.due().is_none() {
                self.open.remove();
            }
        }
        Ok(done)
    }

    /// Counts the starts no more, because the operation is dropped. The caller holds the lock of
    /// the executor.
    pub(super) fn forget(&self) {
        if self.tracker.due().is_some() {
            self.open.remove();
        }
    }

    /// Returns the abort record of a start that an engine's error has ended.
    pub(super) fn broken(&self, error: &Error) -> AbortRecord {
        if error.kind() == ErrorKind::Mismatch
            && let Some(record) = self.tracker.first_mismatch()
        {
            return record;
        }

        let (cause, peer, text) = self.life.cause_of_engine(error);
        self.tracker.record(cause, Some(peer), "engine", &format!("because {text}"))
    }

    /// Ends the group because a start has not completed within a timeout.
    pub(super) fn raise_late(&self, timeout: Duration) {
        self.life.set_timeout(timeout);
        let waits = self.waits().into_iter().map(|rank| rank.0).collect();
        self.life.raise_overdue(waits, self.tracker.overdue(timeout));
    }

    fn late(&self) -> Overdue {
        let timeout = self.tracker.timeout();
        Overdue::Late { timeout, waits: self.waits(), record: self.tracker.overdue(timeout) }
    }
}

impl Work for Execution {
    fn is_open(&self) -> bool {
        self.tracker.due().is_some()
    }

    fn is_for_thread(&self, all: bool) -> bool {
        self.tracker.is_driven_by_thread() || all && self.is_open()
    }

    fn is_observed(&self) -> bool {
        self.tracker.is_observed()
    }

    fn drive(&self) -> Result<Driven, AbortRecord> {
        let Some(mut executor) = self.free_executor() else { return Ok(Driven::default()) };
        let (advanced, started) = (self.advance(&mut executor), executor.started());
        drop(executor);

        let (has_progressed, done) = advanced.map_err(|error| self.broken(&error))?;
        self.tracker.tell_complete();
        if has_progressed {
            self.tracker.tell_progress();
        }
        Ok(Driven { has_progressed, is_open: done < started })
    }

    fn waits(&self) -> Vec<Rank> {
        // The start waits for its own caller first.
        if self.tracker.misses_parts() {
            return Vec::new();
        }
        self.tracker.missing_writers().into_iter().collect()
    }

    fn copies_with_others(&self) -> bool {
        // A start that waits for its own caller has not submitted all copies.
        self.is_polled && self.is_open() && !self.tracker.misses_parts()
    }

    fn is_blocked(&self) -> bool {
        self.tracker.is_blocked()
    }

    fn has_waited_for_long(&self) -> Option<bool> {
        self.tracker.is_blocked().then(|| self.tracker.has_waited_for_long())
    }

    fn due(&self) -> Option<Instant> {
        self.tracker.due()
    }

    fn judge(&self) -> Option<Overdue> {
        let mut has_looked = false;
        if let Some(mut executor) = self.free_executor()
            && (self.tracker.is_on_stream() || !executor.is_polled())
        {
            let advanced = self.advance(&mut executor);
            drop(executor);
            if let Err(error) = advanced {
                return Some(Overdue::Broken(self.broken(&error)));
            }
            has_looked = self.tracker.is_on_stream();
        }
        if !self.tracker.is_overdue() {
            return None;
        }

        // With every flag there, a start of the host waits for its caller; nobody looks at one
        // on a stream but this thread.
        if has_looked || self.tracker.missing().is_some() {
            return Some(self.late());
        }
        self.wake();
        self.tracker.tell();
        None
    }

    fn stream_timeout(&self) -> Option<Duration> {
        let is_checked = self.is_captured() || self.tracker.is_on_stream() && self.is_open();
        is_checked.then(|| self.tracker.timeout())
    }

    fn check_streams(&self) -> Option<Overdue> {
        let tracker = &self.tracker;
        let mut executor = self.free_executor()?;
        let driven = match tracker.due() {
            Some(_) if tracker.is_on_stream() => executor.drive().map(drop),
            _ => Ok(()),
        };
        let waited = driven.and_then(|()| {
            self.close_done(&executor)?;
            if tracker.is_captured() { executor.replay_wait() } else { Ok(None) }
        });
        drop(executor);

        match waited {
            Err(error) => Some(Overdue::Broken(self.broken(&error))),
            Ok(waited) => {
                tracker.set_replay_waits(waited.is_some());
                let is_late = waited.is_some_and(|waited| waited >= tracker.timeout());
                is_late.then(|| self.late())
            }
        }
    }

    fn is_captured(&self) -> bool {
        self.tracker.is_captured()
    }

    fn replay_waits(&self) -> bool {
        let executor = self.free_executor();
        executor.is_some_and(|mut executor| matches!(executor.replay_wait(), Ok(Some(_))))
    }

    fn release(&self) -> bool {
        self.free_executor().is_some_and(|mut executor| executor.release_once())
    }

    fn wake(&self) {
        self.wakers.iter().for_each(Waker::wake_by_ref);
    }

    fn tell(&self) {
        self.tracker.tell();
    }

    fn tracker(&self) -> Option<&StartTracker> {
        Some(&self.tracker)
    }
}
