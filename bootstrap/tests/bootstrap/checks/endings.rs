//! Checks of losses, aborts and goodbyes.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use insta::{allow_duplicates, assert_snapshot};
use peerlane_bootstrap::Notice;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

use super::{AT_ONCE, Open, assert_hears_loss, each, hear, long, next};

pub(crate) fn a_loss_before_an_exchange_is_told(open: Open) {
    for n in 2..=9 {
        let mut group = open(n);
        let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
        let lost = Rank::at(n - 1);
        drop(group.ranks.pop());
        heard[..n - 1].iter().for_each(|heard| assert_hears_loss(heard, lost));
        for error in each(&group.ranks, |rank| rank.exchange("keys", &[], long()).unwrap_err()) {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(lost)), "n={n}");
        }
    }
}

pub(crate) fn a_loss_ends_an_exchange_at_once(open: Open) {
    let mut group = open(3);
    let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
    let lost = group.ranks.remove(1);
    let watch = Stopwatch::start();
    let waiting = Barrier::new(3);
    thread::scope(|scope| {
        scope.spawn(|| {
            waiting.wait();
            thread::sleep(Duration::from_millis(50));
            drop(lost);
        });
        for error in each(&group.ranks, |rank| {
            waiting.wait();
            rank.exchange("keys", &[], long()).unwrap_err()
        }) {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
            let text = error.to_string();
            assert!(text.starts_with("exchange \"keys\": rank 1 is lost: "), "{text}");
        }
    });
    watch.assert_within(AT_ONCE);
    assert_hears_loss(&heard[0], Rank(1));
    assert_hears_loss(&heard[2], Rank(1));
}

pub(crate) fn what_was_complete_before_a_loss_stays_complete(open: Open) {
    for round in 0..20 {
        let group = open(4);
        thread::scope(|scope| {
            for (rank, handle) in group.ranks.into_iter().enumerate() {
                scope.spawn(move || {
                    let given = handle.exchange("last", &[rank as u8], long());
                    assert!(given.is_ok(), "rank {rank}, round {round}: {given:?}");
                    // Whoever has all pieces is gone at once.
                });
            }
        });
    }
}

pub(crate) fn the_first_of_two_aborts_is_heard_by_all(open: Open) {
    for n in 2..=9 {
        let group = open(n);
        let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
        let together = Barrier::new(n);
        each(&group.ranks, |rank| {
            together.wait();
            if rank.rank() == Rank(0) || rank.rank() == Rank::at(n - 1) {
                rank.abort(&[rank.rank().0 as u8; 3]).unwrap();
            }
        });
        let first = next(&heard[0], 2);
        let Notice::Abort { from, record } = &first[0] else { panic!("heard {first:?}") };
        assert_eq!(*record, [from.0 as u8; 3]);
        assert_eq!(first[1], Notice::Acknowledged);
        assert!(heard[1..].iter().all(|heard| next(heard, 2) == first), "n={n}");
        // Nobody hears more, not even of the losses at the end.
        drop((group.ranks, group.keep));
        assert!(heard.iter().all(|heard| heard.iter().next().is_none()), "n={n}");
    }
}

pub(crate) fn an_abort_ends_an_exchange_at_once(open: Open) {
    let group = open(3);
    let watch = Stopwatch::start();
    let ended = each(&group.ranks, |rank| {
        if rank.rank() == Rank(2) {
            rank.abort(b"out of memory").unwrap();
            return None;
        }
        Some(rank.exchange("keys", &[], long()).unwrap_err())
    });
    watch.assert_within(AT_ONCE);
    allow_duplicates!(for error in ended.into_iter().flatten() {
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(Rank(2))));
        assert_snapshot!(error, @r#"exchange "keys": rank 2 has aborted the group"#);
    });
}

pub(crate) fn notices_wait_for_a_listener(open: Open) {
    let group = open(3);
    let [first, second, third] = &group.ranks[..] else { unreachable!() };
    let heard = hear(second.as_ref());
    third.leave(long()).unwrap();
    first.abort(b"why").unwrap();
    let expected = [
        Notice::Left { rank: Rank(2) },
        Notice::Abort { from: Rank(0), record: b"why".to_vec() },
        Notice::Acknowledged,
    ];
    assert_eq!(next(&heard, 3), expected);
    // Rank 0 has had no listener so far; a second one hears nothing of what the first has heard.
    assert_eq!(next(&hear(first.as_ref()), 3), expected);
    assert!(hear(first.as_ref()).try_recv().is_err());
}

pub(crate) fn a_goodbye_is_no_loss(open: Open) {
    let mut group = open(3);
    let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
    let leaver = group.ranks.remove(1);
    let watch = Stopwatch::start();
    let sent = AtomicU32::new(0);
    thread::scope(|scope| {
        scope.spawn(|| {
            leaver.leave(long()).unwrap();
            drop(leaver);
            sent.fetch_add(1, Ordering::Relaxed);
        });
        allow_duplicates!(for error in
            each(&group.ranks, |rank| { rank.exchange("keys", &[], long()).unwrap_err() })
        {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
            assert_snapshot!(error, @r#"exchange "keys": rank 1 has left the group and cannot take part"#);
        });
    });
    assert_eq!(sent.into_inner(), 1);
    watch.assert_within(AT_ONCE);
    for rank in [0, 2] {
        assert_eq!(next(&heard[rank], 1), [Notice::Left { rank: Rank(1) }]);
        assert!(heard[rank].try_recv().is_err());
    }
    assert!(heard[1].try_recv().is_err());
}

pub(crate) fn nothing_follows_a_goodbye(open: Open) {
    let group = open(2);
    let rank = &group.ranks[1];
    rank.leave(long()).unwrap();
    rank.leave(long()).unwrap();
    let error = rank.exchange("keys", &[], long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    assert_snapshot!(error, @r#"exchange "keys": this rank has already left the group"#);
    let error = rank.abort(b"late").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Other);
    assert_snapshot!(error, @"abort: this rank has already left the group");
}

pub(crate) fn a_goodbye_after_an_abort_succeeds(open: Open) {
    let group = open(3);
    group.ranks[1].abort(b"why").unwrap();
    each(&group.ranks, |rank| rank.leave(long()).unwrap());
}
