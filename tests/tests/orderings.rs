//! Tests the orders of memory accesses with which threads sleep and are woken, in all executions that the memory model permits,
//! also those of processors with weaker orders than x86.
//!
//! The modules under test are compiled here with the primitives of loom. A thread that nobody wakes is a deadlock, which loom reports.

use std::mem::ManuallyDrop;
use std::time::Duration;

use loom::sync::Arc;
use loom::thread;

use sync::{AtomicBool, AtomicU32, Condvar, Mutex, Ordering, fence};

mod sync {
    pub(crate) use std::sync::PoisonError;

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering, fence};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
}

mod fused;
#[expect(dead_code, reason = "the models use a part of the list")]
#[path = "../../collectives/src/group/driver/list.rs"]
mod list;
#[path = "../../bootstrap/src/monitor.rs"]
mod monitor;
#[path = "../../collectives/src/sleeper.rs"]
mod sleeper;
#[path = "../../hal/host/src/doorbell/word.rs"]
mod word;

use list::{List, Rest};
use monitor::Monitor;
use sleeper::{Announcement, Sleeper};

const LIMIT: Duration = Duration::from_secs(60);

/// The word of a doorbell with a lock in place of the kernel's futex.
struct Doorbell {
    word: AtomicU32,
    futex: Mutex<()>,
    changed: Condvar,
}

impl Doorbell {
    fn new() -> Self {
        Self { word: AtomicU32::new(0), futex: Mutex::new(()), changed: Condvar::new() }
    }

    fn sleep(&self, announced: u32) {
        let futex = self.futex.lock().unwrap();
        if self.word.load(Ordering::SeqCst) == announced {
            drop(self.changed.wait(futex).unwrap());
        }
    }

    fn wake(&self) {
        if word::take_announcement(&self.word) {
            let _futex = self.futex.lock().unwrap();
            self.changed.notify_all();
        }
    }
}

/// Sleeps until both flags are set.
fn wait_for_flags(doorbell: &Doorbell, flags: &[AtomicU32; 2], announce: fn(&AtomicU32) -> u32) {
    let are_set = || flags.iter().all(|flag| flag.load(Ordering::Acquire) == 1);
    while !are_set() {
        let announced = announce(&doorbell.word);
        if are_set() {
            break;
        }
        doorbell.sleep(announced);
    }
}

/// Tries all executions with at most three preemptions; those of two writers without a limit take minutes.
fn model(body: impl Fn() + Send + Sync + 'static) {
    model_with(3, body);
}

/// Tries all executions with so many preemptions or fewer.
fn model_with(preemptions: usize, body: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

fn signal_both(announce: fn(&AtomicU32) -> u32) {
    model(move || {
        let shared = Arc::new((Doorbell::new(), [AtomicU32::new(0), AtomicU32::new(0)]));
        let writers = [0, 1].map(|index| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (doorbell, flags) = &*shared;
                flags[index].store(1, Ordering::Release);
                word::after_signals();
                doorbell.wake();
            })
        });
        let (doorbell, flags) = &*shared;
        wait_for_flags(doorbell, flags, announce);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        // What is left announced only costs a needless wake-up.
        assert!(doorbell.word.load(Ordering::Relaxed) < 8);
        let _ = word::is_announced(&doorbell.word);
    });
}

#[test]
fn a_signal_is_seen_or_wakes_the_rank() {
    signal_both(word::announce);
}

/// Without the fence, a rank can miss the flag while the writer misses the announcement.
#[test]
#[should_panic(expected = "deadlock")]
fn an_announcement_without_a_fence_is_found() {
    signal_both(|word| word.fetch_or(1, Ordering::AcqRel) | 1);
}

/// How a thread announces that it may sleep, and how another one looks for it.
trait Announces: Default + Send + Sync + 'static {
    fn make(&self);
    fn is_made(&self) -> bool;
}

impl Announces for Announcement {
    fn make(&self) {
        self.make();
    }

    fn is_made(&self) -> bool {
        self.is_made()
    }
}

/// Announces as the progress thread once did: only the accesses to the announcement were sequentially consistent.
#[derive(Default)]
struct Unfenced(AtomicBool);

impl Announces for Unfenced {
    fn make(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn is_made(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Two callers open messages, which a thread handles that sleeps while there are none.
fn messages<A: Announces>() {
    model(|| {
        let shared = Arc::new((A::default(), Sleeper::default(), AtomicBool::new(false)));
        let callers = [0, 1].map(|_| {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (announcement, sleeper, has_messages) = &*shared;
                has_messages.store(true, Ordering::Release);
                if announcement.is_made() {
                    sleeper.wake();
                }
            })
        });
        let (announcement, sleeper, has_messages) = &*shared;
        loop {
            announcement.make();
            if has_messages.load(Ordering::Relaxed) && has_messages.swap(false, Ordering::AcqRel) {
                break;
            }
            sleeper.sleep(LIMIT);
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
    });
}

#[test]
fn a_message_is_seen_or_wakes_the_progress_thread() {
    messages::<Announcement>();
}

#[test]
#[should_panic(expected = "deadlock")]
fn announcements_without_fences_are_found() {
    messages::<Unfenced>();
}

/// A thread that withdraws its announcement looks again before it sleeps.
#[test]
fn a_withdrawn_announcement_loses_nothing() {
    model(|| {
        let shared = Arc::new((Announcement::default(), Sleeper::default(), AtomicU32::new(0)));
        let caller = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (announcement, sleeper, work) = &*shared;
                for _ in 0..2 {
                    work.fetch_add(1, Ordering::Relaxed);
                    if announcement.is_made() {
                        sleeper.wake();
                    }
                }
            })
        };
        let (announcement, sleeper, work) = &*shared;
        loop {
            announcement.make();
            match work.load(Ordering::Relaxed) {
                0 => sleeper.sleep(LIMIT),
                1 => {
                    announcement.withdraw();
                    thread::yield_now();
                }
                _ => break,
            }
        }
        caller.join().unwrap();
    });
}

/// Ranks change the state of a hub and wait for a part of it, as in an exchange.
#[test]
fn every_change_of_the_hub_is_seen_by_who_waits() {
    model(|| {
        let hub = Arc::new(Monitor::new((0, Vec::new())));
        let rank = |rank: u32| {
            let hub = Arc::clone(&hub);
            thread::spawn(move || {
                hub.change(|(count, blobs)| {
                    *count += 1;
                    blobs.push(rank);
                });
                let all = hub.wait(peerlane_hal::Deadline::after(LIMIT), |(count, blobs)| {
                    (*count == 2).then_some(blobs.len())
                });
                assert_eq!(all, Some(2));
            })
        };
        let ranks = [rank(0), rank(1)];
        ranks.into_iter().for_each(|rank| rank.join().unwrap());
        assert_eq!(hub.lock().0, 2);
    });
}

/// A fence belongs to the protocol of both sides.
#[test]
#[should_panic(expected = "deadlock")]
fn a_look_without_a_fence_is_found() {
    #[derive(Default)]
    struct OneSided(Announcement, AtomicBool);
    impl Announces for OneSided {
        fn make(&self) {
            self.1.store(true, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            self.0.make();
        }

        fn is_made(&self) -> bool {
            self.1.load(Ordering::Relaxed)
        }
    }
    messages::<OneSided>();
}

/// Work in a list, which looks into the list when it is dropped, as the drop of an operation may.
struct Work {
    is_open: AtomicBool,
    list: std::sync::Weak<List<Work>>,
}

impl Work {
    fn new(list: std::sync::Weak<List<Self>>) -> std::sync::Arc<Self> {
        std::sync::Arc::new(Self { is_open: AtomicBool::new(false), list })
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        let list = self.list.upgrade();
        assert!(list.is_none_or(|list| !list.any(|other| std::ptr::eq(other, self))));
    }
}

/// Two callers prepare an operation each and start it, which a thread moves on and drops.
fn starts(announces_first: bool) {
    model(move || {
        // Loom cannot drop it after a deadlock.
        let shared = Arc::new((std::sync::Arc::new(List::default()), Rest::default()));
        let shared = ManuallyDrop::new(shared);
        let callers = [0, 1].map(|_| {
            let shared = Arc::clone(&*shared);
            thread::spawn(move || {
                let (list, rest) = &*shared;
                // A drop after a deadlock could not look.
                let looks = announces_first.then(|| std::sync::Arc::downgrade(list));
                let work = Work::new(looks.unwrap_or_default());
                list.add(std::sync::Arc::clone(&work));
                work.is_open.store(true, Ordering::Relaxed);
                rest.wake_if_asleep();
            })
        });

        let (list, rest) = &**shared;
        let mut moved = 0;
        while moved < 2 {
            if announces_first {
                rest.announce();
            }
            let mut picked = Vec::new();
            list.pick(&mut picked, |work: &Work| work.is_open.load(Ordering::Relaxed));
            if !announces_first {
                rest.announce();
            }

            if picked.is_empty() {
                rest.sleep(LIMIT);
                continue;
            }
            rest.withdraw();
            moved += picked.len();
            picked.iter().for_each(|work: &std::sync::Arc<Work>| list.remove(work));
        }
        callers.into_iter().for_each(|caller| caller.join().unwrap());
        assert!(!list.any(|_| true));
        drop(ManuallyDrop::into_inner(shared));
    });
}

#[test]
fn a_start_is_found_in_the_list_or_wakes_the_progress_thread() {
    starts(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_look_into_the_list_before_the_announcement_is_found() {
    starts(false);
}

/// A thread goes through the list while two others remove what is before and behind its place.
#[test]
fn a_walk_meets_what_stays_in_the_list() {
    model(|| {
        let list = std::sync::Arc::new(List::default());
        let works = [0, 1, 2, 3].map(|_| Work::new(std::sync::Arc::downgrade(&list)));
        works.iter().for_each(|work| list.add(std::sync::Arc::clone(work)));
        let [first, second, third, fourth] = works;
        let removers = [first, third].map(|work| {
            let list = std::sync::Arc::clone(&list);
            thread::spawn(move || list.remove(&work))
        });

        let (mut last, mut met) = (None, Vec::new());
        while let Some((number, work)) = list.next(last, |_| true) {
            last = Some(number);
            met.push(work);
        }
        for stays in [&second, &fourth] {
            assert!(met.iter().any(|work| std::sync::Arc::ptr_eq(work, stays)));
        }
        removers.into_iter().for_each(|remover| remover.join().unwrap());
    });
}
