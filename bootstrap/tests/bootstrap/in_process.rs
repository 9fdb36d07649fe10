//! The bootstrap for ranks that are threads of one process.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::checks::{Handle, Opened, hear, long, next};
use insta::assert_snapshot;
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::{Bootstrap, in_process};
use peerlane_hal::{ErrorKind, Rank};

fn open(ranks: usize) -> Opened {
    let ranks = in_process::group(ranks).unwrap().into_iter().map(|rank| Box::new(rank) as Handle);
    Opened { ranks: ranks.collect(), keep: Box::new(()) }
}

crate::checks::run_all!(open);

#[test]
fn a_group_of_no_ranks_is_refused() {
    let error = in_process::group(0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_snapshot!(error, @"number of ranks is 0, expected at least 1");
}

#[test]
fn a_loss_says_how_it_came() {
    let mut ranks = in_process::group(2).unwrap();
    let heard = hear(&ranks[0]);
    drop(ranks.pop());
    assert_snapshot!(format!("{:?}", next(&heard, 1)), @r#"[Lost { rank: Rank(1), how: "its bootstrap was dropped before the rank left the group" }]"#);

    let mut ranks = in_process::group(2).unwrap();
    let heard = hear(&ranks[0]);
    let lost = ranks.pop().unwrap();
    let rank = std::thread::spawn(move || {
        let _lost = lost;
        panic!("on purpose");
    });
    assert!(rank.join().is_err());
    assert_snapshot!(format!("{:?}", next(&heard, 1)), @r#"[Lost { rank: Rank(1), how: "its thread panicked" }]"#);
}

#[test]
fn run_returns_results_in_rank_order() {
    for n in 1..=9 {
        let sums = in_process::run(n, |rank| {
            let given = rank.exchange("numbers", &[rank.rank().0 as u8], long())?;
            rank.leave(long())?;
            Ok((rank.rank(), given.concat().iter().map(|byte| u32::from(*byte)).sum::<u32>()))
        });
        let total = (0..n as u32).sum();
        let expected: Vec<_> = Rank::all(n).map(|rank| (rank, total)).collect();
        assert_eq!(sums.unwrap(), expected);
    }
}

#[test]
fn run_returns_the_error_of_the_rank_that_failed_by_itself() {
    let ended = in_process::run(4, |rank| {
        if rank.rank() == Rank(2) {
            return Err(Error::new(ErrorKind::OutOfMemory, "no memory left"));
        }
        rank.exchange("keys", &[], long()).map(drop)
    });
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    assert_eq!(error.to_string(), "no memory left");
}

#[test]
fn run_passes_a_panic_on_after_all_ranks_have_ended() {
    let ended = AtomicU32::new(0);
    let caught = catch_unwind(AssertUnwindSafe(|| {
        in_process::run(3, |rank| {
            if rank.rank() == Rank(0) {
                panic!("rank 0 panics on purpose");
            }
            let error = rank.exchange("keys", &[], long()).unwrap_err();
            assert_eq!(error.peer(), Some(Rank(0)));
            ended.fetch_add(1, Ordering::Relaxed);
            Ok(())
        })
    }));
    let payload = caught.unwrap_err();
    assert_eq!(payload.downcast_ref(), Some(&"rank 0 panics on purpose"));
    assert_eq!(ended.into_inner(), 2);
}
