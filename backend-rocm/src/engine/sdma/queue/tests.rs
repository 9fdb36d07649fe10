//! The queue over a runtime that keeps no order which it was not told.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::super::fake::{Failure, Fake};
use super::super::placement::{ChosenBy, SdmaSet};
use super::*;

const ME: usize = 0;

fn way(mask: u32) -> Placement {
    Placement { set: SdmaSet::of_mask(mask), by: ChosenBy::Table }
}

fn queue(fake: &Fake, masks: &[u32], piece_bytes_max: u64) -> Queue<Fake> {
    let ways = |mask: &u32| Some(Ways { put: way(*mask), get: way(*mask) });
    let ways = masks.iter().map(ways).collect();
    Queue::new(fake.clone(), ME, ways, (1024, piece_bytes_max))
}

fn put(peer: usize, dst: &mut [u8], src: &[u8]) -> Request {
    assert_eq!(dst.len(), src.len());
    let (dst, bytes) = (dst.as_mut_ptr() as u64, src.len() as u64);
    let span = Span { dst, src: src.as_ptr() as u64, bytes };
    Request { peer, work: Work::Copy { direction: Direction::Put, span } }
}

fn signal(peer: usize, flag: &AtomicU64, value: u64, on_host: bool) -> Request {
    let place = NonNull::from(flag);
    let flag =
        if on_host { FlagPlace::Host(place) } else { FlagPlace::Device(place.as_ptr() as u64) };
    Request { peer, work: Work::Signal { flag, value } }
}

fn drive(queue: &mut Queue<Fake>) -> Result<bool, Failure> {
    // SAFETY: buffers of the tests outlive their queues.
    unsafe { queue.drive() }
}

/// Runs until nothing is left; `look` looks at every state in between.
fn finish(queue: &mut Queue<Fake>, fake: &Fake, mut look: impl FnMut()) {
    let last = queue.ledger().last();
    for _ in 0..100_000 {
        drive(queue).unwrap();
        look();
        if queue.ledger().completed() == last {
            assert_eq!((queue.len(), queue.on_their_way()), (0, 0));
            return;
        }
        fake.state().run_one();
        look();
    }
    panic!("it does not end: {queue:?}");
}

/// Bytes that tell where they come from.
fn source(bytes: usize, seed: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index * 31 + seed * 97 + 1) as u8 | 1).collect()
}

#[test]
fn a_flag_is_seen_behind_everything_put_before_it() {
    for seed in 1..=60 {
        let fake = Fake::new(seed);
        fake.state().room = (seed as usize % 7) + 1;
        fake.state().forgets_to_wait = seed % 3 == 0;
        // Peers share engines; one has none of its own.
        let mut queue = queue(&fake, &[0b1, 0b1110, 0b0110, 0], 4096);
        let (parts, part) = (7, 3000 + 4096 * (seed as usize % 4));
        let from = source(parts * part, seed as usize);
        let mut to: Vec<_> = (0..4).map(|_| vec![0_u8; parts * part]).collect();
        let flags: Vec<_> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let views: Vec<_> = to.iter_mut().map(|to| (to.as_mut_ptr(), to.len())).collect();
        for index in 0..parts {
            let mut slice = Vec::new();
            for peer in [1, 2, 0, 3] {
                let at = index * part..(index + 1) * part;
                // SAFETY: parts of a buffer that outlives the queue.
                let to = unsafe {
                    std::slice::from_raw_parts_mut(views[peer].0.wrapping_add(at.start), part)
                };
                slice.push(put(peer, to, &from[at]));
                // Mixed within one chain too.
                let on_host = (peer + index + seed as usize).is_multiple_of(2);
                slice.push(signal(peer, &flags[peer], index as u64 + 1, on_host));
            }
            queue.push(&slice);
            if index % 3 == 0 {
                drive(&mut queue).unwrap();
            }
        }
        let mut seen = [0; 4];
        finish(&mut queue, &fake, || {
            for peer in 0..4 {
                let value = flags[peer].load(Ordering::Acquire);
                assert!(value >= seen[peer], "flags of rank {peer} went back");
                seen[peer] = value;
                let whole = value as usize * part;
                // SAFETY: nobody writes meanwhile; the engines run in this thread.
                let to = unsafe { std::slice::from_raw_parts(views[peer].0, whole) };
                assert!(
                    to == &from[..whole],
                    "seed {seed}: rank {peer} saw flag {value} too early"
                );
            }
        });
        assert_eq!(seen, [parts as u64; 4]);
        assert!(fake.state().log.iter().all(|copy| copy.span.bytes <= 4096));
    }
}

#[test]
fn puts_to_the_same_bytes_keep_their_order() {
    for seed in 1..=40 {
        let fake = Fake::new(seed);
        fake.state().forgets_to_wait = seed % 3 == 0;
        let mut queue = queue(&fake, &[0b1, 0b1110], 64);
        let (one, two) = (source(300, 1), source(300, 2));
        let mut to = vec![0_u8; 400];
        let mut requests = Vec::new();
        for round in 0..6 {
            let at = round * 17;
            let from = if round % 2 == 0 { &one } else { &two };
            requests.push(put(1, &mut to[at..at + 300], from));
        }
        queue.push(&requests);
        finish(&mut queue, &fake, || {});
        let mut wanted = vec![0_u8; 400];
        for round in 0..6 {
            let from = if round % 2 == 0 { &one } else { &two };
            wanted[round * 17..round * 17 + 300].copy_from_slice(from);
        }
        assert!(to == wanted, "seed {seed}");
    }
}

#[test]
fn a_flag_of_ones_own_waits_for_all_peers() {
    for (seed, on_host) in (1..=20).flat_map(|seed| [(seed, true), (seed, false)]) {
        let fake = Fake::new(seed);
        let mut queue = queue(&fake, &[0b1, 0b10, 0b100], 512);
        let from = source(5000, 3);
        let (mut own, mut one, mut two) = (vec![0; 5000], vec![0; 5000], vec![0; 5000]);
        let flag = AtomicU64::new(0);
        let own_put = put(ME, &mut own, &from);
        queue.push(&[put(1, &mut one, &from), own_put, put(2, &mut two, &from)]);
        queue.push(&[signal(ME, &flag, 9, on_host)]);
        let behind = AtomicU64::new(0);
        queue.push(&[signal(1, &behind, 1, false)]);
        let places = [own.as_ptr(), one.as_ptr(), two.as_ptr()];
        finish(&mut queue, &fake, || {
            if flag.load(Ordering::Acquire) == 9 {
                // SAFETY: the buffers live, and the engines run in this thread.
                let whole = |place: &*const u8| unsafe { std::slice::from_raw_parts(*place, 5000) };
                assert!(places.iter().all(|place| whole(place) == from), "seed {seed}");
            }
        });
        assert_eq!((flag.into_inner(), behind.into_inner()), (9, 1));
    }
}

#[test]
fn an_engine_that_is_refused_is_not_asked_again() {
    let fake = Fake::new(5);
    fake.state().refuses = |copy| copy.on.is_some_and(|engine| engine.index() != 2);
    let mut queue = queue(&fake, &[0b1, 0b1100], 4096);
    let from = source(20_000, 1);
    let (mut to, mut own) = (vec![0; 20_000], vec![0; 20_000]);
    queue.push(&[put(1, &mut to, &from), put(ME, &mut own, &from)]);
    finish(&mut queue, &fake, || {});
    assert!(to == from && own == from);
    let texts: Vec<_> = queue.ways().map(|(_, ways)| ways.put.to_string()).collect();
    assert_eq!(texts, ["SDMA of the runtime's choice", "SDMA 2 (by number)"]);
    // Who refuses every engine refuses the copy.
    fake.state().refuses = |_| true;
    queue.push(&[put(ME, &mut own, &from)]);
    assert_eq!(drive(&mut queue), Err(Failure("refused on None".to_owned())));
}

#[test]
fn behind_a_copy_that_failed_nothing_is_signalled() {
    let fake = Fake::new(7);
    fake.state().fails = |copy| copy.span.bytes == 777;
    let mut queue = queue(&fake, &[0b1, 0b110], 4096);
    let from = source(777, 1);
    let mut to = vec![0; 777];
    let (device, host) = (AtomicU64::new(0), AtomicU64::new(0));
    let signals = [signal(1, &device, 1, false), signal(1, &host, 1, true)];
    queue.push(&[put(1, &mut to, &from), signals[0], signals[1]]);
    drive(&mut queue).unwrap();
    while fake.state().run_one() {}
    let error = drive(&mut queue).unwrap_err();
    assert_eq!(error.to_string(), "copy to rank 1 ended with -7");
    while fake.state().run_one() {}
    assert_eq!((device.load(Ordering::Acquire), host.load(Ordering::Acquire)), (0, 0));
    // Once all know, the engine is let go.
    queue.close(Deadline::after(Duration::from_secs(5)));
    assert_eq!((queue.on_their_way(), host.into_inner()), (0, 0));
}

#[test]
fn a_release_drops_what_no_engine_has() {
    let fake = Fake::new(9);
    let mut queue = queue(&fake, &[0b1, 0b10], 64);
    let from = source(6400, 1);
    let mut to = vec![0; 6400];
    let flag = AtomicU64::new(0);
    let last = queue.push(&[put(1, &mut to, &from), signal(1, &flag, 1, true)]);
    drive(&mut queue).unwrap();
    queue.release();
    assert!(queue.ledger().completed() < last, "pieces are on their way");
    finish(&mut queue, &fake, || {});
    assert_eq!(flag.into_inner(), 0);
    assert!(to.contains(&0), "the rest was dropped");
}

#[test]
fn a_runtime_without_room_is_asked_again() {
    let fake = Fake::new(3);
    fake.state().room = 0;
    let mut queue = queue(&fake, &[0b1], 64);
    let from = source(640, 1);
    let mut to = vec![0; 640];
    queue.push(&[put(ME, &mut to, &from)]);
    assert_eq!(drive(&mut queue), Ok(false));
    finish(&mut queue, &fake, || {});
    assert!(to == from);
}
