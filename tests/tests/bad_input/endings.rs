//! Ends groups early: an engine fails, a rank leaves, a rank uses its group after the end.

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::GroupOptions;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::{FailAtLayer, Wrapped};

use crate::ranks::{LONG, Latch, all_said, fabric, in_group, on_ranks, said};

/// Rank 1 of three has an engine that fails after so many ops.
fn failing(ops: u64, outputs: u32, kind: ErrorKind) -> String {
    failing_with(outputs, FailAtLayer { ops, kind, peer: None })
}

fn failing_with(outputs: u32, layer: FailAtLayer) -> String {
    let results = on_ranks(3, |bootstrap| {
        let ops = if bootstrap.rank() == Rank(1) { layer.ops } else { u64::MAX };
        let layer = FailAtLayer { ops, ..layer };
        let fabric = Wrapped::new(fabric(&bootstrap), layer);
        let mut group = GroupOptions::default().timeout(LONG).open(bootstrap, fabric)?;
        let mut gather = group.all_gather::<u8>(4).outputs(outputs).prepare()?;
        let failed = (0..10).map(|_| gather.run()).find(Result::is_err).expect("it fails");
        let first = said(failed.clone());
        assert_eq!(said(gather.run()), first);
        assert_eq!(said(gather.start().map(drop)), first);
        assert_eq!(said(gather.output().map(drop)), first);
        assert_eq!(said(gather.input_mut().map(drop)), first);
        assert_eq!(said(group.barrier()), first);
        assert_eq!(said(group.all_gather::<u8>(4).prepare()), first);
        let record = group.abort_record().expect("a group that is over has a record");
        assert_eq!(record.to_string(), failed.clone().unwrap_err().to_string());
        assert_eq!((record.by, record.peer), (Some(Rank(1)), layer.peer.or(Some(Rank(1)))));
        assert_eq!(said(group.close()), first);
        failed
    });
    all_said(results)
}

#[test]
fn an_engine_that_fails_at_once() {
    assert_snapshot!(failing(0, 1, ErrorKind::Other), @"all: aborted, rank 1: all-gather 1, start 1, did not finish because the engine of rank 1 failed: cannot submit ops: op 1 of a slice failed, because the layer FailAt injected the error: other");
}

#[test]
fn an_engine_that_fails_in_the_middle() {
    assert_snapshot!(failing(20, 1, ErrorKind::Other), @"all: aborted, rank 1: all-gather 1, start 2, did not finish because the engine of rank 1 failed: cannot submit ops: op 10 of a slice failed, because the layer FailAt injected the error: other");
    assert_snapshot!(failing(20, 2, ErrorKind::Other), @"all: aborted, rank 1: all-gather 1, start 3, did not finish because the engine of rank 1 failed: cannot submit ops: op 7 of a slice failed, because the layer FailAt injected the error: other");
}

#[test]
fn a_device_that_is_lost_is_a_lost_peer_for_the_others() {
    assert_snapshot!(failing(0, 1, ErrorKind::DeviceLost), @r"
    rank 0: peer lost, rank 1: all-gather 1, start 1, did not finish because the engine of rank 1 failed: cannot submit ops: op 1 of a slice failed, because the layer FailAt injected the error: device lost
    rank 1: device lost, rank 1: all-gather 1, start 1, did not finish because the engine of rank 1 failed: cannot submit ops: op 1 of a slice failed, because the layer FailAt injected the error: device lost
    rank 2: peer lost, rank 1: all-gather 1, start 1, did not finish because the engine of rank 1 failed: cannot submit ops: op 1 of a slice failed, because the layer FailAt injected the error: device lost
    ");
}

#[test]
fn an_engine_that_loses_a_peer_blames_the_peer() {
    let lost = FailAtLayer { ops: 0, kind: ErrorKind::PeerLost, peer: Some(Rank(2)) };
    assert_snapshot!(failing_with(1, lost), @"all: peer lost, rank 2: all-gather 1, start 1, did not finish because the engine of rank 1 lost rank 2: cannot submit ops: op 1 of a slice failed, because the layer FailAt injected the error: peer lost");
}

#[test]
fn after_the_close_nothing_starts() {
    let results = in_group(2, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        gather.run()?;
        group.close()?;
        assert_eq!(said(gather.output().map(drop)), said(gather.run()));
        gather.run()
    });
    assert_snapshot!(all_said(results), @"all: aborted, no rank: the group was closed before");
}

#[test]
fn a_rank_that_drops_its_group_is_lost() {
    let results = in_group(3, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        gather.run()?;
        if group.rank() == Rank(1) {
            return Ok(());
        }
        gather.run()
    });
    assert_snapshot!(all_said(results), @r"
    rank 0: peer lost, rank 1: rank 1 is lost: its group was dropped without a call of `close`
    rank 1: ok
    rank 2: peer lost, rank 1: rank 1 is lost: its group was dropped without a call of `close`
    ");
}

#[test]
fn a_rank_that_keeps_only_its_operation_is_lost() {
    let (ran_once, ran_twice) = (Latch::default(), Latch::default());
    let results = in_group(3, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        gather.run()?;
        ran_once.come();
        if group.rank() == Rank(1) {
            ran_once.wait_for(3);
            drop(group);
            ran_twice.wait_for(2);
            return gather.run();
        }
        let ran = gather.run();
        ran_twice.come();
        ran
    });
    assert_snapshot!(all_said(results), @"all: peer lost, rank 1: rank 1 is lost: its group was dropped without a call of `close`");
}

#[test]
fn a_rank_that_fails_alone_does_not_hold_the_others() {
    let results = in_group(3, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(4).prepare()?;
        if group.rank() == Rank(2) {
            return Err(Error::new(ErrorKind::Other, "it went wrong elsewhere"));
        }
        gather.run()?;
        group.close()
    });
    assert_snapshot!(all_said(results), @r"
    rank 0: peer lost, rank 2: rank 2 is lost: its group was dropped without a call of `close`
    rank 1: peer lost, rank 2: rank 2 is lost: its group was dropped without a call of `close`
    rank 2: other, no rank: it went wrong elsewhere
    ");
}
