//! Tests captured starts: recorded with their constants, and replayed with other bytes.

use std::time::Duration;

use peerlane_hal::{CopyEngine as _, Ticket};

use super::world::{CAPTURED, Member, PLAIN, ensure_gathered, world};
use crate::backend::{Compute, Graph, Mode, SignalBy, driver};

const RANKS: usize = 3;

/// Records `starts` starts on the stream.
fn record(member: &mut Member, compute: &Compute, starts: usize) -> Graph {
    let last = member.engine.completed().unwrap();
    compute.begin_capture(Mode::Global);
    let state = member.engine.streams().unwrap().capture_state(&compute.handle()).unwrap();
    assert!(state.is_capturing());
    for _ in 0..starts {
        member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
        let ticket = member.submit(0, CAPTURED);
        assert_eq!(ticket, last, "a captured submit makes no ticket");
        member.engine.streams().unwrap().join(&compute.handle()).unwrap();
    }
    compute.end_capture()
}

/// Covers small and large shards, one and three starts per graph, and several replays in a row, with eager
/// starts on the same streams in between.
#[test]
fn graphs_replay_and_mix_with_eager_starts() {
    for (shard, signal) in [
        (1001, None),
        (1001, Some(SignalBy::Copy)),
        (150_007, None),
        (150_007, Some(SignalBy::Copy)),
    ] {
        let (driver, _turn) = driver();
        let mut members = world(RANKS, shard, signal);
        let streams: Vec<Compute> = (0..RANKS).map(Compute::new).collect();
        let graphs: Vec<[Graph; 2]> = members
            .iter_mut()
            .zip(&streams)
            .map(|(member, compute)| [1, 3].map(|starts| record(member, compute, starts)))
            .collect();
        driver.set("JITTER_US", "200");
        let seed = |rank: usize, round: usize| (rank * 64 + round) as u8;
        let mut rounds = Vec::new();
        for round in 0..8 {
            for (rank, member) in members.iter_mut().enumerate() {
                let compute = &streams[rank];
                let (sent, received) = member.round(seed(rank, round));
                compute.copy(&member.regions.source, &sent);
                match round % 4 {
                    3 => {
                        member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
                        member.submit(round as u64, PLAIN);
                        member.engine.streams().unwrap().join(&compute.handle()).unwrap();
                    }
                    2 => (0..2).for_each(|_| graphs[rank][0].launch()),
                    graph => graphs[rank][graph].launch(),
                }
                compute.copy(&received, &member.regions.output);
                rounds.push((rank, round, sent, received));
            }
        }
        streams.iter().for_each(Compute::finish);
        driver.set("JITTER_US", "0");
        for (rank, round, _, received) in &rounds {
            let what = format!("shard {shard}, {signal:?}, rank {rank}, round {round}");
            ensure_gathered(received, |rank| seed(rank, *round), shard, &what);
        }
        for member in &mut members {
            member.finish(Ticket(2));
        }
    }
}

/// A capture in progress is not affected by an engine that queries its events meanwhile.
#[test]
fn an_engine_that_waits_does_not_spoil_a_capture() {
    let (_driver, _turn) = driver();
    let mut members = world(1, 64, None);
    let compute = Compute::new(0);
    let ticket = members[0].wait_for(0, 5);
    compute.begin_capture(Mode::Global);
    for _ in 0..4 {
        std::thread::sleep(Duration::from_millis(6));
        assert_eq!(members[0].engine.completed().unwrap(), Ticket(ticket.0 - 1));
        members[0].engine.park(Duration::from_millis(1)).unwrap();
    }
    // A stream behind a blocked wait cannot be joined to a graph.
    let error =
        members[0].engine.streams().unwrap().join(&compute.handle()).expect_err("eager work");
    assert_eq!(peerlane_hal::Error::kind(&error), peerlane_hal::ErrorKind::Mismatch, "{error}");
    compute.end_empty_capture();
}

/// Two concurrent captures on one engine use separate streams.
#[test]
fn two_captures_of_one_engine_do_not_meet() {
    let (_driver, _turn) = driver();
    let mut members = world(1, 400_000, None);
    let streams = [0, 0].map(Compute::new);
    let member = &mut members[0];
    for compute in &streams {
        compute.begin_capture(Mode::Relaxed);
        member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
        member.submit(0, CAPTURED);
        member.submit(0, CAPTURED);
        member.engine.streams().unwrap().join(&compute.handle()).unwrap();
    }
    for (seed, compute) in [7, 9].into_iter().zip(&streams) {
        let graph = compute.end_capture();
        let (sent, _) = member.round(seed);
        compute.copy(&member.regions.source, &sent);
        graph.launch();
        compute.finish();
        member.ensure_gathered(|_| seed, "one rank");
    }
}
