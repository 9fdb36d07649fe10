//! Looks after the starts of a group: ends the group when an operation is overdue, and releases
//! waits after its end.
//!
//! The watchdog ends the group when a start is overdue. It keeps the deadlines of starts that no
//! caller waits for, and wakes callers that sleep. One thread looks after all groups of a driver,
//! so a look must not take long. The release of waits on streams and in graphs can, because a
//! vendor may open a context for it, so it has a thread of its own, which lives only from the end
//! of the group to its drop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use peerlane_hal::Deadline;
use peerlane_toolkit::limits;

use super::group::GroupWork;
use super::work::{DynWork, Overdue};
use crate::group::control::ACKNOWLEDGE_TIMEOUT;
use crate::group::life::{Close, LifeCycle};
use crate::run::executor::DRAIN_TIMEOUT;
use crate::sleeper::Sleeper;

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

/// A group that the watchdog looks after.
pub(in crate::group) struct Watch {
    pub(super) work: Arc<GroupWork>,
    /// Locked by the watchdog alone.
    looks: Mutex<Looks>,
    releaser: Mutex<Option<JoinHandle<()>>>,
    releaser_sleeps: Sleeper,
}

/// What the watchdog has seen of a group.
struct Looks {
    checked_at: Instant,
    judged: bool,
    waits: Waits,
    /// The work of one look. A look allocates nothing, because starts run at the same time.
    picked: Vec<Arc<DynWork>>,
}

impl Watch {
    pub(in crate::group) fn new(work: Arc<GroupWork>) -> Arc<Self> {
        let looks = Looks {
            checked_at: Instant::now(),
            judged: false,
            waits: Waits::default(),
            picked: Vec::with_capacity(PICKED_MIN),
        };
        Arc::new(Self {
            work,
            looks: Mutex::new(looks),
            releaser: Mutex::default(),
            releaser_sleeps: Sleeper::default(),
        })
    }

    /// Ends the group if a start is overdue, or has waits released if the group has ended, and
    /// returns the time until the next call.
    ///
    /// If no start is open, that is the group's timeout, because no start that is made meanwhile
    /// can be overdue before. The first start on a stream wakes the watchdog earlier.
    pub(super) fn look(self: &Arc<Self>) -> Duration {
        let (work, life) = (&*self.work, &*self.work.life);
        let mut looks = self.looks();
        loop {
            if life.closed().is_some() {
                return life.timeout;
            }

            let until_tick = life.until_tick();
            if until_tick.is_some_and(|pause| pause.is_zero()) {
                life.tick();
                continue;
            }
            if life.has_record() {
                if until_tick.is_none() {
                    self.begin_release();
                }
                return until_tick.unwrap_or(life.timeout);
            }

            // What was judged and is still overdue only waits for its caller to look.
            if !looks.judged {
                let now = Instant::now();
                let is_overdue = |work: &DynWork| work.due().is_some_and(|due| due <= now);
                work.list.pick(&mut looks.picked, is_overdue);
            }
            looks.judged = !looks.picked.is_empty();
            if looks.judged {
                let overdue = looks.picked.drain(..).find_map(|work| work.judge());
                overdue.into_iter().for_each(|overdue| begin_end(life, overdue));
                continue;
            }

            let until_order = work.look_at_exchange();
            // Before the look: a start that is opened, or a wait that begins, after the look wakes
            // the watchdog.
            work.watchdog_sleeps.make();
            let until_check = check_interval(work)
                .map(|interval| interval.saturating_sub(looks.checked_at.elapsed()));
            let until_waits = looks.waits.look(work);
            if until_check.is_some() || until_waits.is_some() {
                work.watchdog_sleeps.withdraw();
            }

            if until_check.is_some_and(|pause| pause.is_zero()) {
                pick_streams(work, &mut looks.picked);
                let overdue = looks.picked.drain(..).find_map(|work| work.check_streams());
                overdue.into_iter().for_each(|overdue| begin_end(life, overdue));
                looks.checked_at = Instant::now();
                continue;
            }

            let until_due = next_due(work).unwrap_or(life.timeout);
            let others = [until_check, until_tick, until_order, until_waits];
            return others.into_iter().flatten().fold(until_due, Duration::min);
        }
    }

    fn looks(&self) -> MutexGuard<'_, Looks> {
        self.looks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has the waits on streams and in graphs released, again and again until the group is dropped.
    fn begin_release(self: &Arc<Self>) {
        let mut releaser = self.releaser.lock().unwrap_or_else(PoisonError::into_inner);
        if releaser.is_some() {
            return self.releaser_sleeps.wake();
        }
        if !self.work.list.any(|work| work.stream_timeout().is_some()) {
            return;
        }

        let watch = Arc::clone(self);
        match limits::spawn("peerlane-release".to_owned(), move || watch.release()) {
            Ok(thread) => *releaser = Some(thread),
            // Without a thread of its own, the release holds up the other groups of the driver.
            Err(_) => {
                let mut picked = Vec::new();
                pick_streams(&self.work, &mut picked);
                release_all(&picked);
            }
        }
    }

    /// Releases waits on streams and in graphs until the group is dropped.
    ///
    /// A signal of a peer that arrives late can overwrite a released flag on engines whose signals
    /// write the whole word, so releases are repeated. A replay that has just ended may be followed
    /// by another, so the pause grows with the time since the last one.
    fn release(&self) {
        let drain = Deadline::after(DRAIN_TIMEOUT);
        let mut replay_at = Instant::now();
        let mut streams = Vec::new();
        while self.work.life.closed().is_none() {
            pick_streams(&self.work, &mut streams);
            let is_drained = release_all(&streams);
            if streams.iter().any(|work| work.replay_waits()) {
                replay_at = Instant::now();
            }

            let is_captured = streams.iter().any(|work| work.is_captured());
            // What is dropped meanwhile ends here, and not after the pause.
            streams.clear();
            self.releaser_sleeps.sleep(match (is_drained, is_captured) {
                (_, true) => (replay_at.elapsed() / 4).clamp(RELEASE_PAUSE, RELEASE_PAUSE_MAX),
                (true, false) => self.work.life.timeout,
                (false, false) if drain.has_passed() => RELEASE_PAUSE_MAX,
                (false, false) => RELEASE_PAUSE,
            });
        }
    }

    /// Releases the waits of starts on streams after the group was closed.
    ///
    /// It can run on the watchdog's thread in the middle of a look, if a waker of the caller drops
    /// the group there.
    pub(in crate::group) fn release_closed(&self) {
        let (work, life) = (&*self.work, &*self.work.life);
        let Some(how) = life.closed() else { return };

        let releaser = self.releaser.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.releaser_sleeps.wake();
        if let Some(releaser) = releaser {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = releaser.join();
        }

        // All ranks have waited for their starts; what is left are starts on streams that nobody
        // has waited for, and channels.
        let may_block = |work: &DynWork| {
            let is_quiet = how == Close::Together && !work.is_open() && !work.is_channel();
            work.stream_timeout().is_some() && !is_quiet
        };
        let mut blocked = Vec::new();
        work.list.pick(&mut blocked, may_block);
        if blocked.is_empty() {
            return;
        }

        if how != Close::Together {
            // The record that the drop of the group sent comes back.
            life.wait_record(Deadline::after(ACKNOWLEDGE_TIMEOUT));
            life.wait_acknowledged();
        }

        let deadline = Deadline::after(DRAIN_TIMEOUT);
        while !release_all(&blocked) && !deadline.has_passed() {
            thread::sleep(RELEASE_PAUSE);
        }
    }
}

/// Picks the work on streams and in graphs.
fn pick_streams(work: &GroupWork, picked: &mut Vec<Arc<DynWork>>) {
    work.list.pick(picked, |work| work.stream_timeout().is_some());
}

/// Ends the group because of its work. It does not wait until all ranks know of the end.
fn begin_end(life: &LifeCycle, overdue: Overdue) {
    match overdue {
        Overdue::Broken(record) => life.begin_raise(record),
        Overdue::Late { timeout, waits, record } => {
            life.set_timeout(timeout);
            life.begin_overdue(waits.into_iter().map(|rank| rank.0).collect(), record);
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
    fn look(&mut self, work: &GroupWork) -> Option<Duration> {
        let now = Instant::now();
        if let Some(next) = self.next.filter(|next| *next > now) {
            return Some(next - now);
        }

        let mut is_any = false;
        work.list.each(|work| {
            let Some(is_long) = work.has_waited_for_long() else { return };
            is_any = true;
            if is_long {
                work.wake();
            }
        });
        self.next = is_any.then_some(now + WAITS_INTERVAL);
        is_any.then_some(WAITS_INTERVAL)
    }
}

fn next_due(work: &GroupWork) -> Option<Duration> {
    let now = Instant::now();
    let mut next: Option<Instant> = None;
    work.list.each(|work| {
        let due = work.due().filter(|due| *due > now);
        next = next.into_iter().chain(due).min();
    });
    next.map(|due| due - now)
}

/// Returns how often work on streams and in graphs is checked, if there is some.
fn check_interval(work: &GroupWork) -> Option<Duration> {
    let mut shortest: Option<Duration> = None;
    work.list.each(|work| {
        shortest = shortest.into_iter().chain(work.stream_timeout()).min();
    });
    shortest.map(|timeout| (timeout / STREAM_CHECKS).min(STREAM_CHECK_MAX))
}

/// Lets the waits of work pass, and returns whether its engines are drained.
fn release_all(streams: &[Arc<DynWork>]) -> bool {
    // All of it is released.
    streams.iter().filter(|work| !work.release()).count() == 0
}
