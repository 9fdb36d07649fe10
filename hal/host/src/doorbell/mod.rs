//! Parks a rank until one of its flags may have changed, and wakes parked ranks.
//!
//! A doorbell is a word in a small shared region of the parked rank: a count of wake-ups, and a low bit that
//! announces that the rank is about to sleep. The rank sets the bit, checks its flags once more, and sleeps
//! on the word. A writer stores its flags; if the bit is set, it clears the bit, increments the count and
//! wakes the rank. Fences on both sides exclude that the writer misses the bit while the rank misses the
//! flag. A signal costs a system call only if the rank really sleeps, and only the first of several signals
//! does.
//!
//! The region also holds the core on which the rank ran last. Waking a rank of the same core is cheap, so
//! such ranks are woken first; those on other cores are then left to the ranks that run there. A rank that
//! spins on a core keeps another runnable rank of that core from running.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_toolkit::{ParkStep, Parker, Unpark};
use rustix::thread::futex;

use crate::registration::Registration;

mod word;

/// A rank with a core of its own spins for this time before it sleeps, which is a few times the wake-up time
/// of an idle core.
const SPIN: Duration = Duration::from_micros(100);
/// A rank spins for this time if the other ranks of its core sleep, which is not longer than the wake-up
/// time of an idle core, since a runnable rank may wait for this core.
const SPIN_SHARED: Duration = Duration::from_micros(20);

/// A futex word in shared memory that wakes a parked rank.
#[derive(Debug)]
pub(crate) struct Doorbell(Arc<Registration>);

#[repr(C)]
struct DoorbellWords {
    wakes: AtomicU32,
    /// The core on which the rank ran last, which is only a hint for the order of wake-ups.
    core: AtomicU32,
}

impl Doorbell {
    pub(crate) const BYTES: u64 = size_of::<DoorbellWords>() as u64;

    /// Creates a doorbell in a zeroed region of at least [`BYTES`](Self::BYTES) bytes.
    pub(crate) fn of(region: Arc<Registration>) -> Arc<Self> {
        Arc::new(Self(region))
    }

    fn words(&self) -> &DoorbellWords {
        // SAFETY: the region is a page-aligned mapping of at least `BYTES` (`Fabric::open_with` allocates it,
        // `memory::open` checks what a peer hands over). It lives as long as `self`, and is accessed as these
        // atomics only.
        unsafe { self.0.base().cast().as_ref() }
    }

    fn word(&self) -> &AtomicU32 {
        &self.words().wakes
    }

    fn core(&self) -> u32 {
        self.words().core.load(Ordering::Relaxed)
    }

    fn publish_core(&self) {
        let core = this_core();
        // A store would take the cache line from the peers that read it.
        if self.core() != core {
            self.words().core.store(core, Ordering::Relaxed);
        }
    }

    fn is_announced(&self) -> bool {
        word::is_announced(self.word())
    }

    fn announce(&self) -> u32 {
        self.publish_core();
        word::announce(self.word())
    }

    /// Wakes a rank that announced its sleep; must be called after its flag was stored, behind a fence.
    fn wake_if_parked(&self) {
        let word = self.word();
        if word::take_announcement(word) {
            // An error means that no thread sleeps there any more.
            let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
        }
    }

    fn sleep(&self, announced: u32, limit: Duration) {
        let limit = (limit < Duration::MAX).then(|| rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        // After every result (woken, woken before, interrupted, timed out) the caller checks its flags.
        let _ = futex::wait(self.word(), futex::Flags::empty(), announced, limit.as_ref());
    }
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

/// Parks the thread that drives one engine by spinning first and sleeping later.
///
/// Spinning is right while no other rank is runnable on this core: it costs no other rank anything, and an
/// idle core takes long to wake. Otherwise a rank without work yields its core at once. The doorbells show
/// which ranks are awake and on which core.
#[derive(Debug)]
pub(crate) struct DoorbellParker {
    parker: Parker<Arc<Doorbell>>,
    /// The time to spin before a park sleeps; `None` chooses it by the state of the ranks on this core.
    spin: Option<Duration>,
    neighbours: CoreNeighbours,
    announced: u32,
}

impl DoorbellParker {
    pub(crate) fn new(
        doorbell: Arc<Doorbell>,
        spin: Option<Duration>,
        neighbours: CoreNeighbours,
    ) -> Self {
        // This also runs the first query of the core here, which costs a system call once.
        doorbell.publish_core();
        Self { parker: Parker::new(doorbell), spin, neighbours, announced: 0 }
    }

    pub(crate) fn waker(&self) -> Waker {
        self.parker.waker()
    }

    /// Executes one step of a park, which is to spin, to announce the sleep, or to sleep. The caller must check
    /// its flags between two calls, so that no change is missed.
    pub(crate) fn park(&mut self, limit: Duration) {
        let spin = match self.neighbours.state() {
            Neighbours::Awake => Duration::ZERO,
            Neighbours::None => self.spin.unwrap_or(SPIN),
            Neighbours::Asleep => self.spin.unwrap_or(SPIN_SHARED),
        };
        if !self.parker.is_idle() {
            self.parker.unpark().publish_core();
        }
        match self.parker.step(spin, limit) {
            ParkStep::Woken => {}
            ParkStep::Poll => std::hint::spin_loop(),
            ParkStep::Announce => self.announced = self.parker.unpark().announce(),
            // A wake-up before the last check was seen there; a later one changes the word.
            ParkStep::Sleep => self.parker.unpark().sleep(self.announced, limit),
        }
    }

    /// An announced sleep stays in the doorbell, because another engine of this rank may have made it too;
    /// a needless wake-up is harmless.
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

#[derive(Debug)]
pub(crate) struct CoreNeighbours(Box<[Arc<Doorbell>]>);

impl CoreNeighbours {
    pub(crate) fn new(ranks: impl Iterator<Item = Arc<Doorbell>>, me: &Doorbell) -> Self {
        Self(ranks.filter(|doorbell| !std::ptr::eq(doorbell.words(), me.words())).collect())
    }

    fn state(&self) -> Neighbours {
        let core = this_core();
        let mut state = Neighbours::None;
        for doorbell in self.0.iter().filter(|doorbell| doorbell.core() == core) {
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
