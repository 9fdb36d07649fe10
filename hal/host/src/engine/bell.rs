//! How a rank sleeps until a flag may have changed, and how others wake it.
//!
//! A bell is a word in a small shared region of the sleeping rank: an even count of rings, and an
//! odd bit that says that somebody is about to sleep. A sleeper sets the bit, looks at its flags
//! once more, and sleeps on the word; a writer stores its flags, and where it finds the bit set,
//! clears it, counts a ring and wakes. Fences on both sides make it impossible that the writer
//! misses the bit and the sleeper misses the flag. So a signal costs a system call only when
//! somebody really sleeps, and of several signals only the first.
//!
//! Beside the word stands the core on which the rank ran last. To wake a rank of one's own core is
//! cheap, and leaves those of other cores to the ranks that run there; and who spins on a core where
//! an awake rank stands in line keeps it from running.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
use std::task::{Wake, Waker};
use std::time::{Duration, Instant};

use rustix::thread::futex;

use crate::memory::Registration;

/// How long a rank with a core of its own spins: a few times what waking an idle core takes.
const SPIN: Duration = Duration::from_micros(100);
/// How long a rank spins that shares its core, while the others there seem to sleep: about what
/// waking an idle core takes. Not longer, since an awake rank may stand in line for this very core.
const SPIN_SHARED: Duration = Duration::from_micros(20);

/// The bit of the word that announces a sleeper.
const ANNOUNCED: u32 = 1;

/// A rank's bell, one's own or a peer's.
#[derive(Debug)]
pub(crate) struct Bell(Arc<Registration>);

/// What is shared of a bell.
#[repr(C)]
struct Words {
    rings: AtomicU32,
    /// Where the rank ran last; only a hint.
    core: AtomicU32,
}

impl Bell {
    pub(crate) const BYTES: u64 = size_of::<Words>() as u64;

    /// The bell in a region of [`BYTES`](Self::BYTES) that was zero when it was made.
    pub(crate) fn of(region: Arc<Registration>) -> Arc<Self> {
        Arc::new(Self(region))
    }

    fn words(&self) -> &Words {
        // SAFETY: the region is a page-aligned mapping of at least `BYTES` (`Fabric::open_with`
        // allocates it, `memory::open` checks what a peer hands over), it lives as long as `self`,
        // and everyone touches it as these atomics.
        unsafe { self.0.base().cast().as_ref() }
    }

    fn word(&self) -> &AtomicU32 {
        &self.words().rings
    }

    fn core(&self) -> u32 {
        self.words().core.load(Ordering::Relaxed)
    }

    /// Tells peers where this rank runs.
    fn publish_core(&self) {
        let core = this_core();
        // A store would take the line from the peers that read it.
        if self.core() != core {
            self.words().core.store(core, Ordering::Relaxed);
        }
    }

    fn is_announced(&self) -> bool {
        self.word().load(Ordering::Relaxed) & ANNOUNCED != 0
    }

    /// Announces a sleeper; the word as it stands then.
    fn announce(&self) -> u32 {
        self.publish_core();
        let word = self.word().fetch_or(ANNOUNCED, Ordering::SeqCst) | ANNOUNCED;
        // Orders the announcement before the next look at a flag.
        fence(Ordering::SeqCst);
        word
    }

    /// Wakes whoever is announced; called after the flag was stored, behind a fence.
    fn ring_if_awaited(&self) {
        let word = self.word();
        let seen = word.load(Ordering::Relaxed);
        if seen & ANNOUNCED == 0 {
            return;
        }
        // Adding to the odd word clears the bit and counts. Who loses this race need not wake.
        let rung = seen.wrapping_add(1);
        if word.compare_exchange(seen, rung, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
            // Nobody left to wake is no error.
            let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
        }
    }

    /// Sleeps while the word is `announced`.
    fn sleep(&self, announced: u32, limit: Duration) {
        let limit = (limit < Duration::MAX).then(|| rustix::time::Timespec {
            tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        // Woken, rung before, interrupted or out of time: the caller looks in any case.
        let _ = futex::wait(self.word(), futex::Flags::empty(), announced, limit.as_ref());
    }
}

fn this_core() -> u32 {
    // A core's number fits; if it did not, the hint would be worthless and nothing else.
    rustix::thread::sched_getcpu() as u32
}

/// The bells that are to be rung for the flags that an engine has stored.
#[derive(Debug)]
pub(super) struct Rings {
    bells: Vec<*const Bell>,
}

// SAFETY: the pointers name bells that the remote regions of a submitted op keep, as `Work` does.
unsafe impl Send for Rings {}

impl Rings {
    /// Allocates nothing while at most `signals` are pending.
    pub(super) fn with_capacity(signals: usize) -> Self {
        Self { bells: Vec::with_capacity(signals) }
    }

    /// A flag of this bell's rank has been stored. The bell must live until [`flush`](Self::flush).
    pub(super) fn push(&mut self, bell: *const Bell) {
        self.bells.push(bell);
    }

    /// Rings them all, those that sleep on this core first.
    pub(super) fn flush(&mut self) {
        if self.bells.is_empty() {
            return;
        }
        // Orders the stores of the flags before the looks for sleepers.
        fence(Ordering::SeqCst);
        // SAFETY: `push`'s contract, which `Engine::run` keeps.
        let bells = || self.bells.iter().map(|bell| unsafe { &**bell });
        let core = this_core();
        bells().filter(|bell| bell.core() == core).for_each(Bell::ring_if_awaited);
        bells().for_each(Bell::ring_if_awaited);
        self.bells.clear();
    }
}

/// Ends a park from another thread of this process.
struct Alarm {
    bell: Arc<Bell>,
    rung: AtomicBool,
}

impl Alarm {
    fn was_rung(&self) -> bool {
        // Mostly it was not, and a look is cheaper than a swap.
        self.rung.load(Ordering::SeqCst) && self.rung.swap(false, Ordering::SeqCst)
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.rung.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.bell.ring_if_awaited();
    }
}

/// The parking place of one engine: spin for a while, announce, look again, sleep.
///
/// Spinning is right while no other rank is awake on this core: it costs nobody anything, and a core
/// that falls idle takes long to wake. Otherwise a rank that has nothing to do gives its core away at
/// once. Who is awake and where, the bells tell.
pub(super) struct Parker {
    alarm: Arc<Alarm>,
    /// Where it is given; otherwise the crowd decides.
    spin: Option<Duration>,
    crowd: Crowd,
    /// Since when the engine has had nothing to do.
    idle_since: Option<Instant>,
    /// The bell's word at the announcement, while announced.
    announced: Option<u32>,
}

impl Parker {
    pub(super) fn new(bell: Arc<Bell>, spin: Option<Duration>, crowd: Crowd) -> Self {
        // Also makes the first look for the core here, which costs a system call once.
        bell.publish_core();
        let alarm = Arc::new(Alarm { bell, rung: AtomicBool::new(false) });
        Self { alarm, spin, crowd, idle_since: None, announced: None }
    }

    pub(super) fn waker(&self) -> Waker {
        Waker::from(Arc::clone(&self.alarm))
    }

    /// One step: the caller looks at its flags between two of them, which is what makes the
    /// announcement safe.
    pub(super) fn park(&mut self, limit: Duration) {
        if self.alarm.was_rung() {
            return self.busy();
        }
        if let Some(announced) = self.announced.take() {
            // An alarm before the look above was seen there, one after it moves the word.
            return self.alarm.bell.sleep(announced, limit);
        }
        if self.may_spin(limit) {
            std::hint::spin_loop();
        } else {
            self.announced = Some(self.alarm.bell.announce());
        }
    }

    fn may_spin(&mut self, limit: Duration) -> bool {
        let mates = self.crowd.mates();
        if mates == Mates::Awake {
            return false;
        }
        let default = if mates == Mates::None { SPIN } else { SPIN_SHARED };
        let now = Instant::now();
        let idle_since = *self.idle_since.get_or_insert_with(|| {
            self.alarm.bell.publish_core();
            now
        });
        now.duration_since(idle_since) < self.spin.unwrap_or(default).min(limit)
    }

    /// Something moved: the next park spins again. An announcement stays in the bell: another
    /// engine of this rank may have made it, too, and a ring for nobody is harmless.
    pub(super) fn busy(&mut self) {
        self.idle_since = None;
        self.announced = None;
    }
}

/// The other ranks of this machine, as far as they are connected.
#[derive(Debug)]
pub(crate) struct Crowd(Box<[Arc<Bell>]>);

impl Crowd {
    /// Of ranks with these bells, `me` perhaps among them.
    pub(crate) fn new(ranks: impl Iterator<Item = Arc<Bell>>, me: &Bell) -> Self {
        Self(ranks.filter(|bell| !std::ptr::eq(bell.words(), me.words())).collect())
    }

    fn mates(&self) -> Mates {
        let core = this_core();
        let mut mates = Mates::None;
        for bell in self.0.iter().filter(|bell| bell.core() == core) {
            if !bell.is_announced() {
                return Mates::Awake;
            }
            mates = Mates::Asleep;
        }
        mates
    }
}

/// The other ranks that ran on this core last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mates {
    None,
    Asleep,
    /// One at least.
    Awake,
}

impl std::fmt::Debug for Parker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let announced = self.announced.is_some();
        f.debug_struct("Parker").field("spin", &self.spin).field("announced", &announced).finish()
    }
}
