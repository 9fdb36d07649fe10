//! Models the protocols of flags and tagged data that `backend-cuda/kernels/start.cu` uses between peers.
//!
//! A rank is a thread, which runs its starts one after the other, as the launches in a stream do. Ranks are so few, and data so
//! short, that each has one thread: the barriers of a block are left out, and so is what a stream orders between launches.
//! Accesses have the order that those of the kernel have. `ld.relaxed` and `st.relaxed` are relaxed, `ld.acquire` is an acquiring
//! load, and `fence.acq_rel` is the fence of that name.
//!
//! # Loads that see later stores
//! Loom runs the accesses of a thread in their order, so it never shows a load that is delayed behind a later store, which
//! processors may do. Tagged data does not depend on that. A rank goes on only when a poll has returned the tag of its start.
//! If a poll returned what a peer stores two starts later, then no later poll of the word could return the awaited tag, by
//! coherence, and the rank would never make the store without which the peer does not get there. So a delayed load is harmless
//! if stores wait for the result of the poll, as they do on every processor: the branch that ends the poll comes first.
//! [`Order::Ahead`] is what a processor without that rule would do.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering, fence};
use loom::thread;

use super::model_with;

/// Tries all executions with at most two preemptions. With three, all models had the same results, in up to 10 seconds each.
fn model(body: impl Fn() + Send + Sync + 'static) {
    model_with(2, body);
}

/// Returns the data of a start of a rank, which differs from that of all others in both halves.
fn data_of(rank: usize, start: u64) -> [u64; 2] {
    let number = 10 * (rank as u64 + 1) + start;
    [number, 100 + number]
}

/// Loads until `is_there`, and returns what it has then found.
fn poll<T>(load: impl Fn() -> T, is_there: impl Fn(&T) -> bool) -> T {
    loop {
        let found = load();
        if is_there(&found) {
            return found;
        }
        thread::yield_now();
    }
}

/// A word of a slot: two halves, each with data below the tag.
#[derive(Default)]
struct Word([AtomicU64; 2]);

/// Whose tags a reader looks at.
#[derive(Clone, Copy)]
enum Trust {
    Both,
    First,
}

impl Word {
    fn store(&self, start: u64, data: [u64; 2]) {
        for (half, data) in self.0.iter().zip(data) {
            half.store(start << 32 | data, Ordering::Relaxed);
        }
    }

    /// Polls until the data of a start is there.
    fn load(&self, start: u64, trust: Trust) -> [u64; 2] {
        let load = || self.0.each_ref().map(|half| half.load(Ordering::Relaxed));
        let has_tag = |half: &u64| {
            assert!(half >> 32 <= start, "a slot was overwritten before it was read");
            half >> 32 == start
        };
        let found = poll(load, |halves| match trust {
            Trust::Both => halves.iter().all(has_tag),
            Trust::First => has_tag(&halves[0]),
        });
        found.map(|half| half & u64::from(u32::MAX))
    }
}

/// When a rank sends its data.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// When it has taken the data of the start before.
    After,
    /// Before that.
    Ahead,
}

/// How ranks exchange tagged data.
#[derive(Clone, Copy)]
struct Exchange {
    /// The number of places that starts use by turns.
    places: u64,
    starts: u64,
    trust: Trust,
    order: Order,
}

const TAGGED: Exchange = Exchange { places: 2, starts: 3, trust: Trust::Both, order: Order::After };

/// Two ranks send words to each other, as in an all-gather or an all-reduce.
fn exchange(how: Exchange) {
    let Exchange { places, starts, trust, order } = how;
    model(move || {
        let slots: Arc<[[Word; 2]; 2]> = Arc::default();
        let run = move |slots: &[[Word; 2]; 2], rank: usize| {
            let peer = 1 - rank;
            let send = |start| {
                slots[peer][(start % places) as usize].store(start, data_of(rank, start));
            };
            if order == Order::Ahead {
                send(1);
            }
            for start in 1..=starts {
                match order {
                    Order::After => send(start),
                    Order::Ahead if start < starts => send(start + 1),
                    Order::Ahead => {}
                }
                let found = slots[rank][(start % places) as usize].load(start, trust);
                assert_eq!(found, data_of(peer, start), "a reader has data of another start");
            }
        };

        let other = {
            let slots = Arc::clone(&slots);
            thread::spawn(move || run(&slots, 1))
        };
        run(&slots, 0);
        other.join().unwrap();
    });
}

#[test]
fn tagged_data_is_that_of_the_start() {
    exchange(TAGGED);
}

#[test]
#[should_panic(expected = "a reader has data of another start")]
fn a_half_without_a_tag_is_found() {
    exchange(Exchange { trust: Trust::First, ..TAGGED });
}

#[test]
#[should_panic(expected = "a slot was overwritten before it was read")]
fn a_slot_that_is_used_again_in_the_next_start_is_found() {
    exchange(Exchange { places: 1, starts: 2, ..TAGGED });
}

#[test]
#[should_panic(expected = "a slot was overwritten before it was read")]
fn data_that_is_sent_ahead_of_the_polls_is_found() {
    exchange(Exchange { order: Order::Ahead, ..TAGGED });
}

/// A root sends tagged data to a rank of which it gets none, as in a broadcast. The rank says when it begins a start, by a
/// relaxed store without a fence.
///
/// The store is the first step of a start, because the threads that store are not those that read.
fn tagged_broadcast(awaits_last: bool) {
    model(move || {
        let shared: Arc<([Word; 2], AtomicU64)> = Arc::default();
        let root = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (slots, began) = &*shared;
                for start in 1..=3 {
                    if awaits_last {
                        poll(|| began.load(Ordering::Acquire), |value| *value >= start - 1);
                    }
                    slots[(start % 2) as usize].store(start, data_of(0, start));
                }
            })
        };

        let (slots, began) = &*shared;
        for start in 1..=3 {
            began.store(start, Ordering::Relaxed);
            let found = slots[(start % 2) as usize].load(start, Trust::Both);
            assert_eq!(found, data_of(0, start), "a reader has data of another start");
        }
        root.join().unwrap();
    });
}

#[test]
fn tagged_data_follows_the_start_before_of_its_reader() {
    tagged_broadcast(true);
}

#[test]
#[should_panic(expected = "a slot was overwritten before it was read")]
fn tagged_data_that_follows_nothing_is_found() {
    tagged_broadcast(false);
}

/// A flag of a rank, which a peer stores and the rank polls.
#[derive(Default)]
struct Flag(AtomicU64);

impl Flag {
    fn signal(&self, start: u64, is_fenced: bool) {
        if is_fenced {
            fence(Ordering::AcqRel);
        }
        self.0.store(start, Ordering::Relaxed);
    }

    fn wait(&self, start: u64, order: Ordering) {
        poll(|| self.0.load(order), |value| *value >= start);
    }
}

/// An output, to which peers store without atomics. A race of two accesses ends the model.
struct Output(UnsafeCell<u64>);

impl Output {
    fn store(&self, data: u64) {
        // SAFETY: loom reports if another thread accesses the output at the same time.
        self.0.with_mut(|output| unsafe { *output = data });
    }

    fn load(&self) -> u64 {
        // SAFETY: as in `store`.
        self.0.with(|output| unsafe { *output })
    }
}

impl Default for Output {
    fn default() -> Self {
        Self(UnsafeCell::new(0))
    }
}

/// What a rank has that peers store to.
#[derive(Default)]
struct Rank {
    outputs: [Output; 2],
    ready: Flag,
    arrived: Flag,
}

/// How ranks store to outputs of peers.
#[derive(Clone, Copy)]
struct Direct {
    /// The number of outputs that starts use by turns.
    outputs: u64,
    starts: u64,
    /// Whether a rank waits until its peer says that its output may be overwritten.
    awaits_ready: bool,
    /// Whether signals follow a fence: those for an output that may be overwritten, and those for data.
    is_fenced: [bool; 2],
    /// The order of the loads that poll flags.
    polls: Ordering,
}

const ONE_OUTPUT: Direct = Direct {
    outputs: 1,
    starts: 2,
    awaits_ready: true,
    is_fenced: [true; 2],
    polls: Ordering::Acquire,
};
const TWO_OUTPUTS: Direct = Direct { outputs: 2, starts: 3, awaits_ready: false, ..ONE_OUTPUT };

/// Has two ranks store data to each other's outputs, and announce it by flags.
fn exchange_directly(how: Direct) {
    let Direct { outputs, starts, awaits_ready, is_fenced, polls } = how;
    model(move || {
        let ranks: Arc<[Rank; 2]> = Arc::default();
        let run = move |ranks: &[Rank; 2], rank: usize| {
            let (own, peer) = (&ranks[rank], &ranks[1 - rank]);
            for start in 1..=starts {
                let turn = (start % outputs) as usize;
                if awaits_ready {
                    peer.ready.signal(start, is_fenced[0]);
                    own.ready.wait(start, polls);
                }
                peer.outputs[turn].store(data_of(rank, start)[0]);
                peer.arrived.signal(start, is_fenced[1]);
                own.arrived.wait(start, polls);
                assert_eq!(own.outputs[turn].load(), data_of(1 - rank, start)[0]);
            }
        };

        let other = {
            let ranks = Arc::clone(&ranks);
            thread::spawn(move || run(&ranks, 1))
        };
        run(&ranks, 0);
        other.join().unwrap();
    });
}

#[test]
fn an_output_is_overwritten_when_its_reader_is_ready() {
    exchange_directly(ONE_OUTPUT);
}

#[test]
fn two_outputs_in_turn_need_no_ready() {
    exchange_directly(TWO_OUTPUTS);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn one_output_without_ready_is_found() {
    exchange_directly(Direct { awaits_ready: false, ..ONE_OUTPUT });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_signal_of_data_without_a_fence_is_found() {
    exchange_directly(Direct { is_fenced: [true, false], ..ONE_OUTPUT });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_signal_of_ready_without_a_fence_is_found() {
    exchange_directly(Direct { is_fenced: [false, true], ..ONE_OUTPUT });
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_poll_without_acquire_is_found() {
    exchange_directly(Direct { polls: Ordering::Relaxed, ..ONE_OUTPUT });
}

/// A root stores to one of two outputs of a rank of which it gets no data. The rank says when it begins a start.
fn direct_broadcast(is_fenced: bool) {
    model(move || {
        let shared: Arc<(Rank, Flag)> = Arc::default();
        let root = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                let (rank, began) = &*shared;
                for start in 1..=3 {
                    began.wait(start - 1, Ordering::Acquire);
                    rank.outputs[(start % 2) as usize].store(data_of(0, start)[0]);
                    rank.arrived.signal(start, true);
                }
            })
        };

        let (rank, began) = &*shared;
        for start in 1..=3 {
            began.signal(start, is_fenced);
            rank.arrived.wait(start, Ordering::Acquire);
            assert_eq!(rank.outputs[(start % 2) as usize].load(), data_of(0, start)[0]);
        }
        root.join().unwrap();
    });
}

#[test]
fn an_output_is_overwritten_when_its_reader_has_begun_the_start_before() {
    direct_broadcast(true);
}

/// Only tagged data does without the fence, because its reader knows from the data that it has read what it should.
#[test]
#[should_panic(expected = "Causality violation")]
fn a_signal_of_a_begun_start_without_a_fence_is_found() {
    direct_broadcast(false);
}
