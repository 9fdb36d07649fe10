//! Ranks that die and leave a child behind, which has copies of all their descriptors.

use std::process::exit;
use std::time::Duration;

use crate::support::rank_processes::{place, said, start};
use peerlane_collectives::bootstrap::environment::{Environment, HubAddress};
use peerlane_collectives::bootstrap::tcp::TcpBootstrap;
use peerlane_collectives::error::Error;
use peerlane_collectives::group::Group;
use peerlane_hal::{Deadline, Rank};
use peerlane_host as host;
use peerlane_test_support::ReservedPort;

/// Far beyond what a busy machine needs to tell a death.
const TIMEOUT: Duration = Duration::from_secs(60);

/// How a rank makes the child that it leaves behind.
#[derive(Clone, Copy, Debug)]
enum Fork {
    /// By the library call, which runs the handlers of forks.
    Call,
    /// By the system call, of which nobody knows.
    Raw,
}

fn fork(how: Fork) -> i32 {
    match how {
        // SAFETY: the child only calls `pause`.
        Fork::Call => unsafe { libc::fork() },
        Fork::Raw => {
            let (flags, none) = (libc::SIGCHLD, 0);
            // SAFETY: as above. Without a stack of its own, the child has a copy of the parent's.
            let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
            i32::try_from(pid).unwrap()
        }
    }
}

#[test]
#[ignore = "it is a rank of `the_death_of_a_rank_is_told_while_a_child_of_it_lives`"]
fn rank_process() {
    // Somebody runs all ignored tests.
    let Some(place) = place() else { return };
    // The address of the hub, the rank, and the rank that forks and dies.
    let [hub, rank, victim, how] = &place[..] else { panic!("{place:?}") };
    let (rank, victim) = (Rank(rank.parse().unwrap()), Rank(victim.parse().unwrap()));
    let how = if how == "Raw" { Fork::Raw } else { Fork::Call };
    let ended = be_rank(hub, rank, (victim, how));
    let error = ended.unwrap_err();
    println!("\nerror: {:?} {:?} {error}", error.kind(), error.peer().map(|peer| peer.0));
    exit(0);
}

fn be_rank(hub: &str, rank: Rank, (victim, how): (Rank, Fork)) -> Result<(), Error> {
    let hub = HubAddress::RankZero(hub.to_owned());
    let environment = Environment { hub, ..Environment::at_hub("", rank, 3) };
    let bootstrap = TcpBootstrap::join(&environment, Deadline::after(TIMEOUT))?;
    let mut group = Group::open(bootstrap, host::Fabric::open(rank, 3)?)?;
    group.barrier()?;
    if rank != victim {
        return group.barrier();
    }

    let child = fork(how);
    if child == 0 {
        loop {
            // SAFETY: it only waits for a signal.
            unsafe { libc::pause() };
        }
    }
    println!("\nchild: {child}");
    exit(1);
}

fn is_alive(pid: i32) -> bool {
    // SAFETY: signal 0 only asks whether the process exists.
    unsafe { libc::kill(pid, 0) == 0 }
}

#[test]
fn the_death_of_a_rank_is_told_while_a_child_of_it_lives() {
    for (victim, how) in
        [(0, Fork::Call), (0, Fork::Raw), (1, Fork::Call), (1, Fork::Raw), (2, Fork::Call)]
    {
        let port = ReservedPort::new();
        let hub = port.address().to_string();
        let mut ranks = [0, 1, 2]
            .map(|rank| start("deaths::rank_process", &format!("{hub} {rank} {victim} {how:?}")));
        let child: i32 = said(&mut ranks[victim as usize].1, "child: ").parse().unwrap();

        for (rank, (_, lines)) in (0..).zip(&mut ranks).filter(|(rank, _)| *rank != victim) {
            let error = said(lines, "error: ");
            let expected = format!("PeerLost Some({victim}) rank {victim} is lost: ");
            assert!(error.starts_with(&expected), "rank {rank}, {how:?}: {error}");
        }
        assert!(is_alive(child), "the child of rank {victim} has ended");
        ranks.iter_mut().for_each(|(process, _)| drop(process.wait()));

        // The next generation of the job is at the same address.
        let environment = Environment {
            hub: HubAddress::RankZero(hub.clone()),
            ..Environment::at_hub("", Rank(0), 1)
        };
        let next = TcpBootstrap::join(&environment, Deadline::after(TIMEOUT));
        if let (0, Fork::Raw) = (victim, how) {
            let text = format!("cannot listen at {hub}: the port is in use by process {child} (");
            let error = next.unwrap_err().to_string();
            assert!(error.starts_with(&text), "{error}");
        } else {
            drop(next.unwrap());
        }
        // SAFETY: the child belongs to this test.
        unsafe { libc::kill(child, libc::SIGKILL) };
    }
}
