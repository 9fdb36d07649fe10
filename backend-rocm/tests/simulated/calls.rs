//! Tests the cost of a start: calls of HIP, and copies in flight.

use crate::backend::SignalBy;
use crate::streams::costs;
use crate::streams::world::{GatherOptions, PLAIN};

/// Calls of HIP that a start may make.
const CALLS: [&str; 6] = [
    "hipStreamBatchMemOp",
    "hipStreamWriteValue64",
    "hipStreamWaitValue64",
    "hipMemcpyAsync",
    "hipEventRecord",
    "hipStreamWaitEvent",
];
/// Calls of HIP that a start must not make: they block, allocate or are not allowed in a capture.
const NEVER: [&str; 7] = [
    "hipStreamSynchronize",
    "hipStreamQuery",
    "hipEventQuery",
    "hipMalloc",
    "hipHostMalloc",
    "hipEventCreateWithFlags",
    "hipStreamCreateWithFlags",
];

fn calls(shard: u64, options: GatherOptions, signal: Option<SignalBy>) -> [u64; 6] {
    costs::calls(CALLS, &NEVER, shard, options, signal)
}

#[test]
fn a_start_takes_few_calls() {
    let elided = GatherOptions { ready: false, ..PLAIN };
    let large = (2 << 20) + 1;
    // The numbers are batches of flags, single writes and waits, copies, events recorded, waits for events.
    // There are three engines, so copies use the main stream and two side streams. Of the four events one is
    // the ticket, one starts the side streams, and one ends each of them.
    assert_eq!(calls(large, elided, None), [1, 0, 0, 4, 4, 4]);
    assert_eq!(calls(large, PLAIN, None), [2, 0, 0, 4, 4, 4]);
    assert_eq!(calls(large, PLAIN, Some(SignalBy::Copy)), [4, 0, 0, 10, 4, 4]);
}

/// Every peer has a stream if there are enough engines.
#[test]
fn as_many_copies_are_in_flight_as_there_are_engines() {
    for (engines, most) in [("8", 4), ("3", 3), ("1", 1)] {
        costs::check_copies_at_once(engines, most);
    }
}

/// The runtime's copy of rows may use compute units.
#[test]
fn copies_with_a_constant_stride_take_a_call_each() {
    let calls = costs::calls_of_rows(["hipMemcpyAsync", "hipMemcpy2DAsync"], 9, 64, (128, 64));
    assert_eq!(calls, [9, 0]);
}
