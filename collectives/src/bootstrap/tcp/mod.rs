//! Ranks as processes, on one host or many, under the usual launchers.
//!
//! Every rank holds one connection to the [`Hub`], which rank 0 runs unless the [`Environment`]
//! names an external one. Nothing moves on it but what ranks say to each other while they prepare,
//! abort and leave: in steady state all threads sleep in the kernel.
//!
//! A process that ends, however it ends, has its connection closed by its kernel, and the others
//! hear of it at once. Left out on purpose: heartbeats. A host that vanishes without a word is
//! noticed by the deadline of whatever waits for it; the standard library cannot switch TCP
//! keepalive on. Left out as well: secrecy and proof of who speaks. Whoever reaches the port and
//! speaks the protocol can come as a rank; keep the port inside the cluster.
//!
//! A rank whose exchange times out ends the group: ranks that wait in an exchange get its error,
//! and listeners hear an [abort](super::Notice::Abort) whose record is the text of the error.

mod admit;
mod connection;
mod frame;
mod handshake;
mod hub;
mod join;

use std::fmt;
use std::io::{self, BufReader};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::Arc;
use std::thread;

use peerlane_hal::{Deadline, ErrorKind, Rank};

pub use self::hub::Hub;

use self::connection::{Outbox, Post};
use self::frame::FRAME_BYTES_MAX;
use self::handshake::Hello;
use self::hub::TELL_TIMEOUT;
use super::environment::{Environment, HubAddress};
use super::member::Member;
use super::message::{Blob, Reply, Request, Seconds};
use super::point::check_ranks;
use super::{Bootstrap, Listener, host};
use crate::error::Error;

/// This process as one rank of a group; dropping it without a [goodbye](Bootstrap::leave) is a
/// loss to the others.
pub struct Tcp {
    member: Arc<Member>,
    outbox: Option<Outbox>,
    host: String,
    address: String,
    hub: Option<Hub>,
}

impl Tcp {
    /// Joins the group that `environment` describes and waits until every rank is there. Rank 0
    /// opens the hub, unless that is external.
    ///
    /// # Errors
    /// [`Timeout`](ErrorKind::Timeout) naming the ranks that did not come, or the hub that was not
    /// reached; [`Mismatch`](ErrorKind::Mismatch) if ranks disagree in the size of the group, two
    /// are the same, or something else listens at the address;
    /// [`Unavailable`](ErrorKind::Unavailable) if the port is in use;
    /// [`PeerLost`](ErrorKind::PeerLost) if a rank came and went.
    pub fn join(environment: &Environment, deadline: Deadline) -> Result<Self, Error> {
        let Environment { rank, ranks, ref hub, .. } = *environment;
        match hub {
            HubAddress::RankZero(address) if rank == Rank(0) => {
                Self::join_with_hub(bind(address, ranks)?, deadline)
            }
            HubAddress::RankZero(address) | HubAddress::External(address) => {
                Self::connect(address.clone(), None, rank, ranks, deadline)
            }
        }
    }

    /// Joins as rank 0, which takes over a hub that is open already: with a port that the system
    /// chose, and that the starter of the other ranks hands on.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn join_with_hub(hub: Hub, deadline: Deadline) -> Result<Self, Error> {
        let (address, ranks) = (hub.address_here().to_string(), hub.ranks());
        Self::connect(address, Some(hub), Rank(0), ranks, deadline)
    }

    fn connect(
        address: String,
        hub: Option<Hub>,
        rank: Rank,
        ranks: usize,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        check_ranks(ranks)?;
        let host = host::id();
        let size = u32::try_from(ranks).expect("checked above");
        let hello = Hello { rank: rank.0, ranks: size, host: host.clone() };
        let stream = join::join(&address, &hello, deadline)?;
        let member = Arc::new(Member::new(rank, ranks));
        let outbox = open(stream, &member, &address).map_err(|error| {
            let text = format!("cannot serve the connection to the hub at {address}: {error}");
            Error::new(ErrorKind::Other, text).with_source(error)
        })?;
        let joined = Self { member, outbox: Some(outbox), host, address, hub };
        joined.member.started(deadline).inspect_err(|_| joined.give_up(deadline))?;
        Ok(joined)
    }

    /// Tells the others that the group does not come together.
    fn give_up(&self, deadline: Deadline) {
        let timeout = deadline.timeout();
        match &self.hub {
            Some(hub) => hub.give_up(timeout),
            None => self.send(&Request::GiveUp { timeout }),
        }
    }

    fn send(&self, request: &Request) {
        if let Some(outbox) = &self.outbox {
            outbox.post().send(frame::encode(request));
        }
    }
}

impl Bootstrap for Tcp {
    fn rank(&self) -> Rank {
        self.member.rank()
    }

    fn ranks(&self) -> usize {
        self.member.ranks()
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
        self.member.exchange(label, mine, deadline, |request| self.send(&request))
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.member.check_abort(record)?;
        self.send(&Request::Abort { record: Blob(record.to_vec()) });
        Ok(())
    }

    fn listen(&self, listener: Listener) {
        self.member.listen(listener);
    }

    /// Where this rank runs the hub, it waits until the others have left or are lost: the hub
    /// serves them, and this process may end after its goodbye.
    fn leave(&self, deadline: Deadline) -> Result<(), Error> {
        if self.member.depart()? {
            self.send(&Request::Leave);
        }
        if !self.member.wait_closed(deadline) {
            let within = Seconds(deadline.timeout());
            let text =
                format!("goodbye: the hub at {} did not answer within {within}", self.address);
            return Err(Error::new(ErrorKind::Timeout, text).with_peer(Rank(0)));
        }
        self.hub.as_ref().map_or(Ok(()), |hub| hub.wait_empty(deadline))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.member.silence();
        // Writes what is queued, an abort perhaps, and closes the connection.
        self.outbox = None;
        if let Some(hub) = &self.hub {
            hub.wait_gone(Deadline::after(TELL_TIMEOUT));
        }
    }
}

impl fmt::Debug for Tcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tcp")
            .field("rank", &self.member.rank())
            .field("ranks", &self.member.ranks())
            .field("address", &self.address)
            .field("hub", &self.hub)
            .finish_non_exhaustive()
    }
}

/// Opens both directions of the connection to the hub.
fn open(stream: TcpStream, member: &Arc<Member>, address: &str) -> io::Result<Outbox> {
    let outbox = Outbox::open(&stream)?;
    let (member, post) = (Arc::clone(member), outbox.post().clone());
    let address = address.to_owned();
    thread::Builder::new()
        .name("peerlane-tcp-read".into())
        .spawn(move || hear(stream, &member, &post, &address))?;
    Ok(outbox)
}

fn hear(stream: TcpStream, member: &Member, post: &Post, address: &str) {
    let mut reader = BufReader::new(stream);
    let how = loop {
        match frame::read::<Reply>(&mut reader, FRAME_BYTES_MAX) {
            Ok(Some(reply)) => {
                if member.receive(reply) {
                    post.send(frame::encode(&Request::Acknowledge));
                }
            }
            Ok(None) => break format!("the hub at {address} closed its connection"),
            Err(error) => break format!("on the connection to the hub at {address}, {error}"),
        }
    };
    member.close(how);
    let _ = reader.into_inner().shutdown(Shutdown::Both);
}

/// Opens the hub of rank 0. Other hosts may know this one by another address, so it listens at all
/// of them, unless the address can only mean this host.
fn bind(address: &str, ranks: usize) -> Result<Hub, Error> {
    let (name, port) = address.rsplit_once(':').unwrap_or((address, "0"));
    let literal = name.trim_matches(['[', ']']).parse::<IpAddr>();
    if literal.is_ok_and(|ip| ip.is_loopback()) {
        return Hub::bind(address, ranks);
    }
    let both = Hub::bind(&format!("[::]:{port}"), ranks);
    match both {
        // Without IPv6 on this host there is no `[::]`.
        Err(error) if !is_in_use(&error) => Hub::bind(&format!("0.0.0.0:{port}"), ranks),
        both => both,
    }
}

fn is_in_use(error: &Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(|source: &io::Error| source.kind() == io::ErrorKind::AddrInUse)
}
