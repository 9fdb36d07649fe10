//! Defines work that is under way on this rank: the starts of an operation, and the messages of a
//! channel.
//!
//! The thread that calls into a group, the progress thread and the watchdog know work only as
//! [`Work`]. None of its methods blocks, because the threads look after other work too.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use peerlane_hal::Rank;

use super::list::List;
use crate::bootstrap::AbortRecord;
use crate::group::tracker::StartTracker;

/// Represents work of a group that is under way on this rank.
pub(in crate::group) trait Work: Send + Sync {
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
    fn drive(&self) -> Result<Driven, AbortRecord>;

    /// Returns the other ranks that the work waits for.
    fn waits(&self) -> Vec<Rank>;

    /// Returns whether a start is open whose copies complete only while all ranks take part.
    fn copies_with_others(&self) -> bool {
        false
    }

    /// Returns whether a thread waits for the work, and moves it on meanwhile.
    fn is_blocked(&self) -> bool {
        false
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
    fn judge(&self) -> Option<Overdue> {
        None
    }

    /// Returns the timeout of work on streams and in graphs, or `None` if there is none.
    fn stream_timeout(&self) -> Option<Duration>;

    /// Finds out what is complete on streams and in graphs, and what is overdue there.
    fn check_streams(&self) -> Option<Overdue>;

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

    /// Tells the caller of observed work that something has changed. No lock may be held.
    fn tell(&self) {}

    /// Returns what is known of the starts, if the work is an operation.
    fn tracker(&self) -> Option<&StartTracker> {
        None
    }

    fn is_channel(&self) -> bool {
        self.tracker().is_none()
    }
}

/// Work of any kind that borrows nothing, as lists hold it.
pub(in crate::group) type DynWork = dyn Work;

/// What a call of [`Work::drive`] has achieved.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::group) struct Driven {
    /// Whether something moved, or more can move at once.
    pub(in crate::group) has_progressed: bool,
    /// Whether something is left for a thread to move.
    pub(in crate::group) is_open: bool,
}

/// Why work ends its group.
pub(in crate::group) enum Overdue {
    /// Its engine has failed.
    Broken(AbortRecord),
    /// It waits for these ranks for longer than its timeout.
    Late { timeout: Duration, waits: Vec<Rank>, record: AbortRecord },
}

/// Counts the work of a driver that is open, so that a thread that waits for the only open start
/// does not go through the list.
#[derive(Debug, Default)]
pub(in crate::group) struct OpenCount(AtomicUsize);

impl OpenCount {
    pub(in crate::group) fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    pub(in crate::group) fn remove(&self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }

    pub(in crate::group) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// Returns the first value that `find` finds in what is known of the starts of an operation.
pub(super) fn find_start<R>(
    work: &List<DynWork>,
    find: impl Fn(&StartTracker) -> Option<R>,
) -> Option<R> {
    work.find(|work| work.tracker().and_then(&find))
}

/// Returns the greatest of the values that `value` returns for the operations.
///
/// An operation whose starts use several plans is tracked several times.
pub(super) fn greatest_of_starts<R: Ord>(
    work: &List<DynWork>,
    value: impl Fn(&StartTracker) -> Option<R>,
) -> Option<R> {
    let mut greatest = None;
    work.each(|work| greatest = greatest.take().max(work.tracker().and_then(&value)));
    greatest
}
