//! Looks after the starts of a group: ends the group when an operation is overdue, and releases waits after its end.
//!
//! The watchdog ends the group when a start is overdue. It keeps the deadlines of starts for which no caller waits, and wakes
//! callers that sleep. After an abort it releases the waits of starts on streams and of graphs, because no
//! other thread does. A look does not block, because the groups of a [family](super::family) share the thread.

use std::sync::{Arc, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use crate::error::Error;
use crate::group::channel::ChannelSide;
use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Close, Closed, Driven, Shared, State, TrackedOperation};
use crate::group::tracker::StartTracker;
use crate::run::executor::DRAIN_TIMEOUT;

const RELEASE_PAUSE: Duration = Duration::from_millis(1);
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// This interval bounds how late the watchdog may notice a missed deadline of an operation on a stream.
const STREAM_CHECK_MAX: Duration = Duration::from_millis(50);
const STREAMS_MIN: usize = 16;
const STREAM_CHECKS: u32 = 16;
/// Threads that wait are looked for this often, several times in the time after which a call counts
/// as long.
const WAITS_INTERVAL: Duration = Duration::from_millis(125);

struct Release {
    drain: Deadline,
    replay_at: Instant,
}

impl Release {
    fn new() -> Self {
        Self { drain: Deadline::after(DRAIN_TIMEOUT), replay_at: Instant::now() }
    }
}

/// What the watchdog has seen of a group.
pub(super) struct Watch {
    release: Option<Release>,
    checked_at: Instant,
    judged: bool,
    waits: Waits,
    // Looks allocate nothing, because starts run at the same time.
    streams: Vec<TrackedOperation>,
    channels: Vec<Arc<ChannelSide>>,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            release: None,
            checked_at: Instant::now(),
            judged: false,
            waits: Waits::default(),
            streams: Vec::with_capacity(STREAMS_MIN),
            channels: Vec::with_capacity(STREAMS_MIN),
        }
    }

    fn collect(&mut self, state: MutexGuard<'_, State>) {
        on_streams(&state, &mut self.streams);
        channels_on_streams(&state, &mut self.channels);
    }

    fn clear(&mut self) {
        self.streams.clear();
        self.channels.clear();
    }
}

impl Shared {
    /// Ends the group if a start is overdue, or releases waits if the group has ended, and returns the time until the next
    /// call.
    ///
    /// If no start is open, that is the group's timeout, because no start that is made meanwhile can be overdue before. The first
    /// start on a stream wakes the watchdog earlier.
    pub(super) fn look(&self) -> Duration {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let watch = &mut *watch;
        loop {
            let state = self.state();
            if state.closed.is_some() {
                return self.timeout;
            }
            let until_tick = state.control.until_tick(Instant::now());
            if until_tick.is_some_and(|pause| pause.is_zero()) {
                drop(state);
                self.tick();
                continue;
            }
            if state.control.record().is_some() {
                if let Some(pause) = until_tick {
                    return pause;
                }
                watch.collect(state);
                let release = watch.release.get_or_insert_with(Release::new);
                let pause = self.release_streams(&watch.streams, &watch.channels, release);
                watch.clear();
                return pause;
            }
            let overdue = if watch.judged { Vec::new() } else { overdue(&state) };
            // What was judged and is still overdue only waits for its caller to look.
            watch.judged = !overdue.is_empty();
            if watch.judged {
                drop(state);
                self.judge(&overdue);
                continue;
            }
            drop(state);
            let until_order = self.look_at_exchange();
            let state = self.state();
            // Before the look: a start that is opened, or a wait that begins, after the look wakes
            // the watchdog.
            self.watchdog_sleeps.make();
            let until_check = check_interval(&state, self.timeout)
                .map(|interval| interval.saturating_sub(watch.checked_at.elapsed()));
            let until_waits = watch.waits.look(&state);
            if until_check.is_some() || until_waits.is_some() {
                self.watchdog_sleeps.withdraw();
            }
            if until_check.is_some_and(|pause| pause.is_zero()) {
                watch.collect(state);
                self.check_streams(&watch.streams);
                self.check_channels(&watch.channels);
                watch.clear();
                watch.checked_at = Instant::now();
                continue;
            }
            let until_due = next_due(&state).unwrap_or(self.timeout);
            let others = [until_check, until_tick, until_order, until_waits];
            return others.into_iter().flatten().fold(until_due, Duration::min);
        }
    }

    fn judge(&self, overdue: &[TrackedOperation]) {
        for tracked in overdue {
            let tracker = &tracked.tracker;
            let mut looked = false;
            if let Some(mut executor) = tracked.free_executor()
                && (tracker.is_on_stream() || !executor.is_polled())
            {
                let driven = executor.drive().and_then(|_| self.close_done(tracker, &executor));
                if let Err(error) = driven {
                    drop(executor);
                    return self.begin_raise(self.broken(tracker, &error));
                }
                looked = tracker.is_on_stream();
            }
            if !tracker.is_overdue() {
                continue;
            }
            // With every flag there, a start of the host waits for its caller; nobody looks at one
            // on a stream but this thread.
            if looked || tracker.missing().is_some() {
                return self.begin_late(tracker, tracker.timeout());
            }
            tracked.wakers.iter().for_each(Waker::wake_by_ref);
            tracker.tell();
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
                self.close_done(tracker, &executor)?;
                if tracker.is_captured() { executor.replay_wait() } else { Ok(None) }
            });
            drop(executor);
            match waited {
                Err(error) => return self.raise(self.broken(tracker, &error)),
                Ok(waited) => {
                    tracker.set_replay_waits(waited.is_some());
                    if waited.is_some_and(|waited| waited >= tracker.timeout()) {
                        return self.begin_late(tracker, tracker.timeout());
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
                return self.begin_overdue(waits, record);
            }
        }
    }

    /// Releases the waits of starts on streams when the group is closed.
    pub(super) fn end(&self) {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state();
        let Some(Closed { how, .. }) = state.closed else { return };
        watch.collect(state);
        let Watch { streams, channels, .. } = &mut *watch;
        let (streams, channels) = (std::mem::take(streams), std::mem::take(channels));
        drop(watch);
        let blocked: Vec<TrackedOperation> = streams
            .iter()
            .filter(|tracked| how != Close::Together || tracked.tracker.due().is_some())
            .cloned()
            .collect();
        if blocked.is_empty() && channels.is_empty() {
            return;
        }
        if how != Close::Together {
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
        while !release(&blocked, &channels) && !deadline.has_passed() {
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

/// When the watchdog looks for threads that have waited for long.
#[derive(Debug, Default)]
struct Waits {
    next: Option<Instant>,
}

impl Waits {
    /// Wakes threads that have waited for the same start since the last look, and returns the time
    /// until the next look if threads wait.
    ///
    /// Such a thread then finds out whether it is time to tell its call to other ranks. It parks
    /// without a timer of its own, because a timer makes each sleep longer by about a microsecond.
    fn look(&mut self, state: &State) -> Option<Duration> {
        let now = Instant::now();
        if let Some(next) = self.next.filter(|next| *next > now) {
            return Some(next - now);
        }

        let mut is_any = false;
        for tracked in state.tracked.iter().filter(|tracked| tracked.tracker.is_blocked()) {
            is_any = true;
            if tracked.tracker.has_waited_for_long() {
                tracked.wakers.iter().for_each(Waker::wake_by_ref);
            }
        }
        self.next = is_any.then_some(now + WAITS_INTERVAL);
        is_any.then_some(WAITS_INTERVAL)
    }
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
    pub(crate) fn drive_by_thread(&self, tracker: &StartTracker) -> Result<(), Error> {
        tracker.mark_driven_by_thread();
        self.family.start_progress()
    }

    /// Adds the open starts that the progress thread drives, or all.
    pub(super) fn pick_driven(&self, all: bool, driven: &mut Vec<Driven>) {
        let state = self.state();
        // After an abort nothing is driven any more; it is released.
        if state.control.record().is_none() && state.closed.is_none() {
            let is_wanted = |tracker: &StartTracker| {
                tracker.is_driven_by_thread() || all && tracker.due().is_some()
            };
            let wanted = state.tracked.iter().filter(|tracked| is_wanted(&tracked.tracker));
            driven.extend(wanted.map(TrackedOperation::driven));
        }
    }

    pub(super) fn drive_picked(&self, driven: &[Driven]) -> bool {
        let mut moved = false;
        for (tracker, executor) in driven {
            // Who holds it drives it.
            let Ok(mut executor) = executor.try_lock() else { continue };
            let driven = executor.drive().and_then(|further| {
                self.close_done(tracker, &executor)?;
                Ok(further)
            });
            match driven {
                Ok(further) => {
                    moved |= further;
                    drop(executor);
                    tracker.tell_complete();
                }
                Err(error) => {
                    drop(executor);
                    self.begin_raise(self.broken(tracker, &error));
                }
            }
        }
        moved
    }
}
