//! A rank that refuses a collective call takes part in it, so that the others learn of it at once and the group goes on.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;

const RANKS: usize = 3;
/// A call that takes this long has waited for its timeout, because its rank was not told.
const TIMEOUT: Duration = Duration::from_secs(60);

type Call = fn(&mut Group) -> Result<(), Error>;

/// Calls that exchange messages, each with its name in errors.
const CALLS: [(&str, Call); 6] = [
    ("all-gather", |group| group.all_gather::<f32>(3).prepare()?.run()),
    ("all-gather", |group| group.all_gather::<f32>(vec![1, 2, 3]).prepare()?.run()),
    ("window", |group| group.window::<u8>(64).map(drop)),
    ("split", |group| group.split(Some(0), 0)?.expect("every rank has a color").close()),
    ("exchange", |group| group.exchange(b"mine").map(drop)),
    ("channel", |group| {
        let window = group.window::<u8>(64)?;
        group.channel(&window, 1).map(drop)
    }),
];

fn run(body: impl Fn(&mut Group) -> Result<(), Error> + Sync) {
    let ran = in_process::run(RANKS, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = GroupOptions::default().timeout(TIMEOUT).open(bootstrap, fabric)?;
        body(&mut group)?;
        group.close()
    });
    ran.unwrap();
}

fn refused() -> Error {
    Error::new(ErrorKind::InvalidArgument, "dtype is 99, expected 0 to 13")
}

#[test]
fn the_others_learn_at_once_of_a_refused_call_and_all_go_on() {
    run(|group| {
        group.barrier()?;
        for _ in 0..2 {
            for (name, call) in CALLS {
                let watch = Stopwatch::start();
                if group.rank() == Rank(1) {
                    assert_eq!(group.refuse(refused()).to_string(), refused().to_string());
                } else {
                    let error = call(group).unwrap_err();
                    assert_eq!((error.kind(), error.peer()), (ErrorKind::Aborted, Some(Rank(1))));
                    let (text, refused) = (error.to_string(), refused().to_string());
                    let expected = format!("rank 1 failed (invalid argument): {refused}");
                    // The window of a channel is the call before it.
                    let name = if name == "channel" { "window" } else { name };
                    assert!(text.starts_with(name) && text.ends_with(&expected), "{text}");
                }
                watch.assert_within(Duration::from_secs(1));
                call(group)?;
            }
        }
        Ok(())
    });
}

#[test]
fn the_first_call_of_a_group_can_be_refused() {
    for (_, call) in CALLS {
        run(|group| {
            if group.rank() == Rank(0) {
                group.refuse(refused());
            } else {
                assert_eq!(call(group).unwrap_err().peer(), Some(Rank(0)));
            }
            call(group)
        });
    }
}

#[test]
fn a_refused_channel_leaves_its_window_as_it_was() {
    run(|group| {
        let window = group.window::<u8>(64)?;
        if group.rank() == Rank(2) {
            group.refuse(refused());
        } else {
            assert_eq!(group.channel(&window, 1).unwrap_err().peer(), Some(Rank(2)));
        }
        let channel = group.channel(&window, 1)?;
        group.close_channel(channel)?;

        // A rank that refuses the release keeps its window, and so do the others.
        let window = if group.rank() == Rank(2) {
            group.refuse(refused());
            window
        } else {
            let unreleased = group.release(window).unwrap_err();
            assert_eq!(unreleased.error.peer(), Some(Rank(2)));
            unreleased.window
        };
        group.release(window).map_err(Error::from)
    });
}

#[test]
fn an_exchange_of_too_many_bytes_is_refused_on_all_ranks() {
    run(|group| {
        let bytes = if group.rank() == Rank(1) { 5 << 20 } else { 3 };
        let error = group.exchange(&vec![1; bytes]).unwrap_err();
        let expected =
            "exchange: the data of this rank has 5242888 bytes, expected at most 4190208";
        assert!(error.to_string().ends_with(expected), "{error}");
        // The calls of all ranks are still the same ones.
        let all = group.exchange(&[group.rank().0 as u8])?;
        assert_eq!(all, [[0], [1], [2]]);
        Ok(())
    });
}

#[test]
fn all_ranks_can_refuse_a_call() {
    run(|group| {
        assert_eq!(group.refuse(refused()).kind(), ErrorKind::InvalidArgument);
        group.barrier()
    });
}

#[test]
fn calls_that_differ_leave_a_group_that_goes_on() {
    run(|group| {
        for (_, call) in CALLS {
            let error = if group.rank() == Rank(1) {
                group.all_to_all::<u8>(1).prepare().map(drop).unwrap_err()
            } else {
                call(group).unwrap_err()
            };
            assert_eq!(error.kind(), ErrorKind::Mismatch, "{error}");
            call(group)?;
        }
        Ok(())
    });
}

/// Waits for what another rank does, and fails with the text if it does not.
fn wait_until(text: &str, is_true: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_true() {
        assert!(begun.elapsed() < TIMEOUT, "{text}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn ranks_that_wait_for_a_refused_start_learn_why() {
    let has_refused = AtomicBool::new(false);
    let ran = in_process::run(2, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        let mut group = GroupOptions::default().timeout(TIMEOUT).open(bootstrap, fabric)?;
        let window = group.window::<u8>(64)?;
        let gather = group.all_gather::<u8>(8).output_into(&window, 0);
        let mut gather = gather.timeout(Duration::from_millis(500)).prepare()?;
        if group.rank() == Rank(0) {
            wait_until("rank 1 has not refused", || has_refused.load(Ordering::SeqCst));
            return Ok(gather.run().unwrap_err().to_string());
        }

        let slice = window.slice_mut(0..64)?;
        let refused = gather.run().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument, "{refused}");
        drop(slice);
        has_refused.store(true, Ordering::SeqCst);
        wait_until("the group has not ended", || group.abort_record().is_some());
        Ok(refused.to_string())
    });
    let [timeout, refused] = ran.unwrap().try_into().unwrap();
    assert!(timeout.contains(&format!("refused its last call: {refused}")), "{timeout}");
}
