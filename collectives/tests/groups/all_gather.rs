//! Runs all-gathers on ranks as threads over the host fabric.

use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process::{self, InProcessBootstrap};
use peerlane_collectives::element::Element;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, Operation};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;

fn open(bootstrap: InProcessBootstrap) -> Result<Group, Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    Group::open(bootstrap, fabric)
}

fn check<T: Element + PartialEq>(
    gather: &mut Operation<T>,
    rank: usize,
    ranks: usize,
    value: impl Fn(usize, usize) -> T,
) -> Result<(), Error> {
    for (index, element) in gather.input_mut()?.iter_mut().enumerate() {
        *element = value(rank, index);
    }
    gather.run()?;
    let block_len = gather.output()?.len() / ranks;
    for (index, element) in gather.output()?.iter().enumerate() {
        assert_eq!(*element, value(index / block_len, index % block_len), "element {index}");
    }
    Ok(())
}

#[test]
fn every_rank_gets_every_block() {
    for ranks in 1..=9 {
        let reports = in_process::run(ranks, |bootstrap| {
            let rank = bootstrap.rank().index();
            let mut group = open(bootstrap)?;
            let mut gather = group.all_gather::<i64>(257).prepare()?;
            for round in 0..5 {
                let value = |rank, index| (round * 1_000_000 + rank * 1000 + index) as i64;
                check(&mut gather, rank, ranks, value)?;
            }
            group.barrier()?;
            let mut in_place = group.all_gather::<u8>(33).in_place().chunks(2).prepare()?;
            check(&mut in_place, rank, ranks, |rank, index| (rank * 7 + index) as u8)?;
            let report = gather.report().to_string();
            group.close()?;
            Ok(report)
        });
        let reports = reports.unwrap_or_else(|error| panic!("{ranks} ranks: {error}"));
        assert!(reports[0].starts_with("direct"), "{}", reports[0]);
    }
}

/// Waiting callers park without a timer, so the watchdog must wake up for the shorter timeout.
#[test]
fn a_short_timeout_is_kept_in_a_group_with_a_long_one() {
    for _ in 0..10 {
        let ended = in_process::run(2, |bootstrap| {
            let rank = bootstrap.rank().0;
            let mut group = open(bootstrap)?;
            let timeout = Duration::from_millis(200);
            let mut gather = group.all_gather::<u8>(1).timeout(timeout).prepare()?;
            let watch = Stopwatch::start();
            if rank == 0 {
                let error = gather.run().unwrap_err();
                assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
            } else {
                // A thread that only yields waits for a processor, which is not part of the measured time.
                while group.abort_record().is_none() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            watch.assert_within(timeout + Duration::from_millis(500));
            Ok(())
        });
        ended.unwrap();
    }
}

/// A length at which no put completes inside the call of `start`.
const LARGE: usize = 3 << 20;

#[test]
fn starts_may_be_waited_for_in_any_order() {
    in_process::run(3, |bootstrap| {
        let rank = bootstrap.rank().0;
        let mut group = open(bootstrap)?;
        let mut first = group.all_gather::<u8>(LARGE).prepare()?;
        let mut second = group.all_gather::<u8>(LARGE).prepare()?;
        first.input_mut()?.fill(rank as u8 + 1);
        second.input_mut()?.fill(rank as u8 + 101);
        let (one, two) = (first.start()?, second.start()?);
        if rank == 1 {
            two.wait()?;
            one.wait()?;
        } else {
            one.wait()?;
            two.wait()?;
        }
        for (gather, base) in [(&mut first, 1), (&mut second, 101)] {
            for (rank, block) in gather.output()?.chunks(LARGE).enumerate() {
                assert!(block.iter().all(|byte| *byte == base + rank as u8));
            }
        }
        group.close()
    })
    .unwrap();
}

#[test]
fn a_barrier_may_come_before_or_after_a_wait() {
    in_process::run(3, |bootstrap| {
        let rank = bootstrap.rank().0;
        let mut group = open(bootstrap)?;
        let mut gather = group.all_gather::<u8>(LARGE).prepare()?;
        gather.input_mut()?.fill(rank as u8 + 1);
        let started = gather.start()?;
        if rank == 1 {
            group.barrier()?;
            started.wait()?;
        } else {
            started.wait()?;
            group.barrier()?;
        }
        assert_eq!(gather.output()?[2 * LARGE], 3);
        group.close()
    })
    .unwrap();
}

#[test]
fn an_operation_beside_compute_is_so_on_all_ranks_and_in_the_groups_of_a_group() {
    let texts = in_process::run(2, |bootstrap| {
        let rank = bootstrap.rank();
        let fabric = host::Fabric::open(rank, bootstrap.ranks())?;
        let options = GroupOptions::default().beside_compute(true);
        let mut group = options.open(bootstrap, fabric)?;

        // The operation of a group that was split from it has the same intent.
        let mut part = group.split(Some(0), 0)?.expect("every rank has a color");
        let is_beside = rank == Rank(0);
        let differing = part.all_gather::<u8>(1).beside_compute(is_beside).prepare().unwrap_err();
        part.all_gather::<u8>(1).beside_compute(true).prepare()?.run()?;
        let of_group = match is_beside {
            true => part.all_gather::<u8>(1),
            false => part.all_gather::<u8>(1).beside_compute(true),
        };
        of_group.prepare()?.run()?;

        part.close()?;
        group.close()?;
        Ok(differing.to_string())
    });
    let expected =
        "all-gather 1: ranks disagree: beside_compute is false on rank 1, true on rank 0";
    for text in texts.unwrap() {
        assert!(text.contains(expected), "{text}");
    }
}
