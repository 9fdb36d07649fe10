//! Leaves out a rank: the others must name it, when their timeout has passed and not later.

use std::time::Instant;

use insta::assert_snapshot;
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_collectives::error::Error;
use peerlane_hal::{Deadline, Rank};

use crate::ranks::{Host, LONG, Latch, SHORT, all_said, in_group, on_ranks, open};

/// All but the last of three ranks make a call; then the last one makes it too.
fn late(call: impl Fn(Host) -> Result<(), Error> + Sync) -> String {
    let latch = Latch::default();
    let results = in_group(3, SHORT, |group| {
        if group.rank() == Rank(2) {
            latch.wait_for(2);
            return call(group);
        }
        let called = call(group);
        latch.come();
        called
    });
    all_said(results)
}

#[test]
fn to_open() {
    let latch = Latch::default();
    let results = on_ranks(3, |bootstrap| {
        if bootstrap.rank() == Rank(2) {
            latch.wait_for(2);
            return open(bootstrap, SHORT).map(drop);
        }
        let opened = open(bootstrap, SHORT).map(drop);
        latch.come();
        opened
    });
    assert_snapshot!(all_said(results), @r#"all: timeout, rank 2: exchange "open": rank 2 did not take part within 4 s; rank 2 does not answer"#);
}

#[test]
fn to_prepare() {
    let text = late(|mut group| group.all_gather::<u8>(4).prepare().map(drop));
    assert_snapshot!(text, @r#"all: timeout, rank 2: exchange "all-gather 1": rank 2 did not take part within 4 s; rank 2 is alive but late"#);
}

#[test]
fn to_a_barrier() {
    assert_snapshot!(late(|mut group| group.barrier()), @r#"all: timeout, rank 2: exchange "barrier": rank 2 did not take part within 4 s; rank 2 is alive but late"#);
}

#[test]
fn to_close() {
    assert_snapshot!(late(Host::close), @r#"all: timeout, rank 2: exchange "close": rank 2 did not take part within 4 s; rank 2 is alive but late"#);
}

#[test]
fn to_a_start() {
    let latch = Latch::default();
    let results = in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(4).outputs(1).prepare()?;
        if group.rank() == Rank(1) {
            latch.wait_for(1);
            let late = gather.run();
            assert_eq!(said_again(&mut group, gather.run()), said_again(&mut group, late.clone()));
            return late;
        }
        let ran = gather.run();
        latch.come();
        assert_eq!(said_again(&mut group, gather.run()), said_again(&mut group, ran.clone()));
        ran
    });
    assert_snapshot!(all_said(results), @r#"all: timeout, rank 1: all-gather 1, start 1, did not finish within 4s: rank 0 waited for the flag "ready from 1" from rank 1, which has never signaled it; rank 1 is alive but late"#);
}

#[test]
fn to_a_start_without_ready() {
    let latch = Latch::default();
    let results = in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(4).outputs(2).prepare()?;
        if group.rank() == Rank(1) {
            latch.wait_for(1);
            return gather.run();
        }
        let ran = gather.run();
        latch.come();
        ran
    });
    assert_snapshot!(all_said(results), @r#"all: timeout, rank 1: all-gather 1, start 1, did not finish within 4s: rank 0 waited for the flag "arrived 1.0" from rank 1, which has never signaled it; rank 1 is alive but late"#);
}

/// A start that nobody waits for is overdue all the same.
#[test]
fn to_a_start_that_nobody_waits_for() {
    let results = in_group(2, SHORT, |mut group| {
        let mut gather = group.all_gather::<u8>(4).outputs(1).prepare()?;
        if group.rank() == Rank(0) {
            drop(gather.start()?);
        }
        let begin = Instant::now();
        while group.abort_record().is_none() {
            assert!(begin.elapsed() < LONG, "the start is not overdue");
            std::thread::yield_now();
        }
        gather.output().map(drop)
    });
    assert_snapshot!(all_said(results), @r#"all: timeout, rank 1: all-gather 1, start 1, did not finish within 4s: rank 0 waited for the flag "ready from 1" from rank 1, which has never signaled it; rank 1 is alive but late"#);
}

#[test]
fn two_processes_of_one_rank() {
    let hub = Hub::bind("127.0.0.1:0", 2).expect("a hub");
    let join = |rank| {
        let environment = Environment::at_hub(hub.address(), Rank(rank), 2);
        TcpBootstrap::join(&environment, Deadline::after(LONG))
    };
    std::thread::scope(|scope| {
        let first = scope.spawn(|| join(1));
        // Whoever comes second is refused; the other waits for rank 0.
        let second = scope.spawn(|| join(1));
        let zero = scope.spawn(|| join(0));
        let mut results = [first, second].map(|thread| thread.join().expect("no panic"));
        results.sort_by_key(Result::is_err);
        let [taken, refused] = results;
        assert!(taken.is_ok() && zero.join().expect("no panic").is_ok());
        let text = crate::ranks::said(refused);
        let (begin, end) = (text.find("127.0.0.1"), text.find(" rejected"));
        assert!(begin.is_some() && end.is_some(), "{text}");
        let hub = hub.address().to_string();
        let text = text.replace(&hub, "HUB");
        let (head, tail) =
            text.split_once("connected from 127.0.0.1:").expect("the other's address");
        let tail = tail.trim_start_matches(|letter: char| letter.is_ascii_digit());
        assert_snapshot!(format!("{head}connected from OTHER{tail}"), @"mismatch, rank 1: the hub at HUB rejected this rank: another process on this host, connected from OTHER, is already rank 1; set a different RANK in every process, and a different port for every job");
    });
}

fn said_again(group: &mut Host, result: Result<(), Error>) -> String {
    // The group itself says the same.
    let barrier = crate::ranks::said(group.barrier());
    let said = crate::ranks::said(result);
    assert_eq!(barrier, said);
    said
}
