//! The hub: the one place of a group that every rank is connected to.
//!
//! A thread accepts, and each connection has a thread that reads and one that writes; all sleep in
//! the kernel while nothing is said. All share one [`Point`] under a lock, whose order is the order
//! in which every rank hears everything.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::super::message::{Names, Reply, Request, Seconds};
use super::super::point::{Event, Point, check_ranks};
use super::super::watched::Watched;
use super::admit;
use super::connection::Outbox;
use super::frame;
use super::handshake::{Answer, Hello, Refusal};
use crate::error::Error;

/// How long the hub waits until every live rank has been handed the verdict.
pub(super) const TELL_TIMEOUT: Duration = Duration::from_secs(2);

/// The pause after a connection that could not be taken, when descriptors ran out say.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The exchange point of a group of processes; dropping it closes it.
///
/// It runs inside rank 0, or in a process that starts the ranks. Once it is gone, ranks that have
/// not left count rank 0 as lost.
pub struct Hub {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
}

pub(super) struct Shared {
    address: SocketAddr,
    ranks: usize,
    state: Watched<State>,
}

struct State {
    point: Point,
    seats: Vec<Option<Seat>>,
    closing: bool,
}

/// A rank that has come; kept when it is gone, because its number stays taken.
struct Seat {
    origin: SocketAddr,
    host: String,
    outbox: Option<Outbox>,
}

impl Hub {
    /// Listens at `address`, such as `127.0.0.1:29501`, or port 0 for any free one, as the hub of
    /// a group of `ranks`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for a group of 0 ranks,
    /// [`Unavailable`](ErrorKind::Unavailable) if the port is in use or the address not of this host.
    pub fn bind(address: &str, ranks: usize) -> Result<Self, Error> {
        check_ranks(ranks)?;
        let listener = TcpListener::bind(address).map_err(|error| cannot_listen(address, error))?;
        Self::accept_at(listener, ranks).map_err(|error| cannot_listen(address, error))
    }

    fn accept_at(listener: TcpListener, ranks: usize) -> io::Result<Self> {
        let seats = (0..ranks).map(|_| None).collect();
        let state = State { point: Point::new(ranks), seats, closing: false };
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { address, ranks, state: Watched::new(state) });
        let acceptor = {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name("peerlane-hub".into())
                .spawn(move || accept(&listener, &shared))?
        };
        Ok(Self { shared, acceptor: Some(acceptor) })
    }

    /// Where it listens, with the port that the system chose if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.shared.address
    }

    /// How many ranks its group has.
    pub fn ranks(&self) -> usize {
        self.shared.ranks
    }

    /// Where a process of this host reaches it.
    pub(super) fn address_here(&self) -> SocketAddr {
        let mut address = self.shared.address;
        match address.ip() {
            IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
            IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
            _ => {}
        }
        address
    }

    /// Tells all that the group did not come together; said here, it cannot come after the close.
    pub(super) fn give_up(&self, timeout: Duration) {
        self.shared.take(Rank(0), Event::Said(Request::GiveUp { timeout }));
    }

    /// Waits until all that rank 0 has said before its connection closed is taken.
    pub(super) fn wait_gone(&self, deadline: Deadline) {
        let gone = |state: &mut State| (!state.point.is_live(Rank(0))).then_some(());
        self.shared.state.wait(deadline, gone);
    }

    /// Waits until every rank has left or is lost.
    pub(super) fn wait_empty(&self, deadline: Deadline) -> Result<(), Error> {
        let empty = self
            .shared
            .state
            .wait(deadline, |state| state.point.live().next().is_none().then_some(()));
        let live: Vec<_> = self.shared.state.lock().point.live().collect();
        match (empty, live.first()) {
            (None, Some(first)) => {
                let text = format!(
                    "goodbye: {} did not leave within {}; the rank that holds the hub goes last",
                    Names(&live),
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
        // A verdict under way reaches everybody before their connections close.
        state
            .wait(Deadline::after(TELL_TIMEOUT), |state| (!state.point.is_telling()).then_some(()));
        let outboxes: Vec<_> = state.change(|state| {
            state.closing = true;
            state.seats.iter_mut().flatten().filter_map(|seat| seat.outbox.take()).collect()
        });
        outboxes.iter().for_each(Outbox::close);
        drop(outboxes);
        // `accept` has no other way to be woken.
        let woken = TcpStream::connect_timeout(&self.address_here(), TELL_TIMEOUT);
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
        // Without a thread the stream closes, and the rank tries again.
        let _ = thread::Builder::new()
            .name("peerlane-hub-read".into())
            .spawn(move || admit::serve(&shared, stream));
    }
}

impl Shared {
    pub(super) fn ranks(&self) -> usize {
        self.ranks
    }

    /// Answers a rank that has said hello; false if it is not taken.
    pub(super) fn seat(&self, hello: Hello, origin: SocketAddr, outbox: Outbox) -> bool {
        let refused = self.state.change(|state| {
            if let Err(refusal) = state.check(&hello, self.ranks) {
                return Some((refusal, outbox));
            }
            let rank = Rank(hello.rank);
            outbox.post().send(frame::encode(&Answer::Welcome));
            let seat = Seat { origin, host: hello.host, outbox: Some(outbox) };
            state.seats[rank.index()] = Some(seat);
            let replies = state.point.take(rank, Event::Came);
            state.tell(&replies);
            None
        });
        let Some((refusal, outbox)) = refused else { return true };
        outbox.post().send(frame::encode(&Answer::Refused(refusal)));
        false
    }

    /// Takes what happened to a rank and tells all others what follows from it.
    pub(super) fn take(self: &Arc<Self>, from: Rank, event: Event) {
        let (tells, outbox) = self.state.change(|state| {
            let told_before = state.point.verdict().is_some();
            let replies = state.point.take(from, event);
            state.tell(&replies);
            let seat = state.seats[from.index()].as_mut();
            let gone = seat.filter(|_| !state.point.is_live(from));
            (!told_before && state.point.is_telling(), gone.and_then(|seat| seat.outbox.take()))
        });
        if tells {
            self.release_later();
        }
        // Closing waits for the last words to be written: outside of the lock.
        drop(outbox);
    }

    /// Stops waiting for ranks that do not acknowledge.
    fn release_later(self: &Arc<Self>) {
        let shared = Arc::clone(self);
        let _ = thread::Builder::new().name("peerlane-hub-tell".into()).spawn(move || {
            let told = shared.state.wait(Deadline::after(TELL_TIMEOUT), |state| {
                (!state.point.is_telling()).then_some(())
            });
            if told.is_none() {
                shared.state.change(|state| {
                    let replies = state.point.release();
                    state.tell(&replies);
                });
            }
        });
    }
}

impl State {
    fn check(&self, hello: &Hello, hub_ranks: usize) -> Result<(), Refusal> {
        let Hello { rank, ranks, ref host } = *hello;
        if ranks as usize != hub_ranks {
            let hub_ranks = u32::try_from(hub_ranks).expect("checked when the hub was bound");
            return Err(Refusal::Ranks { rank, ranks, hub_ranks });
        }
        if rank >= ranks {
            return Err(Refusal::OutOfRange { rank, ranks });
        }
        if let Some(seat) = &self.seats[Rank(rank).index()] {
            let (origin, same_host) = (seat.origin.to_string(), seat.host == *host);
            return Err(Refusal::Taken { rank, origin, same_host });
        }
        if let Some(verdict) = self.point.verdict() {
            return Err(Refusal::Over { verdict: verdict.to_string() });
        }
        if self.closing { Err(Refusal::Closing) } else { Ok(()) }
    }

    fn tell(&self, replies: &[Reply]) {
        for reply in replies {
            let frame = frame::encode(reply);
            for rank in self.point.live() {
                let seat = self.seats[rank.index()].as_ref();
                if let Some(outbox) = seat.and_then(|seat| seat.outbox.as_ref()) {
                    outbox.post().send(Arc::clone(&frame));
                }
            }
        }
    }
}

fn cannot_listen(address: &str, error: io::Error) -> Error {
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => format!(
            "cannot listen at {address}: the port is in use; set PEERLANE_PORT, or MASTER_PORT, \
             to a free port, the same for every rank"
        ),
        _ => format!("cannot listen at {address} for the ranks of the group: {error}"),
    };
    Error::new(ErrorKind::Unavailable, text).with_source(error)
}
