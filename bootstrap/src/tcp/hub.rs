//! Implements the TCP hub, the server to which every rank of a group is connected.
//!
//! One thread accepts connections. Each connection has a thread that reads and one that writes; all
//! sleep in the kernel while there is nothing to send. A connection that fails the handshake has no
//! effect on the group: it is counted, and closed after a while. The number of connections in the
//! handshake is limited.
//!
//! All threads share the states of [`HubGroups`] under a lock, and the order of changes under the
//! lock is the order in which every rank receives replies.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::io;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_toolkit::limits::{self, SpareDescriptor, SystemError};

use super::super::address::Address;
use super::super::environment::{HUB_ADDRESS, NO_SECRET_HELP};
use super::super::forks::{Generation, Uninherited};
use super::super::hub::{Event, Joining, check_ranks};
use super::super::message::{RankList, Reply, Request, Seconds};
use super::super::monitor::Monitor;
use super::super::process::ProcessId;
use super::super::secret::{Secret, random_bytes};
use super::super::subgroups::{Addressed, HubGroups, Outgoing, SubgroupId};
use super::accept::accept;
use super::formation::{self, Formation, Probes};
use super::handshake::{GroupId, Hello, HelloReply, Refusal, Sealed};
use super::listener::RankListener;
use super::port::holders;
use super::wire::{Outbox, Stream, encode_frame};
use crate::error::Error;

/// How long the hub waits for the ranks to acknowledge the end of a group.
pub(super) const ACKNOWLEDGE_TIMEOUT: Duration = Duration::from_secs(2);

/// The maximum number of connections that have not joined, in addition to one for each rank.
pub(super) const STRANGERS_MAX: usize = 64;

/// The maximum number of ranks that the text of a refusal lists.
const NAMED_RANKS_MAX: usize = 16;

/// How long a process that asks for a rank number in use waits for that rank to leave.
const SEAT_TIMEOUT: Duration = Duration::from_secs(1);

/// The pause between two checks whether the processes of ranks are stopped.
const STOPPED_PAUSE: Duration = Duration::from_millis(50);

/// The pause between two checks whether the ranks that have not arrived for a shrink are gone.
const FORM_PAUSE: Duration = Duration::from_millis(10);

/// The pause after a connection could not be accepted, for example because descriptors ran out.
pub(super) const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Serves a group of processes, each of which holds a TCP connection to the hub.
///
/// The hub runs in rank 0, or in the process that starts the ranks. Dropping it closes the server.
/// Once it is closed, ranks that have not left count rank 0 as lost.
pub struct Hub {
    pub(super) shared: Arc<Shared>,
    source: Source,
}

/// Owns or shares the listening socket that accepts the connections to a hub.
enum Source {
    Own {
        listener: Arc<Uninherited<TcpListener>>,
        acceptor: Option<JoinHandle<()>>,
    },
    /// The listener of the rank that runs the hub, which accepts the connections of a shrink.
    Rank(Arc<RankListener>),
}

/// Stores the settings and the state that all threads of a hub share.
pub(super) struct Shared {
    address: SocketAddr,
    pub(super) ranks: usize,
    pub(super) secret: Option<Secret>,
    allow_unauthenticated: bool,
    /// The id of the job from [`HubOptions`], if it is set.
    job: Option<String>,
    process: Option<ProcessId>,
    generation: Generation,
    pub(super) state: Monitor<State>,
}

/// Tracks the groups of a hub and the connections of their ranks.
pub(super) struct State {
    group: GroupId,
    pub(super) hub: HubGroups,
    /// The groups that the current change of the state has ended; `None` is the first group.
    ended: Vec<Option<SubgroupId>>,
    formation: Option<Formation>,
    /// The job of the ranks, once the options or the first rank have determined it.
    ///
    /// The inner `None` means that the ranks have no job.
    job: Option<Option<String>>,
    connections: Vec<Option<Connection>>,
    pub(super) pending: BTreeMap<u64, Stream>,
    /// The connections that were closed in the handshake, but whose descriptors are still open.
    pub(super) shed: BTreeMap<u64, Stream>,
    /// The number of the connection that was the oldest in the handshake when resources for a new
    /// connection last ran out.
    ///
    /// It is closed if it is still the oldest when they run out the next time.
    pub(super) oldest: Option<u64>,
    accepted: u64,
    pub(super) closing: bool,
    /// The rank that runs the hub, known before that rank has joined.
    pub(super) run_by: Option<Rank>,
    /// The error because of which the hub could not accept or serve the connection of a rank.
    pub(super) failure: Option<SystemError>,
    /// The ranks that were told why they cannot join.
    pub(super) told: BTreeSet<Rank>,
}

/// Describes the connection of a rank that has joined.
///
/// It is kept after the rank has left, because the number of the rank stays taken.
struct Connection {
    number: u64,
    origin: SocketAddr,
    host: String,
    outbox: Option<Outbox>,
}

/// Configures a [`Hub`] before it is opened.
#[derive(Clone, Debug, Default)]
pub struct HubOptions {
    pub(super) job: Option<String>,
    pub(super) secret: Option<Secret>,
    pub(super) allow_unauthenticated: bool,
}

impl HubOptions {
    /// Sets the id of the job, so that processes of another job, or without a job, cannot join.
    ///
    /// Without it, the first rank that joins determines the job.
    #[must_use]
    pub fn job(mut self, job: impl Into<String>) -> Self {
        self.job = Some(job.into());
        self
    }

    /// Sets the secret of the job, so that only processes that know it can join.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Sets whether a hub without a secret may listen at an address that other hosts can reach.
    ///
    /// Any process that reaches the address can then join.
    #[must_use]
    pub fn allow_unauthenticated(mut self, allow: bool) -> Self {
        self.allow_unauthenticated = allow;
        self
    }

    /// Opens the hub of a group of `ranks` ranks at a TCP address, such as `10.0.0.1:29501`.
    ///
    /// Port 0 selects any free port.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a group of 0 ranks, for a malformed
    /// address, and for an address that other hosts can reach if there is no secret;
    /// [`Unavailable`](ErrorKind::Unavailable) if the port is in use or the address is not one of
    /// this host.
    pub fn bind(self, address: &str, ranks: usize) -> Result<Hub, Error> {
        self.bind_once(address, ranks).map_err(|error| name_holders(address, error))
    }

    /// Opens the hub like [`bind`](Self::bind), but with an error that does not tell which process
    /// holds the port.
    pub(super) fn bind_once(self, address: &str, ranks: usize) -> Result<Hub, Error> {
        check_ranks(ranks)?;

        let parsed = Address::parse(HUB_ADDRESS, address)?;
        let is_open = self.secret.is_some() || self.allow_unauthenticated;
        if !is_open && !parsed.is_loopback() {
            return Err(no_secret(address));
        }

        let listener = parsed.listen().map_err(|error| cannot_listen(address, error))?;
        listener.set_nonblocking(true).map_err(|error| cannot_listen(address, error))?;
        let bound = listener.local_addr().map_err(|error| cannot_listen(address, error))?;

        // The name service can give `localhost` any address.
        if !is_open && !bound.ip().is_loopback() {
            return Err(no_secret(address));
        }

        let shared = self.share(bound, random_bytes()?, ranks, None);
        let server = Arc::clone(&shared);

        let listener = Arc::new(Uninherited::new(listener));
        let accepting = Arc::clone(&listener);
        let spare = SpareDescriptor::reserve()?;
        let acceptor = limits::spawn("peerlane-hub", move || accept(&accepting, spare, &server))?;
        Ok(Hub { shared, source: Source::Own { listener, acceptor: Some(acceptor) } })
    }

    /// Opens the hub of the smaller group of a shrink, whose connections `listener` accepts.
    ///
    /// The hub answers the ranks at `until` at the latest.
    pub(super) fn form(
        self,
        listener: &Arc<RankListener>,
        formation: Formation,
        until: Deadline,
    ) -> Result<Hub, Error> {
        let group = random_bytes()?;
        let address = listener.address().map_err(|error| {
            SystemError::of_io("shrink: cannot start the hub of the new group", &error)
        })?;
        let ranks = formation.ranks();
        let shared = self.share(address, group, ranks, Some(formation));

        let forming = Arc::clone(&shared);
        limits::spawn("peerlane-hub-form", move || forming.form_group(until))?;

        // Connections may come at once, so this is the last step, after which nothing can fail.
        listener.open_hub(&shared);
        Ok(Hub { shared, source: Source::Rank(Arc::clone(listener)) })
    }

    /// Creates the state that the threads of a hub share, before any rank has joined.
    fn share(
        self,
        address: SocketAddr,
        group: GroupId,
        ranks: usize,
        formation: Option<Formation>,
    ) -> Arc<Shared> {
        let state = State {
            group,
            hub: HubGroups::new(ranks),
            ended: Vec::new(),
            formation,
            job: self.job.clone().map(Some),
            connections: (0..ranks).map(|_| None).collect(),
            pending: BTreeMap::new(),
            shed: BTreeMap::new(),
            oldest: None,
            accepted: 0,
            closing: false,
            run_by: None,
            failure: None,
            told: BTreeSet::new(),
        };

        Arc::new(Shared {
            address,
            ranks,
            secret: self.secret,
            allow_unauthenticated: self.allow_unauthenticated,
            job: self.job,
            process: ProcessId::own(),
            generation: Generation::now(),
            state: Monitor::new(state),
        })
    }
}

impl Hub {
    /// Opens the hub of a group of `ranks` ranks at a loopback address, such as `127.0.0.1:29501`.
    ///
    /// Port 0 selects any free port. The hub has no secret, so every process of this host can join;
    /// [`HubOptions`] sets a secret.
    ///
    /// # Errors
    /// Those of [`HubOptions::bind`].
    pub fn bind(address: &str, ranks: usize) -> Result<Self, Error> {
        HubOptions::default().bind(address, ranks)
    }

    /// Returns the address at which the hub listens, with the port that the system chose for
    /// port 0.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Returns the number of ranks of the group.
    pub fn ranks(&self) -> usize {
        self.shared.ranks
    }

    /// Returns the ranks that have not joined the group yet.
    pub fn missing(&self) -> Vec<Rank> {
        self.shared.state.lock().hub.first().missing().collect()
    }

    pub(super) fn secret(&self) -> Option<Secret> {
        self.shared.secret.clone()
    }

    pub(super) fn allows_unauthenticated(&self) -> bool {
        self.shared.allow_unauthenticated
    }

    pub(super) fn job(&self) -> Option<String> {
        self.shared.state.lock().job.clone().flatten()
    }

    /// Returns the address at which a process of this host reaches the hub.
    pub(super) fn address_here(&self) -> SocketAddr {
        let mut address = self.shared.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }

        address
    }

    /// Checks, on another thread, whether `address`, at which ranks look for the hub, belongs to
    /// this host.
    pub(super) fn check_address(&self, address: &str) {
        let Ok(parsed) = Address::parse(HUB_ADDRESS, address) else { return };

        let address = address.to_owned();
        let shared = Arc::clone(&self.shared);
        // Without the thread, an error only lacks a hint.
        let _ = limits::spawn("peerlane-resolve", move || {
            if let Some(doubt) = doubt_own(&parsed) {
                let how = format!("the address of rank 0 is {address} (MASTER_ADDR), but {doubt}");
                shared.state.lock().hub.doubt_address(how);
            }
        });
    }

    /// Ends a start that has timed out after `timeout`, on behalf of the rank that runs this hub.
    pub(super) fn start_timed_out(&self, timeout: Duration) {
        let event = Event::Request(Request::StartTimedOut { timeout });
        let outboxes = self.shared.change(|state| state.apply(Rank(0), Addressed::to_all(event)));
        drop(outboxes);
    }

    /// Waits until the hub has noticed that rank 0, which runs the hub, has disconnected.
    pub(super) fn wait_disconnected(&self, deadline: Deadline) {
        let gone = |state: &mut State| (!state.hub.first().is_live(Rank(0))).then_some(());
        self.shared.state.wait(deadline, gone);
    }

    /// Waits until every rank has left the group or is lost.
    pub(super) fn wait_all_left(&self, deadline: Deadline) -> Result<(), Error> {
        let empty = |state: &mut State| state.hub.first().live().next().is_none().then_some(());
        if self.shared.state.wait(deadline, empty).is_some() {
            return Ok(());
        }

        // The last rank may have left since the wait ended.
        let live: Vec<_> = self.shared.state.lock().hub.first().live().collect();
        let Some(first) = live.first() else { return Ok(()) };

        let text = format!(
            "leave: {} did not leave the group within {}; the rank that runs the hub must leave last",
            RankList(&live),
            Seconds(deadline.timeout())
        );
        Err(Error::new(ErrorKind::Timeout, text).with_peer(*first))
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        // The threads of the hub do not exist in a forked child, and any of them may have held the
        // lock.
        if self.shared.generation.is_past() {
            return;
        }

        // A connection that comes now is for the next hub of this rank.
        if let Source::Rank(listener) = &self.source {
            listener.close_hub(&self.shared);
        }

        // The connections close once the ranks have received a pending end of the group, or after
        // a timeout. A rank that is stopped causes no event, so the loop looks again after each
        // pause.
        let state = &self.shared.state;
        let latest = Deadline::after(ACKNOWLEDGE_TIMEOUT);
        let is_told = |state: &mut State| (!state.hub.awaits_any_acknowledgement()).then_some(());
        while !latest.has_passed() && state.wait(Deadline::after(STOPPED_PAUSE), is_told).is_none()
        {
        }

        let outboxes: Vec<_> = state.change(|state| {
            state.closing = true;
            for stream in mem::take(&mut state.pending).values() {
                let _ = stream.shutdown(Shutdown::Both);
            }

            state
                .connections
                .iter_mut()
                .flatten()
                .filter_map(|connection| connection.outbox.take())
                .collect()
        });

        // All begin to close before the first drop waits, so that the waits run at the same time.
        outboxes.iter().for_each(Outbox::close);
        drop(outboxes);

        let Source::Own { listener, acceptor } = &mut self.source else { return };
        // This ends the wait for connections even if a forked child has a copy of the socket.
        let is_woken = rustix::net::shutdown(&***listener, rustix::net::Shutdown::Both).is_ok();
        // The join would wait for ever for a thread that was not woken.
        if let (true, Some(acceptor)) = (is_woken, acceptor.take()) {
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

impl Shared {
    /// Registers a connection that begins its handshake, and returns the number that identifies the
    /// connection.
    ///
    /// If there are too many connections in the handshake, the oldest is closed. A rank needs
    /// little time for its handshake, and tries again if it was closed.
    pub(super) fn begin(&self, stream: &Stream) -> u64 {
        let mut state = self.state.lock();
        if state.pending.len() >= self.ranks + STRANGERS_MAX {
            state.shed_oldest();
        }

        state.accepted += 1;
        let number = state.accepted;
        state.pending.insert(number, Arc::clone(stream));
        number
    }

    /// Waits until every rank has arrived or is gone, or until `until`, and then forms the smaller
    /// group.
    fn form_group(&self, until: Deadline) {
        let mut probes = Probes::default();
        loop {
            let absent = {
                let state = self.state.lock();
                if state.closing {
                    return;
                }
                formation::absent(state.formation.as_ref())
            };
            let Some(absent) = absent else { return };

            // A probe can take long, so it is made without the lock.
            if until.has_passed() || probes.are_gone(&absent, until) {
                return self.state.change(State::form);
            }

            thread::sleep(FORM_PAUSE);
        }
    }

    /// Counts the rank of `hello` as arrived for a shrink, and waits until the smaller group is
    /// formed.
    ///
    /// It returns at once if this hub is not that of a smaller group.
    fn await_formation(&self, hello: &Hello, number: u64) -> Result<(), Refusal> {
        self.state.change(|state| {
            let Some(formation) = &mut state.formation else {
                return if hello.shrinks.is_some() { Err(Refusal::OtherGroup) } else { Ok(()) };
            };

            // From now on, the connection is not closed if there are too many. A rank whose
            // connection was closed before connects again.
            state.pending.remove(&number).ok_or(Refusal::Closing)?;
            formation.arrive(hello, number)
        })?;

        let formed = |state: &mut State| {
            let is_formed = formation::absent(state.formation.as_ref()).is_none();
            let has_ended = state.hub.first().end_cause().is_some();
            (state.closing || is_formed || has_ended).then_some(())
        };
        // The group is formed at the latest when the deadline of its hub passes. `State::seat` then
        // decides, whatever has ended the wait.
        let _ = self.state.wait(Deadline::after(Deadline::TIMEOUT_MAX), formed);

        Ok(())
    }

    /// Waits for a short time until the rank number in `hello` is free, and begins the next group
    /// if the current one is over.
    ///
    /// A rank that opens its next group can be here before the end of its last connection. Only a
    /// hub in a process outside of the group has a next group.
    fn await_seat(&self, hello: &Hello) -> Result<(), Refusal> {
        if hello.shrinks.is_some() {
            return Ok(());
        }

        let settled = |state: &mut State| {
            let is_taken = state.connection(hello.rank).is_some() && !state.has_left(hello.rank);
            let first = state.hub.first();
            let is_over = first.is_formed() && first.end_cause().is_some();
            (!is_taken || is_over || state.closing).then_some(())
        };
        // A seat that is still taken then is refused by `State::seat`.
        let _ = self.state.wait(Deadline::after(SEAT_TIMEOUT), settled);

        // The system can block soon after the boot, so the lock is not held meanwhile.
        let group = random_bytes().map_err(|_| Refusal::Closing)?;
        self.state.change(|state| {
            if state.is_empty(hello.rank) {
                state.group = group;
                state.hub = HubGroups::new(self.ranks);
                state.job = self.job.clone().map(Some);
                state.connections.fill_with(|| None);
            }
        });
        Ok(())
    }

    /// Lets the rank of `hello` join or refuses it, sends the answer, and returns the rank's number
    /// in the group.
    ///
    /// The rank has proved that it belongs to the job.
    pub(super) fn admit(
        self: &Arc<Self>,
        hello: Hello,
        (origin, number): (SocketAddr, u64),
        outbox: Outbox,
        seal: impl Fn(&HelloReply) -> Sealed,
    ) -> Result<Rank, Refusal> {
        let awaited = self.await_formation(&hello, number).and_then(|()| self.await_seat(&hello));

        let admitted = self.change(|state| {
            // A connection that was closed as the oldest must not join.
            let is_open = state.formation.is_some() || state.pending.contains_key(&number);
            let seat = awaited.and_then(|()| match is_open {
                true => state.seat(&hello, number, self.ranks),
                false => Err(Refusal::Closing),
            });
            let reply = match seat {
                Ok((rank, ranks)) => HelloReply::Welcome {
                    group: state.group,
                    rank: rank.0,
                    ranks,
                    process: self.process.clone(),
                },
                Err(refusal) => HelloReply::Refused(refusal),
            };

            // The rank expects this answer before any reply, so it is queued before the rank joins.
            outbox.sender().send(encode_frame(&seal(&reply)));

            let rank = match reply {
                HelloReply::Welcome { rank, .. } => Rank(rank),
                HelloReply::Refused(refusal) => return Err((refusal, outbox)),
            };

            // The rank has joined. Its connection is no longer one that is closed if there are too
            // many, and its job is that of the group if none was known.
            state.pending.remove(&number);
            state.job.get_or_insert(hello.job);
            let connection = Connection { number, origin, host: hello.host, outbox: Some(outbox) };
            state.connections[rank.index()] = Some(connection);

            let Hello { runs_hub, address, process, .. } = hello;
            let joined = Event::Joined(Joining { runs_hub, address, process });
            Ok((rank, state.apply(rank, Addressed::to_all(joined))))
        });

        // Dropping outboxes waits until their last frames are written, so it happens outside of the
        // lock.
        admitted.map(|(rank, _)| rank).map_err(|(refusal, _)| refusal)
    }

    /// Counts a refused connection, so that the error of a group that does not start can mention
    /// it.
    pub(super) fn count_refused(&self, origin: SocketAddr, number: u64, reason: &str) {
        self.state.lock().count_refused(origin, number, reason);
    }

    /// Removes a connection that did not join from the connections in the handshake.
    pub(super) fn forget(&self, number: u64) {
        let mut state = self.state.lock();
        state.pending.remove(&number);
        state.shed.remove(&number);
    }

    /// Applies an event of the rank `from`, unless its connection `number` belongs to an earlier
    /// group.
    pub(super) fn apply(self: &Arc<Self>, (from, number): (Rank, u64), event: Addressed<Event>) {
        let outboxes = self.change(|state| {
            let connection = state.connections[from.index()].as_ref();
            let is_current = connection.is_some_and(|connection| connection.number == number);
            if is_current { state.apply(from, event) } else { Vec::new() }
        });

        // Dropping outboxes waits until their last frames are written, so it happens outside of the
        // lock.
        drop(outboxes);
    }

    /// Calls `change` with the locked state, and returns its result.
    ///
    /// It limits how long the hub waits for the acknowledgements of groups that the change has
    /// ended.
    pub(super) fn change<R>(self: &Arc<Self>, change: impl FnOnce(&mut State) -> R) -> R {
        let (result, ended) = self.state.change(|state| {
            let result = change(state);
            let mut ended = mem::take(&mut state.ended);
            ended.retain(|group| state.hub.awaits_acknowledgement(*group));
            (result, ended)
        });

        if !ended.is_empty() {
            self.stop_waiting_later(ended);
        }
        result
    }

    /// Starts a thread that, after a timeout, stops the wait for the acknowledgements of the groups
    /// `ended`.
    fn stop_waiting_later(self: &Arc<Self>, ended: Vec<Option<SubgroupId>>) {
        let shared = Arc::clone(self);
        // Without the thread, ranks may wait longer, until every rank has acknowledged or is gone.
        let _ = limits::spawn("peerlane-hub-tell", move || shared.stop_waiting(&ended));
    }

    fn stop_waiting(&self, ended: &[Option<SubgroupId>]) {
        let acknowledged = |state: &mut State| {
            let awaits = |group: &Option<SubgroupId>| state.hub.awaits_acknowledgement(*group);
            (!ended.iter().any(awaits)).then_some(())
        };
        if self.state.wait(Deadline::after(ACKNOWLEDGE_TIMEOUT), acknowledged).is_some() {
            return;
        }

        self.state.change(|state| {
            for group in ended {
                let replies = state.hub.stop_waiting(*group);
                // A rank whose queue is full misses the replies. It counts as lost only when an
                // event has more replies for it.
                state.send(&replies);
            }
        });
    }
}

impl State {
    /// Forms the smaller group of the ranks that have arrived, and resets the hub's state for this
    /// group, unless the start has failed.
    fn form(&mut self) {
        let Some(formation) = &mut self.formation else { return };
        formation.form();

        // The ranks are told why the group has failed instead of joining.
        if self.hub.first().end_cause().is_some() {
            return;
        }

        let ranks = formation.formed_ranks().unwrap_or_default();
        self.hub = HubGroups::new(ranks);
        self.connections = (0..ranks).map(|_| None).collect();
        // In the new group, the rank that runs the hub can have another number, which is known when
        // it joins.
        self.run_by = None;
    }

    fn connection(&self, rank: u32) -> Option<&Connection> {
        self.connections.get(rank as usize).and_then(Option::as_ref)
    }

    /// Returns whether a rank had joined the group, and has left it or was lost.
    fn has_left(&self, rank: u32) -> bool {
        self.connection(rank).is_some() && !self.hub.first().is_live(Rank(rank))
    }

    /// Returns whether the current group is over, so that `rank`, which comes now, begins the next
    /// group.
    ///
    /// All ranks of the group have to be gone, and a process outside of the group has to run the
    /// hub. A rank that has never joined a group that did not start is late for that group, and is
    /// told why it did not start.
    fn is_empty(&self, rank: u32) -> bool {
        let first = self.hub.first();
        let is_next = first.is_formed() || first.end_cause().is_some() && self.has_left(rank);
        let is_over = is_next && first.live().next().is_none();

        is_over && first.runs_hub().is_none() && self.formation.is_none() && !self.closing
    }

    /// Returns the number of the rank of `hello` and the size of its group, or why the rank cannot
    /// join.
    fn seat(&self, hello: &Hello, number: u64, hub_ranks: usize) -> Result<(Rank, u32), Refusal> {
        let Hello { rank, ranks, .. } = *hello;
        if let Some(formation) = &self.formation {
            if self.closing {
                return Err(Refusal::Closing);
            }

            if let Some(cause) = self.hub.first().end_cause() {
                return Err(Refusal::Ended { cause: cause.to_string(), peer: cause.peer() });
            }

            let formed_ranks = formation.formed_ranks().unwrap_or_default();
            let formed_ranks = u32::try_from(formed_ranks).expect("not more than before");
            return Ok((formation.member(rank, number)?, formed_ranks));
        }

        // Checked before job and size, which can be different for the next group.
        let first = self.hub.first();
        let is_ending = first.live().count() < hub_ranks || first.end_cause().is_some();
        if is_ending && (first.is_formed() || self.has_left(rank)) {
            // The numbers of all ranks of a large job would not fit into the answer.
            let live = first.live().map(|rank| rank.0).take(NAMED_RANKS_MAX);
            return Err(Refusal::Earlier { live: live.collect() });
        }

        // A rank of another job can also expect another number of ranks, so the job is compared
        // first.
        if let Some(hub_job) = &self.job
            && hello.job != *hub_job
        {
            return Err(Refusal::Job { job: hello.job.clone(), hub_job: hub_job.clone() });
        }

        if ranks as usize != hub_ranks {
            let hub_ranks = u32::try_from(hub_ranks).expect("checked when the hub was bound");
            return Err(Refusal::Ranks { rank, ranks, hub_ranks });
        }

        if rank >= ranks {
            return Err(Refusal::OutOfRange { rank, ranks });
        }

        if let Some(connection) = &self.connections[Rank(rank).index()] {
            let origin = connection.origin.to_string();
            let same_host = connection.host == hello.host;
            return Err(Refusal::Taken { rank, origin, same_host });
        }

        if let Some(cause) = first.end_cause() {
            return Err(Refusal::Ended { cause: cause.to_string(), peer: cause.peer() });
        }

        if self.closing { Err(Refusal::Closing) } else { Ok((Rank(rank), ranks)) }
    }

    fn count_refused(&mut self, origin: SocketAddr, number: u64, reason: &str) {
        // A connection that is not pending was closed as the oldest, which made its handshake fail.
        let is_known = self.formation.is_some() || self.pending.contains_key(&number);
        let reason = if is_known { reason } else { "too many connections had not joined" };
        self.hub.refuse(format!("{origin}: {reason}"));
    }

    /// Applies an event, queues the replies, and returns the outboxes of the ranks that are gone.
    ///
    /// The caller drops the outboxes outside of the lock.
    pub(super) fn apply(&mut self, from: Rank, event: Addressed<Event>) -> Vec<Outbox> {
        let mut events = VecDeque::from([(from, event)]);
        let mut gone = Vec::new();
        while let Some((rank, event)) = events.pop_front() {
            let replies = self.hub.apply(rank, event);
            // A rank that does not read is lost, which is an event with replies of its own.
            for (reader, how) in self.send(&replies) {
                events.push_back((reader, Addressed::to_all(Event::Lost { how })));
            }

            let ended: Vec<_> = replies
                .iter()
                .filter(|out| matches!(out.reply.message, Reply::Ended(_)))
                .map(|out| out.reply.subgroup)
                .collect();
            self.ended.extend(ended.iter().copied());

            // If the first group ends, the event may have lost another rank than its own.
            let affected = match ended.contains(&None) {
                true => Rank::all(self.connections.len()).collect(),
                false => vec![rank],
            };
            for lost in affected.into_iter().filter(|rank| !self.hub.first().is_live(*rank)) {
                let connection = self.connections[lost.index()].as_mut();
                gone.extend(connection.and_then(|connection| connection.outbox.take()));
            }
        }

        gone
    }

    /// Queues replies, except to ranks whose queues are full, and returns these ranks, each with
    /// the reason to count it as lost.
    fn send(&self, replies: &[Outgoing]) -> BTreeMap<Rank, String> {
        let outbox = |rank: &Rank| {
            let connection = self.connections[rank.index()].as_ref()?;
            connection.outbox.as_ref().map(Outbox::sender)
        };

        // One result may have more bytes than the limit. Whether a rank reads is judged before its
        // queue grows by these replies.
        let readers: BTreeSet<Rank> =
            replies.iter().flat_map(|out| out.to.iter().copied()).collect();
        let full: BTreeMap<_, _> = readers
            .into_iter()
            .filter_map(|rank| {
                let sender = outbox(&rank).filter(|sender| sender.is_full())?;
                Some((rank, sender.full_text()))
            })
            .collect();

        // A frame is encoded once, however many ranks receive it.
        let mut frames = Vec::new();
        for Outgoing { to, reply, charge } in replies {
            let frame = encode_frame(reply).charged_to(charge.as_ref());
            let is_result = matches!(reply.message, Reply::Contributions { .. });
            frames.push((to, is_result, frame));
        }

        // The limit of a queue grows by all results that are sent together.
        let results = frames.iter().filter(|(_, is_result, _)| *is_result);
        let result_bytes = results.map(|(_, _, frame)| frame.kept_bytes()).sum();
        for (to, is_result, frame) in &frames {
            for sender in to.iter().filter(|rank| !full.contains_key(rank)).filter_map(outbox) {
                if *is_result {
                    sender.note_result(result_bytes);
                }
                sender.send(frame.clone());
            }
        }

        full
    }
}

/// Returns why `address` does not seem to belong to this host, or `None` if it does.
fn doubt_own(address: &Address) -> Option<String> {
    match address.resolve() {
        Ok(resolved) if resolved.iter().any(is_own) => None,
        Ok(resolved) => Some(format!("{resolved:?} is not an address of the host of rank 0")),
        Err(error) => Some(format!("it cannot be resolved on the host of rank 0: {error}")),
    }
}

/// Returns whether `address` belongs to this host, by binding a socket to it.
fn is_own(address: &SocketAddr) -> bool {
    let mut any_port = *address;
    any_port.set_port(0);
    TcpListener::bind(any_port).is_ok()
}

/// Returns the error for a hub without a secret at an address that other hosts can reach.
fn no_secret(address: &str) -> Error {
    let text = format!(
        "the hub cannot listen at {address} without a secret, because other hosts can reach this address; \
         {NO_SECRET_HELP}"
    );
    Error::new(ErrorKind::InvalidArgument, text)
}

fn cannot_listen(address: &str, error: io::Error) -> Error {
    let system = SystemError::of_io(format!("cannot listen at {address}"), &error);
    if system.is_exhausted() {
        return system.into();
    }

    let text = match error.kind() {
        io::ErrorKind::AddrInUse => format!("cannot listen at {address}: the port is in use"),
        _ => format!("cannot listen at {address} for the ranks of the group: {error}"),
    };
    Error::new(ErrorKind::Unavailable, text).with_source(error)
}

pub(super) fn is_in_use(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(|source: &io::Error| source.kind() == io::ErrorKind::AddrInUse)
}

/// Returns `error`, extended by the processes that hold the port of `address` if the port is in
/// use.
///
/// Other errors stay as they are.
pub(super) fn name_holders(address: &str, error: Error) -> Error {
    if !is_in_use(&error) {
        return error;
    }

    let port = address.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
    let by = match &port.map(holders).unwrap_or_default()[..] {
        [] => String::new(),
        named => format!(" by {}", named.join(" and ")),
    };

    let text = format!(
        "cannot listen at {address}: the port is in use{by}; set PEERLANE_PORT or MASTER_PORT to a free port, the same on \
         every rank"
    );
    Error::new(error.kind(), text).with_source(io::Error::from(io::ErrorKind::AddrInUse))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_before_a_smaller_group_is_formed_ends_it() {
        let ranks = vec![(Rank(1), SocketAddr::from((Ipv4Addr::LOCALHOST, 1)))];
        let formation = Formation::new(GroupId::default(), 3, ranks);
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let shared = HubOptions::default().share(address, GroupId::default(), 3, Some(formation));
        shared.fail(&SystemError::new("cannot start a thread", rustix::io::Errno::MFILE));
        shared.state.change(State::form);

        let hello = Hello {
            rank: 1,
            ranks: 3,
            host: String::new(),
            job: None,
            runs_hub: false,
            address: None,
            process: None,
            shrinks: Some(GroupId::default()),
            nonce: GroupId::default(),
        };
        let refusal = shared.state.lock().seat(&hello, 1, 3).unwrap_err();
        assert!(matches!(refusal, Refusal::Ended { .. }), "{refusal}");
    }
}
