//! Defines work that is under way on this rank: the starts of an operation, and the messages of a
//! channel.
//!
//! The thread that calls into a group, the progress thread and the watchdog know work only as
//! [`Work`]. None of its methods blocks, because the threads look after other work too.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::Rank;

use super::shared::Shared;
use super::tracker::StartTracker;
use crate::bootstrap::AbortRecord;
use crate::run::executor::Executor;

/// Represents work of a group that is under way on this rank.
pub(super) trait Work: Send + Sync {
    /// Returns whether the host has started something that is not known to be complete.
    fn is_open(&self) -> bool;

    /// Returns whether the progress thread moves the work on. If it moves on `all` work, that is
    /// what is open.
    fn is_for_thread(&self, all: bool) -> bool {
        all && self.is_open()
    }

    /// Returns whether only the progress thread moves the work on, because it tells the caller.
    fn is_observed(&self) -> bool {
        false
    }

    /// Moves the work on, unless another thread does so.
    ///
    /// # Errors
    /// The record that ends the group, if an engine has failed.
    fn drive(&self, group: &Shared) -> Result<Driven, AbortRecord>;

    /// Returns the other ranks that the work waits for.
    fn waits(&self) -> Vec<Rank>;

    /// Returns the ranks that a thread waits for in a call of the operation.
    fn blocked_on(&self) -> Vec<Rank> {
        Vec::new()
    }

    /// Returns whether a thread has waited for long, or `None` if none waits.
    fn has_waited_for_long(&self) -> Option<bool> {
        None
    }

    /// Returns when the first open start of the work is overdue.
    fn due(&self) -> Option<Instant> {
        None
    }

    /// Finds out why a start is overdue. Returns `None` if it only waits for its caller, who is
    /// woken.
    fn judge(&self, group: &Shared) -> Option<Overdue> {
        let _ = group;
        None
    }

    /// Returns the timeout of work on streams and in graphs, or `None` if there is none.
    fn stream_timeout(&self, group: &Shared) -> Option<Duration>;

    /// Finds out what is complete on streams and in graphs, and what is overdue there.
    fn check_streams(&self, group: &Shared) -> Option<Overdue>;

    /// Returns whether a graph may replay the work.
    fn is_captured(&self) -> bool;

    /// Returns whether a replay waits for a flag now.
    fn replay_waits(&self) -> bool {
        false
    }

    /// Lets the waits of the work pass, and returns whether its engines are drained.
    fn release(&self) -> bool;

    /// Wakes the threads that wait for the work.
    fn wake(&self) {}

    /// Tells the caller of observed work that something has changed. The group must not be locked.
    fn tell(&self) {}

    /// Returns what is known of the starts, if the work is an operation.
    fn tracker(&self) -> Option<&StartTracker> {
        None
    }

    fn is_channel(&self) -> bool {
        self.tracker().is_none()
    }
}

/// What a call of [`Work::drive`] has achieved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Driven {
    /// Whether something moved, or more can move at once.
    pub(super) has_progressed: bool,
    /// Whether something is left for a thread to move.
    pub(super) is_open: bool,
}

/// Why work ends its group.
pub(super) enum Overdue {
    /// Its engine has failed.
    Broken(AbortRecord),
    /// It waits for these ranks for longer than its timeout.
    Late { timeout: Duration, waits: Vec<Rank>, record: AbortRecord },
}

/// An operation with the executor of one of its plans.
pub(super) struct Execution {
    tracker: Arc<StartTracker>,
    executor: Arc<Mutex<Executor>>,
    wakers: Box<[Waker]>,
}

impl Execution {
    pub(super) fn new(
        tracker: Arc<StartTracker>,
        executor: Arc<Mutex<Executor>>,
        wakers: Box<[Waker]>,
    ) -> Self {
        Self { tracker, executor, wakers }
    }

    /// Returns the executor, or `None` while another thread uses it.
    fn free_executor(&self) -> Option<MutexGuard<'_, Executor>> {
        match self.executor.try_lock() {
            Ok(executor) => Some(executor),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
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

    fn drive(&self, group: &Shared) -> Result<Driven, AbortRecord> {
        let Some(mut executor) = self.free_executor() else { return Ok(Driven::default()) };
        let driven = executor.drive().and_then(|has_progressed| {
            let done = group.close_done(&self.tracker, &executor)?;
            Ok(Driven { has_progressed, is_open: done < executor.started() })
        });
        drop(executor);

        let driven = driven.map_err(|error| group.broken(&self.tracker, &error))?;
        self.tracker.tell_complete();
        Ok(driven)
    }

    fn waits(&self) -> Vec<Rank> {
        self.tracker.missing_writers().into_iter().collect()
    }

    fn blocked_on(&self) -> Vec<Rank> {
        if self.tracker.is_blocked() { self.waits() } else { Vec::new() }
    }

    fn has_waited_for_long(&self) -> Option<bool> {
        self.tracker.is_blocked().then(|| self.tracker.has_waited_for_long())
    }

    fn due(&self) -> Option<Instant> {
        self.tracker.due()
    }

    fn judge(&self, group: &Shared) -> Option<Overdue> {
        let mut has_looked = false;
        if let Some(mut executor) = self.free_executor()
            && (self.tracker.is_on_stream() || !executor.is_polled())
        {
            let driven = executor.drive().and_then(|_| group.close_done(&self.tracker, &executor));
            drop(executor);
            if let Err(error) = driven {
                return Some(Overdue::Broken(group.broken(&self.tracker, &error)));
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

    fn stream_timeout(&self, _group: &Shared) -> Option<Duration> {
        let is_checked = self.is_captured() || self.tracker.is_on_stream() && self.is_open();
        is_checked.then(|| self.tracker.timeout())
    }

    fn check_streams(&self, group: &Shared) -> Option<Overdue> {
        let tracker = &self.tracker;
        let mut executor = self.free_executor()?;
        let driven = match tracker.due() {
            Some(_) if tracker.is_on_stream() => executor.drive().map(drop),
            _ => Ok(()),
        };
        let waited = driven.and_then(|()| {
            group.close_done(tracker, &executor)?;
            if tracker.is_captured() { executor.replay_wait() } else { Ok(None) }
        });
        drop(executor);

        match waited {
            Err(error) => Some(Overdue::Broken(group.broken(tracker, &error))),
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
