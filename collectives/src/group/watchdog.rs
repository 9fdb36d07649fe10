//! Looks after the starts of a group: ends the group when an operation is overdue, and releases
//! waits after its end.
//!
//! The watchdog ends the group when a start is overdue. It keeps the deadlines of starts that no
//! caller waits for, and wakes callers that sleep. After an abort it releases the waits of starts
//! on streams and of graphs, because no other thread does. A look does not block, because the
//! groups of a [family](super::family) share the thread.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use super::work::{Overdue, Work};
use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Close, Closed, Shared, State};
use crate::run::executor::DRAIN_TIMEOUT;

const RELEASE_PAUSE: Duration = Duration::from_millis(1);
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// This interval bounds how late the watchdog may notice a missed deadline of an operation on a
/// stream.
const STREAM_CHECK_MAX: Duration = Duration::from_millis(50);
const PICKED_MIN: usize = 16;
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
    /// The work of one look. A look allocates nothing, because starts run at the same time.
    picked: Vec<Arc<dyn Work>>,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            release: None,
            checked_at: Instant::now(),
            judged: false,
            waits: Waits::default(),
            picked: Vec::with_capacity(PICKED_MIN),
        }
    }

    /// Picks the work on streams and in graphs.
    fn pick_streams(&mut self, state: MutexGuard<'_, State>, group: &Shared) {
        let on_streams = |work: &&Arc<dyn Work>| work.stream_timeout(group).is_some();
        self.picked.extend(state.work.iter().filter(on_streams).cloned());
    }

    /// Ends the group if a start is overdue, or releases waits if the group has ended, and returns
    /// the time until the next call.
    ///
    /// If no start is open, that is the group's timeout, because no start that is made meanwhile
    /// can be overdue before. The first start on a stream wakes the watchdog earlier.
    pub(super) fn look(&mut self, group: &Shared) -> Duration {
        loop {
            let state = group.state();
            if state.closed.is_some() {
                return group.timeout;
            }

            let until_tick = state.control.until_tick(Instant::now());
            if until_tick.is_some_and(|pause| pause.is_zero()) {
                drop(state);
                group.tick();
                continue;
            }
            if state.control.record().is_some() {
                return until_tick.unwrap_or_else(|| self.release_streams(state, group));
            }

            // What was judged and is still overdue only waits for its caller to look.
            if !self.judged {
                let now = Instant::now();
                let is_overdue = |work: &&Arc<dyn Work>| work.due().is_some_and(|due| due <= now);
                self.picked.extend(state.work.iter().filter(is_overdue).cloned());
            }
            self.judged = !self.picked.is_empty();
            drop(state);
            if self.judged {
                let overdue = self.picked.drain(..).find_map(|work| work.judge(group));
                overdue.into_iter().for_each(|overdue| begin_end(group, overdue));
                continue;
            }

            let until_order = group.look_at_exchange();
            let state = group.state();
            // Before the look: a start that is opened, or a wait that begins, after the look wakes
            // the watchdog.
            group.watchdog_sleeps.make();
            let until_check = check_interval(&state, group)
                .map(|interval| interval.saturating_sub(self.checked_at.elapsed()));
            let until_waits = self.waits.look(&state);
            if until_check.is_some() || until_waits.is_some() {
                group.watchdog_sleeps.withdraw();
            }

            if until_check.is_some_and(|pause| pause.is_zero()) {
                self.pick_streams(state, group);
                let overdue = self.picked.drain(..).find_map(|work| work.check_streams(group));
                overdue.into_iter().for_each(|overdue| begin_end(group, overdue));
                self.checked_at = Instant::now();
                continue;
            }

            let until_due = next_due(&state).unwrap_or(group.timeout);
            let others = [until_check, until_tick, until_order, until_waits];
            return others.into_iter().flatten().fold(until_due, Duration::min);
        }
    }

    /// Releases waits on streams and in graphs once, and returns the time until the next call.
    ///
    /// A signal of a peer that arrives late can overwrite a released flag on engines whose signals
    /// write the whole word, so releases are repeated. A replay that has just ended may be followed
    /// by another, so the pause grows with the time since the last one.
    fn release_streams(&mut self, state: MutexGuard<'_, State>, group: &Shared) -> Duration {
        self.pick_streams(state, group);
        let streams = &self.picked;
        let release = self.release.get_or_insert_with(Release::new);

        let is_drained = release_all(streams);
        if streams.iter().any(|work| work.replay_waits()) {
            release.replay_at = Instant::now();
        }

        let is_captured = streams.iter().any(|work| work.is_captured());
        let pause = match (is_drained, is_captured) {
            (_, true) => (release.replay_at.elapsed() / 4).clamp(RELEASE_PAUSE, RELEASE_PAUSE_MAX),
            (true, false) => group.timeout,
            (false, false) if release.drain.has_passed() => RELEASE_PAUSE_MAX,
            (false, false) => RELEASE_PAUSE,
        };
        self.picked.clear();
        pause
    }
}

/// Ends the group because of its work. It does not wait until all ranks know of the end.
fn begin_end(group: &Shared, overdue: Overdue) {
    match overdue {
        Overdue::Broken(record) => group.begin_raise(record),
        Overdue::Late { timeout, waits, record } => {
            group.set_timeout(timeout);
            group.begin_overdue(waits.into_iter().map(|rank| rank.0).collect(), record);
        }
    }
}

/// Releases the waits of starts on streams when the group is closed.
pub(super) fn release_closed(group: &Shared) {
    let mut watch = group.watch.lock().unwrap_or_else(PoisonError::into_inner);
    let state = group.state();
    let Some(Closed { how, .. }) = state.closed else { return };
    watch.pick_streams(state, group);
    let streams = std::mem::take(&mut watch.picked);
    drop(watch);

    // All ranks have waited for their starts; what is left are starts on streams that nobody has
    // waited for, and channels.
    let may_block =
        |work: &&Arc<dyn Work>| how != Close::Together || work.is_open() || work.is_channel();
    let blocked: Vec<_> = streams.iter().filter(may_block).cloned().collect();
    if blocked.is_empty() {
        return;
    }

    if how != Close::Together {
        // The record that the drop of the group sent comes back.
        let deadline = Deadline::after(ACKNOWLEDGE_TIMEOUT);
        let mut state = group.state();
        while state.control.record().is_none() && !deadline.has_passed() {
            state = group.sleep(state, deadline.remaining());
        }
        drop(state);
        group.wait_acknowledged();
    }

    let deadline = Deadline::after(DRAIN_TIMEOUT);
    while !release_all(&blocked) && !deadline.has_passed() {
        std::thread::sleep(RELEASE_PAUSE);
    }
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
        for work in &state.work {
            let Some(is_long) = work.has_waited_for_long() else { continue };
            is_any = true;
            if is_long {
                work.wake();
            }
        }
        self.next = is_any.then_some(now + WAITS_INTERVAL);
        is_any.then_some(WAITS_INTERVAL)
    }
}

fn next_due(state: &State) -> Option<Duration> {
    let now = Instant::now();
    let dues = state.work.iter().filter_map(|work| work.due());
    dues.filter(|due| *due > now).min().map(|due| due - now)
}

/// Returns how often work on streams and in graphs is checked, if there is some.
fn check_interval(state: &State, group: &Shared) -> Option<Duration> {
    let timeouts = state.work.iter().filter_map(|work| work.stream_timeout(group));
    timeouts.min().map(|timeout| (timeout / STREAM_CHECKS).min(STREAM_CHECK_MAX))
}

/// Lets the waits of work pass, and returns whether its engines are drained.
fn release_all(streams: &[Arc<dyn Work>]) -> bool {
    // All of it is released.
    streams.iter().filter(|work| !work.release()).count() == 0
}
