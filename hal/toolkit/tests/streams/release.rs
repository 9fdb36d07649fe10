//! Tests the release of blocked waits from the host, including those of graphs.

use std::time::{Duration, Instant};

use peerlane_hal::{CopyEngine as _, Error as _, ErrorKind, Region as _};

use super::world::{CAPTURED, Member, PLAIN, world};
use crate::backend::{Compute, Graph, Mode, driver};

const PATIENCE: Duration = Duration::from_secs(10);

/// Creates a graph of rank 0 that waits for a signal that is never sent.
fn blocked(members: &mut [Member], compute: &Compute) -> Graph {
    compute.begin_capture(Mode::ThreadLocal);
    let member = &mut members[0];
    member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
    member.submit(0, CAPTURED);
    member.engine.streams().unwrap().join(&compute.handle()).unwrap();
    let graph = compute.end_capture();
    graph.launch();
    // The slice signals that it is ready right before its wait.
    let start = Instant::now();
    while members[1].regions.flags.flag_value(2 * members.len() as u64) != Some(1) {
        assert!(start.elapsed() < PATIENCE, "the graph does not run");
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!compute.is_idle(), "it waits");
    graph
}

/// Calls `step` until all work of the stream is complete.
fn finish(compute: &Compute, mut step: impl FnMut()) {
    let start = Instant::now();
    while !compute.is_idle() {
        step();
        assert!(start.elapsed() < PATIENCE, "a graph is still blocked");
    }
}

#[test]
fn a_graph_that_waits_for_ever_is_released() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let _graph = blocked(&mut members, &compute);
    finish(&compute, || members[0].engine.release().unwrap());
    // SAFETY: the slice has no op.
    let error = unsafe { members[0].engine.submit(&[]) }.expect_err("released");
    assert_eq!(error.kind(), ErrorKind::Aborted);
}

#[test]
fn one_release_frees_all_replays_that_are_queued() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let graph = blocked(&mut members, &compute);
    (0..200).for_each(|_| graph.launch());
    members[0].engine.release().unwrap();
    finish(&compute, || std::thread::sleep(Duration::from_millis(1)));
    // A graph that is launched afterwards does not wait either.
    graph.launch();
    finish(&compute, || {});
}

/// Calls `replay_wait` for `period`, and returns the longest result.
fn longest_replay_wait(member: &mut Member, period: Duration) -> Option<Duration> {
    let (start, mut longest) = (Instant::now(), None);
    while start.elapsed() < period {
        longest = longest.max(member.engine.streams().unwrap().replay_wait().unwrap());
        std::thread::sleep(Duration::from_millis(1));
    }
    longest
}

#[test]
fn a_replay_that_waits_is_reported() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    assert_eq!(members[0].engine.streams().unwrap().replay_wait().unwrap(), None);
    let _graph = blocked(&mut members, &compute);
    let start = Instant::now();
    loop {
        let waited = longest_replay_wait(&mut members[0], Duration::from_millis(50));
        assert!(waited <= Some(start.elapsed()), "{waited:?}");
        if waited > Some(Duration::from_millis(20)) {
            break;
        }
        assert!(start.elapsed() < PATIENCE, "the graph is not reported");
    }
    while members[0].engine.streams().unwrap().replay_wait().unwrap().is_some() {
        members[0].engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "the graph is still reported");
    }
    // After its last wait, the graph still joins its streams.
    finish(&compute, || {});
}

/// Replays one start at a time, which waits for a peer. No wait is longer than its own replay, however many there were.
#[test]
fn replays_that_go_on_are_not_reported_as_waiting_for_long() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 64, None);
    let streams: Vec<Compute> = (0..2).map(Compute::new).collect();
    let graphs: Vec<Graph> = members
        .iter_mut()
        .zip(&streams)
        .map(|(member, compute)| {
            compute.begin_capture(Mode::ThreadLocal);
            member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
            member.submit(0, CAPTURED);
            member.engine.streams().unwrap().join(&compute.handle()).unwrap();
            compute.end_capture()
        })
        .collect();
    let mut longest = None;
    for _ in 0..60 {
        let launched = Instant::now();
        graphs[0].launch();
        let waited = longest_replay_wait(&mut members[0], Duration::from_millis(10));
        let at_most = launched.elapsed();
        assert!(waited <= Some(at_most), "{waited:?}, launched {at_most:?} ago");
        longest = longest.max(waited);

        graphs[1].launch();
        streams.iter().for_each(Compute::finish);
    }
    assert!(longest.is_some(), "the replays wait");
    longest_replay_wait(&mut members[0], Duration::from_millis(20));
    assert_eq!(members[0].engine.streams().unwrap().replay_wait().unwrap(), None);
}

#[test]
fn a_drop_releases_a_graph() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let _graph = blocked(&mut members, &compute);
    let start = Instant::now();
    let member = members.remove(0);
    let Member { engine, regions, .. } = member;
    drop(engine);
    while !compute.is_idle() {
        assert!(start.elapsed() < PATIENCE, "the graph is still blocked");
    }
    drop(regions);
}

/// Submits many eager starts on a stream of the caller that no peer answers.
#[test]
fn starts_on_a_callers_stream_are_released() {
    let (_driver, _turn) = driver();
    let mut members = world(2, 5000, None);
    let compute = Compute::new(0);
    let member = &mut members[0];
    for epoch in 1..=20 {
        member.engine.streams().unwrap().fork(&compute.handle()).unwrap();
        member.submit(epoch, PLAIN);
        member.engine.streams().unwrap().join(&compute.handle()).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    assert!(!compute.is_idle(), "they wait");
    let start = Instant::now();
    while member.engine.completed().unwrap().0 < 20 {
        member.engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "{:?}", member.engine.completed());
    }
    compute.finish();
    assert!(compute.is_idle(), "the device lives");
}

/// Waits for values of both halves of the range on one flag.
#[test]
fn waits_for_unlike_values_are_released() {
    let (_driver, _turn) = driver();
    let mut members = world(1, 64, None);
    let mut last = members[0].engine.completed().unwrap();
    for value in [u64::MAX, 3, 1 << 63, u64::MAX, 1] {
        last = members[0].wait_for(0, value);
    }
    let start = Instant::now();
    while members[0].engine.completed().unwrap() < last {
        members[0].engine.release().unwrap();
        assert!(start.elapsed() < PATIENCE, "{:?}", members[0].engine.completed());
        std::thread::yield_now();
    }
}
