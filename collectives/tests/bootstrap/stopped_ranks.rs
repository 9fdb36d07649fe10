//! Ranks whose processes are stopped while the others wait for them.

use std::net::TcpListener;
use std::process::exit;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::rank_processes::{place, said, start};
use peerlane_collectives::bootstrap::Bootstrap;
use peerlane_collectives::bootstrap::environment::{Environment, HubAddress};
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::GroupOptions;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;

const TIMEOUT: Duration = Duration::from_secs(1);

/// A rank that waits for the answer of a stopped one waits at least this long.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(1500);

#[test]
#[ignore = "it is a rank of `nobody_waits_for_an_answer_of_a_rank_that_is_stopped`"]
fn rank_process() {
    // The address of the hub, the rank, the rank that is stopped, and the call of the others.
    let [hub, rank, victim, call] = &place()[..] else { panic!() };
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
    let begun = Instant::now();
    let error = match call.as_str() {
        "exchange" => exchange(bootstrap),
        _ => open(bootstrap),
    };
    let error = error.unwrap_err();
    let (late, peer) = (begun.elapsed().saturating_sub(TIMEOUT), error.peer().map(|peer| peer.0));
    println!("\nend: {} {:?} {peer:?}", late.as_millis(), error.kind());
    exit(0);
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
    let hub = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut ranks = [0, 1, 2]
        .map(|rank| start("stopped_ranks::rank_process", &format!("{hub} {rank} {victim} {call}")));
    ranks.iter_mut().for_each(|(_, lines)| drop(said(lines, "joined: ")));

    let stopped = i32::try_from(ranks[victim as usize].0.id()).unwrap();
    // SAFETY: the process is one of this test.
    unsafe { libc::kill(stopped, libc::SIGSTOP) };

    for (rank, (_, lines)) in (0..).zip(&mut ranks).filter(|(rank, _)| *rank != victim) {
        let end = said(lines, "end: ");
        let (late, how) = end.split_once(' ').unwrap();
        assert_eq!(how, format!("Timeout Some({victim})"), "{call} on rank {rank}");
        let late = Duration::from_millis(late.parse().unwrap());
        assert!(late < ANSWER_TIMEOUT, "{call} on rank {rank}: {late:?} after its deadline");
    }

    for (process, _) in &mut ranks {
        process.kill().unwrap();
        process.wait().unwrap();
    }
}
