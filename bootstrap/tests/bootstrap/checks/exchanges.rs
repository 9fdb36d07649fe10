//! Checks of exchanges that end well, and of those that cannot.

use std::thread;
use std::time::Duration;

use insta::{allow_duplicates, assert_snapshot};
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::{AbortRecord, Notice};
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

use super::{LATE_MAX, Open, each, hear, long, next};

pub(crate) fn every_rank_gets_what_every_rank_gave(open: Open) {
    for n in 1..=9 {
        let group = open(n);
        for bytes in [0, 1, 1 << 20] {
            let mut random = fastrand::Rng::with_seed((n * bytes) as u64);
            let mut blobs = vec![vec![0; bytes]; n];
            blobs.iter_mut().for_each(|blob| random.fill(blob));
            let given = each(&group.ranks, |rank| {
                rank.exchange("blobs", &blobs[rank.rank().index()], long()).unwrap()
            });
            let wrong = given.iter().position(|given| *given != blobs);
            assert_eq!(wrong, None, "n={n} bytes={bytes} seed={}", n * bytes);
        }
    }
}

pub(crate) fn exchanges_one_after_another_do_not_mix(open: Open) {
    for n in [1, 2, 5, 9] {
        let group = open(n);
        each(&group.ranks, |rank| {
            let mut random = fastrand::Rng::with_seed(rank.rank().0.into());
            for round in 0..200_u32 {
                // The length says who, the bytes say when.
                let blob = |from: usize| round.to_le_bytes().repeat(from + 1);
                let (label, mine) = (format!("round {}", round % 3), blob(rank.rank().index()));
                if random.u8(..) == 0 {
                    thread::sleep(Duration::from_millis(1));
                }
                let given = rank.exchange(&label, &mine, long()).unwrap();
                let expected: Vec<_> = (0..n).map(blob).collect();
                assert_eq!(given, expected, "n={n} round={round}, seeds are rank numbers");
            }
        });
    }
}

pub(crate) fn labels_that_differ_are_a_mismatch_on_every_rank(open: Open) {
    let group = open(2);
    each(&group.ranks, |rank| rank.exchange("first", &[], long()).unwrap());
    let errors = each(&group.ranks, |rank| {
        let label = if rank.rank() == Rank(1) { "sizes" } else { "keys" };
        rank.exchange(label, &[], long()).unwrap_err()
    });
    allow_duplicates!(for error in errors {
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_snapshot!(error, @r#"ranks call different collectives in exchange 1: rank 0 calls "keys", rank 1 calls "sizes"; make the same collective calls in the same order on all ranks"#);
    });
    for n in 3..=9 {
        let group = open(n);
        let odd = Rank::at(n - 2);
        let errors = each(&group.ranks, |rank| {
            let label = if rank.rank() == odd { "odd" } else { "even" };
            rank.exchange(label, &[1], long()).unwrap_err()
        });
        let text = errors[0].to_string();
        assert!(text.contains(&format!("rank {odd} calls \"odd\"")), "{text}");
        assert!(text.contains("calls \"even\""), "{text}");
        assert!(errors.iter().all(|error| error.to_string() == text), "n={n}: {errors:?}");
    }
}

pub(crate) fn what_is_too_long_is_refused(open: Open) {
    let group = open(1);
    let rank = &group.ranks[0];
    let error = rank.exchange("keys", &vec![0; 64 << 20], long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_snapshot!(error, @"exchange data is 67108864 bytes long, expected at most 4190208 bytes");
    let error = rank.exchange(&"l".repeat(1025), &[], long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_snapshot!(error, @"exchange label is 1025 bytes long, expected at most 1024 bytes");
    let error = rank.abort(&vec![0; 64 << 20]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_eq!(rank.exchange("still good", &[7], long()).unwrap(), [[7]]);
}

/// How late rank 0 exchanges in [`lack_two`].
const LACK_DELAY: Duration = Duration::from_millis(300);
/// How long it waits then. A quarter of it is left for the answer of the hub.
const LACK_PATIENCE: Duration = Duration::from_secs(3);

/// Two of four exchange "keys": first rank 2 with much patience, then rank 0 with little.
fn lack_two(open: Open) -> (super::Opened, Vec<Error>) {
    let group = open(4);
    let errors = each(&group.ranks, |rank| match rank.rank() {
        Rank(0) => {
            thread::sleep(LACK_DELAY);
            rank.exchange("keys", &[0; 9], Deadline::after(LACK_PATIENCE)).err()
        }
        Rank(2) => rank.exchange("keys", &[0; 9], long()).err(),
        _ => None,
    });
    let errors: Vec<_> = errors.into_iter().flatten().collect();
    (group, errors)
}

pub(crate) fn a_rank_that_never_comes_is_named(open: Open) {
    let watch = Stopwatch::start();
    let (group, errors) = lack_two(open);
    watch.assert_within(LACK_DELAY + LACK_PATIENCE + LATE_MAX);
    assert!(errors.iter().all(|error| error.kind() == ErrorKind::Timeout));
    assert!(errors.iter().all(|error| error.peer() == Some(Rank(1))));
    assert_snapshot!(errors[0], @r#"exchange "keys": ranks 1 and 3 did not take part within 3 s"#);
    assert_snapshot!(errors[1], @r#"exchange "keys": rank 0 timed out: exchange "keys": ranks 1 and 3 did not take part within 3 s"#);

    // What follows is aborted, with the same cause.
    for rank in &group.ranks {
        let heard = hear(rank.as_ref());
        let text = "exchange \"keys\": ranks 1 and 3 did not take part within 3 s";
        let mut record = AbortRecord::timeout(Some(Rank(1)), text);
        record.by = Some(Rank(0));
        let abort = Notice::Abort { from: Rank(0), record: record.encode() };
        assert_eq!(next(&heard, 2)[0], abort);
    }
    allow_duplicates!(for rank in &group.ranks {
        let error = rank.exchange("sizes", &[], long()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted);
        assert_snapshot!(error, @r#"exchange "sizes": rank 0 timed out: exchange "keys": ranks 1 and 3 did not take part within 3 s"#);
    });
}

pub(crate) fn a_deadline_that_has_passed_is_a_timeout(open: Open) {
    let group = open(3);
    let error = group.ranks[1].exchange("keys", &[], Deadline::after(Duration::ZERO)).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(0))));
    assert!(error.to_string().ends_with(" within 0 s"), "{error}");
}

pub(crate) fn hosts_agree(open: Open) {
    let group = open(2);
    assert!(!group.ranks[0].host().is_empty());
    assert_eq!(group.ranks[0].host(), group.ranks[1].host());
    assert_eq!(group.ranks[1].ranks(), 2);
}
