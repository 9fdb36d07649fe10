//! Runs the service thread of a rank, which answers TCP requests of peers and handles NIC events.
//!
//! It owns the passive ends of the peers' queue pairs. They live as long as the connection that requested
//! them. No client can hold the thread: sockets do not block, a client without the token is closed after a
//! time limit, and the oldest of them if there are too many.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ibverbs_sys::ibv_event_type;
use peerlane_hal::{Deadline, Rank};
use peerlane_toolkit::limits;
use peerlane_toolkit::{Fault, WakeupEvent};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::address::Tokens;
use super::client::{Client, ClientTimeouts};
use super::receiver::SignalReceiver;
use super::signals::RAILS_MAX;
use crate::error::Error;
use crate::nic::Nic;
use crate::options::Options;

pub(super) const TIMEOUTS: ClientTimeouts =
    ClientTimeouts { hello: Duration::from_secs(10), message: Duration::from_secs(10) };

/// The number of clients without the token that a rank serves besides one for each rank; the oldest is closed
/// for a new one.
pub(super) const STRANGERS_MAX: usize = 64;

/// The connections that the system queues until they are accepted; it may queue fewer.
const QUEUE_MAX: i32 = 4096;

/// The pause after a failed system call of the thread, for example because descriptors ran out.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(crate) struct Resources {
    pub(crate) rank: Rank,
    pub(crate) ranks: usize,
    pub(crate) options: Options,
    /// The NICs of this rank, of which the first one carries the primary queue pair of every engine.
    pub(crate) nics: Arc<[Nic]>,
    pub(crate) receiver: SignalReceiver,
    pub(crate) tokens: Tokens,
    lost: OnceLock<Error>,
}

impl Resources {
    pub(crate) fn new(
        rank: Rank,
        ranks: usize,
        options: Options,
        nics: Arc<[Nic]>,
    ) -> Result<Self, Error> {
        let receiver = SignalReceiver::new(Arc::clone(&nics));
        let tokens = Tokens::random()?;
        Ok(Self { rank, ranks, options, nics, receiver, tokens, lost: OnceLock::new() })
    }

    fn set_lost(&self, nic: usize, event: String) {
        let device = Arc::clone(&self.nics[nic].port.context.name);
        // The first event is the cause; later ones are ignored.
        let _ = self.lost.set(Error::DeviceLost { device, event });
        self.receiver.wake();
    }

    pub(crate) fn rails(&self, peer_nics: usize) -> usize {
        let nics = self.nics.len().max(peer_nics);
        (self.options.queue_pairs as usize * nics).min(RAILS_MAX)
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        self.lost.get().cloned().map_or(Ok(()), Err)
    }
}

/// Stops the service thread when dropped.
#[derive(Debug)]
pub(crate) struct Service {
    pub(crate) address: SocketAddr,
    stop: Arc<WakeupEvent>,
    stopped: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Service {
    /// Starts the thread, which listens at the first of `ips` that is an address of this process's network.
    pub(crate) fn start(resources: &Arc<Resources>, ips: &[IpAddr]) -> Result<Self, Error> {
        let nics = (0..resources.nics.len()).collect();
        let events = NicEvents { resources: Arc::clone(resources), nics };
        let service_ip = resources.options.service_ip;
        let listener = listen(ips).map_err(|reasons| cannot_listen(service_ip, &reasons))?;
        Self::start_with(resources, listener, events, TIMEOUTS)
    }

    pub(super) fn start_with(
        resources: &Arc<Resources>,
        listener: TcpListener,
        events: impl Events + Send + 'static,
        timeouts: ClientTimeouts,
    ) -> Result<Self, Error> {
        let address = listener.local_addr().map_err(Error::io("listen for peers"))?;
        let stop = WakeupEvent::new()?;
        stop.set_asleep(true);
        let stopped = Arc::new(AtomicBool::new(false));

        let mut server = Server {
            resources: Arc::clone(resources),
            events,
            listener,
            accepts_after: None,
            timeouts,
            clients: Vec::new(),
            stop: Arc::clone(&stop),
            stopped: Arc::clone(&stopped),
        };
        let thread = limits::spawn("peerlane-rdma", move || server.run()).map_err(Fault::from)?;
        Ok(Self { address, stop, stopped, thread: Some(thread) })
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.stop.notify();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Returns the reason for each address if this process can listen at none of them.
pub(super) fn listen(ips: &[IpAddr]) -> Result<TcpListener, String> {
    let mut reasons = Vec::new();
    for ip in ips {
        let listener = TcpListener::bind((*ip, 0)).and_then(|listener| {
            // The standard library lets the system queue 128 connections.
            rustix::net::listen(&listener, QUEUE_MAX)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        match listener {
            Ok(listener) => return Ok(listener),
            Err(error) => reasons.push(format!("{ip}: {error}")),
        }
    }
    Err(reasons.join(", "))
}

fn cannot_listen(service_ip: Option<IpAddr>, reasons: &str) -> Error {
    match service_ip {
        Some(ip) => Error::argument(format!(
            "service_ip is {ip}, expected an IP address of this host that its peers reach: cannot listen at {reasons}"
        )),
        None => Error::unavailable(format!(
            "cannot listen for peers at {reasons}; set service_ip to an IP address of this host that its peers reach"
        )),
    }
}

/// Waits for events of devices; tests use a fake implementation.
pub(super) trait Events {
    /// Returns the descriptors that are readable when there is an event.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Handles the event of the descriptor with this index. Descriptors with smaller indices keep their index.
    fn handle(&mut self, index: usize);
}

struct NicEvents {
    resources: Arc<Resources>,
    /// The NICs whose events can be read.
    nics: Vec<usize>,
}

impl Events for NicEvents {
    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let fd = |nic: &usize| {
            let context = &self.resources.nics[*nic].port.context;
            // SAFETY: the context stays open as long as `resources` exists.
            unsafe { BorrowedFd::borrow_raw(context.event_fd()) }
        };
        self.nics.iter().map(fd).collect()
    }

    fn handle(&mut self, index: usize) {
        let nic = self.nics[index];
        let resources = &self.resources;
        let (event, text) = match resources.nics[nic].port.context.event() {
            Ok(event) => event,
            // A signal; the next poll finds the event again.
            Err(Error::Verbs { errno: Errno::INTR | Errno::AGAIN, .. }) => return,
            // The descriptor of a removed device stays readable for ever.
            Err(error) => {
                resources.set_lost(nic, format!("its events cannot be read: {error}"));
                self.nics.remove(index);
                return;
            }
        };
        match event {
            ibv_event_type::DEVICE_FATAL | ibv_event_type::CQ_ERR | ibv_event_type::SRQ_ERR => {
                resources.set_lost(nic, text);
            }
            // The rank does not poll now, and peers continue to send.
            ibv_event_type::SRQ_LIMIT_REACHED => {
                // Requested before the poll: if all buffers were used in between, no message could arrive
                // that causes the event.
                resources.nics[nic].request_low_event();
                // An error is returned again to the next caller that polls.
                let _ = resources.receiver.poll();
            }
            ibv_event_type::PORT_ERR => resources.nics[nic].set_down(true),
            ibv_event_type::PORT_ACTIVE => resources.nics[nic].set_down(false),
            _ => {}
        }
    }
}

struct Server<E> {
    resources: Arc<Resources>,
    events: E,
    listener: TcpListener,
    /// The end of the pause after a connection could not be accepted.
    accepts_after: Option<Deadline>,
    timeouts: ClientTimeouts,
    /// The clients in the order of their connections.
    clients: Vec<Client>,
    stop: Arc<WakeupEvent>,
    stopped: Arc<AtomicBool>,
}

struct Ready {
    events: Vec<bool>,
    clients: Vec<bool>,
    listener: bool,
}

impl<E: Events> Server<E> {
    fn run(&mut self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let Ok(ready) = self.wait() else {
                thread::sleep(PAUSE);
                continue;
            };

            // From the last one, because a source that is lost is removed.
            for (index, is_ready) in ready.events.into_iter().enumerate().rev() {
                if is_ready {
                    self.events.handle(index);
                }
            }
            self.serve(&ready.clients);
            if ready.listener {
                self.accept();
            }
        }
    }

    fn wait(&mut self) -> rustix::io::Result<Ready> {
        self.accepts_after = self.accepts_after.filter(|pause| !pause.has_passed());
        let deadlines = self.clients.iter().filter_map(Client::deadline).chain(self.accepts_after);
        let limit = deadlines.min().map(Deadline::remaining);
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());

        let readable = |fd| PollFd::from_borrowed_fd(fd, PollFlags::IN);
        let events = self.events.fds();
        let mut fds = vec![readable(self.stop.fd())];
        fds.extend(events.iter().copied().map(readable));
        fds.extend(self.clients.iter().map(|it| PollFd::from_borrowed_fd(it.fd(), it.events())));
        if self.accepts_after.is_none() {
            fds.push(readable(self.listener.as_fd()));
        }
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }

        let mut ready = fds.iter().skip(1).map(|fd| !fd.revents().is_empty());
        Ok(Ready {
            events: ready.by_ref().take(events.len()).collect(),
            clients: ready.by_ref().take(self.clients.len()).collect(),
            listener: ready.next().unwrap_or(false),
        })
    }

    /// Serves the clients that are ready, and closes those that have ended or are late.
    fn serve(&mut self, ready: &[bool]) {
        let mut ready = ready.iter();
        let closed = self.clients.extract_if(.., |client| {
            let is_ready = ready.next() == Some(&true);
            let is_open = !is_ready || client.advance(&self.resources);
            !is_open || client.deadline().is_some_and(Deadline::has_passed)
        });
        for client in closed.collect::<Vec<_>>() {
            client.close(&self.resources);
        }
    }

    fn accept(&mut self) {
        let stream = match self.listener.accept() {
            Ok((stream, _)) => stream,
            Err(error) => {
                let is_gone = matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::Interrupted | ErrorKind::ConnectionAborted
                );
                if !is_gone {
                    self.accepts_after = Some(Deadline::after(PAUSE));
                }
                return;
            }
        };
        let Ok(mut client) = Client::new(stream, self.timeouts) else { return };
        // The token has often arrived with the connection.
        if client.advance(&self.resources) {
            self.add(client);
        }
    }

    /// A rank needs little time to send the token and connects again, so the oldest client without it is closed
    /// if there are too many.
    fn add(&mut self, client: Client) {
        let strangers = self.clients.iter().filter(|client| !client.is_rank()).count();
        if !client.is_rank()
            && strangers >= self.resources.ranks + STRANGERS_MAX
            && let Some(oldest) = self.clients.iter().position(|client| !client.is_rank())
        {
            self.clients.remove(oldest).close(&self.resources);
        }
        self.clients.push(client);
    }
}
