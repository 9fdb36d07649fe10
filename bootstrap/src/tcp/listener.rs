//! Accepts the connections that other ranks make to this rank when the group shrinks.
//!
//! A thread accepts them from the beginning. Otherwise connections that send nothing could fill the
//! queue of the system, and the rank would look as if its host were down.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

use peerlane_hal::Deadline;
use peerlane_toolkit::limits::{self, SystemError};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::forks::{Generation, Uninherited};
use super::accept::canonical;
use super::hub::{self, ACCEPT_PAUSE, STRANGERS_MAX};
use super::serve::HANDSHAKE_TIMEOUT;
use super::wire::Stream;

/// The maximum number of connections that the system queues until they are accepted.
///
/// The system may queue fewer.
const QUEUE_MAX: i32 = 4096;

/// Binds a socket at a free port of `ip`, to which other ranks connect when the group shrinks.
pub(super) fn bind(ip: IpAddr) -> io::Result<Uninherited<TcpListener>> {
    let listener = Uninherited::new(TcpListener::bind((ip, 0))?);
    // The standard library lets the system queue 128 connections.
    rustix::net::listen(&*listener, QUEUE_MAX)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections of other ranks until it is dropped, and passes them to the hub of the
/// smaller group.
///
/// A rank can call `shrink` before this one does, so connections wait until this rank opens a hub.
/// If there are too many, the oldest are closed, as are those that have waited too long. Their
/// ranks connect again.
pub(super) struct RankListener {
    shared: Arc<Shared>,
    acceptor: Option<JoinHandle<()>>,
    generation: Generation,
}

/// Stores the socket and the state that the accepting thread shares with the rank.
struct Shared {
    listener: Uninherited<TcpListener>,
    ranks: usize,
    state: Mutex<State>,
}

/// Tracks the hub that receives the connections, or the connections that wait for a hub.
#[derive(Default)]
struct State {
    hub: Option<Arc<hub::Shared>>,
    /// The connections that wait for a hub, in the order of their arrival.
    waiting: VecDeque<Waiting>,
    closing: bool,
}

/// Describes a connection that waits for a hub until its deadline.
struct Waiting {
    stream: Stream,
    origin: SocketAddr,
    deadline: Deadline,
}

impl RankListener {
    /// Starts the thread that accepts connections in a group of `ranks` ranks.
    pub(super) fn start(
        listener: Uninherited<TcpListener>,
        ranks: usize,
    ) -> Result<Self, SystemError> {
        let shared = Arc::new(Shared { listener, ranks, state: Mutex::default() });
        let accepting = Arc::clone(&shared);
        let acceptor = limits::spawn("peerlane-tcp-accept", move || accepting.accept_all())?;
        Ok(Self { shared, acceptor: Some(acceptor), generation: Generation::now() })
    }

    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.shared.listener.local_addr()
    }

    /// Passes the waiting connections, and all later connections, to `hub`.
    pub(super) fn open_hub(&self, hub: &Arc<hub::Shared>) {
        let waiting = {
            let mut state = self.shared.state();
            state.hub = Some(Arc::clone(hub));
            std::mem::take(&mut state.waiting)
        };

        let mut has_threads = true;
        for Waiting { stream, origin, .. } in waiting {
            if has_threads {
                has_threads = hub.take(stream, origin);
            } else {
                // Without threads, each refusal could take seconds of this call. The ranks connect
                // again, and the thread that accepts then passes them to the hub.
                let _ = stream.shutdown(Shutdown::Both);
            }
        }
    }

    /// Stops passing connections to `hub`, so that they wait for the next hub of this rank.
    pub(super) fn close_hub(&self, hub: &Arc<hub::Shared>) {
        let mut state = self.shared.state();
        // The rank may have opened its next hub before this one is dropped.
        if state.hub.as_ref().is_some_and(|open| Arc::ptr_eq(open, hub)) {
            state.hub = None;
        }
    }
}

impl Drop for RankListener {
    fn drop(&mut self) {
        // The thread does not exist in a forked child, and it may have held the lock.
        if self.generation.is_past() {
            return;
        }

        // Set first, because the thread checks it when it wakes.
        self.shared.state().closing = true;
        // This ends the wait for connections even if a forked child has a copy of the socket.
        let is_woken =
            rustix::net::shutdown(&*self.shared.listener, rustix::net::Shutdown::Both).is_ok();
        // The join would wait for ever for a thread that was not woken.
        if let (true, Some(acceptor)) = (is_woken, self.acceptor.take()) {
            let _ = acceptor.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Accepts connections until the listener is dropped.
    fn accept_all(&self) {
        use io::ErrorKind::{Interrupted, WouldBlock};

        loop {
            self.wait();
            if self.state().closing {
                return;
            }

            match self.listener.accept() {
                Ok((stream, origin)) => {
                    self.take(Stream::new(Uninherited::new(stream)), canonical(origin));
                }
                // The wait has ended without a connection, the connection was closed in the
                // meantime, or a signal came.
                Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => {}
                Err(_) => thread::sleep(ACCEPT_PAUSE),
            }
        }
    }

    /// Closes connections that have waited too long, and sleeps until another connection comes.
    ///
    /// It returns early when the oldest connection has waited too long.
    fn wait(&self) {
        let time_left = {
            let mut state = self.state();
            while state.waiting.front().is_some_and(|oldest| oldest.deadline.has_passed()) {
                state.waiting.pop_front();
            }
            state.waiting.front().map(|oldest| oldest.deadline.remaining())
        };

        let limit = time_left.and_then(|left| Timespec::try_from(left).ok());
        let mut polled = [PollFd::new(&*self.listener, PollFlags::IN)];
        match poll(&mut polled, limit.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => thread::sleep(ACCEPT_PAUSE),
        }
    }

    /// Passes a connection to the hub, or lets the connection wait until this rank opens a hub.
    fn take(&self, stream: Stream, origin: SocketAddr) {
        let mut state = self.state();
        if let Some(hub) = state.hub.clone() {
            // The hub can take seconds to refuse a connection, so the lock is released first.
            drop(state);
            hub.take(stream, origin);
            return;
        }

        // If there are too many, the oldest makes room. It is closed without the lock.
        let oldest = match state.waiting.len() >= self.ranks + STRANGERS_MAX {
            true => state.waiting.pop_front(),
            false => None,
        };
        let deadline = Deadline::after(HANDSHAKE_TIMEOUT);
        state.waiting.push_back(Waiting { stream, origin, deadline });
        drop(state);

        if let Some(oldest) = oldest {
            let _ = oldest.stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::net::{Ipv4Addr, TcpStream};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use peerlane_hal::Rank;

    use super::super::formation::Probes;
    use super::super::{Hub, TcpBootstrap};
    use super::*;
    use crate::Bootstrap as _;
    use crate::environment::Environment;
    use crate::error::Error;

    /// More connections than a rank holds, and than the system queues by default.
    const FLOOD: usize = 300;

    /// What was not accepted until then is not worth more time.
    const SOON: Duration = Duration::from_millis(250);

    fn long() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn open(ranks: usize) -> Vec<TcpBootstrap> {
        let hub = Hub::bind("127.0.0.1:0", ranks).unwrap();
        let address = hub.address();
        thread::scope(|scope| {
            let join = |rank| {
                let environment = Environment::at_hub(address, rank, ranks);
                scope.spawn(move || TcpBootstrap::join(&environment, long()).unwrap())
            };
            let others: Vec<_> = Rank::all(ranks).skip(1).map(join).collect();
            let first = TcpBootstrap::join_with_hub(hub, long()).unwrap();
            let others = others.into_iter().map(|other| other.join().unwrap());
            std::iter::once(first).chain(others).collect()
        })
    }

    fn addresses(rank: &TcpBootstrap) -> Vec<(Rank, SocketAddr)> {
        rank.client().remaining()
    }

    /// Opens connections that send nothing, until one is not accepted in time.
    fn flood(address: SocketAddr, timeout: Duration) -> Vec<TcpStream> {
        let connect = |_| TcpStream::connect_timeout(&address, timeout).ok();
        (0..FLOOD).map_while(connect).collect()
    }

    #[test]
    fn a_live_rank_with_many_idle_connections_is_not_gone() {
        let ranks = open(2);
        let other = addresses(&ranks[0])[1];
        let idle = flood(other.1, SOON);
        let mut probes = Probes::default();
        assert!(!probes.is_gone(other, Deadline::after(Duration::from_secs(40))));
        drop(idle);
    }

    #[test]
    fn the_oldest_of_many_connections_are_closed() {
        let listener = bind(Ipv4Addr::LOCALHOST.into()).unwrap();
        listener.set_nonblocking(false).unwrap();
        let address = listener.local_addr().unwrap();
        // Without the thread that accepts, no connection is closed because it has waited too long.
        let shared = Shared { listener, ranks: 2, state: Mutex::default() };
        let mut connections: Vec<_> = (0..FLOOD)
            .map(|_| {
                let connection = TcpStream::connect(address).unwrap();
                let (stream, origin) = shared.listener.accept().unwrap();
                shared.take(Stream::new(Uninherited::new(stream)), origin);
                connection
            })
            .collect();

        let (closed, open) = connections.split_at_mut(FLOOD - shared.ranks - STRANGERS_MAX);
        for connection in closed {
            connection.set_read_timeout(Some(long().remaining())).unwrap();
            assert!(matches!(connection.read(&mut [0]), Ok(0)));
        }
        for connection in open {
            connection.set_nonblocking(true).unwrap();
            let error = connection.read(&mut [0]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        }
    }

    #[test]
    fn idle_connections_exclude_no_rank_from_a_smaller_group() {
        let mut ranks = open(4);
        drop(ranks.remove(0));
        let remaining = addresses(&ranks[0]).into_iter().skip(1);
        let idle: Vec<_> = remaining.flat_map(|(_, address)| flood(address, SOON)).collect();

        let timeout = Duration::from_secs(16);
        let shrunk = thread::scope(|scope| {
            let shrink = |rank: &TcpBootstrap| {
                let shrunk = rank.shrink(&[Rank(0)], Deadline::after(timeout)).unwrap();
                shrunk.ranks()
            };
            let early: Vec<_> =
                ranks[1..].iter().map(|rank| scope.spawn(move || shrink(rank))).collect();
            // A host counts as down if it has not answered for an eighth of the time.
            thread::sleep(timeout / 6);
            let first = shrink(&ranks[0]);
            let early = early.into_iter().map(|rank| rank.join().unwrap());
            std::iter::once(first).chain(early).collect::<Vec<_>>()
        });
        assert_eq!(shrunk, [3, 3, 3]);
        drop(idle);
    }

    /// Connections that come all the time close those of ranks that wait, which connect again.
    #[test]
    fn new_connections_exclude_no_rank_from_a_smaller_group() {
        let mut ranks = open(4);
        drop(ranks.remove(0));
        let addresses = addresses(&ranks[0]);
        let is_over = AtomicBool::new(false);
        let shrunk = thread::scope(|scope| {
            for (_, address) in &addresses[1..] {
                scope.spawn(|| {
                    let mut held = VecDeque::new();
                    while !is_over.load(Ordering::Relaxed) {
                        held.extend(TcpStream::connect_timeout(address, long().remaining()));
                        if held.len() > FLOOD {
                            held.pop_front();
                        }
                    }
                });
            }
            let shrink = |rank: &TcpBootstrap| Ok(rank.shrink(&[Rank(0)], long())?.ranks());
            let shrunk: Vec<_> =
                ranks.iter().map(|rank| scope.spawn(move || shrink(rank))).collect();
            let shrunk: Vec<_> = shrunk.into_iter().map(|rank| rank.join()).collect();
            is_over.store(true, Ordering::Relaxed);
            shrunk.into_iter().map(|ranks| ranks.unwrap()).collect::<Result<Vec<_>, Error>>()
        });
        assert_eq!(shrunk.unwrap(), [3, 3, 3]);
    }
}
