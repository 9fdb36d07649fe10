//! Checks that a start runs after the earlier work of its stream and before the later work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use peerlane_collectives::error::Error;
use peerlane_tests::middleware::{Stream, StreamLayer};

use crate::support::{
    BLOCK_BYTES, LONG, Rounds, SHORT, byte, gathered, in_group, in_group_with, pause,
};

type Builder<'g> = peerlane_collectives::group::OperationBuilder<'g, u8>;

const ROUNDS: u64 = 40;

/// Rounds in a row without a look of the host in between.
fn rounds(ranks: usize, layer: StreamLayer, describe: impl Fn(Builder<'_>) -> Builder<'_> + Sync) {
    let results = in_group_with(layer, ranks, LONG, |mut group| {
        let me = group.rank().index();
        let mut gather = describe(group.all_gather(BLOCK_BYTES)).prepare()?;
        let (stream, rounds) = (Stream::new(), Rounds::default());
        for round in 1..=ROUNDS {
            if round % 7 == me as u64 {
                pause(&stream, Duration::from_millis(2));
            }
            rounds.fill(&stream, me, gather.input_memory().unwrap());
            let lease = gather.start_on(&stream)?;
            assert_eq!(lease.epoch(), Some(round));
            rounds.look(&stream, ranks, lease.output());
        }
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), ROUNDS, "rank {me}");
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn one_output() {
    for ranks in 1..=4 {
        rounds(ranks, StreamLayer::default(), |builder| builder.outputs(1));
    }
}

#[test]
fn two_outputs() {
    for ranks in [2, 3] {
        rounds(ranks, StreamLayer::default(), |builder| builder.outputs(2));
    }
}

#[test]
fn in_place() {
    rounds(3, StreamLayer::default(), |builder| builder.in_place());
}

#[test]
fn a_queue_that_is_always_full() {
    rounds(3, StreamLayer { slices_max: 1 }, |builder| builder.outputs(2));
}

#[test]
fn starts_of_the_host_and_on_a_stream_alternate() {
    let results = in_group(2, LONG, |mut group| {
        let me = group.rank().index();
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let (stream, rounds) = (Stream::new(), Rounds::default());
        for round in 1..=5 {
            rounds.fill(&stream, me, gather.input_memory().unwrap());
            let mut lease = gather.start_on(&stream)?;
            rounds.look(&stream, 2, lease.output());
            lease.wait()?;
            assert!(lease.poll()?);
            assert!(stream.is_idle_within(LONG));
            assert_eq!(rounds.right(), round);
            gather.input_mut()?.fill(byte(me, 200 + round));
            gather.run()?;
            assert_eq!(gather.output()?, gathered(2, 200 + round));
        }
        drop(gather);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn two_operations_on_two_streams() {
    let results = in_group(3, LONG, |mut group| {
        let me = group.rank().index();
        let mut gathers = Vec::new();
        for _ in 0..2 {
            let gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
            gathers.push((gather, Stream::new(), Rounds::default()));
        }
        for round in 0..20 {
            // Ranks put them onto their streams in other orders.
            for turn in 0..2 {
                let (gather, stream, rounds) = &mut gathers[(turn + me + round) % 2];
                rounds.fill(stream, me, gather.input_memory().unwrap());
                let lease = gather.start_on(stream)?;
                rounds.look(stream, 3, lease.output());
            }
        }
        for (_, stream, rounds) in &gathers {
            assert!(stream.is_idle_within(LONG));
            assert_eq!(rounds.right(), 20);
        }
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

/// Each start has its own timeout, not all of them together.
#[test]
fn many_slow_starts_are_not_overdue() {
    let results = in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let stream = Stream::new();
        for turn in 0..2 {
            // Together longer than the timeout.
            for _ in 0..10 {
                pause(&stream, SHORT / 8);
                drop(gather.start_on(&stream)?);
            }
            if turn == 0 {
                gather.start_on(&stream)?.wait()?;
            }
        }
        // Waits for the rest.
        drop(gather);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

/// Complete starts are closed by the watchdog, and later ones are not blamed.
#[test]
fn starts_that_nobody_looks_at_are_not_overdue() {
    let results = in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let stream = Stream::new();
        for _ in 0..2 {
            for _ in 0..3 {
                drop(gather.start_on(&stream)?);
            }
            // Beyond their deadlines.
            std::thread::sleep(SHORT * 5 / 4);
        }
        gather.start_on(&stream)?.wait()?;
        drop(gather);
        group.close()
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

/// The delay of a rank's stream, longer than a call that does not wait for the stream takes.
const PEER_STARTS_AFTER: Duration = Duration::from_secs(3);

/// Delays a stream, and tells afterwards that starts behind the delay can complete.
fn delay(stream: &Stream, is_over: &Arc<AtomicBool>) {
    let is_over = Arc::clone(is_over);
    stream.run(move || {
        std::thread::sleep(PEER_STARTS_AFTER);
        is_over.store(true, Ordering::SeqCst);
    });
}

#[test]
fn dropping_waits_for_open_starts() {
    ends_behind_open_starts(false);
}

#[test]
fn closing_waits_for_open_starts() {
    ends_behind_open_starts(true);
}

/// Drops an operation and closes its group, in one order or the other, while a start is open.
fn ends_behind_open_starts(close_first: bool) {
    // Of rank 1, for which rank 0 waits.
    let is_over = Arc::default();
    let results = in_group(2, LONG, |mut group| {
        let me = group.rank().index();
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let (stream, rounds) = (Stream::new(), Rounds::default());
        if me == 1 {
            delay(&stream, &is_over);
        }
        rounds.fill(&stream, me, gather.input_memory().unwrap());
        drop(gather.start_on(&stream)?);
        if close_first {
            group.close()?;
            assert!(is_over.load(Ordering::SeqCst), "rank {me} did not wait for the start");
            assert!(stream.is_idle_within(LONG));
            drop(gather);
        } else {
            drop(gather);
            assert!(is_over.load(Ordering::SeqCst), "rank {me} did not wait for the start");
            assert!(stream.is_idle_within(LONG));
            group.close()?;
        }
        Ok(())
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn closing_waits_for_starts_that_another_thread_waits_for() {
    let results = in_group(2, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let (stream, is_over) = (Stream::new(), Arc::default());
        delay(&stream, &is_over);
        drop(gather.start_on(&stream)?);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| gather.output().map(drop));
            std::thread::sleep(PEER_STARTS_AFTER / 6);
            group.close()?;
            assert!(is_over.load(Ordering::SeqCst), "the group did not wait for the start");
            assert!(stream.is_idle_within(LONG));
            // It sees the end of the start or of the group.
            let _ = waits.join().expect("the other thread does not panic");
            Ok(())
        })
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}

#[test]
fn closing_waits_for_open_starts_of_subgroups() {
    let results = in_group(2, LONG, |mut group| {
        let me = group.rank().index();
        let mut subgroup = group.split(Some(0), 0)?.expect("every rank has a color");
        let mut gather = subgroup.all_gather::<u8>(BLOCK_BYTES).prepare()?;
        let (stream, rounds, is_over) = (Stream::new(), Rounds::default(), Arc::default());
        // Longer than a group waits for its peers before it releases what is open.
        delay(&stream, &is_over);
        rounds.fill(&stream, me, gather.input_memory().unwrap());
        let lease = gather.start_on(&stream)?;
        rounds.look(&stream, 2, lease.output());
        drop(lease);
        group.close()?;
        assert!(is_over.load(Ordering::SeqCst), "rank {me} did not wait for the start");
        assert!(stream.is_idle_within(LONG));
        assert_eq!(rounds.right(), 1, "rank {me}");
        Ok(())
    });
    results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
}
