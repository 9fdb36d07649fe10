//! Runs the watchdog thread, which ends the group when an operation is overdue, and the progress thread, which polls
//! engines.
//!
//! The watchdog ends the group when a start is overdue. It keeps the deadlines of starts for which no caller waits, and wakes
//! callers that sleep without a timer. After an abort it releases the waits of starts on streams and of graphs, because no
//! other thread does.
//!
//! The progress thread drives lanes of starts on streams whose engines need polling. A rank has at most one, started when a
//! start on a stream needs it; a start that its caller waits for is driven by the caller. It sleeps while no start is open.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use peerlane_hal::{Deadline, ErrorKind};

use crate::error::Error;
use crate::group::channel::ChannelSide;
use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Closed, Shared, State, TrackedOperation};
use crate::group::tracker::StartTracker;
use crate::run::backoff::Backoff;
use crate::run::executor::{DRAIN_TIMEOUT, Executor};

const RELEASE_PAUSE: Duration = Duration::from_millis(1);
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// This interval bounds how late the watchdog may notice a missed deadline of an operation on a stream.
const STREAM_CHECK_MAX: Duration = Duration::from_millis(50);
const STREAMS_MIN: usize = 16;
const STREAM_CHECKS: u32 = 16;

/// A replayed graph should not wait long for its network transfers, so the progress thread sleeps at most this long.
const NAP_MAX: Duration = Duration::from_millis(1);

type Driven = (Arc<StartTracker>, Arc<Mutex<Executor>>);

struct Release {
    drain: Deadline,
    replay_at: Instant,
}

impl Release {
    fn new() -> Self {
        Self { drain: Deadline::after(DRAIN_TIMEOUT), replay_at: Instant::now() }
    }
}

impl Shared {
    /// If no start is open, the watchdog wakes after the group's timeout, before any new start can be overdue. The
    /// first start on a stream after that wakes it.
    pub(super) fn run_watchdog(&self) {
        let mut release = None;
        let mut checked_at = Instant::now();
        let mut judged = false;
        // Checks allocate nothing, because starts run at the same time.
        let mut streams = Vec::with_capacity(STREAMS_MIN);
        let mut channels = Vec::with_capacity(STREAMS_MIN);
        let mut state = self.state();
        let how = loop {
            if let Some(how) = state.closed {
                break how;
            }
            let pause;
            if state.control.record().is_some() {
                on_streams(&state, &mut streams);
                channels_on_streams(&state, &mut channels);
                drop(state);
                let release = release.get_or_insert_with(Release::new);
                pause = self.release_streams(&streams, &channels, release);
                streams.clear();
                channels.clear();
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
                // Before the look: a start that is opened after the look wakes the watchdog.
                self.watchdog_sleeps.store(true, Ordering::SeqCst);
                let until_check = check_interval(&state, self.timeout)
                    .map(|interval| interval.saturating_sub(checked_at.elapsed()));
                self.watchdog_sleeps.store(until_check.is_none(), Ordering::SeqCst);
                if until_check.is_some_and(|pause| pause.is_zero()) {
                    on_streams(&state, &mut streams);
                    channels_on_streams(&state, &mut channels);
                    drop(state);
                    self.check_streams(&streams);
                    self.check_channels(&channels);
                    streams.clear();
                    channels.clear();
                    checked_at = Instant::now();
                    state = self.state();
                    continue;
                }
                // From this look until it sleeps, the watchdog holds the lock.
                let until_due = next_due(&state).unwrap_or(self.timeout);
                pause = until_check.map_or(until_due, |until_check| until_due.min(until_check));
            }
            state = self.sleep(state, pause);
        };
        on_streams(&state, &mut streams);
        channels_on_streams(&state, &mut channels);
        drop(state);
        self.end(&streams, &channels, how);
    }

    fn judge(&self, overdue: &[TrackedOperation]) {
        for tracked in overdue {
            let tracker = &tracked.tracker;
            let mut looked = false;
            if let Some(mut executor) = tracked.free_executor()
                && (tracker.is_on_stream() || !executor.is_polled())
            {
                if let Err(error) = executor.drive() {
                    drop(executor);
                    return self.raise(tracker.broken(&error));
                }
                self.close_done(tracker, &executor);
                looked = tracker.is_on_stream();
            }
            if !tracker.is_overdue() {
                continue;
            }
            // With every flag there, a start of the host waits for its caller; nobody looks at one
            // on a stream but this thread.
            if looked || tracker.missing().is_some() {
                return self.raise_late(tracker, tracker.timeout());
            }
            tracked.wakers.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// The deadline of a start on a stream begins when the start before it is complete, so complete starts must be
    /// found.
    fn check_streams(&self, streams: &[TrackedOperation]) {
        for tracked in streams {
            let tracker = &tracked.tracker;
            let Some(mut executor) = tracked.free_executor() else { continue };
            let driven = match tracker.due() {
                Some(_) if tracker.is_on_stream() => executor.drive().map(drop),
                _ => Ok(()),
            };
            let waited = driven.and_then(|()| {
                self.close_done(tracker, &executor);
                if tracker.is_captured() { executor.replay_wait() } else { Ok(None) }
            });
            drop(executor);
            match waited {
                Err(error) => return self.raise(tracker.broken(&error)),
                Ok(waited) => {
                    tracker.set_replay_waits(waited.is_some());
                    if waited.is_some_and(|waited| waited >= tracker.timeout()) {
                        return self.raise_late(tracker, tracker.timeout());
                    }
                }
            }
        }
    }

    /// A signal of a peer that arrives late can overwrite a released flag on engines whose signals write the whole
    /// word, so releases are repeated. A replay that has just ended may be followed by another, so the pause grows with
    /// the time since the last one.
    fn release_streams(
        &self,
        streams: &[TrackedOperation],
        channels: &[Arc<ChannelSide>],
        state: &mut Release,
    ) -> Duration {
        if streams.is_empty() && channels.is_empty() {
            return self.timeout;
        }
        self.wait_acknowledged();
        let drained = release(streams, channels);
        if replay_waits(streams) {
            state.replay_at = Instant::now();
        }
        let replayed =
            streams.iter().any(|tracked| tracked.tracker.is_captured()) || !channels.is_empty();
        match (drained, replayed) {
            (_, true) => (state.replay_at.elapsed() / 4).clamp(RELEASE_PAUSE, RELEASE_PAUSE_MAX),
            (true, false) => self.timeout,
            (false, false) if state.drain.has_passed() => RELEASE_PAUSE_MAX,
            (false, false) => RELEASE_PAUSE,
        }
    }

    fn check_channels(&self, channels: &[Arc<ChannelSide>]) {
        for channel in channels {
            if let Some(record) = channel.overdue(self.timeout) {
                self.set_timeout(self.timeout);
                let waits = channel.waits().into_iter().map(|peer| peer.0).collect();
                return self.raise_overdue(waits, record);
            }
        }
    }

    fn end(&self, streams: &[TrackedOperation], channels: &[Arc<ChannelSide>], how: Closed) {
        let blocked: Vec<TrackedOperation> = streams
            .iter()
            .filter(|tracked| how == Closed::Alone || tracked.tracker.due().is_some())
            .cloned()
            .collect();
        if blocked.is_empty() && channels.is_empty() {
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
        while !release(&blocked, channels) && !deadline.has_passed() {
            std::thread::sleep(RELEASE_PAUSE);
        }
    }
}

fn on_streams(state: &MutexGuard<'_, State>, streams: &mut Vec<TrackedOperation>) {
    let on_stream = |tracked: &&TrackedOperation| {
        let tracker = &tracked.tracker;
        tracker.is_on_stream() || tracker.is_captured()
    };
    streams.extend(state.tracked.iter().filter(on_stream).cloned());
}

fn overdue(state: &MutexGuard<'_, State>) -> Vec<TrackedOperation> {
    state.tracked.iter().filter(|tracked| tracked.tracker.is_overdue()).cloned().collect()
}

fn next_due(state: &MutexGuard<'_, State>) -> Option<Duration> {
    let now = Instant::now();
    let dues = state.tracked.iter().filter_map(|tracked| tracked.tracker.due());
    dues.filter(|due| *due > now).min().map(|due| due - now)
}

fn channels_on_streams(state: &MutexGuard<'_, State>, channels: &mut Vec<Arc<ChannelSide>>) {
    let live = state.channels.iter().filter_map(Weak::upgrade);
    channels.extend(live.filter(|channel| channel.is_watched()));
}

fn check_interval(state: &MutexGuard<'_, State>, timeout: Duration) -> Option<Duration> {
    let checked = |tracker: &StartTracker| {
        tracker.is_captured() || tracker.is_on_stream() && tracker.due().is_some()
    };
    let watches = state.tracked.iter().map(|tracked| &tracked.tracker);
    let timeouts = watches.filter(|tracker| checked(tracker)).map(|tracker| tracker.timeout());
    let mut channels = state.channels.iter().filter_map(Weak::upgrade);
    let channels = channels.any(|channel| channel.is_watched()).then_some(timeout);
    let timeouts = timeouts.chain(channels);
    timeouts.min().map(|timeout| (timeout / STREAM_CHECKS).min(STREAM_CHECK_MAX))
}

fn replay_waits(streams: &[TrackedOperation]) -> bool {
    let waits = |tracked: &TrackedOperation| {
        let executor = tracked.free_executor();
        executor.is_some_and(|mut executor| matches!(executor.replay_wait(), Ok(Some(_))))
    };
    streams.iter().any(waits)
}

fn release(executors: &[TrackedOperation], channels: &[Arc<ChannelSide>]) -> bool {
    let mut drained = true;
    for channel in channels {
        drained &= channel.release();
    }
    for tracked in executors {
        drained &= tracked.free_executor().is_some_and(|mut executor| executor.release_once());
    }
    drained
}

impl Shared {
    pub(crate) fn drive_by_thread(self: &Arc<Self>, tracker: &StartTracker) -> Result<(), Error> {
        tracker.mark_driven_by_thread();
        let mut progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        if progress.is_none() {
            let shared = Arc::clone(self);
            let thread = std::thread::Builder::new().name("peerlane-progress".to_owned());
            *progress = Some(thread.spawn(move || shared.make_progress()).map_err(|error| {
                let text = format!("cannot start the progress thread: {error}");
                Error::new(ErrorKind::Other, text).with_source(error)
            })?);
        }
        Ok(())
    }

    pub(crate) fn wake_progress(&self) {
        if self.progress_sleeps.load(Ordering::SeqCst) {
            // The thread holds the lock from its look until it sleeps.
            drop(self.state());
            self.progress_wanted.notify_all();
        }
    }

    /// The thread must be joined after the group is closed.
    pub(crate) fn take_progress(&self) -> Option<JoinHandle<()>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn make_progress(&self) {
        let mut driven: Vec<Driven> = Vec::new();
        let mut backoff = Backoff::new(NAP_MAX);
        while self.pick(&mut driven) {
            let polled_at = Instant::now();
            let progressed = self.drive_picked(&driven);
            // What is dropped meanwhile ends here, and not with the next start.
            driven.clear();
            if progressed {
                backoff.reset();
            } else if let Some(nap) = backoff.nap(polled_at) {
                std::thread::sleep(nap);
            } else {
                std::thread::yield_now();
            }
        }
    }

    fn pick(&self, driven: &mut Vec<Driven>) -> bool {
        let mut state = self.state();
        loop {
            // Before the look: a start that is opened behind the look finds it, and wakes the thread.
            self.progress_sleeps.store(true, Ordering::SeqCst);
            // After an abort nothing is driven any more; it is released.
            if state.control.record().is_none() {
                let wanted =
                    state.tracked.iter().filter(|tracked| tracked.tracker.is_driven_by_thread());
                driven.extend(wanted.map(TrackedOperation::driven));
            }
            if state.closed.is_some() || !driven.is_empty() {
                self.progress_sleeps.store(false, Ordering::SeqCst);
                return state.closed.is_none();
            }
            let (slept, _) = self
                .progress_wanted
                .wait_timeout(state, self.timeout)
                .unwrap_or_else(PoisonError::into_inner);
            state = slept;
        }
    }

    fn drive_picked(&self, driven: &[Driven]) -> bool {
        let mut moved = false;
        for (tracker, executor) in driven {
            // Who holds it drives it.
            let Ok(mut executor) = executor.try_lock() else { continue };
            match executor.drive() {
                Ok(further) => {
                    moved |= further;
                    self.close_done(tracker, &executor);
                }
                Err(error) => {
                    drop(executor);
                    self.raise(tracker.broken(&error));
                }
            }
        }
        moved
    }
}
