//! Tests that processes without the address of a rank neither stop its service nor use much of its memory.
//!
//! The service runs in a process of its own, with memory that is registered with no NIC and with a descriptor
//! instead of the events of a NIC.

use std::collections::VecDeque;
use std::fs::File;
use std::io::ErrorKind::{BrokenPipe, ConnectionReset};
use std::io::{BufRead as _, BufReader, Lines, Read as _, Seek as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use peerlane_hal::{BackendId, Deadline, Error as _, ErrorKind, Rank, RemoteKey as _, Role};
use peerlane_toolkit::{WakeupEvent, handover};
use rustix::net::sockopt::{set_socket_recv_buffer_size, set_socket_send_buffer_size};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::address::{Address, Token, Tokens};
use super::client::ClientTimeouts;
use super::control::{Control, HELLO_BYTES, OpenRequest, Request, Response, framed};
use super::service::{Events, Resources, STRANGERS_MAX, Service, TIMEOUTS, listen};
use super::signals::QpRole;
use crate::key::Key;
use crate::nic::QpAddress;
use crate::options::Options;
use crate::registration::Registration;

const CONNECTIONS: usize = 10_000;
/// Each attacker keeps this number of connections open.
const HELD: usize = 50;
const ATTACKERS: usize = 4;
const GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Enough for a busy machine. What comes sooner has waited for no time limit of another client.
const AT_ONCE: Duration = Duration::from_secs(9);

/// An event descriptor that stands for the events of a NIC.
struct FakeEvents {
    event: Arc<WakeupEvent>,
    handled: Sender<()>,
    /// Counts the waits of the service for events and clients.
    waits: Arc<AtomicUsize>,
}

impl FakeEvents {
    fn new() -> (Self, Arc<WakeupEvent>, Receiver<()>) {
        let event = WakeupEvent::new().unwrap();
        let (handled, receiver) = channel();
        let fake = Self { event: Arc::clone(&event), handled, waits: Arc::default() };
        (fake, event, receiver)
    }
}

impl Events for FakeEvents {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        vec![self.event.fd()]
    }

    fn handle(&mut self, _: usize) {
        self.event.clear();
        let _ = self.handled.send(());
    }
}

/// Starts the service of rank 0 of two ranks, which has no NIC.
fn serve(events: impl Events + Send + 'static, timeouts: ClientTimeouts) -> (Service, Address) {
    let resources = Resources::new(Rank(0), 2, Options::default(), Arc::from(Vec::new())).unwrap();
    let resources = Arc::new(resources);
    let listener = listen(&[[127, 0, 0, 1].into()]).unwrap();
    // The connections have it too, so that few responses fill it.
    set_socket_send_buffer_size(&listener, 4096).unwrap();
    let service = Service::start_with(&resources, listener, events, timeouts).unwrap();
    let address = address(resources.tokens, service.address);
    (service, address)
}

/// Returns the address of rank 0 of two ranks.
fn address(tokens: Tokens, service: SocketAddr) -> Address {
    let (host, device) = ("here".to_owned(), "none".to_owned());
    Address { rank: Rank(0), ranks: 2, tokens, service, nics: 1, host, device }
}

/// Registers memory of rank 0, and returns what keeps it registered and its key.
fn register() -> (handover::Entry, Key) {
    let registration = Arc::new(Registration::without_nics(Rank(0), Role::Data));
    let shared = Arc::clone(&registration);
    let entry = handover::enter(BackendId::RDMA, Rank(0), Role::Data, shared);
    let key = registration.key(entry.generation());
    (entry, key)
}

/// Serves until its input ends. Prints the address and a key, and after each line of its input "handled" when an
/// event of the fake NIC is handled, how often the service has waited, and the most memory in KiB.
fn run_rank_0() {
    let (fake, event, events) = FakeEvents::new();
    let waits = Arc::clone(&fake.waits);
    let (_service, address) = serve(fake, TIMEOUTS);
    let (_entry, key) = register();
    println!("\n{} {}", hex(&address.encode()), hex(&key.encode()));
    // Later, there may be no descriptor for it.
    let status = File::open("/proc/self/status").unwrap();
    for line in std::io::stdin().lines() {
        line.unwrap();
        event.set_asleep(true);
        event.notify();
        events.recv_timeout(AT_ONCE).expect("an event is handled");
        let waits = waits.load(Ordering::Relaxed);
        println!("handled {waits} {}", peak_kib(&status));
    }
}

/// Reads the most memory that this process has used from its file in `/proc`.
fn peak_kib(mut file: &File) -> u64 {
    let mut status = String::new();
    file.rewind().unwrap();
    file.read_to_string(&mut status).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn rank_0() {
    run_rank_0();
}

#[test]
#[ignore = "run by other tests, in a process of its own"]
fn rank_0_with_few_descriptors() {
    let limit = Rlimit { current: Some(40), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();
    run_rank_0();
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    let digits = hex.as_bytes().chunks(2).map(|digits| std::str::from_utf8(digits).unwrap());
    digits.map(|digits| u8::from_str_radix(digits, 16).unwrap()).collect()
}

/// The process of rank 0, and a connection of rank 1 to it.
struct Rank0 {
    process: Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    address: Address,
    key: Key,
    control: Control,
}

impl Rank0 {
    fn start(test: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args([&format!("connection::attacks::{test}"), "--exact", "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = process.stdin.take().unwrap();
        let mut output = BufReader::new(process.stdout.take().unwrap()).lines();
        let (address, key) = output
            .find_map(|line| {
                let line = line.unwrap();
                let (address, key) = line.split_once(' ')?;
                let address = address.starts_with("504c5241").then(|| bytes(address))?;
                Some((Address::decode(Rank(0), &address).unwrap(), bytes(key)))
            })
            .unwrap();
        let key = Key::decode(&key).unwrap();
        let control = Control::open(Rank(1), &address, Deadline::after(AT_ONCE)).unwrap();
        Self { process, input, output, address, key, control }
    }

    /// Imports over a connection that exists, and lets rank 0 handle an event. Returns how often the service has waited,
    /// and the most memory of rank 0 in KiB.
    fn import_and_handle_event(&mut self) -> (u64, u64) {
        self.control.import(&self.key, Deadline::after(AT_ONCE)).unwrap();
        writeln!(self.input, "event").unwrap();
        let handled = self.output.next().unwrap().unwrap();
        let mut fields = handled.strip_prefix("handled ").unwrap().split(' ');
        let mut field = || fields.next().unwrap().parse().unwrap();
        (field(), field())
    }

    /// Connects to the service as a rank that has not been connected, and imports.
    fn connect_and_import(&self) {
        let deadline = Deadline::after(AT_ONCE);
        let control = Control::open(Rank(1), &self.address, deadline).unwrap();
        control.import(&self.key, deadline).unwrap();
    }

    fn end(mut self) {
        drop(self.input);
        assert!(self.process.wait().unwrap().success());
    }
}

/// Connects to the service, and does one thing that a rank does not do.
fn attack(service: SocketAddr, kind: usize) -> std::io::Result<TcpStream> {
    let mut stream = TcpStream::connect_timeout(&service, AT_ONCE)?;
    // The token is wrong.
    let hello = [&[1, 0][..], &[7; HELLO_BYTES - 2]].concat();
    match kind {
        0 | 1 => {}
        2 => stream.write_all(&[3])?,
        3 => stream.write_all(&framed(&hello)[..HELLO_BYTES])?,
        4 => stream.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")?,
        // A frame of 4 GiB, one that is too long without a token, and a request without a token.
        5 => stream.write_all(&[0xff; 4096])?,
        6 => stream.write_all(&framed(&[0; 4096]))?,
        7 => stream.write_all(&framed(&[4, 0, 1, 2, 3, 4]))?,
        8 => stream.shutdown(Shutdown::Write)?,
        9 => {
            stream.write_all(&framed(&hello))?;
            stream.set_read_timeout(Some(AT_ONCE))?;
            let mut refusal = Vec::new();
            stream.read_to_end(&mut refusal)?;
            let refusal = String::from_utf8_lossy(&refusal);
            assert!(refusal.ends_with("a fabric that was closed there"), "{refusal}");
        }
        10 => stream.write_all(&framed(&hello).repeat(100))?,
        _ => {
            for byte in framed(&hello) {
                stream.write_all(&[byte])?;
            }
        }
    }
    Ok(stream)
}

#[test]
fn strangers_delay_neither_imports_nor_events_and_do_not_fill_the_memory() {
    let mut rank_0 = Rank0::start("rank_0");
    let (_, before_kib) = rank_0.import_and_handle_event();
    let (service, done) = (rank_0.address.service, AtomicUsize::new(0));
    let (mut rounds, mut longest) = (0, Duration::ZERO);
    thread::scope(|scope| {
        for attacker in 0..ATTACKERS {
            let done = &done;
            scope.spawn(move || {
                let mut held = VecDeque::new();
                for number in 0..CONNECTIONS / ATTACKERS {
                    // The service closes the oldest connections, so an attack can fail.
                    held.extend(attack(service, (attacker + number) % 12));
                    if held.len() > HELD {
                        held.pop_front();
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        while done.load(Ordering::Relaxed) < CONNECTIONS {
            let start = Instant::now();
            rank_0.import_and_handle_event();
            rank_0.connect_and_import();
            (rounds, longest) = (rounds + 1, longest.max(start.elapsed()));
        }
    });
    let (_, after_kib) = rank_0.import_and_handle_event();
    rank_0.end();
    let growth_kib = after_kib - before_kib;
    println!("{rounds} rounds of at most {longest:?}, {growth_kib} KiB more memory");
    assert!(longest < AT_ONCE, "a round took {longest:?}");
    assert!(growth_kib << 10 <= GROWTH_BYTES_MAX, "the memory grew by {growth_kib} KiB");
}

#[test]
fn without_descriptors_the_service_pauses_and_serves_the_clients_that_it_has() {
    const IDLE: usize = 200;
    /// A service without a pause waits as often within a few milliseconds.
    const WAITS_MAX: u64 = 100;
    let mut rank_0 = Rank0::start("rank_0_with_few_descriptors");
    let service = rank_0.address.service;
    let connect = |_| TcpStream::connect_timeout(&service, AT_ONCE).unwrap();
    let idle: Vec<_> = (0..IDLE).map(connect).collect();
    let (before, _) = rank_0.import_and_handle_event();
    thread::sleep(Duration::from_millis(500));
    let (after, _) = rank_0.import_and_handle_event();
    assert!(after - before < WAITS_MAX, "{} waits in half a second", after - before);
    drop(idle);
    rank_0.connect_and_import();
    rank_0.end();
}

/// A rank that sends requests and takes no response is closed after a while, and delays no other until then.
#[test]
fn a_rank_that_does_not_read_delays_no_other_and_is_closed() {
    let (fake, event, events) = FakeEvents::new();
    let timeouts = ClientTimeouts { message: Duration::from_millis(300), ..TIMEOUTS };
    let (service, address) = serve(fake, timeouts);
    let (_entry, key) = register();
    let hello = Request::Hello { token: address.tokens.peer, rank: Rank(1), ranks: 2 };
    // The refusal of a NIC that does not exist is a long response.
    let qp = QpAddress { qp_num: 17, psn: 1, gid: [3; 16], lid: 5, mtu: 3, reads: 16 };
    let role = QpRole { primary: None, index: 0 };
    let open = Request::Open(OpenRequest { address: qp, role, nic: 3, signal: None });
    thread::scope(|scope| {
        let stalled = scope.spawn(|| {
            let mut stream = TcpStream::connect(service.address).unwrap();
            set_socket_recv_buffer_size(&stream, 4096).unwrap();
            stream.set_write_timeout(Some(AT_ONCE)).unwrap();
            stream.write_all(&framed(&hello.encode())).unwrap();
            let requests = framed(&open.encode()).repeat(1000);
            loop {
                if let Err(error) = stream.write_all(&requests) {
                    return error.kind();
                }
            }
        });
        while !stalled.is_finished() {
            let deadline = Deadline::after(AT_ONCE);
            let control = Control::open(Rank(1), &address, deadline).unwrap();
            control.import(&key, deadline).unwrap();
            event.set_asleep(true);
            event.notify();
            events.recv_timeout(AT_ONCE).unwrap();
        }
        let closed = stalled.join().unwrap();
        assert!(matches!(closed, ConnectionReset | BrokenPipe), "{closed}");
    });
}

#[test]
fn the_oldest_of_many_clients_without_the_token_are_closed() {
    const CLIENTS: usize = 300;
    let (service, address) = serve(FakeEvents::new().0, TIMEOUTS);
    let (_entry, key) = register();
    let rank = Control::open(Rank(1), &address, Deadline::after(AT_ONCE)).unwrap();
    let connect = |_| TcpStream::connect(service.address).unwrap();
    let mut clients: Vec<_> = (0..CLIENTS).map(connect).collect();
    for client in clients.drain(..CLIENTS - 2 - STRANGERS_MAX) {
        let start = Instant::now();
        assert!(sent_until_closed(client).is_empty());
        assert!(start.elapsed() < AT_ONCE, "closed at its time limit");
    }
    rank.import(&key, Deadline::after(AT_ONCE)).unwrap();
}

/// Returns what the service sends to a client until it closes it.
fn sent_until_closed(mut stream: TcpStream) -> Vec<u8> {
    stream.set_read_timeout(Some(AT_ONCE)).unwrap();
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => bytes,
        Err(error) if error.kind() == ConnectionReset => bytes,
        Err(error) => panic!("the client is not closed: {error}"),
    }
}

#[test]
fn clients_without_the_token_are_closed_after_a_time_limit_or_at_once() {
    let hello = Duration::from_millis(50);
    let (service, address) = serve(FakeEvents::new().0, ClientTimeouts { hello, ..TIMEOUTS });
    let known = Request::Hello { token: address.tokens.peer, rank: Rank(1), ranks: 2 };
    for sent in [&[][..], &framed(&known.encode())[..HELLO_BYTES]] {
        let mut stream = TcpStream::connect(service.address).unwrap();
        stream.write_all(sent).unwrap();
        assert!(sent_until_closed(stream).is_empty());
    }

    // These need no time limit.
    let (service, _) =
        serve(FakeEvents::new().0, ClientTimeouts { hello: 100 * AT_ONCE, ..TIMEOUTS });
    let close = Request::Close { primary: 1 }.encode();
    for sent in [&framed(&close)[..], &[0xff; 4], &framed(&[0; HELLO_BYTES + 1])[..4], &framed(&[])]
    {
        let mut stream = TcpStream::connect(service.address).unwrap();
        stream.write_all(sent).unwrap();
        assert!(sent_until_closed(stream).is_empty(), "{sent:?}");
    }
}

#[test]
fn an_idle_rank_stays_connected() {
    let short = Duration::from_millis(1);
    let (_service, address) =
        serve(FakeEvents::new().0, ClientTimeouts { hello: AT_ONCE, message: short });
    let (_entry, key) = register();
    let deadline = Deadline::after(AT_ONCE);
    let control = Control::open(Rank(1), &address, deadline).unwrap();
    for _ in 0..3 {
        thread::sleep(20 * short);
        control.import(&key, deadline).unwrap();
    }
}

#[test]
fn a_rank_that_is_not_of_the_fabric_is_refused_with_the_reason() {
    let (_service, address) = serve(FakeEvents::new().0, TIMEOUTS);
    let refusal = |rank: Rank, address: &Address| {
        let opened = Control::open(rank, address, Deadline::after(AT_ONCE));
        opened.unwrap_err().to_string()
    };
    let tokens = Tokens::random().unwrap();
    for (rank, wrong, expected) in [
        (Rank(1), Address { tokens, ..address.clone() }, "a fabric that was closed there"),
        (Rank(1), Address { ranks: 3, ..address.clone() }, "it was opened for 2 ranks"),
        (Rank(2), address, "rank 2 is out of range, expected less than 2"),
    ] {
        let text = refusal(rank, &wrong);
        assert!(
            text.starts_with("connection to rank 0 lost: ") && text.ends_with(expected),
            "{text}"
        );
    }
}

/// Answers the hello of one client at the address of a rank.
fn welcome(listener: &TcpListener, token: Token) {
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; 4 + HELLO_BYTES]).unwrap();
    stream.write_all(&framed(&Response::Welcome { token }.encode())).unwrap();
}

/// A process that has taken the port of a rank that has ended does not know the token of the service.
#[test]
fn a_service_that_does_not_know_the_address_is_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = address(Tokens::random().unwrap(), listener.local_addr().unwrap());
    let error = thread::scope(|scope| {
        scope.spawn(|| welcome(&listener, Tokens::random().unwrap().service));
        Control::open(Rank(1), &address, Deadline::after(AT_ONCE)).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::PeerLost);
    assert!(error.to_string().contains("another process has its port"), "{error}");
}

#[test]
fn a_rank_whose_connection_is_closed_before_the_answer_connects_again() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tokens = Tokens::random().unwrap();
    let address = address(tokens, listener.local_addr().unwrap());
    // Not joined, because it waits for the second connection.
    thread::spawn(move || {
        drop(listener.accept().unwrap());
        welcome(&listener, tokens.service);
    });
    Control::open(Rank(1), &address, Deadline::after(AT_ONCE)).unwrap();
}

#[test]
fn the_service_listens_at_one_address_of_this_host() {
    let (other, own) = ([192, 0, 2, 1].into(), [127, 0, 0, 1].into());
    let bound = listen(&[other, own]).unwrap().local_addr().unwrap();
    assert_eq!(bound.ip(), own);
    let reasons = listen(&[other]).unwrap_err();
    assert!(reasons.starts_with("192.0.2.1: "), "{reasons}");

    let options = Options { service_ip: Some(other), ..Options::default() };
    let resources = Resources::new(Rank(0), 1, options, Arc::from(Vec::new())).unwrap();
    let error = Service::start(&Arc::new(resources), &[other]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().starts_with("service_ip is 192.0.2.1, expected "), "{error}");
}
