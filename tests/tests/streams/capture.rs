//! Captures starts in graphs.

use std::sync::{Arc, Barrier, Mutex};
use std::time::Duration;

use peerlane_collectives::error::Error;
use peerlane_collectives::plan::Algorithm;
use peerlane_hal::{ErrorKind, Rank};
use peerlane_tests::middleware::Stream;

use crate::support::{BLOCK_BYTES, GRACE, LONG, Rounds, assert_idle_within, in_group};

#[test]
fn replays_and_eager_starts_alternate() {
    for (ranks, in_place) in [(1, false), (2, false), (3, true), (4, false)] {
        let results = in_group(ranks, LONG, |mut group| {
            let me = group.rank().index();
            let builder = group.all_gather::<u8>(BLOCK_BYTES);
            // SAFETY: the stream is idle before the operation is dropped, and the host borrows nothing.
            let builder = unsafe { builder.capturable() };
            let builder = if in_place { builder.in_place() } else { builder };
            let mut gather = builder.prepare()?;
            let outputs = if in_place { 1 } else { 2 };
            assert_eq!((gather.report().outputs, gather.report().capturable), (outputs, true));
            let (stream, rounds) = (Stream::new(), Rounds::default());
            stream.begin_capture();
            // Two starts in one graph.
            for _ in 0..2 {
                rounds.fill(&stream, me, gather.input_memory().unwrap());
                let lease = gather.start_on(&stream)?;
                assert_eq!(lease.epoch(), None);
                rounds.look(&stream, ranks, lease.output());
            }
            let graph = stream.end_capture();
            assert_eq!(rounds.right(), 0);
            for turn in 1..=10 {
                for _ in 0..turn % 3 {
                    graph.replay(&stream);
                }
                rounds.fill(&stream, me, gather.input_memory().unwrap());
                let lease = gather.start_on(&stream)?;
                assert_eq!(lease.epoch(), Some(turn));
                rounds.look(&stream, ranks, lease.output());
            }
            assert!(stream.is_idle_within(LONG));
            assert_eq!(rounds.right(), 10 + 2 * 10);
            group.close()
        });
        results.into_iter().for_each(|result: Result<(), Error>| result.unwrap());
    }
}

#[test]
fn an_operation_without_flags_for_it_is_not_recorded() {
    in_group(2, LONG, |mut group| {
        let mut gather = group.all_gather::<u8>(BLOCK_BYTES).prepare().unwrap();
        let stream = Stream::new();
        stream.begin_capture();
        let error = gather.start_on(&stream).unwrap_err();
        assert!(stream.end_capture().is_empty());
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.to_string(),
            "the stream captures a graph, but the operation is not capturable; prepare it with \
             `capturable()`"
        );
        // Nothing is broken by that.
        gather.start_on(&stream).unwrap().wait().unwrap();
        drop(gather);
        group.close().unwrap();
    });
}

#[test]
fn a_recorded_start_cannot_be_waited_for() {
    in_group(1, LONG, |mut group| {
        // SAFETY: the graph is never replayed.
        let builder = unsafe { group.all_gather::<u8>(BLOCK_BYTES).capturable() };
        let mut gather = builder.prepare().unwrap();
        let stream = Stream::new();
        stream.begin_capture();
        let mut lease = gather.start_on(&stream).unwrap();
        let errors = [lease.wait().unwrap_err(), lease.poll().unwrap_err()];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            assert_eq!(
                error.to_string(),
                "this start was recorded into a graph and has not run; wait for the replay of the \
                 graph"
            );
        }
        assert_eq!(stream.end_capture().len(), 1);
        drop(gather);
        group.close().unwrap();
    });
}

#[test]
fn starts_of_one_graph_alternate_where_everyone_hears_from_everyone() {
    in_group(2, LONG, |mut group| {
        // SAFETY: no graph records the operations.
        let builder = unsafe { group.all_gather::<u8>(4).capturable() };
        assert_eq!(builder.prepare().unwrap().report().outputs, 2);
        // SAFETY: as above.
        let builder = unsafe { group.all_gather::<u8>(4).outputs(1).capturable() };
        assert_eq!(builder.prepare().unwrap().report().outputs, 1);
        // SAFETY: as above.
        let builder = unsafe { group.broadcast::<u8>(Rank(0), 4).capturable() };
        assert_eq!(builder.prepare().unwrap().report().outputs, 1);

        // SAFETY: as above.
        let builder = unsafe { group.broadcast::<u8>(Rank(0), 4).capturable() };
        let refused = builder.outputs(2).prepare().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            refused.to_string(),
            "outputs is 2, expected 1 in a capturable broadcast by the algorithm direct"
        );
    });
}

/// Ranks read their outputs slowly, each at other times, and look for bytes of later starts.
#[test]
fn replays_out_of_turn_and_eager_starts_between_them_overwrite_nothing_in_use() {
    for (ranks, seed) in [(2, 1), (2, 2), (3, 3), (4, 4), (5, 5)] {
        in_group(ranks, LONG, |mut group| {
            let me = group.rank().index();
            // SAFETY: the stream is idle before the operation is dropped, and the host borrows
            // nothing.
            let builder = unsafe { group.all_gather::<u8>(BLOCK_BYTES).capturable() };
            let mut gather = builder.algorithm(Algorithm::Direct).prepare().unwrap();
            assert_eq!(gather.report().outputs, 2);
            let (stream, rounds) = (Stream::new(), Rounds::default());
            let own_pauses = Arc::new(Mutex::new(fastrand::Rng::with_seed(10 * seed + me as u64)));

            let mut start = |places: &mut Vec<_>| {
                rounds.fill(&stream, me, gather.input_memory().unwrap());
                let lease = gather.start_on(&stream).unwrap();
                places.push(lease.output().base);

                let pauses = Arc::clone(&own_pauses);
                stream.run(move || {
                    let micros = pauses.lock().unwrap().u64(..800);
                    std::thread::sleep(Duration::from_micros(micros));
                });
                rounds.look(&stream, ranks, lease.output());
            };

            let graphs = [1, 2, 3, 4].map(|starts| {
                stream.begin_capture();
                let mut places = Vec::new();
                (0..starts).for_each(|_| start(&mut places));
                let alternates = places.windows(2).all(|pair| pair[0] != pair[1]);
                assert!(alternates, "the starts of one graph use the outputs in turn");
                (starts, stream.end_capture())
            });

            let turns = &mut fastrand::Rng::with_seed(seed);
            let mut made = 0;
            for _ in 0..60 {
                match turns.usize(..5) {
                    4 => {
                        start(&mut Vec::new());
                        made += 1;
                    }
                    graph => {
                        let (starts, graph) = &graphs[graph];
                        graph.replay(&stream);
                        made += starts;
                    }
                }
            }
            assert!(stream.is_idle_within(LONG));
            assert_eq!(rounds.right(), made);

            drop(gather);
            group.close().unwrap();
        });
    }
}

#[test]
fn ranks_agree_on_it() {
    in_group(2, LONG, |mut group| {
        let capturable = group.rank().0 == 1;
        let builder = group.all_gather::<u8>(4).outputs(1);
        // SAFETY: no graph records the operation.
        let builder = if capturable { unsafe { builder.capturable() } } else { builder };
        let prepared = builder.prepare();
        assert_eq!(
            prepared.unwrap_err().to_string(),
            "all-gather 1: ranks disagree: capturable is true on rank 1, false on rank 0"
        );
    });
}

/// Nobody watches a replay; when the group ends, it is let go, and so is one that comes later.
#[test]
fn a_replay_that_a_peer_does_not_join_ends_with_the_group() {
    let recorded = Barrier::new(2);
    in_group(2, LONG, |mut group| {
        // SAFETY: each replay is complete before the operation is dropped, and the host borrows nothing.
        let builder = unsafe { group.all_gather::<u8>(BLOCK_BYTES).capturable() };
        let mut gather = builder.prepare().unwrap();
        let stream = Stream::new();
        if group.rank().0 == 1 {
            recorded.wait();
            // Leaves without a word.
            return drop((gather, group));
        }
        stream.begin_capture();
        drop(gather.start_on(&stream).unwrap());
        let graph = stream.end_capture();
        recorded.wait();
        for _ in 0..2 {
            graph.replay(&stream);
            assert_idle_within(&stream, GRACE);
        }
        assert_eq!(gather.start_on(&stream).unwrap_err().kind(), ErrorKind::PeerLost);
    });
}
