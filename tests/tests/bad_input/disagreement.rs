//! Lets ranks disagree about the operation or the group.

use std::time::Duration;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;

use crate::ranks::{Host, LONG, all_said, gather, in_group, on_ranks, open};

/// Prepares, must fail, and gathers afterwards: the group is still good.
fn prepared(prepare: impl Fn(&mut Host) -> Result<(), Error> + Sync) -> String {
    let results = in_group(3, LONG, |mut group| {
        let refused = prepare(&mut group);
        gather(&mut group).expect("the group is still whole");
        group.close().expect("the group closes");
        refused
    });
    all_said(results)
}

#[test]
fn block_lengths_that_differ() {
    let text = prepared(|group| {
        let block_len = if group.rank() == Rank(2) { 8 } else { 4 };
        group.all_gather::<f32>(block_len).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 2: all-gather 1: ranks disagree: block_bytes is 32 on rank 2, 16 on rank 0");
}

#[test]
fn element_types_that_differ_though_the_bytes_are_the_same() {
    let text = prepared(|group| match group.rank() {
        Rank(1) => group.all_gather::<i32>(4).prepare().map(drop),
        _ => group.all_gather::<f32>(4).prepare().map(drop),
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: dtype is i32 on rank 1, f32 on rank 0");
}

#[test]
fn chunks_that_differ() {
    let text = prepared(|group| {
        let chunks = 1 + group.rank().0.min(1);
        group.all_gather::<u8>(4).chunks(chunks).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: chunks is 2 on rank 1, 1 on rank 0");
}

#[test]
fn in_place_on_one_rank_only() {
    let text = prepared(|group| {
        let in_place = group.rank() == Rank(0);
        let gather = group.all_gather::<u8>(4).outputs(1);
        if in_place { gather.in_place() } else { gather }.prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: in_place is false on rank 1, true on rank 0");
}

#[test]
fn outputs_that_differ() {
    let text = prepared(|group| {
        let outputs = 1 + group.rank().0.min(1);
        group.all_gather::<u8>(4).outputs(outputs).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: outputs is 2 on rank 1, 1 on rank 0");
}

#[test]
fn timeouts_of_an_operation_that_differ() {
    let text = prepared(|group| {
        let timeout = Duration::from_secs(1 + u64::from(group.rank().0));
        group.all_gather::<u8>(4).timeout(timeout).prepare().map(drop)
    });
    assert_snapshot!(text, @"all: mismatch, rank 1: all-gather 1: ranks disagree: timeout is 2s on rank 1, 1s on rank 0");
}

#[test]
fn timeouts_of_a_group_that_differ() {
    let results = on_ranks(3, |bootstrap| {
        let timeout = LONG + Duration::from_secs(u64::from(bootstrap.rank().0 / 2));
        open(bootstrap, timeout)
    });
    assert_snapshot!(all_said(results), @"all: mismatch, rank 2: open: ranks disagree: timeout is 21s on rank 2, 20s on rank 0");
}

#[test]
fn calls_in_another_order() {
    let results = in_group(2, LONG, |mut group| match group.rank() {
        Rank(0) => group.barrier(),
        _ => group.close(),
    });
    for result in results {
        // Which of the two is named is a matter of who came first.
        let error = result.expect_err("one order is wrong");
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_eq!(
            error.to_string(),
            "ranks call different collectives in exchange 2: rank 0 calls \"barrier\", rank 1 \
             calls \"close\"; make the same collective calls in the same order on all ranks"
        );
    }
}

#[test]
fn a_fabric_of_another_rank() {
    let results = on_ranks(2, |bootstrap| {
        let fabric = host::Fabric::open(Rank(0), 2)?;
        Group::open(bootstrap, fabric)
    });
    assert_snapshot!(all_said(results), @r"
    rank 0: aborted, rank 1: open: rank 1 failed (invalid argument): the fabric was opened as rank 0, but the bootstrap as rank 1; open both as the same rank
    rank 1: invalid argument, no rank: the fabric was opened as rank 0, but the bootstrap as rank 1; open both as the same rank
    ");
}
