//! Ranks that make collective calls in different orders learn so long before the timeout, and late ranks are no mistake.

use std::thread;
use std::time::Duration;

use peerlane_collectives::bootstrap::{Bootstrap, in_process};
use peerlane_collectives::error::Error;
use peerlane_collectives::group::{Group, GroupOptions, Operation};
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_test_support::Stopwatch;

/// Far above what any call here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How long ranks may wait in different calls.
const TOLD_WITHIN: Duration = Duration::from_secs(1);

/// Longer than a rank waits before it tells its call, several times.
const LATE: Duration = Duration::from_millis(1200);

fn run<R: Send>(ranks: usize, body: impl Fn(Group) -> Result<R, Error> + Sync) -> Vec<R> {
    let ran = in_process::run(ranks, |bootstrap| {
        let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
        body(GroupOptions::default().timeout(TIMEOUT).open(bootstrap, fabric)?)
    });
    ran.unwrap()
}

type Call = fn(&mut Group, &mut [Operation<u32>; 2]) -> Result<(), Error>;

/// Has rank 0 of several ranks make one call, and the others another one.
fn crossed(ranks: usize, first: Call, others: Call) -> String {
    let watch = Stopwatch::start();
    let texts = run(ranks, |mut group| {
        // The second barrier exchanges no messages.
        group.barrier()?;
        let mut operations = [group.all_gather(3).prepare()?, group.all_gather(5).prepare()?];
        let call = if group.rank() == Rank(0) { first } else { others };
        let error = call(&mut group, &mut operations).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, None), "{error}");
        Ok(error.to_string())
    });
    watch.assert_within(TOLD_WITHIN);
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts[0].clone()
}

/// Returns the error of ranks 0 and 1 in these calls.
fn text(first: &str, other: &str) -> String {
    format!(
        "ranks call in different orders: rank 0 waits in {first}, rank 1 in {other}, and neither has begun the call of the other; \
         make the same collective calls in the same order on all ranks"
    )
}

#[test]
fn a_barrier_beside_a_preparation_names_both_calls() {
    let barrier: Call = |group, _| group.barrier();
    let prepare: Call = |group, _| group.all_gather::<u8>(7).label("weights").prepare().map(drop);
    let expected = text("start 2 of barrier", "the call \"all-gather 4 \"weights\"\"");
    assert_eq!(crossed(2, barrier, prepare), expected);
    let expected = text("the call \"all-gather 4 \"weights\"\"", "start 2 of barrier");
    assert_eq!(crossed(2, prepare, barrier), expected);
    // Which of the others is the first to tell depends on time.
    let error = crossed(5, barrier, prepare);
    assert!(error.contains("rank 0 waits in start 2 of barrier, rank "), "{error}");
}

#[test]
fn starts_in_different_orders_name_both() {
    let error = crossed(2, |_, [one, _]| one.run(), |_, [_, other]| other.run());
    assert_eq!(error, text("start 1 of all-gather 2", "start 1 of all-gather 3"));
    // A start that nobody waits for counts too: the next call waits for it.
    let error = crossed(
        3,
        |group, [one, _]| {
            let _open = one.start()?;
            group.exchange(b"").map(drop)
        },
        |group, _| group.exchange(b"").map(drop),
    );
    assert!(error.contains("rank 0 waits in start 1 of all-gather 2, rank "), "{error}");
}

#[test]
fn a_rank_that_closes_early_is_named_with_its_call() {
    // The ranks that close have no group any more when the other one learns of it.
    let texts = run(2, |mut group| {
        group.barrier()?;
        let ended = if group.rank() == Rank(0) { group.barrier() } else { group.close() };
        Ok(ended.unwrap_err().to_string())
    });
    assert_eq!(texts, [(); 2].map(|()| text("start 2 of barrier", "the call \"close\"")));
}

#[test]
fn late_ranks_are_no_mistake() {
    let rounds = run(3, |mut group| {
        let mut gather = group.all_gather::<u32>(4).prepare()?;
        for round in 0..3 {
            if group.rank() == Rank(round) {
                thread::sleep(LATE);
            }
            match round {
                0 => group.barrier()?,
                1 => drop(group.exchange(b"late")?),
                _ => gather.run()?,
            }
        }
        // Nobody waits for the same start: rank 0 has made it and goes on, while rank 1 is late.
        if group.rank() == Rank(1) {
            thread::sleep(LATE);
        }
        let started = gather.start()?;
        started.wait()?;
        group.close()
    });
    assert_eq!(rounds.len(), 3);
}

#[test]
fn a_wait_with_a_limit_lets_a_rank_go_on_with_another_call() {
    run(2, |mut group| {
        let [mut one, mut other] =
            [3, 5].map(|len| group.all_gather::<u32>(len).prepare().unwrap());
        if group.rank() == Rank(0) {
            other.run()?;
            one.run()?;
        } else {
            let mut started = one.start()?;
            assert!(!started.wait_for(LATE)?);
            other.run()?;
            started.wait()?;
        }
        drop((one, other));
        group.close()
    });
}

#[test]
fn a_wait_in_parts_is_one_wait() {
    let in_parts: Call = |group, _| {
        let mut started = group.all_gather::<u8>(3).prepare()?.into_started()?;
        while !started.wait_part(Duration::from_millis(20))? {}
        Ok(())
    };
    let prepared: Call = |group, _| {
        let gather = group.all_gather::<u8>(3).prepare()?;
        group.exchange(b"")?;
        drop(gather);
        Ok(())
    };
    assert_eq!(
        crossed(2, in_parts, prepared),
        text("start 1 of all-gather 4", "the call \"exchange\"")
    );
}

#[test]
fn threads_of_a_rank_may_make_calls_in_any_order() {
    run(2, |mut group| {
        let mut gather = group.all_gather::<u32>(4).prepare()?;
        let rank = group.rank();
        // On rank 0 the start waits for the late one of rank 1, and on rank 1 the exchange for the late one of rank 0.
        thread::scope(|scope| {
            let starts = scope.spawn(move || {
                if rank == Rank(1) {
                    thread::sleep(LATE);
                }
                gather.run()
            });
            if rank == Rank(0) {
                thread::sleep(LATE);
            }
            group.exchange(b"")?;
            starts.join().unwrap()
        })?;
        group.close()
    });
}

#[test]
fn a_group_that_was_split_is_named_with_its_ranks() {
    let errors = run(4, |mut world| {
        let rank = world.rank();
        let mut pair = world.split(Some(rank.0 / 2), 0)?.expect("every rank has a color");
        let label = format!("split 1, color {}", rank.0 / 2);
        assert_eq!((world.label(), pair.label()), (None, Some(label.as_str())));

        let len = if rank == Rank(3) { 5 } else { 4 };
        let mismatch = pair.all_gather::<u8>(len).prepare();
        let options = GroupOptions::default().label("pipeline").timeout(TIMEOUT);
        let mut whole = world.split_with(options, Some(7), 0)?.expect("every rank has a color");
        assert_eq!(whole.label(), Some("pipeline"));
        // The rank that is missing in the first group of the second pair.
        let lost = match rank {
            Rank(2) => None,
            _ => Some(whole.barrier()),
        };
        Ok((
            mismatch.err().map(|error| error.to_string()),
            lost.map(|lost| lost.unwrap_err().to_string()),
        ))
    });
    let mismatches: Vec<_> = errors.iter().map(|(mismatch, _)| mismatch.as_deref()).collect();
    assert_eq!(&mismatches[..2], [None, None]);
    let expected = "group \"split 1, color 1\": all-gather 1: ranks disagree: block_bytes is 5 on rank 1, 4 on rank 0; rank 1 of \
                    this group is rank 3 of the first one";
    assert_eq!(&mismatches[2..], [Some(expected); 2]);
    for lost in errors.into_iter().filter_map(|(_, lost)| lost) {
        assert!(lost.starts_with("group \"pipeline\": "), "{lost}");
        assert!(lost.ends_with("; rank 2 of this group is rank 2 of the first one"), "{lost}");
    }
}

#[test]
fn a_label_that_is_too_long_is_refused_on_all_ranks() {
    let label = |rank: Rank| "x".repeat(if rank == Rank(1) { 257 } else { 256 });
    let refused = "label is 257 bytes long, expected at most 256";
    run(2, |mut group| {
        let rank = group.rank();
        let error = group.all_gather::<u8>(4).label(label(rank)).prepare().unwrap_err().to_string();
        assert!(error.ends_with(refused), "{error}");
        group.all_gather::<u8>(4).label("x".repeat(256)).prepare()?;
        group.close()
    });
    let opened = in_process::run(2, |bootstrap| {
        let rank = bootstrap.rank();
        let fabric = host::Fabric::open(rank, 2)?;
        let opened = GroupOptions::default().label(label(rank)).open(bootstrap, fabric);
        Ok(opened.unwrap_err().to_string())
    });
    assert!(opened.unwrap().iter().all(|error| error.ends_with(refused)));
}
