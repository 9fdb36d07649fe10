//! Implements the hub: the process that every rank of a group is connected to.
//!
//! One thread accepts connections. Each connection has a thread that reads and one that writes; all sleep in
//! the kernel while there is nothing to send. All share one [`HubState`] under a lock, and the order of
//! changes under the lock is the order in which every rank receives replies.

use std::fmt;
use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::super::client::Monitor;
use super::super::hub::{Event, HubState, check_ranks};
use super::super::message::{RankList, Reply, Request, Seconds};
use super::wire::{
    DeadlineReader, FRAME_BYTES_MAX, HANDSHAKE_BYTES_MAX, Hello, HelloReply, Outbox, PreambleError,
    Refusal, VERSION, encode_frame, preamble, read_frame, read_preamble,
};
use crate::error::Error;

/// Maximum time that the hub waits until every live rank has acknowledged the end of the group.
pub(super) const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause after a connection that could not be accepted, for example because descriptors ran out.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Runs the hub of a group of processes; dropping it closes the hub.
///
/// It runs in rank 0, or in the process that starts the ranks. Once it is closed, ranks that have not
/// left count rank 0 as lost.
pub struct Hub {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

pub(super) struct Shared {
    address: SocketAddr,
    ranks: usize,
    state: Monitor<State>,
}

struct State {
    hub: HubState,
    /// The job of the group, once it is known.
    job: Option<String>,
    connections: Vec<Option<Connection>>,
    closing: bool,
}

/// The connection of a rank that has joined. It is kept after the rank has left, because its number stays
/// taken.
struct Connection {
    origin: SocketAddr,
    host: String,
    outbox: Option<Outbox>,
}

impl Hub {
    /// Opens the hub of a group of `ranks` ranks at `address`, such as `127.0.0.1:29501`. Port 0 selects any
    /// free port.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a group of 0 ranks,
    /// [`Unavailable`](ErrorKind::Unavailable) if the port is in use or the address is not one of this host.
    pub fn bind(address: &str, ranks: usize) -> Result<Self, Error> {
        check_ranks(ranks)?;
        let listener = TcpListener::bind(address).map_err(|error| cannot_listen(address, error))?;
        Self::accept_at(listener, ranks).map_err(|error| cannot_listen(address, error))
    }

    fn accept_at(listener: TcpListener, ranks: usize) -> io::Result<Self> {
        let connections = (0..ranks).map(|_| None).collect();
        let hub = HubState::new(ranks);
        let state = State { hub, job: None, connections, closing: false };
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { address, ranks, state: Monitor::new(state) });
        let acceptor = {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name("peerlane-hub".into())
                .spawn(move || accept(&listener, &shared))?
        };
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// Sets the id of the job; processes of another job cannot join. Without it, the first rank with an id
    /// determines the job.
    #[must_use]
    pub fn with_job(self, job: impl Into<String>) -> Self {
        self.shared.state.change(|state| state.job = Some(job.into()));
        self
    }

    /// Returns the address at which the hub listens, with the port that the system chose for port 0.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.shared.ranks
    }

    /// Returns the id of the job, if it is known.
    pub(super) fn job(&self) -> Option<String> {
        self.shared.state.lock().job.clone()
    }

    /// Returns an address at which a process of this host reaches the hub.
    pub(super) fn address_here(&self) -> SocketAddr {
        let mut address = self.shared.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        address
    }

    /// Ends the group because not all ranks have joined in time. The direct call takes effect before a later
    /// close.
    pub(super) fn start_timed_out(&self, timeout: Duration) {
        self.shared.apply(Rank(0), Event::Request(Request::StartTimedOut { timeout }));
    }

    /// Waits until every request that rank 0 sent before its connection closed is handled.
    pub(super) fn wait_disconnected(&self, deadline: Deadline) {
        let gone = |state: &mut State| (!state.hub.is_live(Rank(0))).then_some(());
        self.shared.state.wait(deadline, gone);
    }

    /// Waits until every rank has left or is lost.
    pub(super) fn wait_all_left(&self, deadline: Deadline) -> Result<(), Error> {
        let empty = self
            .shared
            .state
            .wait(deadline, |state| state.hub.live().next().is_none().then_some(()));
        let live: Vec<_> = self.shared.state.lock().hub.live().collect();
        match (empty, live.first()) {
            (None, Some(first)) => {
                let text = format!(
                    "leave: {} did not leave the group within {}; the rank that runs the hub must \
                     leave last",
                    RankList(&live),
                    Seconds(deadline.timeout())
                );
                Err(Error::new(ErrorKind::Timeout, text).with_peer(*first))
            }
            _ => Ok(()),
        }
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        let state = &self.shared.state;
        // Every rank receives a pending end of the group before its connection closes.
        state.wait(Deadline::after(ACKNOWLEDGE_TIMEOUT), |state| {
            (!state.hub.awaits_acknowledgement()).then_some(())
        });
        let outboxes: Vec<_> = state.change(|state| {
            state.closing = true;
            state
                .connections
                .iter_mut()
                .flatten()
                .filter_map(|connection| connection.outbox.take())
                .collect()
        });
        outboxes.iter().for_each(Outbox::close);
        drop(outboxes);
        // A connection is the only way to wake `accept`.
        let woken = TcpStream::connect_timeout(&self.address_here(), ACKNOWLEDGE_TIMEOUT);
        if let (Ok(_), Some(acceptor)) = (woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub")
            .field("address", &self.shared.address)
            .field("ranks", &self.shared.ranks)
            .finish_non_exhaustive()
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    for stream in listener.incoming() {
        if shared.state.lock().closing {
            return;
        }
        let Ok(stream) = stream else {
            thread::sleep(ACCEPT_PAUSE);
            continue;
        };
        let shared = Arc::clone(shared);
        // If no thread can be started, the stream closes and the rank tries again.
        let _ = thread::Builder::new()
            .name("peerlane-hub-read".into())
            .spawn(move || serve(&shared, stream));
    }
}

impl Shared {
    /// Answers a rank that has said hello, and returns whether it joins the group.
    pub(super) fn admit(&self, hello: Hello, origin: SocketAddr, outbox: Outbox) -> bool {
        let refused = self.state.change(|state| {
            if let Err(refusal) = state.check(&hello, self.ranks) {
                return Some((refusal, outbox));
            }
            let rank = Rank(hello.rank);
            state.job = state.job.take().or(hello.job);
            outbox.sender().send(encode_frame(&HelloReply::Welcome));
            let connection = Connection { origin, host: hello.host, outbox: Some(outbox) };
            state.connections[rank.index()] = Some(connection);
            let replies = state.hub.apply(rank, Event::Joined { runs_hub: hello.runs_hub });
            state.broadcast(&replies);
            None
        });
        let Some((refusal, outbox)) = refused else { return true };
        outbox.sender().send(encode_frame(&HelloReply::Refused(refusal)));
        false
    }

    /// Handles an event of a rank and sends the replies to all live ranks.
    pub(super) fn apply(self: &Arc<Self>, from: Rank, event: Event) {
        let (must_acknowledge, outbox) = self.state.change(|state| {
            let ended_before = state.hub.end_cause().is_some();
            let replies = state.hub.apply(from, event);
            state.broadcast(&replies);
            let connection = state.connections[from.index()].as_mut();
            let gone = connection.filter(|_| !state.hub.is_live(from));
            (
                !ended_before && state.hub.awaits_acknowledgement(),
                gone.and_then(|connection| connection.outbox.take()),
            )
        });
        if must_acknowledge {
            self.stop_waiting_later();
        }
        // Dropping the outbox waits until its last frames are written, so it happens outside of the lock.
        drop(outbox);
    }

    /// Starts a thread that stops waiting for ranks that do not acknowledge in time.
    fn stop_waiting_later(self: &Arc<Self>) {
        let shared = Arc::clone(self);
        let _ = thread::Builder::new().name("peerlane-hub-tell".into()).spawn(move || {
            let acknowledged = shared.state.wait(Deadline::after(ACKNOWLEDGE_TIMEOUT), |state| {
                (!state.hub.awaits_acknowledgement()).then_some(())
            });
            if acknowledged.is_none() {
                shared.state.change(|state| {
                    let replies = state.hub.stop_waiting();
                    state.broadcast(&replies);
                });
            }
        });
    }
}

impl State {
    fn check(&self, hello: &Hello, hub_ranks: usize) -> Result<(), Refusal> {
        let Hello { rank, ranks, ref host, .. } = *hello;
        if let (Some(job), Some(hub_job)) = (&hello.job, &self.job)
            && job != hub_job
        {
            return Err(Refusal::Job { job: job.clone(), hub_job: hub_job.clone() });
        }
        if ranks as usize != hub_ranks {
            let hub_ranks = u32::try_from(hub_ranks).expect("checked when the hub was bound");
            return Err(Refusal::Ranks { rank, ranks, hub_ranks });
        }
        if rank >= ranks {
            return Err(Refusal::OutOfRange { rank, ranks });
        }
        if let Some(connection) = &self.connections[Rank(rank).index()] {
            let (origin, same_host) = (connection.origin.to_string(), connection.host == *host);
            return Err(Refusal::Taken { rank, origin, same_host });
        }
        if let Some(cause) = self.hub.end_cause() {
            return Err(Refusal::Ended { cause: cause.to_string() });
        }
        if self.closing { Err(Refusal::Closing) } else { Ok(()) }
    }

    fn broadcast(&self, replies: &[Reply]) {
        for reply in replies {
            let frame = encode_frame(reply);
            for rank in self.hub.live() {
                let connection = self.connections[rank.index()].as_ref();
                if let Some(outbox) = connection.and_then(|connection| connection.outbox.as_ref()) {
                    outbox.sender().send(Arc::clone(&frame));
                }
            }
        }
    }
}

fn cannot_listen(address: &str, error: io::Error) -> Error {
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot listen at {address}: the port is in use; set PEERLANE_PORT or MASTER_PORT to a \
             free port, the same on every rank"
        ),
        _ => format!("cannot listen at {address} for the ranks of the group: {error}"),
    };
    Error::new(ErrorKind::Unavailable, text).with_source(error)
}

/// Time that a new connection has to send its hello.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes that are read from a connection that is rejected, and the time for that, so that the other side
/// can read the answer.
const REJECT_BYTES: u64 = 64 << 10;
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Serves a connection until it ends. A connection that is no rank of this group gets a text and is
/// closed, without effect on the group.
fn serve(shared: &Arc<Shared>, stream: TcpStream) {
    let Some((rank, origin)) = handshake(shared, &stream) else { return };
    let mut reader = BufReader::new(stream);
    let how = loop {
        match read_frame::<Request>(&mut reader, FRAME_BYTES_MAX) {
            Ok(Some(request)) => shared.apply(rank, Event::Request(request)),
            Ok(None) => {
                break format!(
                    "its connection from {origin} closed before the rank left the group"
                );
            }
            Err(error) => break format!("its connection from {origin} failed: {error}"),
        }
    };
    shared.apply(rank, Event::Lost { how });
}

fn handshake(shared: &Arc<Shared>, stream: &TcpStream) -> Option<(Rank, SocketAddr)> {
    let origin = origin(stream).ok()?;
    stream.set_nodelay(true).ok()?;
    (&mut &*stream).write_all(&preamble()).ok()?;
    let mut reader = DeadlineReader { stream, deadline: Deadline::after(HELLO_TIMEOUT) };
    match read_preamble(&mut reader) {
        Ok(()) => {}
        Err(PreambleError::Io(_)) => return None,
        Err(PreambleError::Foreign(_)) => {
            reject(stream, &foreign_text(shared.ranks));
            return None;
        }
        Err(PreambleError::Version(_)) => {
            // The rank knows the hub's version from the preamble and reports it better.
            reject(stream, &[]);
            return None;
        }
    }
    let hello: Hello = read_frame(&mut reader, HANDSHAKE_BYTES_MAX).ok()??;
    stream.set_read_timeout(None).ok()?;
    let outbox = Outbox::open(stream).ok()?;
    let rank = Rank(hello.rank);
    shared.admit(hello, origin, outbox).then_some((rank, origin))
}

fn origin(stream: &TcpStream) -> io::Result<SocketAddr> {
    let address = stream.peer_addr()?;
    Ok(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn foreign_text(ranks: usize) -> Vec<u8> {
    format!(
        "\nThis is the hub of a Peerlane group of {ranks} ranks, protocol version {VERSION}. It \
         received bytes of another protocol.\n"
    )
    .into_bytes()
}

/// Sends `text` and reads on for a moment: a close with unread bytes would discard the text.
fn reject(mut stream: &TcpStream, text: &[u8]) {
    let sent = stream.write_all(text).and_then(|()| stream.shutdown(Shutdown::Write));
    let reader = DeadlineReader { stream, deadline: Deadline::after(REJECT_TIMEOUT) };
    if sent.is_ok() {
        let _ = io::copy(&mut reader.take(REJECT_BYTES), &mut io::sink());
    }
}
