//! Parks a rank until a flag may have changed, and wakes parked ranks.
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

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::memory::Registration;

/// Time to spin for a rank that does not share its core: a few times the time to wake an idle core.
const SPIN: Duration = Duration::from_micros(100);
/// Time to spin for a rank that shares its core with ranks that seem to sleep: about the time to wake an idle
/// core. Not longer, since a runnable rank may wait for this core.
const SPIN_SHARED: Duration = Duration::from_micros(20);

/// The bit of the word that announces a rank that is about to sleep.
const PARKING: u32 = 1;

/// The doorbell of this rank or of a peer.
#[derive(Debug)]
pub(crate) struct Doorbell(Arc<Registration>);

/// The shared memory of a doorbell.
#[repr(C)]
struct DoorbellWords {
    wakes: AtomicU32,
    /// The core on which the rank ran last; only a hint.
    core: AtomicU32,
}

impl Doorbell {
    pub(crate) const BYTES: u64 = size_of::<DoorbellWords>() as u64;

    /// Creates a doorbell in a region of [`BYTES`](Self::BYTES) that is zeroed when it is allocated.
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

    /// Publishes the core of this rank to its peers.
    fn publish_core(&self) {
        let core = this_core();
        // A store would take the cache line from the peers that read it.
        if self.core() != core {
            self.words().core.store(core, Ordering::Relaxed);
        }
    }

    fn is_announced(&self) -> bool {
        self.word().load(Ordering::Relaxed) & PARKING != 0
    }

    /// Announces that this rank is about to sleep. Returns the word after the announcement.
    fn announce(&self) -> u32 {
        self.publish_core();
        let word = self.word().fetch_or(PARKING, Ordering::SeqCst) | PARKING;
        // Orders the announcement before the next check of a flag.
        fence(Ordering::SeqCst);
        word
    }

    /// Wakes the rank if it announced that it sleeps. Called after the flag was stored, behind a fence.
    fn wake_if_parked(&self) {
        let word = self.word();
        let seen = word.load(Ordering::Relaxed);
        if seen & PARKING == 0 {
            return;
        }
        // Adding 1 to the odd word clears the bit and counts. A writer that loses this race need not wake.
        let next = seen.wrapping_add(1);
        if word.compare_exchange(seen, next, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            // An error means that no thread sleeps there any more.
            let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
        }
    }

    /// Sleeps while the word is `announced`.
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

/// The doorbells of the ranks whose flags an engine has stored.
#[derive(Debug)]
pub(crate) struct PendingWakes {
    doorbells: Vec<*const Doorbell>,
}

// SAFETY: the remote regions of a submitted op keep these doorbells alive, as for `QueuedOp`.
unsafe impl Send for PendingWakes {}

impl PendingWakes {
    /// Creates a list that does not allocate while at most `signals` are pending.
    pub(crate) fn with_capacity(signals: usize) -> Self {
        Self { doorbells: Vec::with_capacity(signals) }
    }

    /// Adds the doorbell of a rank whose flag has been stored. It must live until [`flush`](Self::flush).
    pub(crate) fn push(&mut self, doorbell: *const Doorbell) {
        self.doorbells.push(doorbell);
    }

    /// Wakes the parked ranks, those of this core first.
    pub(crate) fn flush(&mut self) {
        if self.doorbells.is_empty() {
            return;
        }
        // Orders the stores of the flags before the checks for parked ranks.
        fence(Ordering::SeqCst);
        // SAFETY: the doorbells are alive (the contract of `push`, which `Engine::run` keeps).
        let doorbells = || self.doorbells.iter().map(|doorbell| unsafe { &**doorbell });
        let core = this_core();
        doorbells().filter(|doorbell| doorbell.core() == core).for_each(Doorbell::wake_if_parked);
        doorbells().for_each(Doorbell::wake_if_parked);
        self.doorbells.clear();
    }
}

/// Ends a park from another thread of this process.
struct EngineWaker {
    doorbell: Arc<Doorbell>,
    woken: AtomicBool,
}

impl EngineWaker {
    fn was_woken(&self) -> bool {
        // Usually it was not, and a load is cheaper than a swap.
        self.woken.load(Ordering::SeqCst) && self.woken.swap(false, Ordering::SeqCst)
    }
}

impl Wake for EngineWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.doorbell.wake_if_parked();
    }
}

/// Parks the thread of one engine: spin for a while, announce, check again, sleep.
///
/// Spinning is right while no other rank is runnable on this core: it costs no other rank anything, and an
/// idle core takes long to wake. Otherwise a rank without work yields its core at once. The doorbells show
/// which ranks are awake and on which core.
pub(crate) struct Parker {
    waker: Arc<EngineWaker>,
    /// The option of the fabric; `None` lets the neighbours decide.
    spin: Option<Duration>,
    neighbours: CoreNeighbours,
    /// The time since which the engine has had no work.
    idle_since: Option<Instant>,
    /// The doorbell's word at the announcement, while announced.
    announced: Option<u32>,
}

impl Parker {
    pub(crate) fn new(
        doorbell: Arc<Doorbell>,
        spin: Option<Duration>,
        neighbours: CoreNeighbours,
    ) -> Self {
        // This also runs the first query of the core here, which costs a system call once.
        doorbell.publish_core();
        let waker = Arc::new(EngineWaker { doorbell, woken: AtomicBool::new(false) });
        Self { waker, spin, neighbours, idle_since: None, announced: None }
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.waker))
    }

    /// Takes one step towards sleep. The caller checks its flags between two steps, which makes the
    /// announcement safe.
    pub(crate) fn park(&mut self, limit: Duration) {
        if self.waker.was_woken() {
            return self.busy();
        }
        if let Some(announced) = self.announced.take() {
            // A wake-up before the check above was seen there; a later one changes the word.
            return self.waker.doorbell.sleep(announced, limit);
        }
        if self.may_spin(limit) {
            std::hint::spin_loop();
        } else {
            self.announced = Some(self.waker.doorbell.announce());
        }
    }

    fn may_spin(&mut self, limit: Duration) -> bool {
        let neighbours = self.neighbours.state();
        if neighbours == Neighbours::Awake {
            return false;
        }
        let default = if neighbours == Neighbours::None { SPIN } else { SPIN_SHARED };
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert_with(|| {
            self.waker.doorbell.publish_core();
            now
        });
        now.duration_since(idle_since) < self.spin.unwrap_or(default).min(limit)
    }

    /// Notes progress: the next park spins again. An announcement stays in the doorbell, since another engine
    /// of this rank may have made it too; a needless wake-up is harmless.
    pub(crate) fn busy(&mut self) {
        self.idle_since = None;
        self.announced = None;
    }
}

/// The other connected ranks of this machine.
#[derive(Debug)]
pub(crate) struct CoreNeighbours(Box<[Arc<Doorbell>]>);

impl CoreNeighbours {
    /// Creates the list from the doorbells of all ranks, possibly including `me`.
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

/// The state of the other ranks that ran on this core last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbours {
    None,
    Asleep,
    /// At least one is awake.
    Awake,
}

impl std::fmt::Debug for Parker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let announced = self.announced.is_some();
        f.debug_struct("Parker").field("spin", &self.spin).field("announced", &announced).finish()
    }
}
