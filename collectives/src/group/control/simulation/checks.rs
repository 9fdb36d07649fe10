//! Runs the simulation of the control plane with many seeds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use peerlane_hal::Rank;

use super::{Action, Control, Defect, Fault, Message, View, World};
use crate::bootstrap::{AbortRecord, Notice, ProcessState};
use crate::group::control::{Answer, RankState};

/// Runs a seed, and returns what went wrong.
fn run(seed: u64, defect: Option<Defect>) -> Result<BTreeMap<&'static str, u32>, String> {
    let mut world = World::new(seed, defect);
    world.run();
    world.check().map_err(|error| format!("seed {seed}, {world:?}: {error}"))?;
    let failed = world.nodes.iter().any(|node| node.error.is_some());
    let name = match world.fault.map(|(_, fault)| fault).filter(|_| failed) {
        None => "none",
        Some(Fault::Kill) => "kill",
        Some(Fault::Stall(_)) => "stall",
        Some(Fault::Cut) => "cut",
        Some(Fault::Slow) => "slow",
    };
    Ok(BTreeMap::from([(name, 1)]))
}

/// Runs 5,000 seeds, or as many as `PEERLANE_SEEDS` says; `cargo xtask test --all` says 20,000.
#[test]
fn every_survivor_names_the_rank_at_fault_in_time() {
    let seeds = std::env::var("PEERLANE_SEEDS")
        .map_or(5_000, |seeds| seeds.parse().expect("PEERLANE_SEEDS is a number of seeds"));
    let mut kinds: BTreeMap<&str, u32> = BTreeMap::new();
    let mut failures = Vec::new();

    for seed in 0..seeds {
        match run(seed, None) {
            Ok(found) => {
                found.into_iter().for_each(|(kind, count)| *kinds.entry(kind).or_default() += count)
            }
            Err(error) => failures.push(error),
        }
    }

    assert!(
        failures.is_empty(),
        "{} of {seeds} seeds fail, first: {:#?}",
        failures.len(),
        &failures[..failures.len().min(5)]
    );

    for kind in ["kill", "stall", "cut", "slow"] {
        let count = kinds.get(kind).copied().unwrap_or(0);
        assert!(u64::from(count) > seeds / 20, "only {count} runs with {kind}: {kinds:?}");
    }
    println!("{seeds} seeds: {kinds:?}");
}

#[test]
fn defects_of_earlier_versions_are_found() {
    for defect in [Defect::OwnErrorFirst, Defect::FirstWriter, Defect::NoRank] {
        let found = (0..2000).find_map(|seed| run(seed, Some(defect)).err());
        println!("{defect:?}: {}", found.expect("no seed finds the defect"));
    }
}

/// Ranks have more time to answer an inquiry if the timeout is longer or if exchanges took longer, within limits.
#[test]
fn the_time_for_answers_follows_the_exchanges_and_the_timeout() {
    let limit = |timeout: u64, exchange: Option<u64>| {
        let mut control = Control::new(Rank(1), 2, Some(Rank(0)));
        control.set_timeout(Duration::from_secs(timeout));
        exchange.into_iter().for_each(|millis| control.add_exchange(Duration::from_millis(millis)));
        assert!(control.inquiry_timeout() < control.relay_timeout());
        control.inquiry_timeout().as_millis()
    };
    assert_eq!([limit(1, None), limit(5, Some(0)), limit(30, Some(1))], [250, 250, 1500]);
    assert_eq!([limit(1, Some(160)), limit(5, Some(1000)), limit(600, None)], [800, 2000, 2000]);
}

/// A peer may send any limit.
#[test]
fn the_limit_of_a_peer_is_limited() {
    let mut control = Control::new(Rank(1), 3, Some(Rank(0)));
    let record = AbortRecord::timeout(Some(Rank(1)), "a start");
    let state = RankState { waits: vec![1], ..RankState::default() };
    let inquiry = Message::Inquiry { state, record, confirms: false, limit: Duration::MAX };
    let message = postcard::to_stdvec(&inquiry).unwrap();
    let now = Instant::now();
    let own = |_: &AbortRecord| RankState::default();
    let sight = View { ranks: vec![ProcessState::Unknown; 3], relay: ProcessState::Unknown };
    let answer = control.receive(now, Notice::Message { from: Rank(2), message }, own, &sight);
    assert!(matches!(answer, Some(Action::Broadcast(_))), "{answer:?}");
    assert!(control.next_tick().is_some_and(|at| at - now <= Duration::from_secs(3)));
}

/// Decides why the copies of rank 0 are late, and returns the rank that is to blame and the text.
fn blame_for_copies(answering: &[u32], third: ProcessState) -> (Option<Rank>, String) {
    let mut control = Control::new(Rank(0), 3, Some(Rank(0)));
    let record =
        AbortRecord::timeout(Some(Rank(0)), "rank 0 did not complete its copies".to_owned());
    let own = RankState { copies_with_others: true, ..RankState::default() };
    let state = |_: &AbortRecord| own.clone();
    let sight = View {
        ranks: vec![ProcessState::Running, ProcessState::Running, third],
        relay: ProcessState::Running,
    };

    let mut now = Instant::now();
    let mut next = control.overdue(now, own.clone(), record);
    let answer = Message::Answer(Answer { state: RankState::default(), adopted: None });
    let Action::Broadcast(answer) = answer.broadcast() else { unreachable!("a broadcast") };
    for _ in 0..100 {
        match next.take() {
            Some(Action::Abort(record)) => return (record.peer, record.text),
            Some(Action::Broadcast(inquiry)) => {
                for (from, message) in
                    [(0, &inquiry)].into_iter().chain(answering.iter().map(|from| (*from, &answer)))
                {
                    let notice = Notice::Message { from: Rank(from), message: message.clone() };
                    next = next.or(control.receive(now, notice, state, &sight));
                }
            }
            _ => {
                now = control.next_tick().expect("the inquiry ends");
                next = control.tick(now, &sight);
            }
        }
    }
    panic!("nothing is decided");
}

#[test]
fn copies_that_a_silent_rank_holds_up_are_no_fault_of_their_own_rank() {
    // Its process is stopped, or nobody sees it.
    let (blamed, text) = blame_for_copies(&[1], ProcessState::Stopped);
    assert_eq!(blamed, Some(Rank(2)), "{text}");
    assert!(text.ends_with("; rank 2 does not answer, because its process is stopped"), "{text}");
    let (blamed, text) = blame_for_copies(&[1], ProcessState::Unknown);
    assert_eq!(blamed, Some(Rank(2)), "{text}");

    // All answer, so no other rank holds them up.
    let (blamed, text) = blame_for_copies(&[1, 2], ProcessState::Running);
    assert_eq!((blamed, &*text), (Some(Rank(0)), "rank 0 did not complete its copies"));
}
