//! Runs lanes that are not on the stream: a network whose engines must be polled.

use std::sync::Barrier;
use std::time::Duration;

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::{Group, GroupOptions};
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_host as host;
use peerlane_tests::middleware::{Stream, StreamLayer, Wrapped};

use crate::support::{
    BLOCK_BYTES, GRACE, LONG, Rounds, SHORT, assert_idle_within, await_end, pause,
};

/// Every algorithm with a lane between nodes.
const TIERED: [Algorithm; 4] =
    [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchical, Algorithm::HierarchicalRing];

fn in_tiers<R: Send>(
    topology: &Topology,
    queued_wait: bool,
    options: &GroupOptions,
    body: impl Fn(Group) -> R + Sync,
) -> Vec<R> {
    let handles = in_process::group(topology.ranks()).unwrap();
    std::thread::scope(|scope| {
        let body = &body;
        let rank = |bootstrap: in_process::InProcessBootstrap| {
            let (rank, ranks) = (bootstrap.rank(), bootstrap.ranks());
            let local =
                Wrapped::new(host::Fabric::open(rank, ranks).unwrap(), StreamLayer::default());
            let mut caps = host::Options::default();
            caps.caps.queued_wait = queued_wait;
            let network = host::Fabric::open_with(rank, ranks, caps).unwrap();
            let options = options.clone().topology(topology.clone());
            body(options.open_tiers(bootstrap, local, network).unwrap())
        };
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(move || rank(handle))).collect();
        threads.into_iter().map(|thread| thread.join().expect("a rank panicked")).collect()
    })
}

fn options(timeout: Duration) -> GroupOptions {
    GroupOptions::default().timeout(timeout)
}

fn topologies() -> impl Iterator<Item = Topology> {
    ["2x1", "2x2", "3+1+2"].into_iter().map(|nodes| nodes.parse().unwrap())
}

#[test]
fn starts_that_nobody_waits_for_are_driven() {
    for topology in topologies() {
        for algorithm in TIERED {
            for queued_wait in [true, false] {
                in_tiers(&topology, queued_wait, &options(LONG), |mut group| {
                    let (me, ranks) = (group.rank().index(), group.ranks());
                    let builder = group.all_gather::<u8>(BLOCK_BYTES).algorithm(algorithm);
                    let mut gather = builder.chunks(2).prepare().unwrap();
                    let (stream, rounds) = (Stream::new(), Rounds::default());
                    for _ in 0..10 {
                        rounds.fill(&stream, me, gather.input_memory().unwrap());
                        let lease = gather.start_on(&stream).unwrap();
                        rounds.look(&stream, ranks, lease.output());
                    }
                    assert!(stream.is_idle_within(LONG), "{algorithm}, the stream is blocked");
                    assert_eq!(rounds.right(), 10, "{algorithm} on {}", topology.notation());
                    drop(gather);
                    group.close().unwrap();
                });
            }
        }
    }
}

#[test]
fn lanes_beside_a_graph_take_part_in_every_replay() {
    for topology in topologies() {
        for algorithm in TIERED {
            in_tiers(&topology, false, &options(LONG), |mut group| {
                let (me, ranks) = (group.rank().index(), group.ranks());
                let builder = group.all_gather::<u8>(BLOCK_BYTES).algorithm(algorithm);
                // SAFETY: the stream is idle before the operation is dropped, and the host borrows nothing.
                let mut gather = unsafe { builder.capturable() }.prepare().unwrap();
                let (stream, rounds) = (Stream::new(), Rounds::default());
                stream.begin_capture();
                for _ in 0..2 {
                    rounds.fill(&stream, me, gather.input_memory().unwrap());
                    let lease = gather.start_on(&stream).unwrap();
                    rounds.look(&stream, ranks, lease.output());
                }
                let graph = stream.end_capture();
                for turn in 0..6 {
                    for _ in 0..turn % 3 {
                        graph.replay(&stream);
                    }
                    rounds.fill(&stream, me, gather.input_memory().unwrap());
                    let lease = gather.start_on(&stream).unwrap();
                    rounds.look(&stream, ranks, lease.output());
                }
                assert!(stream.is_idle_within(LONG), "{algorithm}, the stream is blocked");
                assert_eq!(rounds.right(), 6 + 2 * 6, "{algorithm} on {}", topology.notation());
                // All replays are over on all ranks before anyone lets go.
                group.barrier().unwrap();
                drop(gather);
                group.close().unwrap();
            });
        }
    }
}

/// An operation with two lanes on streams is refused: while its graph waits, the copies of the second lane could not run.
#[test]
fn a_second_lane_on_streams_is_refused() {
    let topology = Topology::flat(3).unwrap();
    in_tiers(&topology, true, &options(LONG), |mut group| {
        let builder = group.all_gather::<u8>(BLOCK_BYTES).algorithm(Algorithm::DoubleRing);
        // SAFETY: no graph records the operation.
        let error = unsafe { builder.chunks(2).capturable() }.prepare().unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::InvalidArgument, Some(Rank(0))));
        assert_eq!(
            error.to_string(),
            "double-ring cannot be captured: a graph contains only one lane of each rank, and rank 0 has another one that \
             a thread cannot drive; use direct or ring, or remove `capturable()`"
        );
        group.close().unwrap();
    });
}

#[test]
fn strict_refuses_what_a_thread_would_have_to_drive() {
    let topology = Topology::even(2, 1).unwrap();
    in_tiers(&topology, true, &options(LONG).strict(true), |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        let fallbacks = &gather.report().fallbacks;
        assert_eq!(fallbacks.len(), 1);
        assert_eq!(
            fallbacks[0].to_string(),
            "starts on a stream need a thread, because engines of the backend host (lane 1) make no \
             progress by themselves"
        );
        let stream = Stream::new();
        let error = gather.start_on(&stream).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "strict is set, but `start_on` needs a progress thread for the lanes whose engines cannot wait by themselves; use \
             `start`, or turn strict off"
        );
        // Nothing has started, and the caller may drive it.
        gather.run().unwrap();
        // SAFETY: no graph records the operation.
        let builder = unsafe { group.all_gather::<u8>(BLOCK_BYTES).capturable() };
        let error = builder.prepare().unwrap_err();
        let text = error.to_string();
        assert!(text.contains("strict is set, but the operation needs a fallback"), "{text}");
        drop(gather);
        group.close().unwrap();
    });
}

#[test]
fn a_rank_that_does_not_come_ends_the_start_of_all() {
    let topology = Topology::even(2, 2).unwrap();
    let told = Barrier::new(4);
    let records = in_tiers(&topology, false, &options(SHORT), |mut group| {
        let me = group.rank();
        let builder = group.all_gather::<u8>(BLOCK_BYTES).algorithm(Algorithm::Hierarchical);
        let mut gather = builder.prepare().unwrap();
        let stream = Stream::new();
        if me != Rank(3) {
            drop(gather.start_on(&stream).unwrap());
            pause(&stream, Duration::ZERO);
            assert_idle_within(&stream, SHORT + GRACE);
        }
        await_end(&group);
        told.wait();
        let error = gather.run().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        group.abort_record().unwrap().text
    });
    assert!(records.iter().all(|record| *record == records[0]), "{records:?}");
}
