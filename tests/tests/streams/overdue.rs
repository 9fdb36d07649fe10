//! Starts operations that never complete and are not waited for: the stream must go on, and every
//! later call must return the cause.

use std::sync::Barrier;
use std::time::Duration;

use insta::assert_snapshot;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_test_support::Stopwatch;
use peerlane_tests::middleware::{Stream, StreamLayer};

use crate::support::{
    BLOCK_BYTES, GRACE, Gate, LONG, SHORT, assert_idle_within, await_end, in_group, in_group_with,
};

#[test]
fn a_peer_that_does_not_come_is_named_on_all_ranks() {
    let done = Gate::default();
    let texts = in_group(3, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).outputs(1).prepare().unwrap();
        let stream = Stream::new();
        if group.rank() == Rank(1) {
            done.wait();
        } else {
            drop(gather.start_on(&stream).unwrap());
            assert_idle_within(&stream, SHORT + GRACE);
            done.open();
        }
        let error = gather.start_on(&stream).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
        assert_eq!(gather.input_mut().unwrap_err().to_string(), error.to_string());
        error.to_string().replace("rank 2 waited", "rank 0 waited")
    });
    assert_eq!((&texts[0], &texts[1]), (&texts[1], &texts[2]));
    assert_snapshot!(texts[0], @r#"all-gather 1, start 1, did not finish within 1.5s: rank 0 waited for the flag "ready from 1" from rank 1, which has never signaled it; rank 1 is alive but late"#);
}

#[test]
fn waiting_on_the_host_says_the_same() {
    let done = Gate::default();
    in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).outputs(2).prepare().unwrap();
        if group.rank() == Rank(1) {
            return done.wait();
        }
        let stream = Stream::new();
        drop(gather.start_on(&stream).unwrap());
        let mut lease = gather.start_on(&stream).unwrap();
        assert!(!lease.poll().unwrap());
        let error = lease.wait().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
        assert_idle_within(&stream, GRACE);
        done.open();
    });
}

/// The time of a start begins when the start before it completes, and not when that is noticed.
#[test]
fn a_deadline_counts_from_the_end_of_the_start_before() {
    const TIMEOUT: Duration = Duration::from_secs(6);
    let done = Gate::default();
    in_group(2, TIMEOUT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).outputs(1).prepare().unwrap();
        let stream = Stream::new();
        let watch = Stopwatch::start();
        if group.rank() == Rank(1) {
            std::thread::sleep(TIMEOUT / 2);
            drop(gather.start_on(&stream).unwrap());
            return done.wait();
        }
        for _ in 0..2 {
            drop(gather.start_on(&stream).unwrap());
        }
        assert!(stream.is_idle_within(LONG), "the stream is blocked");
        let took = watch.elapsed();
        let limit = TIMEOUT / 2 + TIMEOUT + GRACE;
        assert!(
            took.total > TIMEOUT && took.is_within(limit),
            "it took {took}, expected {limit:?}"
        );
        done.open();
    });
}

/// Long before the timeout.
#[test]
fn a_peer_that_is_lost_ends_starts_that_nobody_waits_for() {
    let started = Barrier::new(3);
    in_group(3, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        if group.rank() == Rank(2) {
            started.wait();
            return drop((gather, group));
        }
        let stream = Stream::new();
        drop(gather.start_on(&stream).unwrap());
        started.wait();
        assert_idle_within(&stream, GRACE);
        let error = gather.start_on(&stream).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(2))));
    });
}

#[test]
fn a_stream_that_holds_a_start_up_is_named() {
    let done = Gate::default();
    in_group(1, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        let stream = Stream::new();
        done.hold(&stream);
        drop(gather.start_on(&stream).unwrap());
        await_end(&group);
        done.open();
        assert_idle_within(&stream, GRACE);
        let error = gather.start_on(&stream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert_snapshot!(error, @"all-gather 1, start 1, did not finish within 1.5s: rank 0 did not complete its copies or earlier work on its stream");
    });
}

#[test]
fn a_queue_that_stays_full_is_an_error_in_time() {
    in_group_with(StreamLayer { slices_max: 2 }, 1, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        let (stream, gate) = (Stream::new(), Gate::default());
        gate.hold(&stream);
        let watch = Stopwatch::start();
        let error = loop {
            match gather.start_on(&stream) {
                Ok(lease) => assert!(lease.epoch() <= Some(2), "there is no room"),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::Timeout);
        watch.assert_within(SHORT + GRACE);
        gate.open();
        assert_idle_within(&stream, GRACE);
    });
}

/// A group that is dropped is over; a handle that outlives it leaves no stream blocked.
#[test]
fn dropping_the_group_lets_the_own_streams_go() {
    let done = Gate::default();
    in_group(2, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        if group.rank() == Rank(1) {
            return done.wait();
        }
        let stream = Stream::new();
        drop(gather.start_on(&stream).unwrap());
        drop(group);
        assert_idle_within(&stream, GRACE);
        assert!(gather.start_on(&stream).is_err());
        done.open();
    });
}
