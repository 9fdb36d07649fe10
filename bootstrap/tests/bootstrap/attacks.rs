//! Tests that processes without the secret of a job neither stop its start nor use much of rank 0's memory, and that a member
//! with the secret that sends too much is lost, by its name, before it uses much of that memory.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use crate::support::raw::{
    AT_ONCE, NO_SUBGROUP, PREAMBLE, RANK, Silent, frame, hello, proof, read_frame, sealed,
};
use peerlane_bootstrap::environment::Environment;
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::tcp::{HubOptions, TcpBootstrap};
use peerlane_bootstrap::{Bootstrap, Listener, Notice, Secret};
use peerlane_hal::{Deadline, ErrorKind, Rank};

const SECRET: &str = "the secret of this job";
const CONNECTIONS: usize = 10_000;
/// Each attacker keeps this number of connections open.
const HELD: usize = 50;
const ATTACKERS: usize = 4;
const GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Ends a test of a member that hangs. An attack takes the time that its bytes take, which differs by more than ten times with
/// what else a machine does; the tests are about the name in the error and about memory.
const HANGS_AFTER: Duration = Duration::from_secs(300);

/// Returns the most memory that this process has had so far, in KiB.
fn peak_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Runs one of the tests of this program that are rank 0, in a process of its own.
fn spawn(test: &str) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--ignored", "--nocapture", "--quiet"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap()
}

/// Starts a group of two ranks when a line arrives, and ends it with the next line. Prints the address of the hub, then a
/// line when the group has started, then the growth of this process's memory in KiB.
#[test]
#[ignore = "run by strangers_neither_stop_a_start_nor_fill_the_memory_of_rank_0, in a process of its own"]
fn rank_0() {
    let mut lines = std::io::stdin().lines();
    let secret = Secret::new(SECRET).unwrap();
    let before = peak_kib();
    let hub = HubOptions::default().secret(secret.clone()).bind("127.0.0.1:0", 2).unwrap();
    let address = hub.address();
    println!("{address}");
    lines.next().unwrap().unwrap();
    let deadline = || Deadline::after(Duration::from_secs(60));
    let other = thread::spawn(move || {
        let environment =
            Environment { secret: Some(secret), ..Environment::at_hub(address, Rank(1), 2) };
        let rank = TcpBootstrap::join(&environment, deadline()).unwrap();
        assert_eq!(rank.exchange("keys", &[1], deadline()).unwrap(), [[0], [1]]);
        rank
    });
    let rank = TcpBootstrap::join_with_hub(hub, deadline()).unwrap();
    assert_eq!(rank.exchange("keys", &[0], deadline()).unwrap(), [[0], [1]]);
    let other = other.join().unwrap();
    println!("started");
    lines.next().unwrap().unwrap();
    other.leave(deadline()).unwrap();
    rank.leave(deadline()).unwrap();
    println!("{}", peak_kib() - before);
}

/// Connects to the hub, and does one thing that a rank with the secret does not do.
fn attack(hub: SocketAddr, kind: usize, recorded: &[u8]) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&hub, AT_ONCE)?;
    stream.set_read_timeout(Some(AT_ONCE))?;
    match kind {
        0 => return Ok(stream),
        1 => stream.write_all(&PREAMBLE[..5])?,
        2 => stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")?,
        3 => stream.write_all(&[0xff; 4096])?,
        4 => drop(stream.try_clone()?.shutdown(std::net::Shutdown::Write)),
        _ => {
            stream.write_all(PREAMBLE)?;
            stream.read_exact(&mut [0; PREAMBLE.len()])?;
            let mut nonce = [0; 36];
            stream.read_exact(&mut nonce)?;
            let hello = hello(1, 2);
            match kind {
                // A frame of 4 GiB, one that never arrives in full, and one that is too long for a handshake.
                5 => stream.write_all(&[0xff; 4])?,
                6 => stream.write_all(&frame(&[0; 4096])[..100])?,
                7 => stream.write_all(&frame(&vec![0; 1 << 20]))?,
                8 => stream.write_all(&sealed(None, &hello))?,
                9 => {
                    let guess = proof("a guess", RANK, &[&nonce[4..], &hello]);
                    stream.write_all(&sealed(Some(guess), &hello))?;
                }
                10 => stream.write_all(recorded)?,
                _ => return Ok(stream),
            }
        }
    }
    Ok(stream)
}

/// Returns the hello that rank 1, which has the secret, sends to a hub.
fn record() -> Vec<u8> {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let secret = Some(Secret::new(SECRET).unwrap());
        let environment = Environment { secret, ..Environment::at_hub(address, Rank(1), 2) };
        TcpBootstrap::join(&environment, Deadline::after(AT_ONCE))
    });
    let mut stream = listener.accept().unwrap().0;
    stream.write_all(&[&PREAMBLE[..], &frame(&[9; 32])].concat()).unwrap();
    stream.read_exact(&mut [0; PREAMBLE.len()]).unwrap();
    frame(&read_frame(&mut stream))
}

#[test]
fn strangers_neither_stop_a_start_nor_fill_the_memory_of_rank_0() {
    let mut rank_0 = spawn("attacks::rank_0");
    let mut input = rank_0.stdin.take().unwrap();
    let mut output = BufReader::new(rank_0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let hub = output.find_map(|line| line.parse::<SocketAddr>().ok()).unwrap();
    let (recorded, done, started) = (record(), AtomicUsize::new(0), AtomicBool::new(false));
    let mut started_after = Duration::MAX;
    thread::scope(|scope| {
        for attacker in 0..ATTACKERS {
            let (recorded, done, started) = (&recorded, &done, &started);
            scope.spawn(move || {
                let mut held = VecDeque::new();
                for number in 0.. {
                    if number >= CONNECTIONS / ATTACKERS && started.load(Ordering::Relaxed) {
                        break;
                    }
                    // The hub closes the oldest connections, so an attack can fail.
                    held.extend(attack(hub, (attacker + number) % 12, recorded));
                    if held.len() > HELD {
                        held.pop_front();
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while done.load(Ordering::Relaxed) < CONNECTIONS / 10 {
            thread::sleep(Duration::from_millis(1));
        }
        let start = Instant::now();
        writeln!(input, "start").unwrap();
        output.find(|line| line == "started").expect("the group did not start");
        started_after = start.elapsed();
        started.store(true, Ordering::Relaxed);
    });
    writeln!(input, "end").unwrap();
    let growth = output.find_map(|line| line.parse::<u64>().ok()).expect("the group did not end");
    assert!(rank_0.wait().unwrap().success());
    println!("{done:?} connections: started in {started_after:?}, {growth} KiB more memory");
    assert!(started_after < AT_ONCE, "the start took {started_after:?}");
    assert!(growth << 10 <= GROWTH_BYTES_MAX, "the memory grew by {growth} KiB");
}

/// Ignores all notices.
struct Deaf;

impl Listener for Deaf {
    fn notice(&self, _: Notice) {}

    fn exchange_timed_out(&self, _: &[Rank], error: Error) -> Error {
        error
    }
}

/// Exchanges with the other ranks until that fails, and returns the error.
fn exchange_until_lost(rank: &TcpBootstrap) -> Error {
    rank.listen(Arc::new(Deaf));
    loop {
        if let Err(error) = rank.exchange("keys", &[0], Deadline::after(HANGS_AFTER)) {
            return error;
        }
    }
}

/// Is rank 0 of three ranks. Prints the address of its hub, then the error that ends the group, and the growth of this process's
/// memory in KiB.
#[test]
#[ignore = "run by a_member_that_sends_too_much_is_lost_by_its_name, in a process of its own"]
fn rank_0_of_members() {
    let before = peak_kib();
    let options = HubOptions::default().secret(Secret::new(SECRET).unwrap());
    let hub = options.bind("127.0.0.1:0", 3).unwrap();
    println!("{}", hub.address());
    let rank = TcpBootstrap::join_with_hub(hub, Deadline::after(HANGS_AFTER)).unwrap();
    println!("{}", exchange_until_lost(&rank));
    println!("{}", peak_kib() - before);
}

/// What a member does, until a write fails.
type Attack = fn(&mut Member) -> std::io::Result<()>;

/// Rank 2 of a group, which knows the secret and does not read.
struct Member {
    silent: Silent,
    subgroups: u32,
}

impl Member {
    fn send(&mut self, subgroup: Option<(u32, u32)>, request: &[u8]) -> std::io::Result<()> {
        let subgroup = postcard::to_stdvec(&subgroup).unwrap();
        self.silent.0.write_all(&frame(&[&subgroup, request].concat()))
    }

    /// Sends the same request again and again, many in one write.
    fn repeat(&mut self, subgroup: Option<(u32, u32)>, request: &[u8]) -> std::io::Result<()> {
        let subgroup = postcard::to_stdvec(&subgroup).unwrap();
        let many = frame(&[&subgroup, request].concat()).repeat(1000);
        loop {
            self.silent.0.write_all(&many)?;
        }
    }

    /// Opens a group of these ranks.
    fn open(&mut self, ranks: &[u32]) -> std::io::Result<(u32, u32)> {
        let id = (ranks[0], self.subgroups);
        self.subgroups += 1;
        self.send(Some(id), &postcard::to_stdvec(&(7_u8, ranks)).unwrap())?;
        Ok(id)
    }
}

fn contribution(bytes: usize) -> Vec<u8> {
    postcard::to_stdvec(&(0_u8, "keys", &vec![1_u8; bytes][..])).unwrap()
}

/// Returns a request with bytes: an abort has number 2, a message 3, a timeout 4, and the end of a subgroup 8.
fn request(number: u8, bytes: usize) -> Vec<u8> {
    postcard::to_stdvec(&(number, &vec![b'x'; bytes][..])).unwrap()
}

const LONG: usize = (16 << 20) - 16;

const ATTACKS: [(&str, Attack); 15] = [
    ("opens a subgroup of 5 million ranks", |member| {
        let ranks = [&[0, 2][..], &vec![1; 5_000_000]].concat();
        member.open(&ranks).map(drop)
    }),
    ("opens a subgroup with the same rank 65,536 times", |member| {
        member.open(&vec![2; 1 << 16]).map(drop)
    }),
    ("opens a subgroup of which it is no member", |member| member.open(&[0, 1]).map(drop)),
    ("opens subgroups of which the others do not know", |member| {
        loop {
            member.open(&[0, 2])?;
        }
    }),
    ("contributes to exchanges of ten subgroups", |member| {
        for _ in 0..10 {
            let subgroup = member.open(&[0, 1, 2])?;
            for _ in 0..10 {
                member.send(Some(subgroup), &contribution(3 << 20))?;
            }
        }
        Ok(())
    }),
    ("ends subgroups with long texts", |member| {
        for number in [2, 4, 8].into_iter().cycle().take(1000) {
            let subgroup = member.open(&[0, 1, 2])?;
            let end = [request(number, 3 << 20), vec![0]].concat();
            let end = if number == 4 { &end[..] } else { &end[..end.len() - 1] };
            member.send(Some(subgroup), end)?;
        }
        Ok(())
    }),
    ("leaves subgroups that do not exist", |member| member.repeat(Some((0, 0)), &[6])),
    ("contributes, and does not read the results", |member| {
        loop {
            member.send(NO_SUBGROUP, &contribution(3 << 20))?;
        }
    }),
    ("sends messages of one byte", |member| member.repeat(NO_SUBGROUP, &request(3, 1))),
    ("sends messages of 3 MiB", |member| {
        loop {
            member.send(NO_SUBGROUP, &request(3, 3 << 20))?;
        }
    }),
    ("sends a message that is too long to be passed on", |member| {
        member.send(NO_SUBGROUP, &request(3, LONG))
    }),
    ("ends the group by a record that is too long to be passed on", |member| {
        member.send(NO_SUBGROUP, &request(2, LONG))
    }),
    ("ends the group by a text that is too long to be passed on", |member| {
        member.send(NO_SUBGROUP, &[&request(4, LONG)[..], &[0]].concat())
    }),
    ("opens a subgroup again and again", |member| {
        let subgroup = member.open(&[0, 2])?;
        for _ in 0..2 {
            member.send(Some(subgroup), &request(3, 3 << 20))?;
        }
        loop {
            member.subgroups -= 1;
            member.open(&[0, 2])?;
        }
    }),
    ("asks who is missing", |member| {
        // All of them together are not more than one message of the hub.
        for _ in 0..100_000 {
            member.send(NO_SUBGROUP, &[9])?;
        }
        member.silent.0.shutdown(std::net::Shutdown::Both)
    }),
];

#[test]
fn a_member_that_sends_too_much_is_lost_by_its_name() {
    for (name, attack) in ATTACKS {
        let begun = Instant::now();
        let Attacked { error, error_of_rank_1, growth } = attacked(attack);
        println!("{name}: {growth} KiB, {:.1?}, {error}", begun.elapsed());
        assert_eq!(error, error_of_rank_1, "{name}");
        assert!(error.contains("rank 2 is lost"), "{name}: {error}");
        assert!(growth << 10 <= GROWTH_BYTES_MAX, "{name}: rank 0 grew by {growth} KiB");
    }
}

/// How a group has ended: the errors of two ranks, and the growth of the first one's memory in KiB.
struct Attacked {
    error: String,
    error_of_rank_1: String,
    growth: u64,
}

fn attacked(attack: Attack) -> Attacked {
    let mut rank_0 = spawn("attacks::rank_0_of_members");
    let mut output = BufReader::new(rank_0.stdout.take().unwrap()).lines().map(Result::unwrap);
    let hub = output.find_map(|line| line.parse::<SocketAddr>().ok()).unwrap();
    let secret = Some(Secret::new(SECRET).unwrap());
    let environment = Environment { secret, ..Environment::at_hub(hub, Rank(1), 3) };
    let member = thread::spawn(move || Member {
        silent: Silent::join_with(hub, 2, 3, SECRET),
        subgroups: 0,
    });
    let rank = TcpBootstrap::join(&environment, Deadline::after(HANGS_AFTER)).unwrap();
    let mut member = member.join().unwrap();
    // The connection stays open, whether or not the hub still reads from it.
    let connection = member.silent.0.try_clone().unwrap();
    connection.set_write_timeout(Some(HANGS_AFTER)).unwrap();
    thread::spawn(move || attack(&mut member));

    let error = exchange_until_lost(&rank);
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(2))), "{error}");
    let error_of_rank_1 = error.to_string();
    let error = output.find(|line| line.contains("exchange")).expect("rank 0 has no error");
    let growth = output.find_map(|line| line.parse::<u64>().ok()).expect("rank 0 did not end");
    assert!(rank_0.wait().unwrap().success());
    drop(connection);
    Attacked { error, error_of_rank_1, growth }
}
