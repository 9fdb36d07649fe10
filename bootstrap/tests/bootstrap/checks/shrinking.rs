//! What remains of a group forms a new one.

use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use peerlane_bootstrap::error::Error;
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

use super::{AT_ONCE, Handle, LATE_MAX, Open, Opened, each, hear, long};

/// Shrinks the group of these ranks, and lets them exchange their old ranks.
fn shrink(ranks: &[Handle], excluded: &[Rank]) -> Vec<(u32, Vec<Vec<u8>>)> {
    each(ranks, |rank| {
        let new = rank.shrink(excluded, long()).unwrap();
        assert_eq!(new.host(), rank.host());
        let given = new.exchange("old ranks", &[rank.rank().0 as u8], long()).unwrap();
        assert_eq!(given.len(), new.ranks());
        (new.rank().0, given)
    })
}

/// Removes ranks, and drops them.
fn lose(ranks: &mut Vec<Handle>, lost: &[u32]) {
    ranks.retain(|rank| !lost.contains(&rank.rank().0));
}

pub(crate) fn the_ranks_that_are_left_find_each_other(open: Open) {
    for (count, lost) in [
        (2, &[0][..]),
        (2, &[1]),
        (3, &[0]),
        (3, &[1]),
        (5, &[0, 1]),
        (5, &[0, 2, 4]),
        (9, &[0, 8]),
    ] {
        let Opened { mut ranks, keep: _keep } = open(count);
        let watch = Stopwatch::start();
        lose(&mut ranks, lost);
        let old: Vec<_> = ranks.iter().map(|rank| vec![rank.rank().0 as u8]).collect();
        for (new, (rank, given)) in shrink(&ranks, &[Rank(lost[0])]).into_iter().enumerate() {
            assert_eq!(
                (rank as usize, given),
                (new, old.clone()),
                "{count} ranks without {lost:?}"
            );
        }
        watch.assert_within(AT_ONCE);
    }
}

pub(crate) fn a_group_that_has_shrunk_can_shrink_again(open: Open) {
    let Opened { mut ranks, keep: _keep } = open(4);
    lose(&mut ranks, &[0]);
    let mut ranks: Vec<Handle> = each(&ranks, |rank| rank.shrink(&[Rank(0)], long()).unwrap());
    let heard = hear(ranks[2].as_ref());
    lose(&mut ranks, &[0]);
    super::assert_hears_loss(&heard, Rank(0));
    assert_eq!(shrink(&ranks, &[Rank(0)]).len(), 2);
}

/// A stalled rank is excluded, although its process runs.
pub(crate) fn an_excluded_rank_is_not_waited_for(open: Open) {
    let Opened { mut ranks, keep: _keep } = open(3);
    let stalled = ranks.remove(0);
    let watch = Stopwatch::start();
    assert_eq!(shrink(&ranks, &[Rank(0)]).len(), 2);
    watch.assert_within(AT_ONCE);
    drop(stalled);
}

pub(crate) fn a_rank_that_comes_late_is_left_out_and_told(open: Open) {
    let Opened { ranks, keep: _keep } = open(4);
    // The ranks that are not late wait for half of it.
    let timeout = Duration::from_secs(4);
    let formed = Barrier::new(3);
    let late_is_told = Barrier::new(3);
    let watch = Stopwatch::start();
    let (took, formed, late) = thread::scope(|scope| {
        let others = [0, 2].map(|rank| {
            let (rank, formed, late_is_told) = (&ranks[rank], &formed, &late_is_told);
            scope.spawn(move || {
                let new = rank.shrink(&[Rank(1)], Deadline::after(timeout));
                formed.wait();
                // The late rank is told by the new group.
                late_is_told.wait();
                new.unwrap().ranks()
            })
        });
        formed.wait();
        let took = watch.elapsed();

        let late = ranks[3].shrink(&[Rank(1)], long()).map(drop);
        late_is_told.wait();
        (took, others.map(|rank| rank.join().unwrap()), late.unwrap_err())
    });

    assert!(took.net() < timeout / 2 + LATE_MAX, "the group formed after {took}");
    assert_eq!(formed, [2, 2]);
    assert_eq!((late.kind(), late.peer()), (ErrorKind::Aborted, None));
    let text = "the group has shrunk without rank 3, which did not call `shrink` in time";
    assert!(late.to_string().ends_with(text), "{late}");
}

/// A rank that ends between two attempts is left out of the second.
pub(crate) fn an_attempt_can_be_repeated(open: Open) {
    let Opened { mut ranks, keep: _keep } = open(4);
    lose(&mut ranks, &[1]);
    let new: Vec<Handle> = each(&ranks, |rank| rank.shrink(&[Rank(1)], long()).unwrap());
    drop(new);
    lose(&mut ranks, &[0]);
    let new: Vec<Result<Handle, Error>> = each(&ranks, |rank| rank.shrink(&[Rank(1)], long()));
    assert!(new.iter().all(|new| new.as_ref().is_ok_and(|new| new.ranks() == 2)));
}
