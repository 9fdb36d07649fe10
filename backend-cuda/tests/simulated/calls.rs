//! Tests the cost of a start: calls of the driver, and copies in flight.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine, Ticket};

use crate::backend::{SignalBy, driver};
use crate::streams::costs;
use crate::streams::world::{GatherOptions, PLAIN, world};

/// Calls that a start may make.
const CALLS: [&str; 5] = [
    "cuStreamBatchMemOp_v2",
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
];
/// Calls that no start may make, because they wait, allocate or are illegal in a capture.
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

fn calls(shard: u64, options: GatherOptions, signal: Option<SignalBy>) -> [u64; 5] {
    costs::calls(CALLS, &NEVER, shard, options, signal)
}

#[test]
fn a_start_takes_few_calls() {
    let elided = GatherOptions { ready: false, ..PLAIN };
    let in_place = GatherOptions { in_place: true, ..PLAIN };
    let elided_in_place = GatherOptions { ready: false, ..in_place };
    let copy = Some(SignalBy::Copy);
    // The counts: batches of flags, single copies, batched copies, recorded events, waits for events.
    // Small shards: the first put; then the self copy back from the peer, with the other puts; the ticket.
    let small = 4 << 10;
    assert_eq!(calls(small, elided, None), [1, 1, 1, 1, 0]);
    assert_eq!(calls(small, PLAIN, None), [2, 1, 1, 1, 0]);
    assert_eq!(calls(small, elided_in_place, None), [1, 0, 1, 1, 0]);
    assert_eq!(calls(small, in_place, None), [2, 0, 1, 1, 0]);
    // Signals by copy: the values, three copies, then the waits.
    assert_eq!(calls(small, elided, copy), [2, 4, 1, 1, 0]);
    assert_eq!(calls(small, PLAIN, copy), [4, 7, 1, 1, 0]);
    // Large shards: two puts on one stream, one on another, the self copy on a third. One event is the
    // ticket, one starts the side streams, and one ends each of these.
    let large = (2 << 20) + 1;
    assert_eq!(calls(large, elided, None), [1, 2, 1, 4, 4]);
    assert_eq!(calls(large, PLAIN, None), [2, 2, 1, 4, 4]);
    assert_eq!(calls(large, elided_in_place, None), [1, 1, 1, 3, 2]);
    assert_eq!(calls(large, in_place, None), [2, 1, 1, 3, 2]);
    assert_eq!(calls(large, elided, copy), [2, 5, 1, 4, 4]);
    assert_eq!(calls(large, PLAIN, copy), [4, 8, 1, 4, 4]);
}

/// A query of an event costs as much as a copy, so not every event is queried.
#[test]
fn completion_of_many_starts_takes_few_queries() {
    const STARTS: u64 = 32;
    const QUERIES_MAX: u64 = 6;
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
        let queries = driver.calls("cuEventQuery") - before;
        assert!(queries <= QUERIES_MAX, "{queries} queries, completed {done:?}");
        if done == Ticket(STARTS) {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{done:?} of {STARTS}");
    }
}

#[test]
fn copies_in_flight_are_limited_by_streams_and_engines() {
    for (engines, most) in [("4", 3), ("3", 3), ("2", 2), ("1", 1)] {
        // Exactly the limit: fewer would mean lost overlap.
        costs::check_copies_at_once(engines, most);
    }
}

#[test]
fn gets_cost_as_much_as_puts() {
    let (driver, _turn) = driver();
    let mut members = world(4, 70_001, None);
    let first = members[0].pull_from_all(1);
    members[0].finish(first);
    let before = CALLS.map(|call| driver.calls(call));
    let second = members[0].pull_from_all(2);
    let calls: Vec<u64> =
        CALLS.iter().zip(before).map(|(call, before)| driver.calls(call) - before).collect();
    members[0].finish(second);
    // Three copies in one call, then all flags in one batch, then the ticket.
    assert_eq!(calls, [1, 0, 1, 1, 0]);
}

#[test]
fn copies_with_a_constant_stride_take_one_call() {
    const CALLS: [&str; 3] = ["cuMemcpyAsync", "cuMemcpyBatchAsync_v2", "cuMemcpy2DAsync_v2"];
    let calls = |count, bytes, pitches| costs::calls_of_rows(CALLS, count, bytes, pitches);
    assert_eq!(calls(250, 64, (128, 64)), [0, 0, 1]);
    assert_eq!(calls(4, 9, (9, 31)), [0, 0, 1]);
    // Two or three copies go in one batch, and overlapping rows keep their order by a call each.
    assert_eq!(calls(3, 64, (128, 64)), [0, 1, 0]);
    assert_eq!(calls(5, 64, (32, 64)), [5, 0, 0]);
}
