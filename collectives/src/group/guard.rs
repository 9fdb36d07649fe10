//! Runs the watchdog thread, which ends the group when a start is overdue, and releases blocked engines after that.
//!
//! It keeps the deadlines of starts for which no caller waits, and wakes callers that sleep without a timer. After an abort it
//! releases the waits of starts on streams and of graphs, because no other thread does.

use std::sync::MutexGuard;
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Closed, Shared, State, Watched};
use crate::run::executor::DRAIN_TIMEOUT;

/// The pause between two releases of engines that are not drained.
const RELEASE_PAUSE: Duration = Duration::from_millis(1);
/// Pause between two releases while graphs may be replayed, or while an engine does not drain.
const REPLAY_PAUSE: Duration = Duration::from_millis(20);

impl Shared {
    /// Runs until the group is closed.
    ///
    /// If no start is open, it wakes after the group's timeout, before any new start can be overdue.
    pub(crate) fn guard(&self) {
        let mut drain = None;
        let mut judged = false;
        let mut state = self.state();
        let how = loop {
            if let Some(how) = state.closed {
                break how;
            }
            let pause;
            if state.control.record().is_some() {
                let streams = on_streams(&state);
                drop(state);
                let drain = *drain.get_or_insert_with(|| Deadline::after(DRAIN_TIMEOUT));
                pause = self.release_streams(&streams, drain);
                state = self.state();
                if state.closed.is_some() {
                    continue;
                }
            } else {
                let overdue = if judged { Vec::new() } else { overdue(&state) };
                // What was judged and is still overdue only waits for its caller to look.
                judged = !overdue.is_empty();
                if judged {
                    drop(state);
                    self.judge(&overdue);
                    state = self.state();
                    continue;
                }
                // From this look until it sleeps, the guard holds the lock.
                pause = next_due(&state).unwrap_or(self.timeout);
            }
            state = self.sleep(state, pause);
        };
        let streams = on_streams(&state);
        drop(state);
        self.end(&streams, how);
    }

    /// Polls overdue starts, and ends the group if one is not complete.
    fn judge(&self, overdue: &[Watched]) {
        for watched in overdue {
            let watch = &watched.watch;
            let mut looked = false;
            if let Some(mut executor) = watched.free_executor()
                && (watch.is_on_stream() || !executor.is_polled())
            {
                if let Err(error) = executor.drive() {
                    drop(executor);
                    return self.raise(watch.broken(&error));
                }
                self.close_done(watch, &executor);
                looked = watch.is_on_stream();
            }
            if !watch.is_overdue() {
                continue;
            }
            // With every flag there, a start of the host waits for its caller; nobody looks at one
            // on a stream but this thread.
            if looked || watch.missing().is_some() {
                return self.raise_late(watch, watch.timeout());
            }
            watched.wakers.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// Releases engines after an abort, and returns the pause before the next release.
    fn release_streams(&self, streams: &[Watched], drain: Deadline) -> Duration {
        if streams.is_empty() {
            return self.timeout;
        }
        self.wait_acknowledged();
        let drained = release(streams);
        let replayed = streams.iter().any(|watched| watched.watch.is_captured());
        match (drained, drain.has_passed()) {
            (true, _) if !replayed => self.timeout,
            (false, false) => RELEASE_PAUSE,
            _ => REPLAY_PAUSE,
        }
    }

    /// Releases everything that could stay blocked after the group has ended.
    fn end(&self, streams: &[Watched], how: Closed) {
        let blocked: Vec<Watched> = streams
            .iter()
            .filter(|watched| how == Closed::Alone || watched.watch.due().is_some())
            .cloned()
            .collect();
        if blocked.is_empty() {
            return;
        }
        if how == Closed::Alone {
            // The record that the drop of the group sent comes back.
            let deadline = Deadline::after(ACKNOWLEDGE_TIMEOUT);
            let mut state = self.state();
            while state.control.record().is_none() && !deadline.has_passed() {
                state = self.sleep(state, deadline.remaining());
            }
            drop(state);
            self.wait_acknowledged();
        }
        let deadline = Deadline::after(DRAIN_TIMEOUT);
        while !release(&blocked) && !deadline.has_passed() {
            std::thread::sleep(RELEASE_PAUSE);
        }
    }
}

/// Returns the operations with starts on streams.
fn on_streams(state: &MutexGuard<'_, State>) -> Vec<Watched> {
    let on_stream = |watched: &&Watched| {
        let watch = &watched.watch;
        watch.is_on_stream() || watch.is_captured()
    };
    state.watched.iter().filter(on_stream).cloned().collect()
}

fn overdue(state: &MutexGuard<'_, State>) -> Vec<Watched> {
    state.watched.iter().filter(|watched| watched.watch.is_overdue()).cloned().collect()
}

/// Returns the time until the next start is due.
fn next_due(state: &MutexGuard<'_, State>) -> Option<Duration> {
    let now = Instant::now();
    let dues = state.watched.iter().filter_map(|watched| watched.watch.due());
    dues.filter(|due| *due > now).min().map(|due| due - now)
}

/// Releases engines that no other thread drives, and returns whether all are drained.
fn release(executors: &[Watched]) -> bool {
    let mut drained = true;
    for watched in executors {
        drained &= watched.free_executor().is_some_and(|mut executor| executor.release_once());
    }
    drained
}
