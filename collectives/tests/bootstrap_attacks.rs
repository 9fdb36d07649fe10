//! Tests that processes without the secret of a job neither stop its start nor use much of rank 0's memory.

mod bootstrap_raw;

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use bootstrap_raw::{AT_ONCE, PREAMBLE, frame, hello, proof, read_frame, sealed};
use peerlane_collectives::bootstrap::environment::Environment;
use peerlane_collectives::bootstrap::tcp::{HubOptions, TcpBootstrap};
use peerlane_collectives::bootstrap::{Bootstrap, Secret};
use peerlane_hal::{Deadline, Rank};

const SECRET: &str = "the secret of this job";
const CONNECTIONS: usize = 10_000;
/// Each attacker keeps this number of connections open.
const HELD: usize = 50;
const ATTACKERS: usize = 4;
const GROWTH_BYTES_MAX: u64 = 64 << 20;

/// Starts a group of two ranks when a line arrives, and ends it with the next line. Prints the address of the hub, then a
/// line when the group has started, then the growth of this process's memory in KiB.
#[test]
#[ignore = "run by strangers_neither_stop_a_start_nor_fill_the_memory_of_rank_0, in a process of its own"]
fn rank_0() {
    let peak_kib = || {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
    };
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
                    let guess = proof("a guess", "peerlane: rank to hub", &[&nonce[4..], &hello]);
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
    let mut rank_0 = Command::new(std::env::current_exe().unwrap())
        .args(["rank_0", "--exact", "--ignored", "--nocapture", "--quiet"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
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
