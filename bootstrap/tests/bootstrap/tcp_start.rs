//! The start of a group of processes: who is taken, who is refused, and who is missed.

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::raw::{
    PREAMBLE, PROMPT, Silent, challenge, hello, sealed, stranger, wait_missing,
};
use insta::{allow_duplicates, assert_snapshot};
use peerlane_bootstrap::Bootstrap;
use peerlane_bootstrap::environment::{Environment, HubAddress};
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::tcp::{Hub, HubOptions, TcpBootstrap};
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::{ReservedPort, Stopwatch, not_covered};

fn hub(ranks: usize) -> Hub {
    Hub::bind("127.0.0.1:0", ranks).unwrap()
}

fn long() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn after_ms(milliseconds: u64) -> Deadline {
    Deadline::after(Duration::from_millis(milliseconds))
}

fn join(
    hub: SocketAddr,
    rank: u32,
    ranks: usize,
    deadline: Deadline,
) -> Result<TcpBootstrap, Error> {
    TcpBootstrap::join(&Environment::at_hub(hub, Rank(rank), ranks), deadline)
}

/// The text of the error, with each address of this run replaced by its name.
fn text(error: &Error, names: &[(SocketAddr, &str)]) -> String {
    names
        .iter()
        .fold(error.to_string(), |text, (address, name)| text.replace(&address.to_string(), name))
}

/// Checks that a group of two still comes together at `hub`.
fn assert_starts(hub: &Hub) {
    thread::scope(|scope| {
        let other = scope.spawn(|| join(hub.address(), 1, 2, long()).unwrap());
        let rank = join(hub.address(), 0, 2, long()).unwrap();
        let other = other.join().unwrap();
        other.leave(long()).unwrap();
        rank.leave(long()).unwrap();
    });
}

#[test]
fn a_hub_needs_ranks_and_a_free_port() {
    let error = Hub::bind("127.0.0.1:0", 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert_snapshot!(error, @"number of ranks is 0, expected at least 1");

    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let error = Hub::bind(&address.to_string(), 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let own = fs::read_to_string("/proc/self/comm").unwrap();
    let own = format!("process {} ({})", std::process::id(), own.trim());
    let text = text(&error, &[(address, "HUB")]).replace(&own, "PROCESS");
    assert_snapshot!(text, @"cannot listen at HUB: the port is in use by PROCESS; set PEERLANE_PORT or MASTER_PORT to a free port, the same on every rank");

    let options = HubOptions::default().allow_unauthenticated(true);
    let error = options.bind("192.0.2.1:0", 2).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_snapshot!(error, @"cannot listen at 192.0.2.1:0 for the ranks of the group: Cannot assign requested address (os error 99)");
}

#[test]
fn a_rank_that_cannot_join_ends_the_start_for_all_others() {
    let hub = hub(3);
    thread::scope(|scope| {
        let first = scope.spawn(|| join(hub.address(), 0, 3, long()).unwrap_err());
        wait_missing(&hub, &[1, 2]);
        hub.fail_start(Rank(1), "its process ended");
        let first = first.join().unwrap();
        assert_eq!((first.kind(), first.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
        assert_snapshot!(first, @"the group did not start: rank 1 is lost: its process ended");
    });
    let late = join(hub.address(), 2, 3, long()).unwrap_err();
    assert_eq!((late.kind(), late.peer()), (ErrorKind::Aborted, Some(Rank(1))));
    let late = text(&late, &[(hub.address(), "HUB")]);
    assert_snapshot!(late, @"the hub at HUB rejected this rank: the group has already ended: rank 1 is lost: its process ended");

    // Ranks that do not exist cannot end anything, and the connection shows the loss of a rank of a group that runs.
    let hub = self::hub(2);
    hub.fail_start(Rank(2), "no such rank");
    thread::scope(|scope| {
        let other = scope.spawn(|| join(hub.address(), 1, 2, long()).unwrap());
        let rank = join(hub.address(), 0, 2, long()).unwrap();
        let other = other.join().unwrap();
        hub.fail_start(Rank(1), "it has joined");
        other.leave(long()).unwrap();
        rank.leave(long()).unwrap();
    });
}

#[test]
fn a_rank_of_another_job_is_refused() {
    let port = ReservedPort::new();
    let address = port.address();
    let place = |rank, job: Option<&str>| Environment {
        rank: Rank(rank),
        ranks: 2,
        ranks_variable: None,
        local_rank: None,
        local_ranks: None,
        job: job.map(str::to_owned),
        secret: None,
        allow_unauthenticated: false,
        hub: HubAddress::RankZero(address.to_string()),
    };
    // Rank 1 of the first job starts last: rank 1 of the second job must not take its place.
    thread::scope(|scope| {
        let zero = scope.spawn(|| TcpBootstrap::join(&place(0, Some("a")), long()).unwrap());
        let error = TcpBootstrap::join(&place(1, Some("b")), long()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert_snapshot!(text(&error, &[(address, "HUB")]), @r#"the hub at HUB rejected this rank: this process belongs to job "b", the hub to job "a"; set MASTER_PORT or PEERLANE_PORT to a different port for every job, or PEERLANE_JOB_ID to the same id on all ranks"#);
        let one = TcpBootstrap::join(&place(1, Some("a")), long()).unwrap();
        let zero = zero.join().unwrap();
        one.leave(long()).unwrap();
        zero.leave(long()).unwrap();
    });
}

#[test]
fn a_hub_with_a_job_refuses_the_ranks_of_others() {
    let hub = HubOptions::default().job("a").bind("127.0.0.1:0", 1).unwrap();
    let place = |job: Option<&str>| Environment {
        job: job.map(str::to_owned),
        ..Environment::at_hub(hub.address(), Rank(0), 1)
    };
    let error = TcpBootstrap::join(&place(Some("b")), long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    let error = TcpBootstrap::join(&place(None), long()).unwrap_err();
    assert_snapshot!(text(&error, &[(hub.address(), "HUB")]), @r#"the hub at HUB rejected this rank: this process belongs to no job, the hub to job "a"; set MASTER_PORT or PEERLANE_PORT to a different port for every job, or PEERLANE_JOB_ID to the same id on all ranks"#);
    TcpBootstrap::join(&place(Some("a")), long()).unwrap().leave(long()).unwrap();
}

#[test]
fn an_address_of_another_host_is_named_if_ranks_are_missing() {
    // Of a network for documentation (RFC 5737).
    let place = Environment {
        hub: HubAddress::RankZero("192.0.2.1:0".into()),
        allow_unauthenticated: true,
        ..Environment::at_hub("", Rank(0), 2)
    };
    let error = TcpBootstrap::join(&place, after_ms(500)).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
    assert_snapshot!(error, @"the group did not start: rank 1 did not connect within 0.5 s; the address of rank 0 is 192.0.2.1:0 (MASTER_ADDR), but [192.0.2.1:0] is not an address of the host of rank 0; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

#[test]
fn rank_0_opens_the_hub_and_others_wait_for_it() {
    let port = ReservedPort::new();
    let address = port.address();
    for host in ["127.0.0.1", "localhost"] {
        let place = |rank| Environment {
            hub: HubAddress::RankZero(format!("{host}:{}", address.port())),
            ..Environment::at_hub("", Rank(rank), 2)
        };
        thread::scope(|scope| {
            let other = scope.spawn(|| TcpBootstrap::join(&place(1), long()).unwrap());
            thread::sleep(Duration::from_millis(50));
            let first = TcpBootstrap::join(&place(0), long()).unwrap();
            other.join().unwrap().leave(long()).unwrap();
            first.leave(long()).unwrap();
        });
    }
}

/// Joins two ranks whose launcher gives this `MASTER_ADDR`. Rank 0 must reach the hub at the address too.
fn join_at(master_address: &str) {
    let port = ReservedPort::new();
    let place = |rank: &str| {
        let lookup = |name: &str| match name {
            "RANK" => Some(rank.to_owned()),
            "WORLD_SIZE" => Some("2".to_owned()),
            "MASTER_ADDR" => Some(master_address.to_owned()),
            "MASTER_PORT" => Some(port.number().to_string()),
            "PEERLANE_SECRET" => Some("0123456789abcdef".to_owned()),
            _ => None,
        };
        Environment::from_lookup(lookup).unwrap().expect("the variables give a rank")
    };

    thread::scope(|scope| {
        let other = scope.spawn(|| TcpBootstrap::join(&place("1"), long()).unwrap());
        let first = TcpBootstrap::join(&place("0"), long()).unwrap();
        other.join().unwrap().leave(long()).unwrap();
        first.leave(long()).unwrap();
    });
}

#[test]
fn ranks_meet_at_every_form_of_an_address() {
    for address in
        ["127.0.0.1", "127.0.0.2", "localhost", "LOCALHOST", "0.0.0.0", "::ffff:127.0.0.1"]
    {
        join_at(address);
    }
    if TcpListener::bind("[::1]:0").is_err() {
        not_covered("addresses of IPv6", "this host has none");
        return;
    }
    for address in ["::1", "[::1]", "0:0:0:0:0:0:0:1", "::", "[::]"] {
        join_at(address);
    }
}

#[test]
fn ranks_meet_at_a_link_local_address() {
    // Of each line of the table: address, index, prefix length, scope (20 is link-local), flags, interface.
    let table = fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    let lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let Some(line) = lines.into_iter().find(|line| line.get(3) == Some(&"20")) else {
        not_covered("ranks_meet_at_a_link_local_address", "this host has no such address");
        return;
    };

    let address = Ipv6Addr::from(u128::from_str_radix(line[0], 16).unwrap());
    let index = u32::from_str_radix(line[1], 16).unwrap();
    for interface in [line[5].to_owned(), index.to_string()] {
        join_at(&format!("{address}%{interface}"));
        join_at(&format!("[{address}%{interface}]"));
    }
    let options = HubOptions::default().allow_unauthenticated(true);
    let hub = options.bind(&format!("[{address}%{}]:0", line[5]), 1).unwrap();
    let place = Environment {
        allow_unauthenticated: true,
        ..Environment::at_hub(hub.address(), Rank(0), 1)
    };
    TcpBootstrap::join(&place, long()).unwrap().leave(long()).unwrap();
}

#[test]
fn a_malformed_address_is_refused_at_once() {
    let watch = Stopwatch::start();
    for address in ["::1:29500", "a b:1", "localhost", "fe80::1", "[fe80::1]:1", "127.1:1"] {
        let error = Hub::bind(address, 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{address}");
        let text = format!("the address of the hub is {address:?}, expected ");
        assert!(error.to_string().starts_with(&text), "{error}");

        for hub in [HubAddress::RankZero(address.into()), HubAddress::External(address.into())] {
            let place = Environment { hub, ..Environment::at_hub("", Rank(0), 2) };
            let joined = TcpBootstrap::join(&place, long()).unwrap_err();
            assert_eq!(joined.to_string(), error.to_string());
        }
    }
    watch.assert_within(PROMPT);
}

#[test]
fn every_rank_names_all_that_did_not_come() {
    let hub = hub(6);
    let address = hub.address();
    let _silent = Silent::join(&hub, 5, 6);
    let watch = Stopwatch::start();
    thread::scope(|scope| {
        let patient = [0, 4].map(|rank| scope.spawn(move || join(address, rank, 6, long())));
        wait_missing(&hub, &[1, 2, 3]);
        let error = join(address, 2, 6, after_ms(3000)).unwrap_err();
        let others = patient.map(|thread| thread.join().unwrap().unwrap_err());
        // The patience of one cuts that of all short.
        watch.assert_within(Duration::from_secs(3) + PROMPT);
        allow_duplicates!(for error in [error].into_iter().chain(others) {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
            assert_snapshot!(error, @"the group did not start: ranks 1 and 3 did not connect within 3 s; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
        });
    });
}

#[test]
fn rank_0_that_gives_up_takes_the_hub_with_it_and_still_tells() {
    let hub = hub(4);
    let address = hub.address();
    let _silent = Silent::join(&hub, 3, 4);
    thread::scope(|scope| {
        let other = scope.spawn(move || join(address, 2, 4, long()).unwrap_err());
        wait_missing(&hub, &[0, 1]);
        let error = TcpBootstrap::join_with_hub(hub, after_ms(3000)).unwrap_err();
        let errors = [error, other.join().unwrap()];
        allow_duplicates!(for error in errors {
            assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
            assert_snapshot!(error, @"the group did not start: rank 1 did not connect within 3 s; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
        });
    });
}

#[test]
fn who_comes_after_the_others_gave_up_is_told_why() {
    let hub = hub(3);
    let mut silent = Silent::join(&hub, 2, 3);
    // Long enough for the handshake on a loaded machine.
    join(hub.address(), 0, 3, after_ms(3000)).unwrap_err();
    silent.wait_over();
    let error = join(hub.address(), 1, 3, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Aborted);
    assert_snapshot!(text(&error, &[(hub.address(), "HUB")]), @"the hub at HUB rejected this rank: the group has already ended: rank 1 did not connect within 3 s; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

#[test]
fn a_rank_that_comes_and_goes_is_lost() {
    let hub = hub(3);
    let silent = Silent::join(&hub, 1, 3);
    let origin = silent.origin();
    let watch = Stopwatch::start();
    thread::scope(|scope| {
        let rank = scope.spawn(|| join(hub.address(), 0, 3, long()).unwrap_err());
        wait_missing(&hub, &[2]);
        drop(silent);
        let error = rank.join().unwrap();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
        assert_snapshot!(text(&error, &[(origin, "ORIGIN")]), @"the group did not start: rank 1 is lost: its connection from ORIGIN closed before the rank left the group");
    });
    watch.assert_within(PROMPT);
}

#[test]
fn a_rank_that_connects_seconds_after_a_failure_is_told_the_reason() {
    let hub = hub(3);
    let address = hub.address();
    thread::scope(|scope| {
        let first = scope.spawn(|| TcpBootstrap::join_with_hub(hub, long()).unwrap_err());
        drop(Silent::join_at(address, 1, 3));
        // As a program that takes long to load.
        thread::sleep(Duration::from_secs(2));

        let watch = Stopwatch::start();
        let last = join(address, 2, 3, long()).unwrap_err();
        watch.assert_within(PROMPT);
        assert_eq!(last.kind(), ErrorKind::Aborted, "{last}");
        // Rank 0 has connected before or after the loss.
        for error in [last, first.join().unwrap()] {
            assert_eq!(error.peer(), Some(Rank(1)), "{error}");
            assert!(error.to_string().contains("rank 1 is lost"), "{error}");
        }
    });
}

#[test]
fn a_hub_that_is_not_there_is_waited_for_and_then_named() {
    let port = ReservedPort::new();
    let address = port.address();
    let start = Instant::now();
    let error = join(address, 1, 2, after_ms(200)).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(200));
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(0))));
    assert_snapshot!(text(&error, &[(address, "HUB")]), @"rank 1 did not reach the hub at HUB within 0.2 s: Connection refused (os error 111); check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name the host of rank 0 and a free port, and that no firewall blocks the connection");

    let place = Environment {
        allow_unauthenticated: true,
        ..Environment::at_hub("no-such-host.invalid:1", Rank(1), 2)
    };
    let error = TcpBootstrap::join(&place, after_ms(200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("the hub at no-such-host.invalid:1 within 0.2 s: "));

    let place = Environment {
        allow_unauthenticated: true,
        ..Environment::at_hub(format!("0.0.0.0:{}", address.port()), Rank(1), 2)
    };
    let error = TcpBootstrap::join(&place, after_ms(200)).unwrap_err();
    assert_snapshot!(error.to_string().replace(&address.port().to_string(), "PORT"), @"rank 1 did not reach the hub at 0.0.0.0:PORT (which means the own host on every rank) within 0.2 s: Connection refused (os error 111); check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name the host of rank 0 and a free port, and that no firewall blocks the connection");

    // The last attempt has no time for the interface, and the text has the reason of those before.
    let place = Environment {
        allow_unauthenticated: true,
        ..Environment::at_hub("[fe80::1%nosuch0]:1", Rank(1), 2)
    };
    let error = TcpBootstrap::join(&place, after_ms(200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert!(error.to_string().contains("this host has no network interface nosuch0"), "{error}");
}

#[test]
fn who_disagrees_is_refused_and_the_group_starts_without_it() {
    let hub = hub(2);
    let names = [(hub.address(), "HUB")];
    let error = join(hub.address(), 0, 3, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, &names), @"the hub at HUB rejected this rank: rank 0 expects 3 ranks, the hub expects 2; set the same WORLD_SIZE on all ranks");
    let error = join(hub.address(), 2, 2, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, &names), @"the hub at HUB rejected this rank: rank 2 is out of range, expected a rank below 2, the number of ranks");
    assert_starts(&hub);
}

#[test]
fn the_second_of_two_equal_ranks_is_refused() {
    let hub = hub(2);
    let first = Silent::join(&hub, 1, 2);
    let origin = first.origin();
    let error = join(hub.address(), 1, 2, long()).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Mismatch, Some(Rank(1))));
    assert_snapshot!(text(&error, &[(hub.address(), "HUB"), (origin, "ORIGIN")]), @"the hub at HUB rejected this rank: another process on another host, connected from ORIGIN, is already rank 1; set a different RANK in every process, and a different port for every job");
    // The group goes on with the first.
    join(hub.address(), 0, 2, long()).unwrap();
}

#[test]
fn strangers_do_not_disturb_a_group() {
    let hub = hub(2);
    let mut foreign = stranger(&hub, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n");
    let mut answer = Vec::new();
    foreign.read_to_end(&mut answer).unwrap();
    assert_eq!(&answer[..12], PREAMBLE);
    let answer = String::from_utf8(answer.split_off(12)).unwrap();
    assert_snapshot!(answer.trim(), @"This is the hub of a Peerlane group of 2 ranks, protocol version 8. It received bytes of another protocol.");

    let mut old = stranger(&hub, b"PEERLANE\x02\0\0\0");
    let mut answer = Vec::new();
    let _ = old.read_to_end(&mut answer);
    assert_eq!(answer, PREAMBLE);

    let trailing = sealed(None, &[&hello(0, 2)[..], &[0]].concat());
    for bytes in [vec![255; 4], vec![1, 0, 0, 0, 200], sealed(None, &[200]), trailing] {
        let (mut stream, _) = challenge(&hub);
        stream.write_all(&bytes).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        // Nothing, or that the hello is refused.
        let refused = sealed(None, &[1, 0]);
        assert!(answer.is_empty() || answer == refused, "{bytes:?}: {answer:?}");
    }
    let _silent = stranger(&hub, b"");
    let mut cut = challenge(&hub).0;
    cut.write_all(&sealed(None, &hello(0, 2))[..20]).unwrap();
    assert_starts(&hub);
}

#[test]
fn a_rank_that_sends_no_frames_is_lost() {
    for (bytes, wanted) in [
        (
            &[255; 4][..],
            "received the header of a frame of 4294967295 bytes, expected at most 4194304 bytes",
        ),
        (&[2, 0, 0, 0, 99, 99], "received a frame that is not a message of this protocol"),
    ] {
        let hub = hub(2);
        let mut broken = Silent::join(&hub, 1, 2);
        let origin = broken.origin();
        let rank = join(hub.address(), 0, 2, long()).unwrap();
        broken.0.write_all(bytes).unwrap();
        let error = rank.exchange("keys", &[], long()).unwrap_err();
        assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
        let expected = format!(
            "exchange \"keys\": rank 1 is lost: its connection from {origin} failed: {wanted}"
        );
        assert_eq!(error.to_string(), expected);
    }
}

/// Something else at the port of the hub: takes one connection, says `words`, and waits.
fn impostor(words: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    // A rank that is late tries again shortly before its deadline, so it listens until the test ends.
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let _ = stream.write_all(words);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    address
}

#[test]
fn what_is_no_hub_is_told_apart() {
    let address = impostor(b"SSH-2.0-OpenSSH_9.2\r\n");
    let error = join(address, 1, 2, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, &[(address, "HUB")]), @r#"the process that listens at HUB is not a Peerlane hub: its first bytes are "SSH-2.0-Open"; set PEERLANE_PORT or MASTER_PORT to another port, the same on every rank"#);

    let address = impostor(b"PEERLANE\x09\0\0\0");
    let error = join(address, 1, 2, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, &[(address, "HUB")]), @"the hub at HUB uses version 9 of the protocol, expected 8; run the same Peerlane on all ranks");

    let address = impostor(b"");
    let error = join(address, 1, 2, after_ms(200)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_snapshot!(text(&error, &[(address, "HUB")]), @"rank 1 did not reach the hub at HUB within 0.2 s: a process accepted the connection but sent nothing, so it may not be a Peerlane hub; check that rank 0 runs, that MASTER_ADDR and MASTER_PORT name the host of rank 0 and a free port, and that no firewall blocks the connection");
}

#[test]
fn a_rank_whose_start_has_failed_comes_again_and_a_hub_outside_of_the_ranks_begins_anew() {
    let hub = hub(2);
    let error = join(hub.address(), 1, 2, after_ms(300)).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(0))));
    thread::scope(|scope| {
        // The hub may not have seen yet that its last connection has ended.
        let again = scope.spawn(|| join(hub.address(), 1, 2, long()).unwrap());
        let zero = loop {
            match join(hub.address(), 0, 2, long()) {
                Ok(zero) => break zero,
                // Rank 0 was never in the group that did not start, and rank 1 has not begun the next one yet.
                Err(error) => assert_eq!(error.kind(), ErrorKind::Aborted, "{error}"),
            }
        };
        again.join().unwrap().leave(long()).unwrap();
        zero.leave(long()).unwrap();
    });
}
