//! The bootstrap for ranks that are processes: what all bootstraps do, and how a group ends there.
//!
//! What happens before a group has started is in `tcp_start.rs`.

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::checks::{Handle, Opened, each, hear, long, next};
use insta::{allow_duplicates, assert_snapshot};
use peerlane_bootstrap::environment::Environment;
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::tcp::{Hub, TcpBootstrap};
use peerlane_bootstrap::{Bootstrap, Listener, Notice};
use peerlane_hal::{Deadline, ErrorKind, Rank};

fn join(hub: SocketAddr, rank: Rank, ranks: usize) -> TcpBootstrap {
    TcpBootstrap::join(&Environment::at_hub(hub, rank, ranks), long()).unwrap()
}

/// A group whose hub belongs to nobody in it.
fn open(ranks: usize) -> Opened {
    let hub = Hub::bind("127.0.0.1:0", ranks).unwrap();
    let address = hub.address();
    let joined = thread::scope(|scope| {
        let join = |rank| scope.spawn(move || Box::new(join(address, rank, ranks)) as Handle);
        let joining: Vec<_> = Rank::all(ranks).map(join).collect();
        joining.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    Opened { ranks: joined, keep: Box::new(hub) }
}

/// A group whose hub belongs to rank 0.
fn open_with_own_hub(ranks: usize) -> Opened {
    let hub = Hub::bind("127.0.0.1:0", ranks).unwrap();
    let address = hub.address();
    let joined = thread::scope(|scope| {
        let first =
            scope.spawn(|| Box::new(TcpBootstrap::join_with_hub(hub, long()).unwrap()) as Handle);
        let join = |rank| scope.spawn(move || Box::new(join(address, rank, ranks)) as Handle);
        let others: Vec<_> = Rank::all(ranks).skip(1).map(join).collect();
        std::iter::once(first).chain(others).map(|thread| thread.join().unwrap()).collect()
    });
    Opened { ranks: joined, keep: Box::new(()) }
}

crate::checks::run_all!(open);

mod with_own_hub {
    use super::open_with_own_hub;

    crate::checks::run_all!(open_with_own_hub, shrinking:
        the_ranks_that_are_left_find_each_other,
        a_group_that_has_shrunk_can_shrink_again,
        an_excluded_rank_is_not_waited_for,
        a_rank_that_comes_late_is_left_out_and_told,
        an_attempt_can_be_repeated,
    );
}

/// The port of a connection is different in every run.
fn without_ports(text: impl ToString) -> String {
    let text = text.to_string();
    let mut pieces = text.split("127.0.0.1:");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| {
        text + "127.0.0.1:PORT" + piece.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

#[test]
fn a_loss_says_how_it_came() {
    let mut group = open(2);
    let heard = hear(group.ranks[0].as_ref());
    drop(group.ranks.pop());
    assert_snapshot!(without_ports(format!("{:?}", next(&heard, 1))), @r#"[Lost { rank: Rank(1), how: "its connection from 127.0.0.1:PORT closed before the rank left the group" }]"#);
    let error = group.ranks[0].exchange("keys", &[], long()).unwrap_err();
    assert_snapshot!(without_ports(error), @r#"exchange "keys": rank 1 is lost: its connection from 127.0.0.1:PORT closed before the rank left the group"#);
}

#[test]
fn the_loss_of_the_hub_is_the_loss_of_rank_0() {
    let group = open(3);
    let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
    drop(group.keep);
    allow_duplicates!(for heard in heard {
        let heard = next(&heard, 2);
        assert_snapshot!(without_ports(format!("{:?}", heard[0])), @r#"Lost { rank: Rank(0), how: "the hub at 127.0.0.1:PORT closed its connection" }"#);
        assert_eq!(heard[1], Notice::Acknowledged);
    });
    let errors = each(&group.ranks, |rank| rank.exchange("keys", &[], long()).unwrap_err());
    allow_duplicates!(for error in errors {
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(0))));
        assert_snapshot!(without_ports(error), @r#"exchange "keys": rank 0 is lost: the hub at 127.0.0.1:PORT closed its connection"#);
    });
    let error = group.ranks[1].abort(b"late").unwrap_err();
    assert_snapshot!(without_ports(error), @"abort: rank 0 is lost: the hub at 127.0.0.1:PORT closed its connection");
    let error = group.ranks[1].leave(long()).unwrap_err();
    assert_snapshot!(without_ports(error), @"goodbye: rank 0 is lost: the hub at 127.0.0.1:PORT closed its connection");
}

#[test]
fn rank_0_leaves_last() {
    let group = open_with_own_hub(3);
    let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
    let start = Instant::now();
    each(&group.ranks, |rank| {
        if rank.rank() != Rank(0) {
            thread::sleep(Duration::from_millis(100));
        }
        rank.leave(long()).unwrap();
        assert!(start.elapsed() >= Duration::from_millis(100), "rank {}", rank.rank());
    });
    drop(group);
    let losses = |notice: Notice| !matches!(notice, Notice::Left { .. });
    assert_eq!(heard.iter().flat_map(|heard| heard.iter()).find(|n| losses(n.clone())), None);
}

#[test]
fn rank_0_names_who_does_not_leave() {
    let group = open_with_own_hub(4);
    group.ranks[2].leave(long()).unwrap();
    let error = group.ranks[0].leave(Deadline::after(Duration::from_secs(1))).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
    assert_snapshot!(error, @"leave: ranks 1 and 3 did not leave the group within 1 s; the rank that runs the hub must leave last");
}

#[test]
fn what_rank_0_says_last_is_heard_although_the_hub_goes_with_it() {
    for round in 0..20 {
        let mut group = open_with_own_hub(3);
        let heard: Vec<_> = group.ranks.iter().map(|rank| hear(rank.as_ref())).collect();
        group.ranks[0].abort(b"the end").unwrap();
        drop(group.ranks.remove(0));
        let abort = Notice::Abort { from: Rank(0), record: b"the end".to_vec() };
        for heard in &heard[1..] {
            assert_eq!(next(heard, 2), [abort.clone(), Notice::Acknowledged], "round {round}");
        }
    }
}

/// Sleeps in every notice.
struct Sleeper(Duration);

impl Listener for Sleeper {
    fn notice(&self, _notice: Notice) {
        thread::sleep(self.0);
    }

    fn exchange_timed_out(&self, _missing: &[Rank], error: Error) -> Error {
        error
    }
}

#[test]
fn a_group_is_told_within_a_bound_although_a_listener_hangs() {
    let group = open(2);
    let heard = hear(group.ranks[0].as_ref());
    let patience = Duration::from_secs(30);
    group.ranks[1].listen(Arc::new(Sleeper(patience)));
    let start = Instant::now();
    group.ranks[0].abort(b"why").unwrap();
    // The wait for the listener is longer than `next` allows.
    let told = [(); 2].map(|()| heard.recv_timeout(patience).expect("a notice is missing"));
    assert_eq!(told[1], Notice::Acknowledged);
    assert!(start.elapsed() < patience, "told after {:?}", start.elapsed());
}

/// A rank in a process of its own; the test below starts it.
#[test]
#[ignore = "it is a rank of `a_killed_process_is_noticed_at_once`"]
fn child() {
    // Somebody runs all ignored tests.
    let Some(environment) = Environment::from_env().unwrap() else { return };
    let rank = TcpBootstrap::join(&environment, long()).unwrap();
    rank.exchange("here", &[], long()).unwrap();
    rank.exchange("never", &[], long()).unwrap_err();
}

fn start_child(hub: SocketAddr, rank: usize, ranks: usize) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["tcp::child", "--exact", "--ignored"])
        .envs([("RANK", rank.to_string()), ("WORLD_SIZE", ranks.to_string())])
        .env("PEERLANE_HUB", hub.to_string())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn a_killed_process_is_noticed_at_once() {
    let hub = Hub::bind("127.0.0.1:0", 3).unwrap();
    let mut killed = start_child(hub.address(), 1, 3);
    let mut other = start_child(hub.address(), 2, 3);
    let rank = join(hub.address(), Rank(0), 3);
    let heard = hear(&rank);
    rank.exchange("here", &[], long()).unwrap();
    killed.kill().unwrap();
    killed.wait().unwrap();
    crate::checks::assert_hears_loss(&heard, Rank(1));
    assert!(other.wait().unwrap().success());
}

/// A process that runs, but in which nobody calls `shrink`, does not keep the others from going on unless it is the first
/// of them.
#[test]
fn a_rank_that_does_not_answer_is_named() {
    let Opened { ranks, keep: _keep } = open(2);
    let deadline = Deadline::after(Duration::from_secs(1));
    let error = ranks[1].shrink(&[], deadline).map(drop).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(0))));
    assert_snapshot!(without_ports(error), @"shrink: rank 0 at 127.0.0.1:PORT did not answer within 1 s: its process runs, but has not called `shrink`");
    let start = Instant::now();
    let alone = ranks[0].shrink(&[], Deadline::after(Duration::from_secs(4))).unwrap();
    assert_eq!((alone.ranks(), start.elapsed() > Duration::from_secs(2)), (1, true));
}
