//! Checks of groups that are split from a group.

use peerlane_bootstrap::{Bootstrap, Notice};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

use super::{AT_ONCE, Handle, Open, assert_hears_loss, each, hear, long, next};

/// Opens a subgroup of the even ranks on an even rank, and of the odd ranks on an odd one. Its ranks are in reverse order.
fn halves(rank: &dyn Bootstrap, number: u32) -> Handle {
    let mine = |other: &Rank| other.0 % 2 == rank.rank().0 % 2;
    let members: Vec<_> = Rank::all(rank.ranks()).filter(mine).collect();
    rank.subgroup(number, &members.into_iter().rev().collect::<Vec<_>>()).unwrap()
}

pub(crate) fn a_subgroup_exchanges_among_its_ranks(open: Open) {
    for n in 1..=9 {
        let group = open(n);
        each(&group.ranks, |rank| {
            let own = rank.rank().0 as u8;
            for number in 0..3 {
                let half = halves(rank, number);
                let members = (0..n as u8).rev().filter(|other| other % 2 == own % 2);
                let members: Vec<_> = members.map(|other| vec![other, number as u8]).collect();
                assert_eq!(half.ranks(), members.len());
                assert_eq!(members[half.rank().index()][0], own);
                let given = half.exchange("keys", &[own, number as u8], long()).unwrap();
                assert_eq!(given, members, "n={n}");
                // A subgroup of one rank of the subgroup.
                let alone = half.subgroup(1000 + number, &[half.rank()]).unwrap();
                assert_eq!(alone.exchange("alone", &[own], long()).unwrap(), [[own]]);
                alone.leave(long()).unwrap();
                half.leave(long()).unwrap();
            }
            assert_eq!(rank.exchange("all", &[], long()).unwrap().len(), n);
        });
    }
}

pub(crate) fn messages_before_a_subgroup_is_open_arrive(open: Open) {
    let group = open(2);
    let both = [Rank(0), Rank(1)];
    let first = group.ranks[0].subgroup(0, &both).unwrap();
    first.broadcast(b"early").unwrap();
    first.abort(b"why").unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    let second = group.ranks[1].subgroup(0, &both).unwrap();
    let heard = next(&hear(second.as_ref()), 3);
    let (from, message) = (Rank(0), b"early".to_vec());
    assert_eq!(heard[0], Notice::Message { from, message });
    assert_eq!(heard[1], Notice::Abort { from, record: b"why".to_vec() });
    assert_eq!(heard[2], Notice::Acknowledged);
}

pub(crate) fn the_end_of_a_subgroup_is_not_that_of_another(open: Open) {
    let group = open(4);
    let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
    let subgroups = each(&group.ranks, |rank| (halves(rank, 0), halves(rank, 1)));
    let first: Vec<_> = subgroups.iter().map(|(one, _)| hear(one.as_ref())).collect();
    let other: Vec<_> = subgroups.iter().map(|(_, other)| hear(other.as_ref())).collect();
    subgroups[2].0.abort(b"why").unwrap();
    let aborted = [Notice::Abort { from: Rank(0), record: b"why".to_vec() }, Notice::Acknowledged];
    for rank in [0, 2] {
        assert_eq!(next(&first[rank], 2), aborted);
        let error = subgroups[rank].0.exchange("keys", &[], long()).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(Rank(0))));
    }
    for heard in [&first[1], &first[3]].into_iter().chain(&other).chain(&heard) {
        assert!(heard.try_recv().is_err());
    }
    let handles: Vec<_> = subgroups.into_iter().map(|(_, other)| other).collect();
    each(&handles, |rank| assert_eq!(rank.exchange("keys", &[], long()).unwrap().len(), 2));
}

pub(crate) fn a_lost_rank_is_lost_by_its_subgroups(open: Open) {
    for n in 4..=9 {
        let mut group = open(n);
        let mut subgroups = each(&group.ranks, |rank| halves(rank, 0));
        let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
        let halves: Vec<_> = subgroups.iter().map(|rank| hear(rank.as_ref())).collect();
        let lost = n - 1;
        // The last rank is rank 0 of its subgroup. Its connection closes, with all of its groups.
        let last = (group.ranks.pop(), subgroups.pop());
        let watch = Stopwatch::start();
        drop(last);
        for rank in 0..lost {
            assert_hears_loss(&heard[rank], Rank::at(lost));
            if rank % 2 == lost % 2 {
                assert_hears_loss(&halves[rank], Rank(0));
            }
        }
        watch.assert_within(AT_ONCE);
        let others = subgroups.into_iter().enumerate();
        let others = others.filter(|(rank, _)| rank % 2 != lost % 2).map(|(_, half)| half);
        let others: Vec<_> = others.collect();
        each(&others, |rank| rank.exchange("keys", &[], long()).unwrap());
    }
}

pub(crate) fn a_subgroup_that_is_dropped_is_lost_by_its_ranks(open: Open) {
    let group = open(4);
    let mut subgroups = each(&group.ranks, |rank| halves(rank, 7));
    let heard = hear(subgroups[1].as_ref());
    let watch = Stopwatch::start();
    drop(subgroups.pop());
    assert_hears_loss(&heard, Rank(0));
    watch.assert_within(AT_ONCE);
    each(&group.ranks, |rank| rank.exchange("all", &[], long()).unwrap());
    assert_eq!(each(&[subgroups.remove(0)], |rank| rank.ranks()), [2]);
}

pub(crate) fn a_goodbye_to_a_subgroup_is_no_loss(open: Open) {
    let group = open(4);
    let subgroups = each(&group.ranks, |rank| halves(rank, 7));
    let heard = hear(subgroups[0].as_ref());
    subgroups[2].leave(long()).unwrap();
    assert_eq!(next(&heard, 1), [Notice::Left { rank: Rank(0) }]);
    let error = subgroups[0].exchange("keys", &[], long()).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(0))));
    // A rank that leaves the first group leaves all others.
    let heard = hear(subgroups[1].as_ref());
    std::thread::scope(|scope| {
        scope.spawn(|| group.ranks[3].leave(long()));
        assert_eq!(next(&heard, 1), [Notice::Left { rank: Rank(0) }]);
        each(&group.ranks[..3], |rank| rank.leave(long()).unwrap());
    });
}
