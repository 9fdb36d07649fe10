//! Parks a rank until one of its flags may have changed, and wakes parked ranks.
//!
//! A doorbell is a word in a small shared region of the parked rank: a count of wake-ups, and a low
//! bit that announces that the rank is about to sleep. The rank sets the bit, checks its flags once
//! more, and sleeps on the word. A writer stores its flags; if the bit is set, it clears the bit,
//! increments the count and wakes the rank. Fences on both sides exclude that the writer misses the
//! bit while the rank misses the flag. A signal costs a system call only if the rank really sleeps,
//! and only the first of several signals does.
//!
//! The region also holds the core on which the rank ran last. Waking a rank of the same core is
//! cheap, so such ranks are woken first; those on other cores are then left to the ranks that run
//! there. A rank that spins on a core keeps another runnable rank of that core from running, so it
//! yields the core between polls.
//!
//! A rank polls before it sleeps for as long as sleeping would cost, and yields only while yields
//! are quick. Both are learned from the last waits, so they follow the load of the machine.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::Rank;
use peerlane_toolkit::{ParkStep, Parker, Unpark};
use rustix::thread::futex;

use crate::registration::Registration;
pub(crate) use patience::Patience;

mod patience;
mod word;

/// A wake-up that seems to take longer was not measured: the clocks of time namespaces differ.
const WAKEUP_MAX: Duration = Duration::from_secs(1);

const SLOW_CORE_SHIFT: u32 = 48;
const SLOW_END_MASK: u64 = (1 << SLOW_CORE_SHIFT) - 1;

/// A futex word in shared memory that wakes a parked rank.
#[derive(Debug)]
pub(crate) struct Doorbell(Arc<Registration>);

#[repr(C)]
struct DoorbellWords {
    wakes: AtomicU32,
    /// The core on which the rank ran last. It is a hint, since the scheduler may have moved the
    /// rank.
    core: AtomicU32,
    /// Counts the begins and ends of long copies of the rank, so that it is odd during a copy.
    long_copies: AtomicU32,
    /// The core on which another process delayed the rank last (upper 16 bits), and the time at
    /// which ranks use this core as any other again (lower 48 bits, in milliseconds of the
    /// monotonic clock).
    slow_core: AtomicU64,
    /// The time of the last wake-up, in nanoseconds of the monotonic clock.
    woken_at_ns: AtomicU64,
}

impl Doorbell {
    pub(crate) const BYTES: u64 = size_of::<DoorbellWords>() as u64;

    /// Creates a doorbell in a zeroed region of at least [`BYTES`](Self::BYTES) bytes.
    pub(crate) fn of(region: Arc<Registration>) -> Arc<Self> {
        Arc::new(Self(region))
    }

    fn words(&self) -> &DoorbellWords {
        // SAFETY: the region is a page-aligned mapping of at least `BYTES` (`Fabric::open_with`
        // allocates it, `memory::open` checks what a peer hands over). It lives as long as `self`,
        // and is accessed as these atomics only.
        unsafe { self.0.base().cast().as_ref() }
    }

    fn word(&self) -> &AtomicU32 {
        &self.words().wakes
    }

    fn core(&self) -> u32 {
        self.words().core.load(Ordering::Relaxed)
    }

    fn publish_core(&self, core: u32) {
        // A store would take the cache line from the peers that read it.
        if self.core() != core {
            self.words().core.store(core, Ordering::Relaxed);
        }
    }

    /// Notes that the rank begins or ends a copy that may take as long as a time slice.
    pub(crate) fn note_long_copy(&self) {
        self.words().long_copies.fetch_add(1, Ordering::Relaxed);
    }

    fn publish_slow_core(&self, core: u32, end_ms: u64) {
        let word = (u64::from(core) << SLOW_CORE_SHIFT) | (end_ms & SLOW_END_MASK);
        self.words().slow_core.store(word, Ordering::Relaxed);
    }

    /// Returns the core on which another process has delayed the rank a short time ago.
    fn slow_core(&self) -> Option<u32> {
        let word = self.words().slow_core.load(Ordering::Relaxed);
        let is_recent = word != 0 && now_ms() < word & SLOW_END_MASK;
        is_recent.then_some((word >> SLOW_CORE_SHIFT) as u32)
    }

    fn is_announced(&self) -> bool {
        word::is_announced(self.word())
    }

    fn announce(&self) -> u32 {
        self.publish_core(this_core());
        word::announce(self.word())
    }

    /// Wakes a rank that announced its sleep; must be called after its flag was stored, behind a
    /// fence.
    fn wake_if_parked(&self) {
        let word = self.word();
        if word::take_announcement(word) {
            self.words().woken_at_ns.store(now_ns(), Ordering::Relaxed);
            // An error means that no thread sleeps there any more.
            let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
        }
    }

    /// Sleeps, and returns how long the wake-up took if a writer ended the sleep.
    fn sleep(&self, announced: u32, limit: Duration) -> Option<Duration> {
        let limit = (limit < Duration::MAX).then(|| rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        let woken_at_ns = || self.words().woken_at_ns.load(Ordering::Relaxed);
        let before = woken_at_ns();
        // After every result (woken, woken before, interrupted, timed out) the caller checks its
        // flags.
        let ended = futex::wait(self.word(), futex::Flags::empty(), announced, limit.as_ref());

        // The clocks of two processes differ if their time namespaces do.
        let woken_at = woken_at_ns();
        let took = now_ns().checked_sub(woken_at).map(Duration::from_nanos);
        took.filter(|took| ended.is_ok() && woken_at != before && *took < WAKEUP_MAX)
    }
}

fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // The clock counts from the start of the machine.
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64)
}

fn now_ms() -> u64 {
    now_ns() / 1_000_000
}

fn this_core() -> u32 {
    // The number of a core fits. If it did not, only the hint would be wrong.
    rustix::thread::sched_getcpu() as u32
}

#[derive(Debug)]
pub(crate) struct PendingWakes {
    doorbells: Vec<*const Doorbell>,
}

// SAFETY: the remote regions of a submitted op keep these doorbells alive, as for `QueuedOp`.
unsafe impl Send for PendingWakes {}

impl PendingWakes {
    pub(crate) fn with_capacity(signals: usize) -> Self {
        Self { doorbells: Vec::with_capacity(signals) }
    }

    /// Adds a doorbell, which must live until the next [`flush`](Self::flush).
    pub(crate) fn push(&mut self, doorbell: *const Doorbell) {
        self.doorbells.push(doorbell);
    }

    pub(crate) fn flush(&mut self) {
        if self.doorbells.is_empty() {
            return;
        }
        word::after_signals();
        // SAFETY: the doorbells are alive (the contract of `push`, which `Engine::run` keeps).
        let doorbells = || self.doorbells.iter().map(|doorbell| unsafe { &**doorbell });
        let core = this_core();
        doorbells().filter(|doorbell| doorbell.core() == core).for_each(Doorbell::wake_if_parked);
        doorbells().for_each(Doorbell::wake_if_parked);
        self.doorbells.clear();
    }
}

impl Unpark for Doorbell {
    fn unpark(&self) {
        self.wake_if_parked();
    }
}

/// Parks the thread that drives one engine by polling first and sleeping later.
///
/// The doorbells show which ranks are awake and on which core. Alone on a core, the rank spins.
/// Beside an awake rank it yields the core, which is cheaper for both than a sleep and a wake-up;
/// but another process of that core would get it for a whole time slice, so after a slow yield the
/// rank sleeps instead, for a while.
#[derive(Debug)]
pub(crate) struct DoorbellParker {
    parker: Parker<Arc<Doorbell>>,
    /// The time to poll before a park sleeps; `None` is what the rank has learned.
    spin: Option<Duration>,
    neighbours: CoreNeighbours,
    patience: Arc<Patience>,
    announced: u32,
}

impl DoorbellParker {
    pub(crate) fn new(
        doorbell: Arc<Doorbell>,
        spin: Option<Duration>,
        neighbours: CoreNeighbours,
        patience: Arc<Patience>,
    ) -> Self {
        // This also runs the first query of the core here, which costs a system call once.
        doorbell.publish_core(this_core());
        Self { parker: Parker::new(doorbell), spin, neighbours, patience, announced: 0 }
    }

    pub(crate) fn waker(&self) -> Waker {
        self.parker.waker()
    }

    pub(crate) fn doorbell(&self) -> &Doorbell {
        self.parker.unpark()
    }

    /// Executes one step of a park, which is to poll, to announce the sleep, or to sleep. The
    /// caller must check its flags between two calls, so that no change is missed.
    pub(crate) fn park(&mut self, limit: Duration) {
        let (core, state) = if self.parker.is_idle() { self.look() } else { self.begin() };
        let spin = match state {
            Neighbours::Awake if self.doorbell().slow_core() == Some(core) => Duration::ZERO,
            _ => self.spin.unwrap_or_else(|| self.patience.spin()),
        };

        match self.parker.step(spin, limit) {
            ParkStep::Woken => {}
            ParkStep::Poll if state == Neighbours::Awake => self.yield_core(core),
            ParkStep::Poll => std::hint::spin_loop(),
            ParkStep::Announce => self.announced = self.parker.unpark().announce(),
            // A wake-up before the last check was seen there; a later one changes the word.
            ParkStep::Sleep => {
                let took = self.parker.unpark().sleep(self.announced, limit);
                took.into_iter().for_each(|took| self.patience.learn_wakeup(took));
            }
        }
    }

    /// Returns the core of this thread, and what the other ranks of this core do.
    fn look(&self) -> (u32, Neighbours) {
        let core = this_core();
        (core, self.neighbours.state(core))
    }

    /// Begins a wait: publishes the core of this thread, or moves the thread to a better core.
    /// Returns what [`look`](Self::look) returns.
    fn begin(&self) -> (u32, Neighbours) {
        let (doorbell, looked) = (self.doorbell(), self.look());
        let (core, state) = looked;
        doorbell.publish_core(core);

        let is_slow = || self.neighbours.slow_cores(doorbell).any(|slow| slow == core);
        if state == Neighbours::None && !is_slow() {
            return looked;
        }

        // Another thread of this rank may be looking.
        let Ok(mut mover) = self.patience.mover.try_lock() else { return looked };
        if !mover.spread(core, self.neighbours.cores(), self.neighbours.slow_cores(doorbell)) {
            return looked;
        }
        let moved = self.look();
        doorbell.publish_core(moved.0);
        moved
    }

    /// Yields the core, and notes how long that took.
    fn yield_core(&self, core: u32) {
        let copies = self.neighbours.long_copies(core);
        let begin = Instant::now();
        std::thread::yield_now();
        let Some(end_ms) = self.patience.learn_yield(begin.elapsed(), now_ms()) else { return };

        // A rank that copied in the meantime is not another process, and yields too when it waits.
        let is_copying = copies % 2 == 1 || copies != self.neighbours.long_copies(core);
        if !is_copying {
            self.doorbell().publish_slow_core(core, end_ms);
        }
    }

    /// An announced sleep stays in the doorbell, because another engine of this rank may have made
    /// it too; a needless wake-up is harmless.
    pub(crate) fn busy(&mut self) {
        self.parker.busy();
    }
}

#[derive(Debug)]
pub(crate) struct Peers(pub(crate) Mutex<Vec<Option<Arc<Doorbell>>>>);

impl Peers {
    pub(crate) fn doorbell(&self, peer: Rank) -> Option<Arc<Doorbell>> {
        let doorbells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        doorbells.get(peer.index()).cloned().flatten()
    }

    pub(crate) fn doorbells(&self) -> Vec<Arc<Doorbell>> {
        let doorbells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        doorbells.iter().flatten().cloned().collect()
    }

    pub(crate) fn insert(&self, peer: Rank, doorbell: Arc<Doorbell>) {
        let mut doorbells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        doorbells[peer.index()] = Some(doorbell);
    }
}

/// The other ranks of this machine.
#[derive(Debug)]
pub(crate) struct CoreNeighbours {
    doorbells: Box<[Arc<Doorbell>]>,
    /// The number of them that come before this rank.
    position: usize,
}

impl CoreNeighbours {
    pub(crate) fn new(ranks: impl Iterator<Item = Arc<Doorbell>>, me: &Doorbell) -> Self {
        let is_me = |doorbell: &Arc<Doorbell>| std::ptr::eq(doorbell.words(), me.words());
        let mut doorbells: Vec<_> = ranks.collect();
        let position = doorbells.iter().position(is_me).unwrap_or(0);
        doorbells.retain(|doorbell| !is_me(doorbell));
        Self { doorbells: doorbells.into(), position }
    }

    /// Returns the position of this rank among those of the machine.
    pub(crate) fn position(&self) -> usize {
        self.position
    }

    /// Returns the cores on which the others ran last, and whether each comes before this rank.
    fn cores(&self) -> impl Iterator<Item = (u32, bool)> {
        let doorbells = self.doorbells.iter().enumerate();
        doorbells.map(|(index, doorbell)| (doorbell.core(), index < self.position))
    }

    /// Returns the cores on which other processes have delayed ranks a short time ago.
    fn slow_cores(&self, me: &Doorbell) -> impl Iterator<Item = u32> {
        let own = me.slow_core();
        self.doorbells.iter().filter_map(|doorbell| doorbell.slow_core()).chain(own)
    }

    /// Returns a number that changes when a rank of the core begins or ends a long copy, and is odd
    /// if one of them is at it.
    fn long_copies(&self, core: u32) -> u32 {
        let ranks = self.doorbells.iter().filter(|doorbell| doorbell.core() == core);
        let copies = ranks.map(|doorbell| doorbell.words().long_copies.load(Ordering::Relaxed));
        copies.fold(0, |all, one| (all & !1).wrapping_add(one & !1) | (all & 1) | (one & 1))
    }

    /// Returns what the other ranks of a core do.
    fn state(&self, core: u32) -> Neighbours {
        let mut state = Neighbours::None;
        for doorbell in self.doorbells.iter().filter(|doorbell| doorbell.core() == core) {
            if !doorbell.is_announced() {
                return Neighbours::Awake;
            }
            state = Neighbours::Asleep;
        }
        state
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbours {
    None,
    Asleep,
    Awake,
}
