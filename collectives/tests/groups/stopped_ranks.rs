//! Ranks whose processes are stopped while the others wait for them.

use std::thread;
use std::time::Duration;

use crate::support::rank_processes::{place, said, start};
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::{Environment, HubAddress};
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::GroupOptions;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_test_support::{ReservedPort, Stopwatch};

const TIMEOUT: Duration = Duration::from_secs(1);

/// How much later than its deadline a rank may return.
const LATE_MAX: Duration = Duration::from_millis(500);

#[test]
#[ignore = "it is a rank of `nobody_waits_for_an_answer_of_a_rank_that_is_stopped`"]
fn rank_process() {
    // Somebody runs all ignored tests.
    let Some(place) = place() else { return };
    // The address of the hub, the rank, the rank that is stopped, and the call of the others.
    let [hub, rank, victim, call] = &place[..] else { panic!("{place:?}") };
    let rank = Rank(rank.parse().unwrap());
    let hub = HubAddress::RankZero(hub.to_owned());
    let environment = Environment { hub, ..Environment::at_hub("", rank, 3) };
    let joined = TcpBootstrap::join(&environment, Deadline::after(Duration::from_secs(60)));
    let bootstrap = joined.unwrap();
    println!("\njoined: {rank}");
    if victim.parse() == Ok(rank.0) {
        // The test stops it, once all ranks have joined.
        thread::sleep(Duration::from_secs(60));
    }

    // With everything that the call drops.
    let error = match call.as_str() {
        "exchange" => exchange(bootstrap),
        _ => open(bootstrap),
    };
    let error = error.unwrap_err();
    let peer = error.peer().map(|peer| peer.0);
    println!("\nend: {:?} {peer:?}", error.kind());
    // The test kills it, once it has read for how long the threads of this process waited for a processor.
    thread::sleep(Duration::from_secs(60));
}

fn exchange(bootstrap: TcpBootstrap) -> Result<(), Error> {
    bootstrap.exchange("keys", &[], Deadline::after(TIMEOUT)).map(drop)
}

fn open(bootstrap: TcpBootstrap) -> Result<(), Error> {
    let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
    GroupOptions::default().timeout(TIMEOUT).open(bootstrap, fabric).map(drop)
}

#[test]
fn nobody_waits_for_an_answer_of_a_rank_that_is_stopped() {
    // At once, because each waits for its deadline.
    thread::scope(|scope| {
        for (victim, call) in [(1, "exchange"), (2, "exchange"), (0, "open"), (1, "open")] {
            scope.spawn(move || assert_blames(victim, call));
        }
    });
}

/// Stops rank `victim` of three, and checks that the others blame it at the deadline of `call`.
fn assert_blames(victim: u32, call: &str) {
    let port = ReservedPort::new();
    let hub = port.address().to_string();
    let mut ranks = [0, 1, 2]
        .map(|rank| start("stopped_ranks::rank_process", &format!("{hub} {rank} {victim} {call}")));
    ranks.iter_mut().for_each(|(_, lines)| drop(said(lines, "joined: ")));

    let stopped = i32::try_from(ranks[victim as usize].0.id()).unwrap();
    // SAFETY: the process is one of this test.
    unsafe { libc::kill(stopped, libc::SIGSTOP) };

    // The others have begun their call before.
    let watch = Stopwatch::start_with(ranks.iter().map(|(process, _)| process.id()));
    for (rank, (_, lines)) in (0..).zip(&mut ranks).filter(|(rank, _)| *rank != victim) {
        let end = said(lines, "end: ");
        watch.assert_within(TIMEOUT + LATE_MAX);
        assert_eq!(end, format!("Timeout Some({victim})"), "{call} on rank {rank}");
    }

    for (process, _) in &mut ranks {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
