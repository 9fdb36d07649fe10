//! Connects ranks that are processes, on one host or on many, over TCP.
//!
//! The processes are started by the usual launchers.
//!
//! Every rank holds one connection to the [`Hub`], which rank 0 runs unless the [`Environment`]
//! names an external one. The connection carries messages only while ranks prepare, abort and
//! leave. In steady state all threads sleep in the kernel.
//!
//! When a process ends, its kernel closes the connection, and the other ranks learn of it at once.
//! Children that it has forked close their copies of the connection. A child that was made by a raw
//! system call keeps its copy; on one host, within one process namespace, the end of the process is
//! noticed nevertheless. Ranks in containers with namespaces of their own rely on the connection
//! alone, as ranks of different hosts do.
//!
//! | left out on purpose | reason |
//! | --- | --- |
//! | heartbeats | the kernel sends them: a connection to a host that has not answered for 20 s closes |
//! | encryption, and the integrity of messages after the handshake | they protect against a third party on the path; the network of a job is trusted |
//!
//! Ranks and hub prove to each other that they know the secret of the job, in the `handshake`.
//! Without a secret the hub listens on a loopback address only, unless the environment or
//! [`HubOptions`] permit other addresses.
//!
//! A rank whose exchange times out ends the group: through its [listener](super::Listener) if it
//! has one, else with a record that names the first missing rank.

mod accept;
mod connect;
mod formation;
mod handshake;
mod hub;
mod listener;
mod port;
mod serve;
mod wire;

use std::fmt;
use std::io::{self, BufReader, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use peerlane_hal::{Deadline, Error as _, ErrorKind, Rank};
use peerlane_toolkit::limits::{self, SystemError};
use serde::de::DeserializeOwned;

pub use self::hub::{Hub, HubOptions};

use self::connect::connect;
use self::formation::{Formation, Probes};
use self::handshake::{
    GroupId, HANDSHAKE_BYTES_MAX, Hello, HelloReply, Nonce, OpenError, PreambleError, Refusal,
    Sealed, Side, VERSION, preamble, read_preamble,
};
use self::hub::{ACKNOWLEDGE_TIMEOUT, is_in_use, name_holders};
use self::listener::RankListener;
use self::wire::{
    DeadlineReader, FrameError, FrameSender, Outbox, PeerReader, REPLY_BYTES_MAX, Stream,
    encode_frame, has_closed, is_timeout, keep_alive, read_frame,
};
use super::address::Address;
use super::client::Client;
use super::environment::{Environment, HUB_ADDRESS, HubAddress, NO_SECRET_HELP};
use super::forks::{Generation, Uninherited};
use super::hub::check_ranks;
use super::message::{Blob, Reply, Request, Seconds, with_peer};
use super::process::{Process, ProcessId, ProcessState};
use super::secret::{Secret, random_bytes};
use super::subgroups::{Addressed, Clients};
use super::{AbortRecord, Bootstrap, Listener, host_id};
use crate::error::Error;

/// The pause after the first failed attempt to reach the hub, which doubles with every further
/// attempt.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// The longest pause between two attempts to reach the hub.
const PAUSE_MAX: Duration = Duration::from_millis(250);

/// How long rank 0 waits for a port of the hub that is in use, such as by an earlier job.
const PORT_TIMEOUT: Duration = Duration::from_secs(4);

const SILENT: &str =
    "a process accepted the connection but sent nothing, so it may not be a Peerlane hub";
const CLOSED: &str = "the hub closed the connection";

/// Connects a rank that is a process of its own to its group, over TCP.
///
/// If it is dropped without a [goodbye](Bootstrap::leave), the other ranks lose this rank.
pub struct TcpBootstrap {
    clients: Arc<Clients>,
    host: String,
    address: String,
    group: GroupId,
    membership: Membership,
    generation: Generation,
    /// The connection, hub and listener of this rank, or `None` once this rank has left the group.
    held: Mutex<Option<Held>>,
}

/// Owns the connection, hub and listener that a rank releases when it leaves the group.
#[derive(Default)]
struct Held {
    outbox: Option<Outbox>,
    hub: Option<Arc<Hub>>,
    /// The listener to which other ranks connect if the group shrinks.
    ///
    /// It is `None` if any process of another host could connect, or if no port could be bound.
    listener: Option<Arc<RankListener>>,
}

/// Stores the job and the secret, by which a rank and a hub decide whether to accept each other.
#[derive(Clone, Debug)]
struct Membership {
    job: Option<String>,
    secret: Option<Secret>,
    allow_unauthenticated: bool,
}

impl TcpBootstrap {
    /// Joins a group of processes, and waits until every rank has joined.
    ///
    /// Rank 0 opens the hub unless it is external.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) naming the ranks that did not join, or the hub that was not
    /// reached; [`Mismatch`](ErrorKind::Mismatch) if ranks disagree on the size of the group or on
    /// the secret, two have the same number, or another program listens at the address;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the address is malformed, or other hosts
    /// can reach it and there is no secret; [`Unavailable`](ErrorKind::Unavailable) if the port is
    /// in use; [`PeerLost`](ErrorKind::PeerLost) if a rank joined and was lost.
    pub fn join(environment: &Environment, deadline: Deadline) -> Result<Self, Error> {
        environment.check_authentication()?;

        let &Environment { rank, ranks, allow_unauthenticated, .. } = environment;
        let job = environment.job.clone();
        let secret = environment.secret.clone();
        let membership = Membership { job, secret, allow_unauthenticated };

        match &environment.hub {
            HubAddress::RankZero(address) if rank == Rank(0) => {
                let hub = bind_in_time(address, ranks, &membership.hub_options(), deadline)?;
                hub.set_run_by(rank);
                hub.check_address(address);

                // Rank 0 reaches its own hub even if `address` is not an address of this host.
                let address = hub.address_here().to_string();
                Self::connect(address, Some(hub), rank, ranks, membership, deadline)
            }
            HubAddress::RankZero(address) | HubAddress::External(address) => {
                Self::connect(address.clone(), None, rank, ranks, membership, deadline)
            }
        }
    }

    /// Joins a group as rank 0, with the open hub `hub`, and waits until every rank has joined.
    ///
    /// The hub can have a port that the system chose, and the launcher passes this port on to the
    /// other ranks.
    ///
    /// # Errors
    /// Those of [`join`](Self::join).
    pub fn join_with_hub(hub: Hub, deadline: Deadline) -> Result<Self, Error> {
        hub.set_run_by(Rank(0));

        let job = hub.job();
        let secret = hub.secret();
        let allow_unauthenticated = hub.allows_unauthenticated();
        let membership = Membership { job, secret, allow_unauthenticated };

        let address = hub.address_here().to_string();
        let ranks = hub.ranks();
        Self::connect(address, Some(hub), Rank(0), ranks, membership, deadline)
    }

    /// Joins a group through the hub at `address`, and waits until every rank has joined.
    ///
    /// `hub` is the hub if this process runs it.
    fn connect(
        address: String,
        hub: Option<Hub>,
        rank: Rank,
        ranks: usize,
        membership: Membership,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        check_ranks(ranks)?;

        let hello = membership.hello(rank, ranks, hub.is_some(), None);
        let hub = hub.map(Arc::new);
        let started = reach_hub(&address, hello, &membership, deadline)
            .and_then(|joined| Self::start(address, hub.clone(), joined, membership, deadline));
        started.map_err(|error| end_start(hub.as_ref(), rank, error, deadline))
    }

    /// Starts the threads of a connection that the hub has accepted, and waits until every rank has
    /// joined.
    fn start(
        address: String,
        hub: Option<Arc<Hub>>,
        joined: Joined,
        membership: Membership,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let Joined { stream, listener, group, rank, ranks, process } = joined;

        // The hub counts this rank as joined, so the rank tells it why a thread cannot start.
        let told = Arc::clone(&stream);
        let tell = |error: &SystemError| tell_failure(&told, rank, error);

        let listener = listener
            .map(|listener| RankListener::start(listener, ranks))
            .transpose()
            .inspect_err(tell)?
            .map(Arc::new);

        let hub_process = process.as_ref().and_then(ProcessId::find);
        let client = Arc::new(Client::of_hub(rank, ranks, process));
        let (clients, outbox) = open_connection(stream, hub_process, client, &address, tell)?;

        let bootstrap = Self {
            clients,
            host: host_id(),
            address,
            group,
            membership,
            generation: Generation::now(),
            held: Mutex::new(Some(Held { outbox, hub, listener })),
        };

        let hub_runs = || bootstrap.relay_process() == ProcessState::Running;
        let time_out = || bootstrap.start_timed_out(deadline);
        bootstrap.client().wait_started(deadline, time_out, hub_runs)?;
        Ok(bootstrap)
    }

    /// Joins the smaller group of a shrink through the hub of `candidate`, or returns `None` if
    /// that hub is gone.
    ///
    /// `hub` is the hub that this rank has opened, if it is the candidate itself.
    fn join_candidate(
        &self,
        (candidate, address): (Rank, SocketAddr),
        hub: Option<Hub>,
        deadline: Deadline,
    ) -> Result<Option<Self>, Error> {
        let rank = self.rank();
        let membership = &self.membership;
        let mut hello = membership.hello(rank, self.ranks(), hub.is_some(), Some(self.group));
        hello.nonce = random_bytes()?;

        let name = format!("{address} (rank {candidate})");
        let hub = hub.map(Arc::new);
        let reason = loop {
            match attempt(&name, &[address], &hello, membership, deadline) {
                Ok(joined) => {
                    // The hub now knows this rank by its number in the smaller group.
                    let new_rank = joined.rank;
                    let started =
                        Self::start(name, hub.clone(), joined, membership.clone(), deadline);
                    return started
                        .map(Some)
                        .map_err(|error| end_start(hub.as_ref(), new_rank, error, deadline));
                }
                Err(JoinError::Gone(_)) => return Ok(None),
                Err(JoinError::Fatal(error)) => {
                    return Err(end_start(hub.as_ref(), rank, error, deadline));
                }
                // The candidate closes connections that are too many or have waited too long. If
                // its process has ended, the next attempt is refused.
                Err(JoinError::Closed(_)) if !deadline.has_passed() => {
                    thread::sleep(PAUSE_MIN);
                    hello.nonce = random_bytes()?;
                }
                Err(JoinError::Closed(reason) | JoinError::Retry(reason)) => break reason,
            }
        };

        let reason = match reason.as_str() {
            // The listener of a rank accepts connections even while the rank does not shrink.
            SILENT => "its process runs, but has not called `shrink`",
            reason => reason,
        };

        let within = Seconds(deadline.timeout());
        let text = format!(
            "shrink: rank {candidate} at {address} did not answer within {within}: {reason}"
        );
        Err(Error::new(ErrorKind::Timeout, text).with_peer(candidate))
    }

    /// Tells the hub that the start has timed out, so that the hub ends the start on every rank.
    fn start_timed_out(&self, deadline: Deadline) {
        let timeout = deadline.timeout();
        match self.held().as_ref().and_then(|held| held.hub.as_ref()) {
            Some(hub) => hub.start_timed_out(timeout),
            None => self.send(Request::StartTimedOut { timeout }),
        }
    }

    /// Tells the hub that this rank leaves, and waits until the hub has closed the connection.
    ///
    /// The rank that runs the hub also waits until the other ranks have left.
    fn say_goodbye(&self, deadline: Deadline) -> Result<(), Error> {
        if self.client().begin_leave()? {
            self.send(Request::Leave);
        }

        // The hub closes the connection once it has handled the goodbye.
        if !self.client().wait_closed(deadline) {
            let within = Seconds(deadline.timeout());
            let text = format!("leave: the hub at {} did not answer within {within}", self.address);
            return Err(with_peer(Error::new(ErrorKind::Timeout, text), self.relay()));
        }

        let hub = self.held().as_ref().and_then(|held| held.hub.clone());
        hub.map_or(Ok(()), |hub| hub.wait_all_left(deadline))
    }

    /// Opens the hub of the smaller group of a shrink, at the address of this rank's `listener`.
    fn open_smaller_hub(
        &self,
        listener: &Arc<RankListener>,
        formation: Formation,
        deadline: Deadline,
    ) -> Result<Hub, Error> {
        // The second half of the time is left to start the group with the ranks that have arrived.
        let until = Deadline::after(deadline.remaining() / 2);
        let hub = self.membership.hub_options().form(listener, formation, until)?;
        hub.set_run_by(self.rank());
        Ok(hub)
    }

    fn held(&self) -> MutexGuard<'_, Option<Held>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, request: Request) {
        self.clients.send(None, request);
    }

    fn client(&self) -> &Client {
        self.clients.first()
    }
}

// SAFETY: every exchange has a sequence number, and its contributions are passed on unchanged. The
// client never changes the `rank` and `ranks` that the hub has assigned.
unsafe impl Bootstrap for TcpBootstrap {
    fn rank(&self) -> Rank {
        self.client().rank()
    }

    fn ranks(&self) -> usize {
        self.client().ranks()
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
        self.client().exchange(label, mine, deadline, |request| self.send(request))
    }

    fn missing(&self) -> Vec<Rank> {
        self.client().missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.client().check_send("broadcast", message)?;
        self.send(Request::Broadcast { message: Blob(message.to_vec()) });
        Ok(())
    }

    fn relay(&self) -> Option<Rank> {
        self.client().relay()
    }

    fn shares_process(&self) -> bool {
        self.client().shares_process()
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.client().check_send("abort", record)?;
        self.send(Request::Abort { record: Blob(record.to_vec()) });
        Ok(())
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.client().listen(listener);
    }

    /// Says goodbye to the other ranks and closes the connection to the hub.
    ///
    /// The rank that runs the hub leaves last, because the hub serves the other ranks. It waits
    /// until the others have left or are lost, because this process may end after its goodbye.
    fn leave(&self, deadline: Deadline) -> Result<(), Error> {
        let left = self.say_goodbye(deadline);
        self.disconnect();
        left
    }

    fn process(&self, rank: Rank) -> ProcessState {
        self.client().process(rank)
    }

    fn relay_process(&self) -> ProcessState {
        self.client().relay_process()
    }

    fn disconnect(&self) {
        // The lock may be held for ever in a forked child, and nothing in `held` is the child's.
        if self.generation.is_past() {
            return;
        }

        // The end of the connection is intended here, so the listener is not told of it.
        self.client().stop_notifications();

        let Some(Held { outbox, hub, listener }) = self.held().take() else { return };
        // Dropping the outbox writes what is queued, for example an abort, and closes the
        // connection.
        drop((outbox, listener));

        // The hub closes when it is dropped. It must first read what this rank has sent, so that
        // the other ranks receive it.
        if let Some(hub) = hub {
            hub.wait_disconnected(Deadline::after(ACKNOWLEDGE_TIMEOUT));
        }
    }

    /// Connects the remaining ranks through a new hub, which the lowest remaining rank whose
    /// process runs opens.
    ///
    /// It opens the hub at the address that it gave when it joined. A host that does not answer for
    /// an eighth of the remaining time counts as down.
    fn shrink(&self, excluded: &[Rank], deadline: Deadline) -> Result<Box<dyn Bootstrap>, Error> {
        let listener = self.held().as_ref().and_then(|held| held.listener.clone());
        let Some(listener) = listener else {
            let text = format!(
                "shrink: rank {} has no address at which the other ranks can reach it; {NO_SECRET_HELP}",
                self.rank()
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        };

        let mut remaining = self.client().remaining();
        remaining.retain(|(rank, _)| !excluded.contains(rank));

        // Every rank tries the candidates in the same order, so that all meet at the same hub.
        let mut probes = Probes::default();
        for &(candidate, address) in &remaining {
            let is_own = candidate == self.rank();
            if !is_own && probes.is_gone((candidate, address), deadline) {
                continue;
            }

            let hub = if is_own {
                let formation = Formation::new(self.group, self.ranks(), remaining.clone());
                Some(self.open_smaller_hub(&listener, formation, deadline)?)
            } else {
                None
            };

            if let Some(joined) = self.join_candidate((candidate, address), hub, deadline)? {
                return Ok(Box::new(joined));
            }
        }

        let text = format!("shrink: rank {} is excluded or has left the group", self.rank());
        Err(Error::new(ErrorKind::InvalidArgument, text))
    }

    fn subgroup(&self, number: u32, members: &[Rank]) -> Result<Box<dyn Bootstrap>, Error> {
        let opened = self.clients.open(number, members.to_vec(), &self.host, self.relay())?;
        Ok(Box::new(opened))
    }
}

impl Membership {
    /// Creates the hello, the message in which a rank asks the hub to join.
    ///
    /// `shrinks` is the earlier group if the rank joins the smaller group of a shrink. The caller
    /// sets a new nonce for each connection, and `attempt` sets the address.
    fn hello(&self, rank: Rank, ranks: usize, runs_hub: bool, shrinks: Option<GroupId>) -> Hello {
        Hello {
            nonce: Nonce::default(),
            rank: rank.0,
            ranks: u32::try_from(ranks).expect("the number of ranks is limited"),
            host: host_id(),
            job: self.job.clone(),
            runs_hub,
            address: None,
            process: ProcessId::own(),
            shrinks,
        }
    }

    fn hub_options(&self) -> HubOptions {
        let Self { job, secret, allow_unauthenticated } = self.clone();
        HubOptions { job, secret, allow_unauthenticated }
    }

    /// Binds the socket of the [`RankListener`], or returns `None` if that is not permitted or not
    /// possible.
    ///
    /// It is not permitted if other hosts could reach the socket without a secret. A rank without
    /// the socket can take part in its group, but not shrink it.
    fn listen(&self, ip: IpAddr) -> Result<Option<Uninherited<TcpListener>>, SystemError> {
        let is_permitted = self.secret.is_some() || self.allow_unauthenticated || ip.is_loopback();
        if !is_permitted {
            return Ok(None);
        }

        listener::bind(ip).map(Some).or_else(|error| {
            let error = SystemError::of_io(format!("cannot listen at {ip}"), &error);
            if error.is_exhausted() { Err(error) } else { Ok(None) }
        })
    }
}

impl Drop for TcpBootstrap {
    fn drop(&mut self) {
        self.disconnect();
    }
}

impl fmt::Debug for TcpBootstrap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TcpBootstrap")
            .field("rank", &self.client().rank())
            .field("ranks", &self.client().ranks())
            .field("address", &self.address)
            .finish_non_exhaustive()
    }
}

/// Tells the other ranks why the start failed if this process runs `hub`, and returns the error for
/// the caller.
fn end_start(hub: Option<&Arc<Hub>>, rank: Rank, error: Error, deadline: Deadline) -> Error {
    match hub {
        Some(hub) => hub.end_start(rank, error, deadline),
        None => error,
    }
}

/// Starts the threads that write to and read from the hub, and returns the clients and the write
/// queue.
///
/// `tell` reports to the hub that a thread could not be started.
fn open_connection(
    stream: Stream,
    hub_process: Option<Process>,
    client: Arc<Client>,
    address: &str,
    tell: impl Fn(&SystemError) + Copy,
) -> Result<(Arc<Clients>, Option<Outbox>), SystemError> {
    let outbox = Outbox::open(&stream).inspect_err(tell)?;
    let full = Arc::new(OnceLock::new());
    let requests = Requests {
        sender: outbox.sender().clone(),
        stream: Arc::clone(&stream),
        hub: format!("the hub at {address}"),
        full: Arc::clone(&full),
    };
    let send = move |request: Addressed<Request>| {
        requests.send(&request);
        Ok(())
    };
    let clients = Arc::new(Clients::new(client, send));

    let reader = Arc::clone(&clients);
    let address = address.to_owned();
    limits::spawn("peerlane-tcp-read", move || {
        read_replies(PeerReader { stream, process: hub_process }, &reader, &address, &full)
    })
    .inspect_err(tell)?;

    Ok((clients, Some(outbox)))
}

/// Queues the requests of a rank, and closes the connection if the hub does not read them.
struct Requests {
    sender: FrameSender,
    stream: Stream,
    /// The name of the hub in errors.
    hub: String,
    /// The reason why this rank has closed the connection, which the thread that reads reports.
    full: Arc<OnceLock<String>>,
}

impl Requests {
    fn send(&self, request: &Addressed<Request>) {
        if !self.sender.is_full() {
            self.sender.send(encode_frame(request));
            return;
        }

        // The caller may be the thread that reads, and hold locks. So the group is not ended here,
        // but when that thread reads next and finds the connection closed. Only the first reason
        // counts.
        let _ = self.full.set(format!("{}: {}", self.hub, self.sender.full_text()));
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Sends the hub an abort because of `error`, so that all ranks learn why `rank` cannot take part.
fn tell_failure(mut stream: &TcpStream, rank: Rank, error: &SystemError) {
    let record = Blob(AbortRecord::failed(rank, error.kind(), error).encode());
    let request = Addressed::to_all(Request::Abort { record });

    // If it fails, the other ranks learn that the connection has closed.
    let _ = stream.write_all(encode_frame(&request).bytes());
}

/// Reads and handles the replies of the hub until the connection ends.
///
/// `full` contains the reason if this rank has ended the connection.
fn read_replies(stream: PeerReader, clients: &Clients, address: &str, full: &OnceLock<String>) {
    let mut reader = BufReader::new(stream);
    let closed = || format!("the hub at {address} closed its connection");
    let how = loop {
        match read_frame::<Addressed<Reply>>(&mut reader, REPLY_BYTES_MAX) {
            Ok(Some(reply)) => {
                if let Some(Addressed { subgroup, message }) = clients.receive(reply) {
                    clients.send(subgroup, message);
                }
            }
            Ok(None) => break closed(),
            // All ranks must say the same of a hub that is killed, whatever each of them was
            // reading.
            Err(error) if error.is_closed() => break closed(),
            Err(error) => break format!("the connection to the hub at {address} failed: {error}"),
        }
    };

    clients.close(full.get().unwrap_or(&how));
    let _ = reader.into_inner().stream.shutdown(Shutdown::Both);
}

/// Opens a hub at all addresses of this host, or only at `address` if that is a loopback address.
///
/// Other hosts may know this host by another address than it does itself.
fn bind(address: &str, ranks: usize, options: &HubOptions) -> Result<Hub, Error> {
    let parsed = Address::parse(HUB_ADDRESS, address)?;
    if parsed.is_loopback() {
        return options.clone().bind_once(address, ranks);
    }

    // By default, a socket at `[::]` accepts connections of both IP versions.
    let port = parsed.port();
    let both = options.clone().bind_once(&format!("[::]:{port}"), ranks);
    match both {
        // `[::]` does not exist on a host without IPv6.
        Err(error) if !is_in_use(&error) => {
            options.clone().bind_once(&format!("0.0.0.0:{port}"), ranks)
        }
        both => both,
    }
}

/// Opens a hub like [`bind`], but tries again for a while if the port is in use.
///
/// The process of an earlier group may just be ending.
fn bind_in_time(
    address: &str,
    ranks: usize,
    options: &HubOptions,
    deadline: Deadline,
) -> Result<Hub, Error> {
    let wait = Deadline::after(deadline.remaining().min(PORT_TIMEOUT));
    loop {
        match bind(address, ranks, options) {
            Err(error) if is_in_use(&error) && !wait.has_passed() => thread::sleep(PAUSE_MIN),
            // The search for the holders reads all of `/proc`, so only the last error gets it.
            bound => return bound.map_err(|error| name_holders(address, error)),
        }
    }
}

/// Stores the connection to a hub that has accepted this rank, and the rank's number in the group.
struct Joined {
    stream: Stream,
    listener: Option<Uninherited<TcpListener>>,
    /// The id of the process that runs the hub, if the hub knows it.
    process: Option<ProcessId>,
    group: GroupId,
    /// The number of this rank in the group, which is a new number if the group has shrunk.
    rank: Rank,
    ranks: usize,
}

/// Tells why an attempt to join failed, and whether another attempt can succeed.
enum JoinError {
    /// The attempt to reach the hub failed, but the hub may start later or come back.
    Retry(String),
    /// No hub of this group listens at the address now, but a hub may start there later.
    Gone(String),
    /// The other side closed the connection without an answer.
    Closed(String),
    /// The attempt to reach the hub failed, and another attempt would fail too.
    Fatal(Error),
}

/// Connects to the hub at `address`, and repeats failed attempts until the hub accepts this rank or
/// the deadline passes.
fn reach_hub(
    address: &str,
    mut hello: Hello,
    membership: &Membership,
    deadline: Deadline,
) -> Result<Joined, Error> {
    let mut pause = PAUSE_MIN;
    let mut earlier = None;
    loop {
        // The answer to an earlier attempt proves nothing for this one.
        hello.nonce = random_bytes()?;

        // The name is resolved for each attempt, because a name service may learn it later.
        let joined = resolve(address, deadline)
            .and_then(|resolved| attempt(address, &resolved, &hello, membership, deadline));
        let reason = match joined {
            Ok(joined) => return Ok(joined),
            Err(JoinError::Fatal(error)) => return Err(error),
            Err(JoinError::Retry(reason) | JoinError::Gone(reason) | JoinError::Closed(reason)) => {
                reason
            }
        };

        let remaining = deadline.remaining();
        if remaining.is_zero() {
            // The deadline may have ended the last attempt before it failed for the real reason.
            let reason = match earlier {
                Some(earlier) if earlier != reason => {
                    format!("{earlier}, and at the end: {reason}")
                }
                _ => reason,
            };
            return Err(not_reached(address, &hello, deadline, &reason));
        }

        earlier = Some(reason);
        thread::sleep(pause.min(remaining));
        pause = (pause * 2).min(PAUSE_MAX);
    }
}

/// Connects to the hub once, and performs the rank's side of the handshake.
fn attempt(
    address: &str,
    resolved: &[SocketAddr],
    hello: &Hello,
    membership: &Membership,
    deadline: Deadline,
) -> Result<Joined, JoinError> {
    let stream = connect(resolved, deadline).map_err(retry)?;
    keep_alive(&stream, stream.peer_addr().map_err(retry)?.ip());

    // The other ranks can reach this host at the address from which it reaches the hub.
    let listener = membership.listen(stream.local_addr().map_err(retry)?.ip());
    let listener = listener.map_err(|error| JoinError::Fatal(error.into()))?;
    let own_address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
    let hello = &Hello { address: own_address, ..hello.clone() };

    stream.set_nodelay(true).map_err(retry)?;
    (&mut &**stream).write_all(&preamble()).map_err(retry)?;
    let mut reader = DeadlineReader { stream: &stream, deadline };
    read_preamble(&mut reader).map_err(|error| no_hub(address, error))?;
    let nonce: Nonce = read_answer(&mut reader)?;

    let secret = membership.secret.as_ref();
    let request = Sealed::new(secret, Side::Rank, &[&nonce], hello);
    (&mut &**stream).write_all(encode_frame(&request).bytes()).map_err(retry)?;
    let reply: Sealed = read_answer(&mut reader)?;

    let opened = reply.open::<HelloReply>(secret, Side::Hub, &[&nonce, &request.message.0]);
    let (group, rank, ranks, process) = match opened {
        Ok(HelloReply::Welcome { group, rank, ranks, process }) if rank < ranks => {
            (group, Rank(rank), ranks as usize, process)
        }
        Ok(HelloReply::Refused(refusal)) => return Err(refused(address, hello, &refusal)),
        Ok(HelloReply::Welcome { .. }) | Err(OpenError::Malformed) => {
            return Err(JoinError::Retry(FrameError::Malformed.to_string()));
        }
        Err(error) => return Err(unproven(address, hello.rank, error)),
    };

    // `DeadlineReader` has limited each read. The thread that reads from now on waits for ever.
    stream.set_read_timeout(None).map_err(retry)?;

    Ok(Joined { stream, listener, group, rank, ranks, process })
}

/// Converts an I/O error into a [`JoinError`], which tells whether another attempt to join can
/// succeed.
fn retry(error: io::Error) -> JoinError {
    let system = SystemError::of_io("cannot connect to the hub", &error);
    if system.is_exhausted() {
        return JoinError::Fatal(system.into());
    }

    let reason = error.to_string();
    match error.kind() {
        io::ErrorKind::ConnectionRefused => JoinError::Gone(reason),
        _ if has_closed(&error) => JoinError::Closed(reason),
        _ => JoinError::Retry(reason),
    }
}

/// Reads and decodes one message of the hub in the handshake.
fn read_answer<T: DeserializeOwned>(reader: &mut DeadlineReader<'_>) -> Result<T, JoinError> {
    let reason = match read_frame(reader, HANDSHAKE_BYTES_MAX) {
        Ok(Some(answer)) => return Ok(answer),
        Ok(None) | Err(FrameError::Truncated { .. }) => {
            return Err(JoinError::Closed(CLOSED.into()));
        }
        Err(FrameError::Io(error)) if is_timeout(&error) => SILENT.into(),
        Err(FrameError::Io(error)) => return Err(retry(error)),
        Err(error) => error.to_string(),
    };

    Err(JoinError::Retry(reason))
}

/// Resolves the address of the hub into socket addresses before the deadline.
///
/// A host name is resolved on another thread, because the system's resolver has no deadline.
fn resolve(address: &str, deadline: Deadline) -> Result<Vec<SocketAddr>, JoinError> {
    let parsed = Address::parse(HUB_ADDRESS, address).map_err(JoinError::Fatal)?;
    if let Some(literal) = parsed.literal() {
        return Ok(vec![literal]);
    }

    let (answer, answered) = channel();
    let resolver = limits::spawn("peerlane-resolve", move || {
        // After the deadline, no thread waits for the answer any more.
        let _ = answer.send(parsed.resolve());
    });
    resolver.map_err(|error| JoinError::Fatal(error.into()))?;

    match answered.recv_timeout(deadline.remaining()) {
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(JoinError::Retry(error.to_string())),
        Err(_) => Err(JoinError::Retry("the name of the host was not resolved in time".into())),
    }
}

/// Converts an error in reading the hub's preamble into a [`JoinError`].
fn no_hub(address: &str, error: PreambleError) -> JoinError {
    let text = match error {
        // A process that is silent or closes the connection may be starting or ending, so another
        // attempt can succeed. Bytes of another protocol or version are final.
        PreambleError::Io(error) if is_timeout(&error) => return JoinError::Retry(SILENT.into()),
        PreambleError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
            return JoinError::Closed("a process accepted the connection and closed it".into());
        }
        PreambleError::Io(error) => return retry(error),
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

/// Converts a refusal of the hub into a [`JoinError`], which tells whether another attempt can
/// succeed.
fn refused(address: &str, hello: &Hello, refusal: &Refusal) -> JoinError {
    match refusal {
        Refusal::Closing => return JoinError::Gone(CLOSED.into()),
        // An earlier group is ending, so the hub of the next one opens soon.
        Refusal::Earlier { .. } => return JoinError::Gone(refusal.to_string()),
        // The hub that this rank looks for is gone, and its port has a new user.
        Refusal::OtherGroup if hello.shrinks.is_some() => {
            return JoinError::Gone(refusal.to_string());
        }
        _ => {}
    }

    let kind = match refusal {
        Refusal::Ended { .. } | Refusal::ShrunkWithout { .. } | Refusal::Exhausted { .. } => {
            ErrorKind::Aborted
        }
        _ => ErrorKind::Mismatch,
    };
    let peer = match refusal {
        Refusal::Taken { rank, .. } => Some(*rank),
        Refusal::Ended { peer, .. } | Refusal::Exhausted { runs_hub: peer, .. } => *peer,
        _ => None,
    };

    let error = Error::new(kind, format!("the hub at {address} rejected this rank: {refusal}"));
    JoinError::Fatal(with_peer(error, peer.map(Rank)))
}

/// Returns the error for a hub that has not proved that it knows the secret of this rank.
fn unproven(address: &str, rank: u32, error: OpenError) -> JoinError {
    let difference = match error {
        OpenError::NoProof => {
            format!("rank {rank} has a secret, but the hub at {address} has none")
        }
        OpenError::NoSecret => {
            format!("the hub at {address} has a secret, but rank {rank} has none")
        }
        _ => format!("rank {rank} and the hub at {address} have different secrets"),
    };

    let text = format!(
        "{difference}; set PEERLANE_SECRET or PEERLANE_SECRET_FILE to the same secret on all ranks and for the hub, and \
         MASTER_PORT or PEERLANE_PORT to a different port for every job"
    );
    JoinError::Fatal(Error::new(ErrorKind::Mismatch, text))
}

/// Returns the error for a hub that this rank did not reach before the deadline.
fn not_reached(address: &str, hello: &Hello, deadline: Deadline, reason: &str) -> Error {
    let is_unspecified =
        Address::parse(HUB_ADDRESS, address).is_ok_and(|parsed| parsed.is_unspecified());
    let host = if is_unspecified { " (which means the own host on every rank)" } else { "" };

    let text = format!(
        "rank {} did not reach the hub at {address}{host} within {}: {reason}; check that rank 0 runs, \
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
            let options = HubOptions::default().allow_unauthenticated(true);
            let bound = bind(address, 1, &options).unwrap().address().ip();
            assert_eq!(
                (bound.is_loopback(), bound.is_unspecified()),
                (is_local, !is_local),
                "{address}"
            );
        }
    }
}
