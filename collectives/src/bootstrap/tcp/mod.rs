//! Connects ranks that are processes, on one host or on many, under the usual launchers.
//!
//! Every rank holds one connection to the [`Hub`], which rank 0 runs unless the [`Environment`] names an
//! external one. The connection carries messages only while ranks prepare, abort and leave. In steady state
//! all threads sleep in the kernel.
//!
//! When a process ends, its kernel closes the connection, and the other ranks learn of it at once.
//!
//! | left out on purpose | reason |
//! | --- | --- |
//! | heartbeats | the deadline of any call that waits for a vanished host detects it; the standard library cannot enable TCP keepalive |
//! | encryption and authentication | any process that reaches the port and speaks the protocol can join as a rank: keep the port inside the cluster |
//!
//! A rank whose exchange times out ends the group: through its [listener](super::Listener) if it has one,
//! else with a record that names the first missing rank.

mod hub;
mod wire;

use std::fmt;
use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

pub use self::hub::Hub;

use self::hub::ACKNOWLEDGE_TIMEOUT;
use self::wire::{
    DeadlineReader, FRAME_BYTES_MAX, FrameError, FrameSender, HANDSHAKE_BYTES_MAX, Hello,
    HelloReply, Outbox, PreambleError, Refusal, VERSION, encode_frame, is_timeout, preamble,
    read_frame, read_preamble,
};
use super::client::Client;
use super::environment::{Environment, HubAddress};
use super::hub::check_ranks;
use super::message::{Blob, Reply, Request, Seconds};
use super::{Bootstrap, Listener, host_id};
use crate::error::Error;

/// The pause before the second attempt to reach the hub; it doubles from attempt to attempt.
const PAUSE_MIN: Duration = Duration::from_millis(10);
const PAUSE_MAX: Duration = Duration::from_millis(250);
const SILENT: &str =
    "a process accepted the connection but sent nothing, so it may not be a Peerlane hub";

/// Joins this process to a group as one rank.
///
/// If it is dropped without a [goodbye](Bootstrap::leave), the other ranks lose this rank.
pub struct TcpBootstrap {
    client: Arc<Client>,
    outbox: Option<Outbox>,
    host: String,
    address: String,
    hub: Option<Hub>,
}

impl TcpBootstrap {
    /// Joins the group that `environment` describes, and waits until every rank has joined. Rank 0
    /// opens the hub, unless that is external.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) naming the ranks that did not join, or the hub that was not
    /// reached; [`Mismatch`](ErrorKind::Mismatch) if ranks disagree on the size of the group, two have
    /// the same number, or another program listens at the address;
    /// [`Unavailable`](ErrorKind::Unavailable) if the port is in use;
    /// [`PeerLost`](ErrorKind::PeerLost) if a rank joined and was lost.
    pub fn join(environment: &Environment, deadline: Deadline) -> Result<Self, Error> {
        let Environment { rank, ranks, ref hub, ref job, .. } = *environment;
        match hub {
            HubAddress::RankZero(address) if rank == Rank(0) => {
                let hub = bind(address, ranks)?;
                let hub = match job {
                    Some(job) => hub.with_job(job),
                    None => hub,
                };
                Self::join_with_hub(hub, deadline)
            }
            HubAddress::RankZero(address) | HubAddress::External(address) => {
                Self::connect(address.clone(), None, rank, ranks, job.clone(), deadline)
            }
        }
    }

    /// Joins as rank 0, which takes over an open hub. The hub can have a port that the system chose, and
    /// the launcher passes this port on to the other ranks.
    ///
    /// # Errors
    /// Those of [`join`](Self::join).
    pub fn join_with_hub(hub: Hub, deadline: Deadline) -> Result<Self, Error> {
        let (address, ranks) = (hub.address_here().to_string(), hub.ranks());
        let job = hub.job();
        Self::connect(address, Some(hub), Rank(0), ranks, job, deadline)
    }

    fn connect(
        address: String,
        hub: Option<Hub>,
        rank: Rank,
        ranks: usize,
        job: Option<String>,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        check_ranks(ranks)?;
        let host = host_id();
        let size = u32::try_from(ranks).expect("checked above");
        let hello =
            Hello { rank: rank.0, ranks: size, host: host.clone(), job, runs_hub: hub.is_some() };
        let stream = reach_hub(&address, &hello, deadline)?;
        let client = Arc::new(Client::new(rank, ranks));
        let outbox = open_connection(stream, &client, &address).map_err(|error| {
            let text = format!(
                "cannot start the threads for the connection to the hub at {address}: {error}"
            );
            Error::new(ErrorKind::Other, text).with_source(error)
        })?;
        let joined = Self { client, outbox: Some(outbox), host, address, hub };
        joined.client.wait_started(deadline).inspect_err(|_| joined.start_timed_out(deadline))?;
        Ok(joined)
    }

    /// Tells the other ranks that the group did not start in time.
    fn start_timed_out(&self, deadline: Deadline) {
        let timeout = deadline.timeout();
        match &self.hub {
            Some(hub) => hub.start_timed_out(timeout),
            None => self.send(&Request::StartTimedOut { timeout }),
        }
    }

    fn send(&self, request: &Request) {
        if let Some(outbox) = &self.outbox {
            outbox.sender().send(encode_frame(request));
        }
    }
}

// SAFETY: every exchange has a sequence number, and its contributions are passed on unchanged.
unsafe impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> Rank {
        self.client.rank()
    }

    fn ranks(&self) -> usize {
        self.client.ranks()
    }

    fn host(&self) -> &str {
        &self.host
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.client.exchange(label, mine, deadline, |request| self.send(&request))
    }

    fn missing(&self) -> Vec<Rank> {
        self.client.missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.client.check_send("broadcast", message)?;
        self.send(&Request::Broadcast { message: Blob(message.to_vec()) });
        Ok(())
    }

    fn relay(&self) -> Option<Rank> {
        self.client.relay()
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.client.check_send("abort", record)?;
        self.send(&Request::Abort { record: Blob(record.to_vec()) });
        Ok(())
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.client.listen(listener);
    }

    /// Leaves the group. The rank that runs the hub waits until the others have left or are lost, because the
    /// hub serves them and this process may end after its goodbye.
    fn leave(&self, deadline: Deadline) -> Result<(), Error> {
        if self.client.begin_leave()? {
            self.send(&Request::Leave);
        }
        if !self.client.wait_closed(deadline) {
            let within = Seconds(deadline.timeout());
            let text = format!("leave: the hub at {} did not answer within {within}", self.address);
            return Err(Error::new(ErrorKind::Timeout, text).with_peer(Rank(0)));
        }
        self.hub.as_ref().map_or(Ok(()), |hub| hub.wait_all_left(deadline))
    }
}

impl Drop for TcpBootstrap {
    fn drop(&mut self) {
        self.client.stop_notifications();
        // Writes what is queued, for example an abort, and closes the connection.
        self.outbox = None;
        if let Some(hub) = &self.hub {
            hub.wait_disconnected(Deadline::after(ACKNOWLEDGE_TIMEOUT));
        }
    }
}

impl fmt::Debug for TcpBootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpBootstrap")
            .field("rank", &self.client.rank())
            .field("ranks", &self.client.ranks())
            .field("address", &self.address)
            .field("hub", &self.hub)
            .finish_non_exhaustive()
    }
}

/// Starts the threads that read from and write to the hub.
fn open_connection(stream: TcpStream, client: &Arc<Client>, address: &str) -> io::Result<Outbox> {
    let outbox = Outbox::open(&stream)?;
    let (client, sender) = (Arc::clone(client), outbox.sender().clone());
    let address = address.to_owned();
    thread::Builder::new()
        .name("peerlane-tcp-read".into())
        .spawn(move || read_replies(stream, &client, &sender, &address))?;
    Ok(outbox)
}

fn read_replies(stream: TcpStream, client: &Client, sender: &FrameSender, address: &str) {
    let mut reader = BufReader::new(stream);
    let how = loop {
        match read_frame::<Reply>(&mut reader, FRAME_BYTES_MAX) {
            Ok(Some(reply)) => {
                if client.receive(reply) {
                    sender.send(encode_frame(&Request::Acknowledge));
                }
            }
            Ok(None) => break format!("the hub at {address} closed its connection"),
            Err(error) => break format!("the connection to the hub at {address} failed: {error}"),
        }
    };
    client.close(how);
    let _ = reader.into_inner().shutdown(Shutdown::Both);
}

/// Opens the hub of rank 0. It listens on all addresses of the host, because other hosts may know this one by
/// another address, unless the address is a loopback address or `localhost`.
///
/// Other names do not tell: a host may resolve its own name to a loopback address.
fn bind(address: &str, ranks: usize) -> Result<Hub, Error> {
    let (name, port) = address.rsplit_once(':').unwrap_or((address, "0"));
    let literal = name.trim_matches(['[', ']']).parse::<IpAddr>();
    if literal.is_ok_and(|ip| ip.is_loopback()) || name.eq_ignore_ascii_case("localhost") {
        return Hub::bind(address, ranks);
    }
    let both = Hub::bind(&format!("[::]:{port}"), ranks);
    match both {
        // `[::]` does not exist on a host without IPv6.
        Err(error) if !is_in_use(&error) => Hub::bind(&format!("0.0.0.0:{port}"), ranks),
        both => both,
    }
}

fn is_in_use(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(|source: &io::Error| source.kind() == io::ErrorKind::AddrInUse)
}

/// The reason why an attempt to reach the hub failed.
enum JoinError {
    /// The hub may start later, or come back.
    Retry(String),
    /// Another attempt would fail too.
    Fatal(Error),
}

/// Connects to the hub at `address`, retrying until `deadline`, and registers the rank.
fn reach_hub(address: &str, hello: &Hello, deadline: Deadline) -> Result<TcpStream, Error> {
    let mut pause = PAUSE_MIN;
    loop {
        let reason = match attempt(address, hello, deadline) {
            Ok(stream) => return Ok(stream),
            Err(JoinError::Fatal(error)) => return Err(error),
            Err(JoinError::Retry(reason)) => reason,
        };
        let remaining = deadline.remaining();
        if remaining.is_zero() {
            return Err(not_reached(address, hello, deadline, &reason));
        }
        thread::sleep(pause.min(remaining));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

fn attempt(address: &str, hello: &Hello, deadline: Deadline) -> Result<TcpStream, JoinError> {
    let retry = |error: io::Error| JoinError::Retry(error.to_string());
    let stream = connect(&resolve(address, deadline)?, deadline).map_err(retry)?;
    stream.set_nodelay(true).map_err(retry)?;
    let mut greeting = preamble().to_vec();
    greeting.extend_from_slice(&encode_frame(hello));
    (&mut &stream).write_all(&greeting).map_err(retry)?;
    let mut reader = DeadlineReader { stream: &stream, deadline };
    read_preamble(&mut reader).map_err(|error| no_hub(address, error))?;
    match read_frame(&mut reader, HANDSHAKE_BYTES_MAX) {
        Ok(Some(HelloReply::Welcome)) => {}
        Ok(Some(HelloReply::Refused(Refusal::Closing)) | None) => {
            return Err(JoinError::Retry("the hub closed the connection".into()));
        }
        Ok(Some(HelloReply::Refused(refusal))) => return Err(refused(address, &refusal)),
        Err(FrameError::Io(error)) if is_timeout(&error) => {
            return Err(JoinError::Retry(SILENT.into()));
        }
        Err(error) => return Err(JoinError::Retry(error.to_string())),
    }
    stream.set_read_timeout(None).map_err(retry)?;
    Ok(stream)
}

/// Resolves a name on another thread, because the system's resolver has no deadline.
fn resolve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, JoinError> {
    if let Ok(literal) = address.parse() {
        return Ok(vec![literal]);
    }
    let (answer, answered) = channel();
    let name = address.to_owned();
    let resolver = thread::Builder::new().name("peerlane-resolve".into()).spawn(move || {
        let _ = answer.send(name.to_socket_addrs().map(Iterator::collect::<Vec<_>>));
    });
    resolver.map_err(|error| {
        JoinError::Retry(format!("cannot start a thread to resolve the name: {error}"))
    })?;
    match answered.recv_timeout(deadline.remaining()) {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(JoinError::Retry(error.to_string())),
        Err(_) => Err(JoinError::Retry("the name of the host was not resolved in time".into())),
    }
}

fn connect(addresses: &[SocketAddr], deadline: Deadline) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name of the host has no address");
    for address in addresses {
        // `connect_timeout` refuses a timeout of zero.
        let timeout = deadline.remaining().max(Duration::from_millis(1));
        match TcpStream::connect_timeout(address, timeout) {
            // TCP can connect a port of this host to itself if no process listens at it.
            Ok(stream) if stream.local_addr()? == *address => {
                last = io::ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn no_hub(address: &str, error: PreambleError) -> JoinError {
    let text = match error {
        PreambleError::Io(error) if is_timeout(&error) => return JoinError::Retry(SILENT.into()),
        PreambleError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return JoinError::Retry("a process accepted the connection and closed it".into());
        }
        PreambleError::Io(error) => return JoinError::Retry(error.to_string()),
        PreambleError::Foreign(bytes) => format!(
            "the process that listens at {address} is not a Peerlane hub: its first bytes are \
             \"{}\"; set PEERLANE_PORT or MASTER_PORT to another port, the same on every rank",
            bytes.escape_ascii()
        ),
        PreambleError::Version(version) => format!(
            "the hub at {address} uses version {version} of the protocol, expected {VERSION}; run \
             the same Peerlane on all ranks"
        ),
    };
    JoinError::Fatal(Error::new(ErrorKind::Mismatch, text))
}

fn refused(address: &str, refusal: &Refusal) -> JoinError {
    let kind = match refusal {
        Refusal::Ended { .. } => ErrorKind::Aborted,
        _ => ErrorKind::Mismatch,
    };
    let error = Error::new(kind, format!("the hub at {address} rejected this rank: {refusal}"));
    JoinError::Fatal(match refusal {
        Refusal::Taken { rank, .. } => error.with_peer(Rank(*rank)),
        _ => error,
    })
}

fn not_reached(address: &str, hello: &Hello, deadline: Deadline, reason: &str) -> Error {
    let text = format!(
        "rank {} did not reach the hub at {address} within {}: {reason}; check that rank 0 runs, \
         that MASTER_ADDR and MASTER_PORT name the host of rank 0 and a free port, and that no \
         firewall blocks the connection",
        hello.rank,
        Seconds(deadline.timeout())
    );
    Error::new(ErrorKind::Timeout, text).with_peer(Rank(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loopback_address_keeps_other_hosts_out() {
        for (address, is_local) in [
            ("127.0.0.1:0", true),
            ("localhost:0", true),
            ("LOCALHOST:0", true),
            ("node0:0", false),
            ("0.0.0.0:0", false),
        ] {
            let bound = bind(address, 1).unwrap().address().ip();
            assert_eq!(
                (bound.is_loopback(), bound.is_unspecified()),
                (is_local, !is_local),
                "{address}"
            );
        }
    }
}
