//! Counts the driver calls and allocations of one start in the steady state.

use std::fmt::Write as _;

use peerlane_collectives::group::Operation;
use peerlane_cuda::Stream;
use peerlane_simulated_driver::Driver;
use peerlane_tests::Outcome;
use peerlane_tests::steady::{Counts, come_to_rest};

use crate::support::data::{check, unexpected};
use crate::support::test_rank::{Form, TestRank};
use crate::vendor::on_streams;

const BLOCK_BYTES: usize = 10_000;
/// More than are looked at, so that everything has grown as far as it will.
const WARM_UP: usize = 40;
const STARTS: usize = 30;

/// Calls of one start; of every other entry point that the backend uses there is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Calls {
    /// Copies alone, and calls for several.
    copies: u64,
    together: u64,
    /// Batches of memory operations: signals, waits, resets.
    batches: u64,
    records: u64,
    waits: u64,
}

/// Where these are counted.
const COUNTED: [&str; 5] = [
    "cuMemcpyAsync",
    "cuMemcpyBatchAsync_v2",
    "cuStreamBatchMemOp_v2",
    "cuEventRecord",
    "cuStreamWaitEvent",
];

/// Looks at what is current and at the stream, which cost next to nothing. Also how often a ticket is
/// looked at is a matter of time.
const LOOKS: [&str; 6] = [
    "cuCtxGetCurrent",
    "cuStreamGetCtx",
    "cuStreamIsCapturing",
    "cuStreamGetCaptureInfo_v2",
    "cuEventQuery",
    "cuThreadExchangeStreamCaptureMode",
];
/// So many looks of each kind a start may take.
const LOOKS_MAX: u64 = 6;

/// What a start has no use for.
const UNUSED: [&str; 19] = [
    "cuCtxSetCurrent",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuGetErrorName",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemsetD8Async",
    "cuPointerGetAttribute",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamWaitValue64_v2",
    "cuStreamWriteValue64_v2",
];

/// What a start asks of the driver, by ranks and form.
fn wanted(ranks: usize, form: Form) -> Calls {
    let self_copy = u64::from(form != Form::InPlace);
    let batches = match (ranks, form) {
        (1, _) => 0,
        // With outputs in turn there is no first phase.
        (_, Form::TwoOutputs) => 1,
        _ => 2,
    };
    let peers = ranks as u64 - 1;
    // The first put goes alone if its bytes come back, since they come behind it; what follows goes
    // together if there is more than one copy of it.
    let (first, rest) = match (peers, self_copy) {
        (0, self_copy) => (self_copy, 0),
        (peers, 0) => (0, peers),
        (peers, _) => (1, peers),
    };
    Calls {
        copies: first + u64::from(rest == 1),
        together: u64::from(rest > 1),
        batches,
        // The ticket; nothing is aside.
        records: 1,
        waits: 0,
    }
}

pub(crate) fn calls(test_rank: &mut TestRank) -> Outcome {
    let driver = peerlane_simulated_driver::install();
    let mut wrong = String::new();
    for form in Form::ALL {
        let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES);
        let mut gather = form.of(on_streams(builder)).prepare().map_err(unexpected)?;
        let stream = test_rank.stream.for_starts();
        warm_up(test_rank, &mut gather)?;
        let before = [count(&driver, &COUNTED), count(&driver, &LOOKS), count(&driver, &UNUSED)];
        repeat(&mut gather, &stream, STARTS)?;
        let after = [count(&driver, &COUNTED), count(&driver, &LOOKS), count(&driver, &UNUSED)];
        test_rank.stream.finish()?;
        let during =
            |kind: usize| after[kind].iter().zip(&before[kind]).map(|(now, old)| now - old);
        let seen: Vec<u64> = during(0).collect();
        let Calls { copies, together, batches, records, waits } = wanted(test_rank.ranks, form);
        let wanted = [copies, together, batches, records, waits].map(|each| each * STARTS as u64);
        if seen != wanted {
            let _ = write!(wrong, "{form:?}: {COUNTED:?} {seen:?}, expected {wanted:?}; ");
        }
        let looks: Vec<u64> = during(1).collect();
        if looks.iter().any(|looks| *looks > LOOKS_MAX * STARTS as u64) {
            let _ = write!(wrong, "{form:?}: {LOOKS:?} {looks:?}; ");
        }
        // The thread of the watchdog may look meanwhile; a start that did so would do it every time.
        let most = |call: &str| if call == "cuCtxSetCurrent" { STARTS as u64 / 2 } else { 0 };
        let used = UNUSED.iter().zip(during(2)).filter(|(call, calls)| *calls > most(call));
        for (call, calls) in used {
            let _ = write!(wrong, "{form:?}: {calls} calls of {call}, expected none; ");
        }
    }
    check(wrong.is_empty(), || format!("{STARTS} starts: {wrong}"))
}

fn count(driver: &Driver, calls: &[&str]) -> Vec<u64> {
    calls.iter().map(|call| driver.calls(call)).collect()
}

/// More starts than are looked at, all of which are open at once.
fn warm_up(test_rank: &TestRank, gather: &mut Operation<u8>) -> Outcome {
    let gate = test_rank.gpu.pinned(4)?;
    gate.write(0, &[0; 4]);
    test_rank.stream.hold(&gate)?;
    repeat(gather, &test_rank.stream.for_starts(), WARM_UP)?;
    gate.write(0, &[1, 0, 0, 0]);
    test_rank.stream.finish()?;
    gather.run().map_err(unexpected)
}

/// Starts that nobody waits for.
fn repeat(gather: &mut Operation<u8>, stream: &Stream, starts: usize) -> Outcome {
    (0..starts).try_for_each(|_| gather.start_on(stream).map(drop).map_err(unexpected))
}

/// A start allocates and frees nothing.
pub(crate) fn allocations(test_rank: &mut TestRank) -> Outcome {
    for form in Form::ALL {
        let builder = test_rank.group.all_gather::<u8>(BLOCK_BYTES);
        let mut gather = form.of(on_streams(builder)).prepare().map_err(unexpected)?;
        let stream = test_rank.stream.for_starts();
        warm_up(test_rank, &mut gather)?;
        come_to_rest();
        let before = Counts::now();
        repeat(&mut gather, &stream, STARTS)?;
        test_rank.stream.finish()?;
        let during = Counts::now().since(before);
        // Behind it all have looked, and may talk to each other again.
        gather.run().map_err(unexpected)?;
        check(during == Counts::default(), || format!("{form:?}: {STARTS} starts: {during:?}"))?;
    }
    Ok(())
}
