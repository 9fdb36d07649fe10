//! What a group's handles, its watchdog and its bootstrap share: the abort record and who left.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use crate::bootstrap::{Bootstrap, Listener, Notice};
use crate::error::Error;
use crate::group::abort::AbortRecord;
use crate::group::watch::Watch;
use crate::run::course::Course;

/// How long a rank waits for the others to be told of an abort before it releases its own waits.
const TELL_TIMEOUT: Duration = Duration::from_millis(1500);

/// The pause between two looks at starts that are driven while nobody waits for them.
const FINISH_PAUSE: Duration = Duration::from_micros(50);

pub(crate) struct Shared {
    pub(crate) bootstrap: Box<dyn Bootstrap>,
    pub(crate) timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
    /// Mirrors `state.record.is_some()`, for the hot path.
    aborted: AtomicBool,
    left: Vec<AtomicBool>,
    left_count: AtomicUsize,
    /// Operations with a start that is not complete.
    open: AtomicUsize,
}

#[derive(Default)]
struct State {
    record: Option<AbortRecord>,
    told: bool,
    closed: bool,
    watched: Vec<Watched>,
}

struct Watched {
    watch: Arc<Watch>,
    course: Arc<Mutex<Course>>,
    wakers: Vec<Waker>,
}

impl Shared {
    pub(crate) fn new(bootstrap: Box<dyn Bootstrap>, timeout: Duration) -> Arc<Self> {
        let left = (0..bootstrap.ranks()).map(|_| AtomicBool::new(false)).collect();
        let shared = Arc::new(Self {
            bootstrap,
            timeout,
            state: Mutex::default(),
            changed: Condvar::new(),
            aborted: AtomicBool::new(false),
            left,
            left_count: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
        });
        shared.bootstrap.listen(Self::listener(Arc::downgrade(&shared)));
        shared
    }

    fn listener(shared: Weak<Self>) -> Listener {
        Arc::new(move |notice| {
            if let Some(shared) = shared.upgrade() {
                shared.hear(notice);
            }
        })
    }

    fn hear(&self, notice: Notice) {
        match notice {
            Notice::Abort { from, record } => self.keep(AbortRecord::decode(&record, from)),
            Notice::Lost { rank, how } => self.keep(AbortRecord::lost(rank, &how)),
            Notice::Told => self.state().told = true,
            Notice::Left { rank } => {
                if let Some(left) = self.left.get(rank.index())
                    && !left.swap(true, Ordering::AcqRel)
                {
                    self.left_count.fetch_add(1, Ordering::Release);
                }
            }
        }
        self.wake();
    }

    fn keep(&self, record: AbortRecord) {
        self.state().record.get_or_insert(record);
        self.aborted.store(true, Ordering::Release);
    }

    fn wake(&self) {
        self.changed.notify_all();
        for watched in &self.state().watched {
            watched.wakers.iter().for_each(Waker::wake_by_ref);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every statement leaves the state whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// # Errors
    /// The abort record, or that the group is closed.
    pub(crate) fn check(&self) -> Result<(), Error> {
        if !self.aborted.load(Ordering::Acquire) {
            return Ok(());
        }
        let state = self.state();
        match &state.record {
            Some(record) => Err(record.to_error()),
            None => Err(Error::new(ErrorKind::Aborted, "the group has been closed")),
        }
    }

    /// The abort record, once there is one.
    pub(crate) fn record(&self) -> Option<AbortRecord> {
        self.state().record.clone()
    }

    pub(crate) fn somebody_left(&self) -> bool {
        self.left_count.load(Ordering::Acquire) > 0
    }

    pub(crate) fn has_left(&self, rank: Rank) -> bool {
        self.left.get(rank.index()).is_some_and(|left| left.load(Ordering::Acquire))
    }

    /// Ends the group with `record`, or with the one that another rank wrote first.
    pub(crate) fn raise(&self, record: AbortRecord) {
        if self.check().is_err() {
            return;
        }
        let told = self.bootstrap.abort(&record.encode()).is_ok();
        let deadline = Deadline::after(TELL_TIMEOUT);
        if !(told && self.wait_while(deadline, |state| state.record.is_none())) {
            // Nobody decides the race any more: the own view has to do.
            self.keep(record);
            self.state().told = true;
            self.wake();
        }
    }

    /// Why an exchange failed: the group's record where it is over, else `error` itself.
    pub(crate) fn cause(&self, error: Error) -> Error {
        let kinds = [ErrorKind::Timeout, ErrorKind::PeerLost, ErrorKind::Aborted];
        if !kinds.contains(&error.kind()) {
            return error;
        }
        // The bootstrap knows of the end a moment before its listener hears of it.
        self.wait_while(Deadline::after(TELL_TIMEOUT), |state| state.record.is_none());
        self.check().err().unwrap_or(error)
    }

    /// The abort record, after every live rank has it or can no longer be told.
    pub(crate) fn wait_until_told(&self) -> Error {
        let deadline = Deadline::after(TELL_TIMEOUT);
        if !self.wait_while(deadline, |state| state.record.is_some() && !state.told) {
            // Later calls need not wait for the same silent rank.
            self.state().told = true;
        }
        match self.check() {
            Err(error) => error,
            Ok(()) => Error::new(ErrorKind::Aborted, "the operation was aborted"),
        }
    }

    /// Whether `waiting` ended before the deadline.
    fn wait_while(&self, deadline: Deadline, waiting: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state();
        while waiting(&state) {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(state, left);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
        true
    }

    pub(crate) fn enter(
        &self,
        watch: &Arc<Watch>,
        course: &Arc<Mutex<Course>>,
        wakers: Vec<Waker>,
    ) {
        let (watch, course) = (Arc::clone(watch), Arc::clone(course));
        self.state().watched.push(Watched { watch, course, wakers });
    }

    pub(crate) fn remove(&self, watch: &Arc<Watch>) {
        if watch.due().is_some() {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
        self.state().watched.retain(|watched| !Arc::ptr_eq(&watched.watch, watch));
    }

    /// Ends the watchdog; what is prepared can start no more.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.aborted.store(true, Ordering::Release);
        self.wake();
    }

    /// Start `epoch` of an operation is under way.
    pub(crate) fn open(&self, watch: &Watch, epoch: u64, deadline: Deadline) {
        if watch.due().is_none() {
            self.open.fetch_add(1, Ordering::Relaxed);
        }
        watch.open(epoch, deadline);
        if deadline.timeout() < self.timeout {
            // The watchdog may sleep past it. It holds the lock from its look at the deadlines until it
            // sleeps, so behind the lock it is either asleep or still to look.
            drop(self.state());
            self.changed.notify_all();
        }
    }

    /// Start `epoch` of an operation is complete.
    pub(crate) fn close_start(&self, watch: &Watch, epoch: u64) {
        let was_open = watch.due().is_some();
        watch.close(epoch);
        if was_open && watch.due().is_none() {
            self.open.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Drives the open starts of all operations but `own`; whether some are not complete. Peers may
    /// wait for them in another order than this rank does.
    pub(crate) fn drive_others(&self, own: &Arc<Watch>) -> bool {
        self.open.load(Ordering::Relaxed) > 1 && self.drive_open(|watch| !Arc::ptr_eq(watch, own))
    }

    /// Drives all open starts until they are complete, before this rank blocks where it cannot.
    pub(crate) fn finish_open(&self, deadline: Deadline) {
        while self.open.load(Ordering::Relaxed) > 0
            && self.drive_open(|_| true)
            && self.check().is_ok()
            && !deadline.has_passed()
        {
            std::thread::sleep(FINISH_PAUSE);
        }
    }

    fn drive_open(&self, picked: impl Fn(&Arc<Watch>) -> bool) -> bool {
        let (mut unfinished, mut broken) = (false, None);
        for watched in &self.state().watched {
            if watched.watch.due().is_none() || !picked(&watched.watch) {
                continue;
            }
            // Somebody else drives a course that is locked.
            let Ok(mut course) = watched.course.try_lock() else { continue };
            match course.drive() {
                Ok(()) => unfinished |= course.done() < course.started(),
                Err(error) => broken = Some(watched.watch.broken(&error)),
            }
        }
        if let Some(record) = broken {
            self.raise(record);
        }
        unfinished
    }

    /// The watchdog's thread: sleeps until a start is overdue, and ends the group then.
    ///
    /// It covers the starts that nobody waits for, and wakes callers who sleep without a timer. With
    /// nothing open it looks again after the group's timeout, before anything that starts meanwhile
    /// can be overdue.
    pub(crate) fn guard(&self) {
        let mut state = self.state();
        while !state.closed {
            let now = std::time::Instant::now();
            let next = state.watched.iter().filter_map(|watched| watched.watch.due()).min();
            let overdue = state.watched.iter().map(|watched| &watched.watch).find(|watch| {
                watch.due().is_some_and(|due| due <= now) && watch.missing().is_some()
            });
            if let Some(watch) = overdue.cloned()
                && state.record.is_none()
            {
                drop(state);
                self.raise(watch.overdue(watch.timeout()));
                state = self.state();
                continue;
            }
            let sleep = next.map_or(self.timeout, |next| next.saturating_duration_since(now));
            // An overdue start that misses nothing only waits for its caller to look.
            let is_overdue = |watched: &&Watched| watched.watch.due().is_some_and(|due| due <= now);
            let wakers =
                state.watched.iter().filter(is_overdue).flat_map(|watched| &watched.wakers);
            wakers.for_each(Waker::wake_by_ref);
            let sleep = if sleep.is_zero() { self.timeout } else { sleep };
            let waited = self.changed.wait_timeout(state, sleep);
            (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}
