//! What a start costs: calls of the driver, and copies in flight.

use peerlane_cuda::SignalBy;
use peerlane_hal::Ticket;

use crate::support::driver;
use crate::world::{Member, PLAIN, Way, world};

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

/// Four ranks, a few starts: the calls of one start of one rank.
fn calls(shard: u64, way: Way, signal: Option<SignalBy>) -> [u64; 5] {
    const STARTS: u64 = 5;
    let (driver, _turn) = driver();
    let mut members = world(4, shard, signal);
    members.iter().for_each(|member| member.fill(member.me as u8));
    let count = |names: &[&str]| -> Vec<u64> { names.iter().map(|it| driver.calls(it)).collect() };
    let start = |members: &mut [Member], epoch| {
        for member in members {
            member.submit(epoch, way);
        }
    };
    let finish = |members: &mut [Member], epoch| {
        members.iter_mut().for_each(|member| member.finish(Ticket(epoch)));
    };
    // The first ones may make what the later ones use again.
    (1..=STARTS).for_each(|epoch| start(&mut members, epoch));
    finish(&mut members, STARTS);
    let (before, never) = (count(&CALLS), count(&NEVER));
    let uses = driver.counter("default_stream_uses", None);
    (STARTS + 1..=2 * STARTS).for_each(|epoch| start(&mut members, epoch));
    assert_eq!(count(&NEVER), never, "{NEVER:?}");
    let all: Vec<u64> = count(&CALLS).iter().zip(before).map(|(now, then)| now - then).collect();
    assert!(all.iter().all(|calls| calls % (4 * STARTS) == 0), "{all:?}");
    finish(&mut members, 2 * STARTS);
    assert_eq!(driver.counter("default_stream_uses", None), uses, "the default stream was used");
    if !way.in_place {
        members.iter().for_each(|member| member.ensure_gathered(|rank| rank as u8, "counted"));
    }
    std::array::from_fn(|index| all[index] / (4 * STARTS))
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

#[test]
fn never_more_copies_at_once_than_streams_or_engines() {
    for (engines, most) in [("4", 3), ("3", 3), ("2", 2), ("1", 1)] {
        let (driver, _turn) = driver();
        driver.set("COPY_ENGINES", engines);
        let mut members = world(4, 1 << 20, None);
        members.iter().for_each(|member| member.fill(member.me as u8));
        driver.set("COPY_DELAY_US", "2000");
        driver.reset_counters();
        for epoch in 1..=3 {
            for member in &mut members {
                member.submit(epoch, PLAIN);
            }
        }
        members.iter_mut().for_each(|member| member.finish(Ticket(3)));
        let seen = [0, 1, 2, 3].map(|it| driver.counter("most_copies_at_once", Some(it)));
        driver.set("COPY_DELAY_US", "0");
        driver.set("COPY_ENGINES", "3");
        // As many as are allowed at once, or an overlap was lost.
        assert_eq!(seen, [most; 4], "{engines} copy engines");
        members.iter().for_each(|member| member.ensure_gathered(|rank| rank as u8, "delayed"));
    }
}

#[test]
fn jitter_changes_no_byte() {
    for (signal, shard) in [(None, 300_001), (Some(SignalBy::Copy), 300_001), (None, 777)] {
        let (driver, _turn) = driver();
        let mut members = world(3, shard, signal);
        driver.set("JITTER_US", "400");
        for epoch in 1..=12 {
            let seed = |rank: usize| (rank as u8 * 16) ^ epoch as u8;
            members.iter().for_each(|member| member.fill(seed(member.me)));
            let tickets: Vec<_> =
                members.iter_mut().map(|member| member.submit(epoch, PLAIN)).collect();
            for (member, ticket) in members.iter_mut().zip(tickets) {
                member.finish(ticket);
            }
            let what = format!("{signal:?}, epoch {epoch}");
            members.iter().for_each(|member| member.ensure_gathered(seed, &what));
        }
        driver.set("JITTER_US", "0");
    }
}
