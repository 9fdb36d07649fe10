//! Ranks that do not come, or leave: all others end with the same record.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::in_process;
use peerlane_collectives::group::GroupOptions;
use peerlane_collectives::plan::Algorithm;
use peerlane_collectives::topology::Topology;
use peerlane_hal::ErrorKind;

use crate::support::{LONG, WAITS, Waits, open};

const SHORT: Duration = Duration::from_millis(300);

/// All but the last rank gather; what they say, and the record of all.
fn ends(
    algorithm: Algorithm,
    waits: Waits,
    timeout: Duration,
    leaves: bool,
) -> Vec<(Option<ErrorKind>, String)> {
    let topology: Topology = "2x2".parse().unwrap();
    let (ready, told) = (Barrier::new(4), Barrier::new(4));
    let handles = in_process::group(4).unwrap();
    let rank = |bootstrap: in_process::InProcess| {
        let me = bootstrap.rank().0;
        let options = GroupOptions::default().timeout(LONG).topology(topology.clone());
        let mut group = open(bootstrap, options, waits).unwrap();
        let builder = group.all_gather::<u8>(1000).algorithm(algorithm).timeout(timeout);
        let mut gather = builder.prepare().unwrap();
        gather.run().unwrap();
        ready.wait();
        if me == 3 && leaves {
            drop((gather, group));
            told.wait();
            return (None, String::new());
        }
        let kind = (me != 3).then(|| gather.run().unwrap_err().kind());
        let begin = Instant::now();
        while group.abort_record().is_none() {
            assert!(begin.elapsed() < LONG, "rank {me} was not told");
            std::thread::yield_now();
        }
        told.wait();
        (kind, group.abort_record().unwrap().text)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            handles.into_iter().map(|handle| scope.spawn(|| rank(handle))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

#[test]
fn a_rank_that_does_not_come_is_a_timeout_on_all() {
    for algorithm in [Algorithm::Direct, Algorithm::Ring, Algorithm::Hierarchical, Algorithm::Pull]
    {
        for waits in WAITS {
            let ended = ends(algorithm, waits, SHORT, false);
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
            let ended = ends(algorithm, waits, LONG, true);
            for (kind, text) in &ended[..3] {
                assert_eq!(*kind, Some(ErrorKind::PeerLost), "{ended:?}");
                assert_eq!(*text, ended[0].1, "{algorithm}, {waits:?}");
                assert!(text.contains("rank 3"), "{text}");
            }
        }
    }
}
