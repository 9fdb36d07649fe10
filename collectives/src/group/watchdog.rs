//! Looks after the starts of a group: ends the group when an operation is overdue, and releases waits after its end.
//!
//! The watchdog ends the group when a start is overdue. It keeps the deadlines of starts for which no caller waits, and wakes
//! callers that sleep. After an abort it releases the waits of starts on streams and of graphs, because no
//! other thread does. A look does not block, because the groups of a [family](super::family) share the thread.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;

use super::work::{Overdue, Work};
use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::shared::{Close, Closed, Shared, State};
use crate::run::executor::DRAIN_TIMEOUT;

const RELEASE_PAUSE: Duration = Duration::from_millis(1);
const RELEASE_PAUSE_MAX: Duration = Duration::from_millis(20);
/// This interval bounds how late the watchdog may notice a missed deadline of an operation on a stream.
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
                watch.pick_streams(state, self);
                let release = watch.release.get_or_insert_with(Release::new);
                let pause = self.release_streams(&watch.picked, release);
                watch.picked.clear();
                return pause;
            }

            // What was judged and is still overdue only waits for its caller to look.
            if !watch.judged {
                let now = Instant::now();
                let is_overdue = |work: &&Arc<dyn Work>| work.due().is_some_and(|due| due <= now);
                watch.picked.extend(state.work.iter().filter(is_overdue).cloned());
            }
            watch.judged = !watch.picked.is_empty();
            drop(state);
            if watch.judged {
                let overdue = watch.picked.drain(..).find_map(|work| work.judge(self));
                overdue.into_iter().for_each(|overdue| self.begin_end(overdue));
                continue;
            }

            let until_order = self.look_at_exchange();
            let state = self.state();
            // Before the look: a start that is opened, or a wait that begins, after the look wakes
            // the watchdog.
            self.watchdog_sleeps.make();
            let until_check = self
                .check_interval(&state)
                .map(|interval| interval.saturating_sub(watch.checked_at.elapsed()));
            let until_waits = watch.waits.look(&state);
            if until_check.is_some() || until_waits.is_some() {
                self.watchdog_sleeps.withdraw();
            }
            if until_check.is_some_and(|pause| pause.is_zero()) {
                watch.pick_streams(state, self);
                let overdue = watch.picked.drain(..).find_map(|work| work.check_streams(self));
                overdue.into_iter().for_each(|overdue| self.begin_end(overdue));
                watch.checked_at = Instant::now();
                continue;
            }

            let until_due = next_due(&state).unwrap_or(self.timeout);
            let others = [until_check, until_tick, until_order, until_waits];
            return others.into_iter().flatten().fold(until_due, Duration::min);
        }
    }

    /// Ends the group because of its work. It does not wait until all ranks know of the end.
    fn begin_end(&self, overdue: Overdue) {
        match overdue {
            Overdue::Broken(record) => self.begin_raise(record),
            Overdue::Late { timeout, waits, record } => {
                self.set_timeout(timeout);
                self.begin_overdue(waits.into_iter().map(|rank| rank.0).collect(), record);
            }
        }
    }

    /// Returns how often work on streams and in graphs is checked, if there is some.
    fn check_interval(&self, state: &State) -> Option<Duration> {
        let timeouts = state.work.iter().filter_map(|work| work.stream_timeout(self));
        timeouts.min().map(|timeout| (timeout / STREAM_CHECKS).min(STREAM_CHECK_MAX))
    }

    /// A signal of a peer that arrives late can overwrite a released flag on engines whose signals write the whole
    /// word, so releases are repeated. A replay that has just ended may be followed by another, so the pause grows with
    /// the time since the last one.
    fn release_streams(&self, streams: &[Arc<dyn Work>], state: &mut Release) -> Duration {
        if streams.is_empty() {
            return self.timeout;
        }

        let is_drained = release(streams);
        if streams.iter().any(|work| work.replay_waits()) {
            state.replay_at = Instant::now();
        }

        match (is_drained, streams.iter().any(|work| work.is_captured())) {
            (_, true) => (state.replay_at.elapsed() / 4).clamp(RELEASE_PAUSE, RELEASE_PAUSE_MAX),
            (true, false) => self.timeout,
            (false, false) if state.drain.has_passed() => RELEASE_PAUSE_MAX,
            (false, false) => RELEASE_PAUSE,
        }
    }

    /// Releases the waits of starts on streams when the group is closed.
    pub(super) fn end(&self) {
        let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self.state();
        let Some(Closed { how, .. }) = state.closed else { return };
        watch.pick_streams(state, self);
        let streams = std::mem::take(&mut watch.picked);
        drop(watch);

        // All ranks have waited for their starts; what is left are starts on streams that nobody
        // has waited for, and channels.
        let may_block =
            |work: &&Arc<dyn Work>| how != Close::Together || work.is_open() || work.is_channel();
        let blocked: Vec<_> = streams.iter().filter(may_block).cloned().collect();
        if blocked.is_empty() {
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
        while !release(&blocked) && !deadline.has_passed() {
            std::thread::sleep(RELEASE_PAUSE);
        }
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

/// Lets the waits of work pass, and returns whether its engines are drained.
fn release(streams: &[Arc<dyn Work>]) -> bool {
    // All of it is released.
    streams.iter().filter(|work| !work.release()).count() == 0
}
