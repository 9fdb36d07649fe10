//! What a start costs: calls of HIP, and copies in flight.

use crate::backend::SignalBy;
use crate::shared::costs;
use crate::shared::world::{PLAIN, Way};

/// Everything that a start may call.
const CALLS: [&str; 6] = [
    "hipStreamBatchMemOp",
    "hipStreamWriteValue64",
    "hipStreamWaitValue64",
    "hipMemcpyAsync",
    "hipEventRecord",
    "hipStreamWaitEvent",
];
/// What no start may call: it waits, or is not legal in a capture, or allocates.
const NEVER: [&str; 7] = [
    "hipStreamSynchronize",
    "hipStreamQuery",
    "hipEventQuery",
    "hipMalloc",
    "hipHostMalloc",
    "hipEventCreateWithFlags",
    "hipStreamCreateWithFlags",
];

fn calls(shard: u64, way: Way, signal: Option<SignalBy>) -> [u64; 6] {
    costs::calls(CALLS, &NEVER, shard, way, signal)
}

#[test]
fn a_start_takes_few_calls() {
    let elided = Way { ready: false, ..PLAIN };
    let large = (2 << 20) + 1;
    // Batches of flags, single writes and waits, copies, events recorded, waits for events. The main
    // stream and two beside it, as there are three engines: of the events one is the ticket, one starts
    // the streams aside, and each of those ends with one.
    assert_eq!(calls(large, elided, None), [1, 0, 0, 4, 4, 4]);
    assert_eq!(calls(large, PLAIN, None), [2, 0, 0, 4, 4, 4]);
    assert_eq!(calls(large, PLAIN, Some(SignalBy::Copy)), [4, 0, 0, 10, 4, 4]);
}

/// Every peer has a stream, as far as there are engines.
#[test]
fn as_many_copies_at_once_as_engines() {
    for (engines, most) in [("8", 4), ("3", 3), ("1", 1)] {
        assert_eq!(costs::copies_at_once(engines), [most; 4], "{engines} copy engines");
    }
}
