//! Accepts the connections to a hub, and ends the start of a group if the hub lacks resources.

use std::io;
use std::mem;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};
use peerlane_toolkit::limits::{self, SpareDescriptor, SystemError};
use rustix::event::{PollFd, PollFlags, poll};

use super::super::forks::Uninherited;
use super::super::hub::Event;
use super::super::message::EndCause;
use super::super::subgroups::Addressed;
use super::hub::{ACCEPT_PAUSE, Hub, Shared, State};
use super::serve::serve;
use super::wire::Stream;
use crate::error::Error;

/// The shortest and the longest time that the hub of a failed start waits for ranks that have not
/// connected, to tell them the reason.
const STRAGGLERS_TIMEOUT: RangeInclusive<Duration> =
    Duration::from_secs(1)..=Duration::from_secs(10);

impl Hub {
    /// Ends the start of the group because `rank` cannot join it, for example if its process has
    /// ended.
    ///
    /// All ranks get an error that names the rank, and `how`. The call does nothing if all ranks
    /// have joined, because the hub then notices the loss of a rank by its connection.
    pub fn fail_start(&self, rank: Rank, how: impl Into<String>) {
        if rank.index() < self.shared.ranks {
            self.shared.fail_start(EndCause::Lost { rank: rank.0, how: how.into() });
        }
    }

    /// Sets the rank that runs the hub, which errors name if the hub fails before that rank joins.
    pub(super) fn set_run_by(&self, rank: Rank) {
        self.shared.state.lock().run_by = Some(rank);
    }

    /// Tells the other ranks why the start has failed on `rank`, which runs this hub, and returns
    /// the reason.
    ///
    /// Ranks that connect within an eighth of the time until the deadline are told too. They would
    /// otherwise look for the hub until their own deadline: where programs take seconds to load,
    /// some ranks connect seconds after the others. The reason is `error`, or the failure of the
    /// hub that has caused `error`.
    pub(super) fn end_start(&self, rank: Rank, error: Error, deadline: Deadline) -> Error {
        let failure = self.shared.state.lock().failure.clone();
        let error = failure.map_or(error, Error::from);

        if error.kind() == ErrorKind::OutOfMemory {
            self.fail_start(rank, error.to_string());
        }

        // These errors can come before the other ranks have connected. If the start has timed out,
        // the missing ranks have had their time.
        let kinds = [ErrorKind::OutOfMemory, ErrorKind::Aborted, ErrorKind::PeerLost];
        if kinds.contains(&error.kind()) {
            let all_told = |state: &mut State| {
                let mut missing = state.hub.first().missing();
                missing.all(|other| other == rank || state.told.contains(&other)).then_some(())
            };
            let (shortest, longest) = STRAGGLERS_TIMEOUT.into_inner();
            let timeout = (deadline.remaining() / 8).clamp(shortest, longest);
            self.shared.state.wait(Deadline::after(timeout), all_told);
        }

        error
    }
}

/// Accepts connections until the hub closes, and serves each on a thread of its own.
pub(super) fn accept(
    listener: &Uninherited<TcpListener>,
    mut spare: SpareDescriptor,
    shared: &Arc<Shared>,
) {
    loop {
        // Without a free descriptor, `accept` fails at once even if no process connects, so `poll`
        // waits for a connection.
        let mut polled = [PollFd::new(&**listener, PollFlags::IN)];
        if poll(&mut polled, None).is_err() {
            thread::sleep(ACCEPT_PAUSE);
        }

        // `closing` is set before the shutdown that ends the wait. It is checked after `accept`, so
        // that a connection to a hub that closes is dropped.
        let accepted = listener.accept();
        if shared.state.lock().closing {
            return;
        }

        let error = match accepted {
            Ok((stream, origin)) => {
                shared.take(Stream::new(Uninherited::new(stream)), canonical(origin));
                continue;
            }
            // The wait ended without a connection, or the connection was closed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => SystemError::of_io("cannot accept the connection of a rank", &error),
        };

        // A later attempt can succeed, because errors other than a limit may not last, and
        // connections in the handshake soon release their descriptors.
        if !error.is_exhausted() || shared.awaits_handshake() {
            thread::sleep(ACCEPT_PAUSE);
            continue;
        }

        // Another attempt would fail too. If a rank connects, it gets the reason, and so do those
        // that have joined.
        match spare.lend(|| listener.accept()) {
            Ok((stream, origin)) => {
                shared.refuse(Stream::new(Uninherited::new(stream)), canonical(origin), &error);
            }
            Err(_) => thread::sleep(ACCEPT_PAUSE),
        }
        spare.take_back();
    }
}

/// Converts an IPv4 address in IPv6 form into the IPv4 address, and returns other addresses
/// unchanged.
pub(super) fn canonical(origin: SocketAddr) -> SocketAddr {
    SocketAddr::new(origin.ip().to_canonical(), origin.port())
}

impl Shared {
    /// Serves a connection on a thread of its own, and returns whether the thread could be started.
    ///
    /// Without the thread, the rank is told so. If other connections hold threads in the handshake,
    /// the connection is closed instead, and the rank connects again.
    pub(super) fn take(self: &Arc<Self>, stream: Stream, origin: SocketAddr) -> bool {
        let number = self.begin(&stream);
        let server = Arc::clone(self);
        let served = Arc::clone(&stream);
        let thread = limits::spawn("peerlane-hub-read", move || {
            serve(&server, served, origin, number, None)
        });
        let Err(error) = thread else { return true };

        self.forget(number);
        if self.awaits_handshake() {
            drop(stream);
            thread::sleep(ACCEPT_PAUSE);
        } else {
            self.refuse(stream, origin, &error);
        }

        false
    }

    /// Performs the handshake on this thread, to tell the rank that it cannot join because of
    /// `error`.
    fn refuse(self: &Arc<Self>, stream: Stream, origin: SocketAddr, error: &SystemError) {
        let number = self.begin(&stream);
        serve(self, stream, origin, number, Some(error));
    }

    /// Returns whether connections in the handshake hold descriptors and threads, which they soon
    /// release.
    ///
    /// It closes the oldest of them if that was the oldest at the last call too. A rank needs
    /// little time for its handshake. Other processes must not keep ranks from joining.
    fn awaits_handshake(&self) -> bool {
        let mut state = self.state.lock();
        let current = state.pending.keys().next().copied();
        let before = mem::replace(&mut state.oldest, current);
        if before == current {
            state.shed_oldest();
        }

        !state.pending.is_empty() || !state.shed.is_empty()
    }

    /// Ends the group, unless all ranks have joined, because the hub lacks resources for a rank, as
    /// `error` says.
    pub(super) fn fail(self: &Arc<Self>, error: &SystemError) {
        self.state.lock().failure.get_or_insert_with(|| error.clone());

        let how = format!("its hub failed: {error}");
        self.fail_start(match self.run_by() {
            Some(rank) => EndCause::Lost { rank: rank.0, how },
            None => EndCause::HubLost { how: error.to_string() },
        });
    }

    fn fail_start(self: &Arc<Self>, cause: EndCause) {
        let event = Addressed::to_all(Event::Failed(cause));
        // The event is that of no rank, and rank 0 is in every group.
        let outboxes = self.change(|state| state.apply(Rank(0), event));
        drop(outboxes);
    }

    /// Records that a rank was told why it cannot join.
    pub(super) fn tell(&self, rank: Rank) {
        // The hello of a rank can contain any number.
        if rank.index() < self.ranks {
            self.state.change(|state| state.told.insert(rank));
        }
    }

    /// Returns the rank that runs this hub, if it is known.
    pub(super) fn run_by(&self) -> Option<Rank> {
        let state = self.state.lock();
        state.hub.first().runs_hub().or(state.run_by)
    }
}

impl State {
    /// Closes the oldest connection in the handshake.
    ///
    /// The connection counts until its thread has closed the descriptor.
    pub(super) fn shed_oldest(&mut self) {
        if let Some((number, stream)) = self.pending.pop_first() {
            let _ = stream.shutdown(Shutdown::Both);
            self.shed.insert(number, stream);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::net::TcpStream;

    use rustix::io::Errno;

    use super::*;

    fn pair() -> (TcpStream, Stream, SocketAddr) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stranger = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, origin) = listener.accept().unwrap();
        (stranger, Stream::new(Uninherited::new(stream)), origin)
    }

    fn exhausted() -> SystemError {
        SystemError::new("cannot accept the connection of a rank", Errno::MFILE)
    }

    #[test]
    fn strangers_do_not_end_a_start_at_a_limit() {
        let hub = Hub::bind("127.0.0.1:0", 2).unwrap();
        for bytes in ["", "GET / HTTP/1.0\r\n\r\n"] {
            let (mut stranger, stream, origin) = pair();
            stranger.write_all(bytes.as_bytes()).unwrap();
            drop(stranger);
            hub.shared.refuse(stream, origin, &exhausted());
            let state = hub.shared.state.lock();
            assert!(state.failure.is_none() && state.hub.first().end_cause().is_none());
        }
    }

    #[test]
    fn a_closed_connection_counts_until_its_descriptor_is_closed() {
        let hub = Hub::bind("127.0.0.1:0", 2).unwrap();
        let shared = &hub.shared;
        let (_stranger, stream, _) = pair();
        let number = shared.begin(&stream);
        // The second call closes the connection, which nothing has served.
        for _ in 0..3 {
            assert!(shared.awaits_handshake());
        }
        assert!(shared.state.lock().pending.is_empty());
        drop(stream);
        shared.forget(number);
        assert!(!shared.awaits_handshake());
    }
}
