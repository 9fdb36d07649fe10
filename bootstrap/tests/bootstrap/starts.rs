//! Starts many groups whose ranks join at random times, while one rank is missing or ends.

use std::sync::mpsc::channel;
use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::raw::Silent;
use peerlane_bootstrap::environment::Environment;
use peerlane_bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

const RANKS: usize = 8;
const DELAY_MAX: Duration = Duration::from_secs(1);
/// Longer than the longest delay, so that all ranks that come have joined before it passes.
const TIMEOUT: Duration = Duration::from_secs(5);
/// How much later than its deadline a rank may return.
const LATE_MAX: Duration = Duration::from_millis(500);
const AT_ONCE: usize = 50;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    /// The rank never joins.
    Missing,
    /// The rank joins, and its process ends before all others have joined.
    Ends,
    /// As `Ends`; the rank runs the hub.
    EndsWithHub,
}

/// Starts a group, and returns the longest time from the deadline of a rank to its error.
///
/// The watch starts before the first deadline.
fn start(seed: u64, watch: &OnceLock<Stopwatch>) -> Duration {
    let mut random = fastrand::Rng::with_seed(seed);
    let fault = [Fault::Missing, Fault::Ends, Fault::EndsWithHub][random.usize(..3)];
    let faulty = if fault == Fault::EndsWithHub { 0 } else { random.u32(..RANKS as u32) };
    let mut delays = [(); RANKS].map(|()| DELAY_MAX.mul_f64(random.f64()));
    // A rank that joins last would complete the group.
    let own = std::mem::take(&mut delays[faulty as usize]);
    let last = (0..RANKS).max_by_key(|rank| delays[*rank]).unwrap();
    delays[faulty as usize] = own.min(delays[last].mul_f64(0.9));
    // The threads of a busy machine may wake in another order, so that the last rank waits for the faulty one.
    let (acts, has_acted) = channel::<()>();
    let (mut acts, mut has_acted) = (Some(acts), Some(has_acted));
    let hub = Hub::bind("127.0.0.1:0", RANKS).unwrap();
    let address = hub.address();
    let (hub, latest) = (Mutex::new(Some(hub)), Mutex::new(Duration::ZERO));
    thread::scope(|scope| {
        for rank in 0..RANKS as u32 {
            let (delay, hub, latest) = (delays[rank as usize], &hub, &latest);
            let acts = if rank == faulty { acts.take() } else { None };
            let has_acted = if rank as usize == last { has_acted.take() } else { None };
            scope.spawn(move || {
                thread::sleep(delay);
                if let Some(has_acted) = has_acted {
                    // It returns when the faulty rank drops the other end. The hub has noted then that it has ended.
                    let _ = has_acted.recv();
                }
                if rank == faulty {
                    match fault {
                        Fault::Missing => {}
                        Fault::Ends => Silent::join_at(address, rank, RANKS as u32).end(),
                        Fault::EndsWithHub => drop(hub.lock().unwrap().take()),
                    }
                    drop(acts);
                    return;
                }
                let begin = Instant::now();
                let environment = Environment::at_hub(address, Rank(rank), RANKS);
                let error = TcpBootstrap::join(&environment, Deadline::after(TIMEOUT)).unwrap_err();
                let mut late = begin.elapsed().saturating_sub(TIMEOUT);
                // The waits are read only if they decide. By then, the watch has started.
                if late >= LATE_MAX {
                    late = late.saturating_sub(watch.wait().elapsed().waited);
                }
                let what = format!("seed {seed}, {fault:?} {faulty}, rank {rank}: {error}");
                match error.kind() {
                    // It came after the end of the group, which the text says.
                    ErrorKind::Aborted => {
                        assert!(error.to_string().contains(&format!("rank {faulty} ")), "{what}");
                    }
                    ErrorKind::Timeout | ErrorKind::PeerLost => {
                        assert_eq!(error.peer(), Some(Rank(faulty)), "{what}");
                    }
                    kind => panic!("{kind:?}: {what}"),
                }
                assert!(late < LATE_MAX, "{late:?} late: {what}");
                let mut latest = latest.lock().unwrap();
                *latest = late.max(*latest);
            });
        }
    });
    latest.into_inner().unwrap()
}

/// Starts 50 groups, or as many as `PEERLANE_STARTS` says.
#[test]
fn every_rank_names_the_one_that_is_missing_or_has_ended() {
    let starts = std::env::var("PEERLANE_STARTS")
        .map_or(AT_ONCE as u64, |starts| starts.parse().expect("PEERLANE_STARTS is a number"));
    let seeds: Vec<u64> = (0..starts).collect();
    let late = seeds.chunks(AT_ONCE).map(|seeds| {
        // One for all, because it reads the waits of hundreds of threads.
        let watch = &OnceLock::new();
        thread::scope(|scope| {
            let begin = Instant::now();
            let threads: Vec<_> =
                seeds.iter().map(|seed| scope.spawn(move || start(*seed, watch))).collect();

            // What threads waited while they joined made nobody late, so only later waits are subtracted.
            thread::sleep(TIMEOUT.saturating_sub(begin.elapsed()));
            watch.get_or_init(Stopwatch::start);
            threads.into_iter().map(|thread| thread.join().unwrap()).max().unwrap_or_default()
        })
    });
    println!("{starts} starts: at most {:?} after the deadline", late.max().unwrap_or_default());
}
