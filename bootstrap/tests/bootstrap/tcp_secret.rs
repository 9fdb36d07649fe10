//! Tests who can join a group of processes: ranks and hub prove that they know the secret of the job. Connections that do
//! not, and ranks that send too much, neither end nor delay the others.

use std::hint::black_box;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::raw::{
    AT_ONCE, NO_SUBGROUP, PREAMBLE, PROMPT, RANK, Silent, challenge, frame, hello, proof,
    read_frame, sealed, stranger,
};
use insta::assert_snapshot;
use peerlane_bootstrap::environment::Environment;
use peerlane_bootstrap::error::Error;
use peerlane_bootstrap::tcp::{Hub, HubOptions, TcpBootstrap};
use peerlane_bootstrap::{AbortRecord, Bootstrap, Listener, Notice, Secret};
use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_test_support::Stopwatch;

const SECRET: &str = "the secret of this job";

const HUB: &str = "peerlane: hub to rank";

fn secret(text: &str) -> Secret {
    Secret::new(text).unwrap()
}

fn hub(ranks: usize) -> Hub {
    HubOptions::default().secret(secret(SECRET)).bind("127.0.0.1:0", ranks).unwrap()
}

fn long() -> Deadline {
    Deadline::after(Duration::from_secs(60))
}

fn join(
    hub: SocketAddr,
    rank: u32,
    ranks: usize,
    text: Option<&str>,
    deadline: Deadline,
) -> Result<TcpBootstrap, Error> {
    let environment =
        Environment { secret: text.map(secret), ..Environment::at_hub(hub, Rank(rank), ranks) };
    TcpBootstrap::join(&environment, deadline)
}

/// Returns the text of an error with the addresses of this run replaced.
fn text(error: &Error, hub: SocketAddr) -> String {
    let text = error.to_string().replace(&hub.to_string(), "HUB");
    let mut pieces = text.split("127.0.0.1:");
    let first = pieces.next().unwrap_or_default().to_owned();
    pieces.fold(first, |text, piece| {
        text + "ORIGIN" + piece.trim_start_matches(|c: char| c.is_ascii_digit())
    })
}

/// Checks that a group of two with the secret starts and exchanges.
fn assert_starts(hub: &Hub) {
    let watch = Stopwatch::start();
    thread::scope(|scope| {
        for number in 0..2 {
            scope.spawn(move || {
                let rank = join(hub.address(), number, 2, Some(SECRET), long()).unwrap();
                let all = rank.exchange("keys", &[number as u8], long()).unwrap();
                assert_eq!(all, [[0], [1]]);
                rank.leave(long()).unwrap();
            });
        }
    });
    watch.assert_within(PROMPT);
}

#[test]
fn a_rank_with_another_secret_or_none_is_refused() {
    let hub = hub(2);
    let error = join(hub.address(), 1, 2, Some("a secret of another job"), long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, hub.address()), @"rank 1 and the hub at HUB have different secrets; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks and for the hub, and MASTER_PORT or PEERLANE_PORT to a different port for every job");
    let error = join(hub.address(), 1, 2, None, long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, hub.address()), @"the hub at HUB has a secret, but rank 1 has none; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks and for the hub, and MASTER_PORT or PEERLANE_PORT to a different port for every job");
    assert_starts(&hub);
}

#[test]
fn a_rank_does_not_join_a_hub_without_its_secret() {
    let hub = Hub::bind("127.0.0.1:0", 2).unwrap();
    let error = join(hub.address(), 1, 2, Some(SECRET), long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, hub.address()), @"rank 1 has a secret, but the hub at HUB has none; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks and for the hub, and MASTER_PORT or PEERLANE_PORT to a different port for every job");
    // The hub says so too, to the ranks that joined.
    let deadline = Deadline::after(Duration::from_secs(3));
    let error = join(hub.address(), 0, 2, None, deadline).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
    assert_snapshot!(text(&error, hub.address()), @"the group did not start: rank 1 did not connect within 3 s; the hub refused a connection from ORIGIN: it has a secret, but the hub has none; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

#[test]
fn the_refused_connections_are_counted_and_the_last_is_named() {
    let hub = hub(2);
    drop(stranger(&hub, PREAMBLE));
    let mut foreign = stranger(&hub, b"GET / HTTP/1.1\r\n\r\n");
    foreign.read_to_end(&mut Vec::new()).unwrap();
    let error = join(hub.address(), 0, 2, Some(SECRET), Deadline::after(AT_ONCE / 5)).unwrap_err();
    assert!(
        text(&error, hub.address())
            .contains("the hub refused 2 connections, the last from ORIGIN: it "),
        "{error}"
    );

    let other = self::hub(2);
    join(other.address(), 1, 2, Some("a secret of another job"), long()).unwrap_err();
    let error =
        TcpBootstrap::join_with_hub(other, Deadline::after(Duration::from_secs(1))).unwrap_err();
    assert_eq!((error.kind(), error.peer()), (ErrorKind::Timeout, Some(Rank(1))));
    assert_snapshot!(text(&error, hub.address()), @"the group did not start: rank 1 did not connect within 1 s; the hub refused a connection from ORIGIN: it has another secret than the hub; check that every rank was started with the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT");
}

#[test]
fn a_recorded_hello_is_not_accepted_again() {
    let hub = hub(2);
    let (mut first, nonce) = challenge(&hub);
    let (mut second, other_nonce) = challenge(&hub);
    assert_ne!(nonce, other_nonce);
    let hello = hello(1, 2);
    let recorded = sealed(Some(proof(SECRET, RANK, &[&nonce, &hello])), &hello);
    second.write_all(&recorded).unwrap();
    let refused = read_frame(&mut second);
    // The proof of the hub, and a message of number 1: refused.
    assert_eq!((refused[0], refused[34]), (1, 1));
    // Each changed byte of the hello is noticed too.
    let mut changed = recorded.clone();
    *changed.last_mut().unwrap() ^= 1;
    let (mut third, _) = challenge(&hub);
    third.write_all(&changed).unwrap();
    assert_eq!(read_frame(&mut third)[34], 1);
    // Where it belongs, it passes, and the hub proves that it knows the secret.
    first.write_all(&recorded).unwrap();
    let welcome = read_frame(&mut first);
    let message = &welcome[34..];
    assert_eq!(welcome[1..33], proof(SECRET, HUB, &[&nonce, &hello, message]));
    // A message of number 0, the id of the group, and the rank among the ranks; the process of the hub follows.
    assert_eq!((message[0], &message[33..35]), (0, &[1, 2][..]));
}

#[test]
fn strangers_neither_end_nor_delay_a_start() {
    let hub = hub(2);
    let (start, watch) = (Instant::now(), Stopwatch::start());
    // More than may be in the handshake, so the hub closes the oldest long before its time is over.
    let mut idle: Vec<TcpStream> = (0..50).map(|_| stranger(&hub, b"")).collect();
    idle.extend((0..50).map(|_| stranger(&hub, PREAMBLE)));
    let closed = idle[0].read_to_end(&mut Vec::new());
    assert!(closed.is_ok() || closed.unwrap_err().kind() == std::io::ErrorKind::ConnectionReset);
    watch.assert_within(PROMPT);

    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        for rank in 0..2 {
            let (hub, over) = (&hub, &over);
            scope.spawn(move || {
                // A hello of each rank without a proof, then one that closes at once, then garbage.
                while !over.load(Ordering::Relaxed) && start.elapsed() < AT_ONCE {
                    let (mut stream, _) = challenge(hub);
                    stream.write_all(&sealed(None, &hello(rank, 2))).unwrap();
                    assert_eq!(read_frame(&mut stream)[34], 1, "not refused");
                    let (mut stream, nonce) = challenge(hub);
                    let wrong = proof("guess", RANK, &[&nonce, &hello(rank, 2)]);
                    stream.write_all(&sealed(Some(wrong), &hello(rank, 2))).unwrap();
                    drop(stream);
                    drop(stranger(hub, b"garbage"));
                }
            });
        }
        thread::sleep(Duration::from_millis(100));
        assert_starts(&hub);
        over.store(true, Ordering::Relaxed);
    });
}

/// Returns how long the start of a group of four ranks takes.
fn start_time(text: Option<&str>) -> Duration {
    let options =
        text.map_or_else(HubOptions::default, |text| HubOptions::default().secret(secret(text)));
    let hub = options.bind("127.0.0.1:0", 4).unwrap();
    let address = hub.address();
    thread::scope(|scope| {
        let start = Instant::now();
        let ranks = [0, 1, 2, 3]
            .map(|rank| scope.spawn(move || join(address, rank, 4, text, long()).unwrap()));
        let ranks = ranks.map(|rank| rank.join().unwrap());
        let took = start.elapsed();

        ranks.iter().for_each(|rank| rank.leave(long()).unwrap());
        took
    })
}

/// Returns how long the proofs of a start of four ranks take to compute.
///
/// A rank and the hub each compute their own proof and that of the other, which is four proofs for each rank.
fn proofs_time() -> Duration {
    let hello = hello(1, 4);
    let start = Instant::now();
    for _ in 0..16 {
        black_box(proof(SECRET, RANK, &[&black_box([7; 32]), &hello]));
    }
    start.elapsed()
}

/// Compares the shortest of many starts without a secret and with one, by turns, with that of the proofs alone.
///
/// A slow machine, or one that computes hashes slowly, makes all three longer. Whatever else it does makes single starts
/// longer, but never makes the shortest one with a secret shorter, if a proof waits for a timer or is computed too often.
#[test]
fn a_secret_costs_little_more_than_its_proofs() {
    const ROUNDS: usize = 100;
    let measure = || [start_time(None), start_time(Some(SECRET)), proofs_time()];
    let shortest = |one: [Duration; 3], other: [Duration; 3]| {
        std::array::from_fn(|index| one[index].min(other[index]))
    };

    let [without, with, proofs] = (0..ROUNDS).map(|_| measure()).fold([Duration::MAX; 3], shortest);
    println!(
        "the shortest of {ROUNDS} starts took {without:?} without a secret, {with:?} with one; \
         its proofs take {proofs:?}"
    );
    assert!(
        with < 2 * (without + proofs),
        "{with:?} with a secret, {without:?} without, {proofs:?} for its proofs"
    );
}

/// Opens a hub that answers a hello with the frame that `answer` returns for its nonce and the hello.
fn impostor(answer: impl FnOnce(&[u8], &[u8]) -> Vec<u8> + Send + 'static) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        let mut stream = listener.accept().unwrap().0;
        let nonce = [9; 32];
        stream.write_all(&[&PREAMBLE[..], &frame(&nonce)].concat()).unwrap();
        stream.read_exact(&mut [0; PREAMBLE.len()]).unwrap();
        let request = read_frame(&mut stream);
        stream.write_all(&answer(&nonce, &request)).unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    address
}

#[test]
fn a_hub_that_cannot_prove_the_secret_is_refused() {
    let address = impostor(|_, _| sealed(None, &[0]));
    let error = join(address, 1, 2, Some(SECRET), long()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Mismatch);
    assert_snapshot!(text(&error, address), @"rank 1 has a secret, but the hub at HUB has none; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks and for the hub, and MASTER_PORT or PEERLANE_PORT to a different port for every job");

    // The rank's own proof, or one of the wrong secret.
    let reflected = impostor(|_, request| sealed(request[1..33].try_into().ok(), &[0]));
    let guessed = impostor(|nonce, _| sealed(Some(proof("guess", HUB, &[nonce, &[0]])), &[0]));
    for address in [reflected, guessed] {
        let error = join(address, 1, 2, Some(SECRET), long()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("have different secrets"), "{error}");
    }
}

/// Passes notices on.
struct Heard(Sender<Notice>);

impl Listener for Heard {
    fn notice(&self, notice: Notice) {
        let _ = self.0.send(notice);
    }

    fn exchange_timed_out(&self, _: &[Rank], error: Error) -> Error {
        error
    }
}

#[test]
fn a_rank_that_sends_data_for_exchanges_that_have_not_begun_is_lost() {
    let hub = Hub::bind("127.0.0.1:0", 2).unwrap();
    let mut ahead = Silent::join(&hub, 1, 2);
    let rank = join(hub.address(), 0, 2, None, long()).unwrap();
    let (sender, heard) = channel();
    rank.listen(Arc::new(Heard(sender)));
    for _ in 0..6 {
        ahead.contribute("keys", &vec![0; 3 << 20]);
    }
    let lost = heard.recv_timeout(AT_ONCE).unwrap();
    let Notice::Lost { rank: Rank(1), how } = lost else { panic!("{lost:?}") };
    assert_snapshot!(how, @"the hub keeps 18880824 bytes of it that others have not taken, in messages, exchanges and groups, expected at most 16779264");
}

#[test]
fn a_rank_that_contributes_but_does_not_read_is_lost() {
    let hub = Hub::bind("127.0.0.1:0", 2).unwrap();
    let mut deaf = Silent::join(&hub, 1, 2);
    let rank = join(hub.address(), 0, 2, None, long()).unwrap();
    let data = vec![0; 3 << 20];
    let exchange = |_| {
        deaf.contribute("keys", &[]);
        rank.exchange("keys", &data, long()).err()
    };
    let error = (0..20).find_map(exchange).expect("every exchange completed");
    assert_eq!((error.kind(), error.peer()), (ErrorKind::PeerLost, Some(Rank(1))));
    let text = error.to_string();
    assert!(text.starts_with("exchange \"keys\": rank 1 is lost: it did not read "), "{text}");
    assert!(text.ends_with(" bytes that were sent to it, expected at most 16777216"), "{text}");
}

#[test]
fn a_rank_that_still_reads_a_large_result_is_not_lost_by_a_message_behind_it() {
    let hub = Hub::bind("127.0.0.1:0", 5).unwrap();
    let address = hub.address();
    let slow = thread::spawn(move || Silent::join_at(address, 4, 5));
    let data = vec![0; 4_000_000];
    thread::scope(|scope| {
        for rank in 0..4 {
            let data = &data;
            scope.spawn(move || {
                let data = [&data[..], &[rank as u8]].concat();
                let rank = join(address, rank, 5, None, long()).unwrap();
                assert_eq!(rank.exchange("keys", &data, long()).unwrap().len(), 5);
                rank.broadcast(b"and more").unwrap();
                rank.leave(long()).unwrap();
            });
        }
        let mut slow = slow.join().unwrap();
        slow.contribute("keys", &vec![4; 4_000_001]);
        // The messages of the others are behind 20 MB that this rank has not read.
        thread::sleep(Duration::from_millis(500));
        let kinds: Vec<u8> =
            (0..10).map(|_| slow.frame()[0]).take_while(|kind| *kind != 3).collect();
        assert!(!kinds.contains(&2), "the group is over: {kinds:?}");
    });
}

#[test]
fn a_rank_that_floods_others_with_messages_is_lost() {
    let hub = Hub::bind("127.0.0.1:0", 3).unwrap();
    let mut flood = Silent::join(&hub, 1, 3);
    let _deaf = Silent::join(&hub, 2, 3);
    let rank = join(hub.address(), 0, 3, None, long()).unwrap();
    let (sender, heard) = channel();
    rank.listen(Arc::new(Heard(sender)));
    // The fourth kind of request, with its bytes.
    let message = postcard::to_stdvec(&(NO_SUBGROUP, 3_u8, &vec![0_u8; 3 << 20][..])).unwrap();
    let mut reader = flood.0.try_clone().unwrap();
    let reads = thread::spawn(move || reader.read_to_end(&mut Vec::new()));
    // The hub does not read what a lost rank still sends, and is slow on a loaded machine.
    flood.0.set_write_timeout(Some(Duration::from_millis(100))).unwrap();
    let (message, mut sent, begun) = (frame(&message), 0, Instant::now());
    let lost = loop {
        if let Some(lost) = heard.try_iter().find(|notice| matches!(notice, Notice::Lost { .. })) {
            break lost;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "no rank was lost");
        match flood.0.write(&message[sent..]) {
            Ok(count) => sent = (sent + count) % message.len(),
            Err(_) => thread::sleep(Duration::from_millis(1)),
        }
    };
    let Notice::Lost { rank: Rank(1), how } = lost else { panic!("{lost:?}") };
    assert!(how.contains(" that others have not taken, in messages,"), "{how}");
    let _ = reads.join();
}

#[test]
fn messages_for_a_rank_without_a_listener_are_limited() {
    let hub = Hub::bind("127.0.0.1:0", 3).unwrap();
    let mut flood = Silent::join(&hub, 1, 3);
    let other = {
        let address = hub.address();
        thread::spawn(move || join(address, 2, 3, None, long()).unwrap())
    };
    let _rank = join(hub.address(), 0, 3, None, long()).unwrap();
    let other = other.join().unwrap();
    let (sender, heard) = channel();
    other.listen(Arc::new(Heard(sender)));
    let message = postcard::to_stdvec(&(NO_SUBGROUP, 3_u8, &vec![0_u8; 1 << 20][..])).unwrap();
    // The hub would keep twice as much of what the flood itself does not read.
    for _ in 0..9 {
        flood.0.write_all(&frame(&message)).unwrap();
    }
    let mut notices = std::iter::from_fn(|| heard.recv_timeout(AT_ONCE).ok());
    let abort = notices.find(|notice| !matches!(notice, Notice::Message { .. })).unwrap();
    let Notice::Abort { from: Rank(0), record } = abort else { panic!("{abort:?}") };
    let record: AbortRecord = postcard::from_bytes(&record).unwrap();
    assert_eq!(record.peer, Some(Rank(1)));
    assert_snapshot!(record.text, @"rank 1 is lost: the messages that wait for a listener on one rank take more than 8388608 bytes, and of those in this group it sent the largest part");
}
