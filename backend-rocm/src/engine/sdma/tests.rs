//! What the contract says of an engine that is driven, over a runtime for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use peerlane_hal::{Flag, Role};
use peerlane_toolkit::device::DevicePtr;

use super::fake::{Failure, Fake};
use super::placement::{ChosenBy, Placement, SdmaSet};
use super::*;

/// A buffer of this process, as a region of whatever rank; declared before the engine, which lets its
/// copies end when it is dropped.
#[derive(Debug)]
struct Bytes {
    words: Vec<AtomicU64>,
    role: Role,
    on_host: bool,
    peer: Rank,
}

impl Bytes {
    fn new(bytes: usize, role: Role, peer: u32) -> Self {
        let words = (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect();
        Self { words, role, on_host: role == Role::Flags, peer: Rank(peer) }
    }

    fn data(bytes: usize, peer: u32) -> Self {
        Self::new(bytes, Role::Data, peer)
    }

    fn word(&self, index: usize) -> u64 {
        self.words[index].load(Ordering::Acquire)
    }
}

impl Place for Bytes {
    fn address(&self) -> DevicePtr {
        self.words.as_ptr() as DevicePtr
    }

    fn bytes(&self) -> u64 {
        self.words.len() as u64 * 8
    }

    fn role(&self) -> Role {
        self.role
    }

    fn host_address(&self) -> Option<u64> {
        self.on_host.then(|| self.address())
    }
}

impl PeerPlace for Bytes {
    fn peer(&self) -> Rank {
        self.peer
    }
}

fn engine(fake: &Fake) -> Sdma<Fake> {
    let way = |mask| Placement { set: SdmaSet::of_mask(mask), by: ChosenBy::Table };
    let ways = [0b1, 0b10, 0b100].map(|mask| Some(Ways { put: way(mask), get: way(mask) }));
    Sdma::over(fake.clone(), Rank(0), ways.into())
}

fn put<'a>(dst: &'a Bytes, src: &'a Bytes, bytes: u64) -> Op<'a, Bytes, Bytes> {
    Op::Put { dst: At { region: dst, offset: 0 }, src: At { region: src, offset: 0 }, bytes }
}

fn signal(region: &Bytes, word: u64, value: u64) -> Op<'_, Bytes, Bytes> {
    Op::Signal { flag: Flag { region, word }, value }
}

fn submit(engine: &mut Sdma<Fake>, ops: &[Op<'_, Bytes, Bytes>]) -> Result<Ticket, Failure> {
    // SAFETY: the buffers of the tests outlive what they submit.
    unsafe { engine.submit(ops) }
}

/// Runs everything to the last ticket.
fn finish(engine: &mut Sdma<Fake>, fake: &Fake, last: Ticket) {
    for _ in 0..10_000 {
        if engine.completed().expect("nothing fails") == last {
            return;
        }
        fake.state().run_one();
    }
    panic!("it does not end: {engine:?}");
}

#[test]
fn puts_gets_and_flags_go_their_ways() {
    let fake = Fake::new(1);
    let (src, dst, back) = (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::data(64, 0));
    let mut engine = engine(&fake);
    src.words[7].store(77, Ordering::Relaxed);
    let (flags, far) = (
        Bytes::new(16, Role::Flags, 1),
        Bytes { on_host: false, ..Bytes::new(16, Role::Flags, 2) },
    );
    let get = Op::Get {
        dst: At { region: &back, offset: 0 },
        src: At { region: &dst, offset: 0 },
        bytes: 64,
    };
    let ops = [put(&dst, &src, 64), signal(&flags, 1, 5), get, signal(&far, 0, 6)];
    let last = submit(&mut engine, &ops).expect("in order");
    assert_eq!((flags.word(1), engine.completed()), (0, Ok(Ticket::NONE)));
    finish(&mut engine, &fake, last);
    assert_eq!((dst.word(7), back.word(7)), (77, 77));
    assert_eq!((flags.word(1), far.word(0)), (5, 6));
    // What the host stores is no copy.
    assert_eq!(fake.state().log.len(), 3);
}

#[test]
fn an_empty_slice_and_a_copy_of_nothing_have_tickets() {
    let fake = Fake::new(2);
    let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
    let mut engine = engine(&fake);
    assert_eq!(submit(&mut engine, &[]), Ok(Ticket(1)));
    assert_eq!(engine.completed(), Ok(Ticket(1)));
    assert_eq!(submit(&mut engine, &[put(&dst, &src, 0)]), Ok(Ticket(2)));
    assert_eq!(submit(&mut engine, &[put(&dst, &src, 8)]), Ok(Ticket(3)));
    assert_eq!(submit(&mut engine, &[]), Ok(Ticket(4)));
    assert_eq!(engine.completed(), Ok(Ticket(2)), "the empty one comes after the copy");
    finish(&mut engine, &fake, Ticket(4));
}

#[test]
fn nothing_of_a_wrong_slice_is_taken() {
    let fake = Fake::new(3);
    let (src, dst, flags) = (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::new(8, Role::Flags, 1));
    let stranger = Bytes::data(64, 3);
    let mut engine = engine(&fake);
    let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
    let at = |region, offset| At { region, offset };
    let beyond = Op::Put { dst: at(&dst, 60), src: at(&src, 0), bytes: 5 };
    let wrong = [
        (beyond, "put destination spans 5 bytes from offset 60, the region has 64"),
        (signal(&flags, 1, 1), "signalled flag spans 8 bytes from offset 8, the region has 8"),
        (
            signal(&dst, 0, 1),
            "the signalled flag lies in a region registered as Data, wanted Flags",
        ),
        (wait, "a wait was submitted to an engine without queued_wait; poll the flag instead"),
        (
            put(&stranger, &src, 8),
            "an op names memory of rank 3, which was not connected when this engine of rank 0 was made",
        ),
    ];
    for (op, text) in wrong {
        let error = submit(&mut engine, &[put(&dst, &src, 64), op]).expect_err(text);
        assert_eq!(error.to_string(), text);
    }
    let long = vec![signal(&flags, 0, 1); SLICE_OPS_MAX + 1];
    let error = submit(&mut engine, &long).expect_err("too long").to_string();
    assert_eq!(error, "a slice has 257 ops, wanted at most slice_ops_max = 256");
    assert_eq!((fake.state().log.len(), engine.queue.len()), (0, 0));
    // And the engine still works.
    submit(&mut engine, &long[..SLICE_OPS_MAX]).expect("just fits");
}

#[test]
fn a_full_queue_passes() {
    let fake = Fake::new(4);
    let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
    let mut engine = engine(&fake);
    let slice = vec![put(&dst, &src, 8); SLICE_OPS_MAX];
    let mut last = Ticket::NONE;
    for _ in 0..QUEUE_OPS / SLICE_OPS_MAX {
        last = submit(&mut engine, &slice).expect("there is room");
    }
    let error = submit(&mut engine, &slice[..1]).expect_err("it is full").to_string();
    assert_eq!(error, "the queue holds 1024 of 1024 commands, 1 more do not fit now");
    finish(&mut engine, &fake, last);
    submit(&mut engine, &slice).expect("it is empty again");
}

#[test]
fn the_first_error_stays_and_a_release_drains() {
    let fake = Fake::new(5);
    fake.state().fails = |copy| copy.span.bytes == 24;
    let (src, dst) = (Bytes::data(64, 0), Bytes::data(64, 1));
    let mut engine = engine(&fake);
    submit(&mut engine, &[put(&dst, &src, 24)]).expect("it fails later");
    while fake.state().run_one() {}
    let first = engine.completed().expect_err("it failed");
    assert_eq!(first.to_string(), "copy to rank 1 ended with -7");
    assert_eq!(engine.completed(), Err(first.clone()));
    assert_eq!(submit(&mut engine, &[]), Err(first.clone()));
    assert_eq!(engine.release(), Err(first.clone()));
    assert_eq!(engine.park(Duration::from_secs(9)), Err(first));
}

#[test]
fn a_released_engine_takes_no_more() {
    let fake = Fake::new(6);
    let (src, dst, flags) = (Bytes::data(64, 0), Bytes::data(64, 1), Bytes::new(8, Role::Flags, 1));
    let mut engine = engine(&fake);
    let last = submit(&mut engine, &[put(&dst, &src, 64), signal(&flags, 0, 1)]).expect("room");
    engine.release().expect("nothing failed");
    let error = submit(&mut engine, &[]).expect_err("released").to_string();
    assert_eq!(error, "the engine was released after an abort and takes no more ops");
    finish(&mut engine, &fake, last);
    assert_eq!(flags.word(0), 0, "the flag behind was dropped");
}

#[test]
fn a_sleeper_wakes_for_news_and_for_its_waker() {
    let fake = Fake::new(7);
    let (src, dst) = (Bytes::data(8, 0), Bytes::data(8, 1));
    let mut engine = engine(&fake);
    engine.waker().wake();
    let start = Instant::now();
    engine.park(Duration::MAX).expect("woken");
    engine.park(Duration::from_millis(1)).expect("in time");
    assert!(start.elapsed() < Duration::from_secs(5));
    let last = submit(&mut engine, &[put(&dst, &src, 8)]).expect("room");
    fake.state().run_one();
    engine.park(Duration::MAX).expect("there is news");
    assert_eq!(engine.completed(), Ok(last));
}

#[test]
fn its_ways_and_its_limits_are_told() {
    let engine = engine(&Fake::new(8));
    let way = |peer, number: &str| {
        let text = format!("SDMA {number} (by number)");
        SdmaWay { peer: Rank(peer), put: text.clone(), get: text }
    };
    assert_eq!(engine.ways(), [way(0, "0"), way(1, "1"), way(2, "2")]);
    let caps = *engine.caps();
    assert!(!caps.queued_wait && caps.polled && caps.put_align_bytes == 1);
    assert_eq!(caps.piece_bytes_max, 128 << 20);
}
