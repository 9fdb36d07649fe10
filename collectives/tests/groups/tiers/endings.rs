//! Tests ranks that do not start, or leave the group: all other ranks end with the same abort record.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::GroupOptions;
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::ErrorKind;

use super::{LONG, WAITS, Waits, open};

const SHORT: Duration = Duration::from_millis(300);

/// Runs a start on all ranks except the last one. Returns the kind of each rank's error, and its abort record.
fn abort(
    algorithm: Algorithm,
    waits: Waits,
    timeout: Duration,
    leaves: bool,
) -> Vec<(Option<ErrorKind>, String)> {
    let topology: Topology = "2x2".parse().unwrap();
    let (ready, recorded) = (Barrier::new(4), Barrier::new(4));
    let handles = in_process::group(4).unwrap();
    let rank = |bootstrap: in_process::InProcessBootstrap| {
        let me = bootstrap.rank().0;
        let options = GroupOptions::default().timeout(LONG).topology(topology.clone());
        let mut group = open(bootstrap, options, waits).unwrap();
        let mut prepare = |timeout| {
            let builder = group.all_gather::<u8>(1000).algorithm(algorithm);
            builder.timeout(timeout).prepare().unwrap()
        };
        prepare(LONG).run().unwrap();
        let mut gather = prepare(timeout);
        ready.wait();
        if me == 3 && leaves {
            drop((gather, group));
            recorded.wait();
            return (None, String::new());
        }
        let kind = (me != 3).then(|| gather.run().unwrap_err().kind());
        let begin = Instant::now();
        while group.abort_record().is_none() {
            assert!(begin.elapsed() < LONG, "rank {me} got no abort record");
            std::thread::yield_now();
        }
        recorded.wait();
        (kind, group.abort_record().unwrap().text)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(|| rank(handle))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_does_not_start_is_a_timeout_on_all() {
    for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchical, Algorithm::Pull]
    {
        // Only a hierarchical rank waits on both tiers at once.
        for waits in WAITS {
            if waits.local != waits.network && algorithm != Algorithm::Hierarchical {
                continue;
            }
            let ended = abort(algorithm, waits, SHORT, false);
            for (kind, text) in &ended {
                assert!(kind.is_none_or(|kind| kind == ErrorKind::Timeout), "{ended:?}");
                assert_eq!(*text, ended[0].1, "{algorithm}, {waits:?}");
                assert!(text.contains("waited for"), "{text}");
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_lost_to_all() {
    for algorithm in [Algorithm::Direct, Algorithm::Hierarchical] {
        for waits in WAITS {
            let ended = abort(algorithm, waits, LONG, true);
            for (kind, text) in &ended[..3] {
                assert_eq!(*kind, Some(ErrorKind::PeerLost), "{ended:?}");
                assert_eq!(*text, ended[0].1, "{algorithm}, {waits:?}");
                assert!(text.contains("rank 3"), "{text}");
            }
        }
    }
}
