//! What a start costs: calls of the driver, and copies in flight.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, Ticket};

use crate::backend::{SignalBy, driver};
use crate::shared::costs;
use crate::shared::world::{PLAIN, Way, world};

/// Everything that a start may call.
const CALLS: [&str; 5] = [
    "cuStreamBatchMemOp_v2",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
];
/// What no start may call: it waits, or is not legal in a capture, or allocates.
const NEVER: [&str; 8] = [
    "cuStreamSynchronize",
    "cuStreamQuery",
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuEventCreate",
    "cuStreamCreate",
];

fn calls(shard: u64, way: Way, signal: Option<SignalBy>) -> [u64; 5] {
    costs::calls(CALLS, &NEVER, shard, way, signal)
}

#[test]
fn a_start_takes_few_calls() {
    let elided = Way { ready: false, ..PLAIN };
    let in_place = Way { in_place: true, ..PLAIN };
    let elided_in_place = Way { ready: false, ..in_place };
    let copy = Some(SignalBy::Copy);
    // Batches of flags, copies alone, copies together, events recorded, waits for events.
    // Small shards: the first put, and behind it its way back with the other puts; the ticket.
    let small = 4 << 10;
    assert_eq!(calls(small, elided, None), [1, 1, 1, 1, 0]);
    assert_eq!(calls(small, PLAIN, None), [2, 1, 1, 1, 0]);
    assert_eq!(calls(small, elided_in_place, None), [1, 0, 1, 1, 0]);
    assert_eq!(calls(small, in_place, None), [2, 0, 1, 1, 0]);
    // The values, three copies, then the waits.
    assert_eq!(calls(small, elided, copy), [2, 4, 1, 1, 0]);
    assert_eq!(calls(small, PLAIN, copy), [4, 7, 1, 1, 0]);
    // Large ones: two puts on one stream, one on another, the own copy on a third. Of the events one
    // is the ticket, one starts the streams aside, and each of those ends with one.
    let large = (2 << 20) + 1;
    assert_eq!(calls(large, elided, None), [1, 2, 1, 4, 4]);
    assert_eq!(calls(large, PLAIN, None), [2, 2, 1, 4, 4]);
    assert_eq!(calls(large, elided_in_place, None), [1, 1, 1, 3, 2]);
    assert_eq!(calls(large, in_place, None), [2, 1, 1, 3, 2]);
    assert_eq!(calls(large, elided, copy), [2, 5, 1, 4, 4]);
    assert_eq!(calls(large, PLAIN, copy), [4, 8, 1, 4, 4]);
}

/// To ask about an event costs as much as a copy, so nobody asks about each.
#[test]
fn many_starts_are_seen_to_end_with_few_looks() {
    const STARTS: u64 = 32;
    const LOOKS_MAX: u64 = 6;
    let (driver, _turn) = driver();
    let mut member = world(1, 64, None).remove(0);
    for epoch in 1..=STARTS {
        member.submit(epoch, PLAIN);
    }
    let begun = Instant::now();
    loop {
        std::thread::sleep(Duration::from_millis(50));
        let before = driver.calls("cuEventQuery");
        let done = member.engine.completed().unwrap();
        let looks = driver.calls("cuEventQuery") - before;
        assert!(looks <= LOOKS_MAX, "{looks} looks, to see {done:?}");
        if done == Ticket(STARTS) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{done:?} of {STARTS}");
    }
}

#[test]
fn never_more_copies_at_once_than_streams_or_engines() {
    for (engines, most) in [("4", 3), ("3", 3), ("2", 2), ("1", 1)] {
        // As many as are allowed at once, or an overlap was lost.
        assert_eq!(costs::copies_at_once(engines), [most; 4], "{engines} copy engines");
    }
}

#[test]
fn gets_cost_what_puts_do() {
    let (driver, _turn) = driver();
    let mut members = world(4, 70_001, None);
    let first = members[0].pull_from_all(1);
    members[0].finish(first);
    let before = CALLS.map(|call| driver.calls(call));
    let second = members[0].pull_from_all(2);
    let calls: Vec<u64> =
        CALLS.iter().zip(before).map(|(call, before)| driver.calls(call) - before).collect();
    members[0].finish(second);
    // Three copies in one call, then all flags in one batch, and the ticket.
    assert_eq!(calls, [1, 0, 1, 1, 0]);
}
