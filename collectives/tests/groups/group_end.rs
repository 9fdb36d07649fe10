//! Tests [`GroupEnd`]: a caller that calls nothing else learns that its group has ended.

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupEnd};
use peerlane_hal::ErrorKind;
use peerlane_host as host;
use peerlane_test_support::{Elapsed, Stopwatch};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Limits how long a rank waits for the end of the group before the test fails.
const LIMIT: Timespec = Timespec { tv_sec: 10, tv_nsec: 0 };
/// The time from the loss of a rank until all others are told, in most rounds: a busy machine delays some of them, and a
/// wait for a timer all.
const TOLD_WITHIN: Duration = Duration::from_millis(100);
const TOLD_ROUNDS: usize = 7;
const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

fn is_readable(end: &GroupEnd, limit: Timespec) -> bool {
    poll(&mut [PollFd::new(end, PollFlags::IN)], Some(&limit)) == Ok(1)
}

fn open(bootstrap: in_process::InProcessBootstrap) -> Result<Group, Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    Group::open(bootstrap, fabric)
}

#[test]
fn a_lost_rank_makes_the_descriptor_readable_and_wakes_the_future() {
    for ranks in 2..=5 {
        let mut times = [(); TOLD_ROUNDS].map(|()| lose_rank_0(ranks));
        times.sort_by_key(|time| time.net());
        let median = times[TOLD_ROUNDS / 2];
        assert!(median.net() < TOLD_WITHIN, "{ranks} ranks: {times:?}, expected {TOLD_WITHIN:?}");
    }
}

/// Returns how long it takes until the last rank is told that rank 0 is lost.
fn lose_rank_0(ranks: usize) -> Elapsed {
    let dropped = OnceLock::new();
    let ended = in_process::run(ranks, |bootstrap| {
        let mut group = open(bootstrap)?;
        let (rank, end) = (group.rank().index(), group.end()?);
        assert!(!is_readable(&end, AT_ONCE) && end.check().is_ok());
        group.barrier()?;
        if rank == 0 {
            group.barrier()?;
            // By then, the others sleep.
            std::thread::sleep(Duration::from_millis(20));
            dropped.set(Stopwatch::start()).expect("only rank 0 drops its group");
            drop(group);
            return Ok(Elapsed::default());
        }
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let mut context = Context::from_waker(&waker);
        let mut future = pin!(group.end()?);
        assert!(future.as_mut().poll(&mut context).is_pending());
        group.barrier()?;
        assert!(is_readable(&end, LIMIT), "rank {rank} of {ranks} hears nothing");
        let told = dropped.get().expect("rank 0 has dropped its group").elapsed();

        let error = end.check().expect_err("the group has ended");
        assert_eq!(error.peer().map(|peer| peer.0), Some(0), "{error}");

        // It stays readable, and a handle that is made afterwards is so at once.
        assert!(is_readable(&end, AT_ONCE) && is_readable(&group.end()?, AT_ONCE));
        let limit = Instant::now() + Duration::from_secs(10);
        while wakes.0.load(Ordering::SeqCst) == 0 && Instant::now() < limit {
            std::thread::yield_now();
        }
        assert_eq!(wakes.0.load(Ordering::SeqCst), 1);
        let Poll::Ready(error) = future.as_mut().poll(&mut context) else {
            panic!("the future of rank {rank} is not ready");
        };
        assert_eq!(error.peer().map(|peer| peer.0), Some(0), "{error}");
        Ok(told)
    });
    ended.unwrap().into_iter().max_by_key(|told| told.net()).expect("there are ranks")
}

#[test]
fn a_barrier_that_one_rank_has_passed_does_not_fail_on_the_other() {
    for round in 0..200 {
        let ended = in_process::run(2, |bootstrap| {
            let mut group = open(bootstrap)?;
            group.barrier()?;
            group.barrier().expect("both ranks have come to the barrier");
            if group.rank().0 == round % 2 {
                // The other rank may still be in the barrier.
                drop(group);
                return Ok(());
            }
            let error = group.barrier().expect_err("the other rank has left");
            assert_eq!(error.peer().map(|peer| peer.0), Some(round % 2), "{error}");
            Ok(())
        });
        ended.unwrap();
    }
}

/// With two outputs, consecutive starts use different flags.
#[test]
fn a_timeout_says_in_which_start_a_flag_was_signaled_last() {
    let timeout = Duration::from_secs(3);
    let check = |done: u32, words: &str| {
        let errors = in_process::run(2, |bootstrap| {
            let mut group = open(bootstrap)?;
            let end = group.end()?;
            let mut gather = group.all_gather::<u8>(8).timeout(timeout).prepare()?;
            assert_eq!(gather.report().outputs, 2, "small outputs are used in turn");
            (0..done).try_for_each(|_| gather.run())?;
            let error = if group.rank().index() == 0 {
                gather.run().expect_err("rank 1 does not start")
            } else {
                assert!(is_readable(&end, LIMIT));
                end.check().expect_err("the group has ended")
            };
            Ok(error.to_string())
        });
        for error in errors.unwrap() {
            assert!(error.contains(words), "{done} starts: {error}");
        }
    };
    std::thread::scope(|scope| {
        for (done, words) in [
            (0, "which has never signaled it"),
            (1, "which last signaled it in start 1;"),
            (2, "which last signaled it in start 2;"),
            (3, "which last signaled it in start 3;"),
        ] {
            scope.spawn(move || check(done, words));
        }
    });
}

#[test]
fn a_group_that_is_closed_has_ended() {
    in_process::run(3, |bootstrap| {
        let group = open(bootstrap)?;
        let end = group.end()?;
        group.close()?;
        assert!(is_readable(&end, AT_ONCE));
        assert_eq!(end.check().expect_err("the group is closed").kind(), ErrorKind::Aborted);
        Ok(())
    })
    .unwrap();
}
