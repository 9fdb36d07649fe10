//! Runs the watchdog thread, which ends the group when a start is overdue, and releases blocked engines after that.
//!
//! It keeps the deadlines of starts for which no caller waits, and wakes callers that sleep without a timer. After an abort it
//! releases the waits of starts on streams and of graphs, because no other thread does.

use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Closed, Shared, State, Watched};
use crate::group::watch::Watch;
use crate::run::executor::DRAIN_TIMEOUT;

/// The pause between two releases of engines that are not drained.
const RELEASE_PAUSE: Duration = Duration::from_millis(1);
/// Longest pause between two releases while graphs may be replayed, or while an engine does not drain.
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// Longest interval at which starts on streams and replays are checked, and thus how late a deadline may be noticed.
const STREAM_CHECK_MAX: Duration = Duration::from_millis(50);
/// Number of operations with starts on streams for which the first check allocates nothing.
const STREAMS_MIN: usize = 16;
/// Number of checks within the timeout of an operation, at least.
const STREAM_CHECKS: u32 = 16;

/// Tracks the release of engines after an abort.
struct Release {
    /// The time after which an engine that does not drain is released less often.
    drain: Deadline,
    /// The last time at which a replay waited.
    replay_at: Instant,
}

impl Release {
    fn new() -> Self {
        Self { drain: Deadline::after(DRAIN_TIMEOUT), replay_at: Instant::now() }
    }
}

impl Shared {
    /// Runs until the group is closed.
    ///
    /// If no start is open, it wakes after the group's timeout, before any new start can be overdue. The first start on a stream
    /// after that wakes it.
    pub(crate) fn guard(&self) {
        let mut release = None;
        let mut checked_at = Instant::now();
        let mut judged = false;
        // Checks allocate nothing, because starts run beside them.
        let mut streams = Vec::with_capacity(STREAMS_MIN);
        let mut state = self.state();
        let how = loop {
            if let Some(how) = state.closed {
                break how;
            }
            let pause;
            if state.control.record().is_some() {
                on_streams(&state, &mut streams);
                drop(state);
                pause = self.release_streams(&streams, release.get_or_insert_with(Release::new));
                streams.clear();
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
                // Before the look: a start that is opened after the look wakes the guard.
                self.guard_sleeps.store(true, Ordering::SeqCst);
                let until_check = check_interval(&state)
                    .map(|interval| interval.saturating_sub(checked_at.elapsed()));
                self.guard_sleeps.store(until_check.is_none(), Ordering::SeqCst);
                if until_check.is_some_and(|pause| pause.is_zero()) {
                    on_streams(&state, &mut streams);
                    drop(state);
                    self.check_streams(&streams);
                    streams.clear();
                    checked_at = Instant::now();
                    state = self.state();
                    continue;
                }
                // From this look until it sleeps, the guard holds the lock.
                let until_due = next_due(&state).unwrap_or(self.timeout);
                pause = until_check.map_or(until_due, |until_check| until_due.min(until_check));
            }
            state = self.sleep(state, pause);
        };
        on_streams(&state, &mut streams);
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

    /// Notes which starts on streams are complete, since the next one's deadline begins then. Ends the group if a replay has
    /// waited for longer than the timeout of its operation.
    fn check_streams(&self, streams: &[Watched]) {
        for watched in streams {
            let watch = &watched.watch;
            let Some(mut executor) = watched.free_executor() else { continue };
            let driven = match watch.due() {
                Some(_) if watch.is_on_stream() => executor.drive().map(drop),
                _ => Ok(()),
            };
            let waited = driven.and_then(|()| {
                self.close_done(watch, &executor);
                if watch.is_captured() { executor.replay_wait() } else { Ok(None) }
            });
            drop(executor);
            match waited {
                Err(error) => return self.raise(watch.broken(&error)),
                Ok(waited) => {
                    watch.set_replay_waits(waited.is_some());
                    if waited.is_some_and(|waited| waited >= watch.timeout()) {
                        return self.raise_late(watch, watch.timeout());
                    }
                }
            }
        }
    }

    /// Releases engines after an abort, and returns the pause before the next release.
    ///
    /// A signal of a peer that arrives late can overwrite a released flag on engines whose signals write the whole word, so releases
    /// are repeated. A replay that has just ended may be followed by another, so the pause grows with the time since the last one.
    fn release_streams(&self, streams: &[Watched], state: &mut Release) -> Duration {
        if streams.is_empty() {
            return self.timeout;
        }
        self.wait_acknowledged();
        let drained = release(streams);
        if replay_waits(streams) {
            state.replay_at = Instant::now();
        }
        let replayed = streams.iter().any(|watched| watched.watch.is_captured());
        match (drained, replayed) {
            (_, true) => (state.replay_at.elapsed() / 4).clamp(RELEASE_PAUSE, RELEASE_PAUSE_MAX),
            (true, false) => self.timeout,
            (false, false) if state.drain.has_passed() => RELEASE_PAUSE_MAX,
            (false, false) => RELEASE_PAUSE,
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

/// Adds the operations with starts on streams.
fn on_streams(state: &MutexGuard<'_, State>, streams: &mut Vec<Watched>) {
    let on_stream = |watched: &&Watched| {
        let watch = &watched.watch;
        watch.is_on_stream() || watch.is_captured()
    };
    streams.extend(state.watched.iter().filter(on_stream).cloned());
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

/// Returns the interval of checks; `None` if no start on a stream is open and no operation is captured.
fn check_interval(state: &MutexGuard<'_, State>) -> Option<Duration> {
    let checked =
        |watch: &Watch| watch.is_captured() || watch.is_on_stream() && watch.due().is_some();
    let watches = state.watched.iter().map(|watched| &watched.watch);
    let timeouts = watches.filter(|watch| checked(watch)).map(|watch| watch.timeout());
    timeouts.min().map(|timeout| (timeout / STREAM_CHECKS).min(STREAM_CHECK_MAX))
}

/// Returns whether a replay waits, as of the last release.
fn replay_waits(streams: &[Watched]) -> bool {
    let waits = |watched: &Watched| {
        let executor = watched.free_executor();
        executor.is_some_and(|mut executor| matches!(executor.replay_wait(), Ok(Some(_))))
    };
    streams.iter().any(waits)
}

/// Releases engines that no other thread drives, and returns whether all are drained.
fn release(executors: &[Watched]) -> bool {
    let mut drained = true;
    for watched in executors {
        drained &= watched.free_executor().is_some_and(|mut executor| executor.release_once());
    }
    drained
}
