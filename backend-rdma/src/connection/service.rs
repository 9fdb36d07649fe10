//! Runs the service thread of a rank, which answers TCP requests of peers and handles NIC events.
//!
//! It owns the passive ends of the peers' queue pairs. They live as long as the connection that requested
//! them.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::JoinHandle;
use std::time::Duration;

use ibverbs_sys::ibv_event_type;
use peerlane_hal::{Deadline, Rank, RemoteKey as _};
use peerlane_toolkit::DeadlineSocket;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};

use super::control::{FRAME_BYTES_MAX, OpenRequest, Request, Response, framed};
use super::receiver::{SignalReceiver, WakeupEvent};
use super::signals::RAILS_MAX;
use crate::error::Error;
use crate::nic::{self, Nic, QpAddress};
use crate::options::{Options, SignalBy};
use crate::registration;
use crate::sys::{Qp, QpSizes};

const RESPONSE_TIMEOUT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Resources {
    pub(crate) rank: Rank,
    pub(crate) ranks: usize,
    pub(crate) options: Options,
    /// The NICs of this rank, of which the first one carries the primary queue pair of every engine.
    pub(crate) nics: Arc<[Nic]>,
    pub(crate) receiver: SignalReceiver,
    /// Random bytes that a peer must send to prove that it knows the address of this rank.
    pub(crate) token: [u8; 16],
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
        let mut token = [0; 16];
        retry_on_intr(|| getrandom(&mut token, GetRandomFlags::empty()))
            .map_err(Error::system("ask for random bytes"))?;
        Ok(Self { rank, ranks, options, nics, receiver, token, lost: OnceLock::new() })
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
    pub(crate) fn start(resources: &Arc<Resources>, ip: IpAddr) -> Result<Self, Error> {
        let any: IpAddr = match ip {
            IpAddr::V4(_) => [0; 4].into(),
            IpAddr::V6(_) => [0; 16].into(),
        };
        let listener = TcpListener::bind((any, 0)).map_err(Error::io("listen for peers"))?;
        listener.set_nonblocking(true).map_err(Error::io("listen for peers"))?;
        let port = listener.local_addr().map_err(Error::io("listen for peers"))?.port();
        let stop = WakeupEvent::new()?;
        stop.set_asleep(true);
        let stopped = Arc::new(AtomicBool::new(false));
        let mut server = Server {
            resources: Arc::clone(resources),
            listener,
            clients: Vec::new(),
            stop: Arc::clone(&stop),
            stopped: Arc::clone(&stopped),
        };
        let thread = std::thread::Builder::new()
            .name("peerlane-rdma".to_owned())
            .spawn(move || server.run())
            .map_err(Error::io("start the thread that answers peers"))?;
        Ok(Self { address: SocketAddr::new(ip, port), stop, stopped, thread: Some(thread) })
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

struct Server {
    resources: Arc<Resources>,
    listener: TcpListener,
    clients: Vec<Client>,
    stop: Arc<WakeupEvent>,
    stopped: Arc<AtomicBool>,
}

struct Client {
    stream: TcpStream,
    bytes: Vec<u8>,
    /// The rank of the connected peer, or `None` until the peer has sent the token.
    rank: Option<Rank>,
    queue_pairs: Vec<PassiveQp>,
}

/// The passive end of a queue pair, which receives from a peer's engine and never sends.
struct PassiveQp {
    qp: Qp,
    nic: usize,
    primary: u32,
}

impl Server {
    fn run(&mut self) {
        while !self.stopped.load(Ordering::SeqCst) {
            let Ok(ready) = self.sleep() else { return };
            for nic in ready.nics {
                self.handle_event(nic);
            }
            if ready.listener {
                self.accept();
            }
            for index in ready.clients.into_iter().rev() {
                if self.answer_requests(index).is_err() {
                    let client = self.clients.swap_remove(index);
                    close(&self.resources, client.queue_pairs);
                }
            }
        }
    }

    fn sleep(&self) -> rustix::io::Result<Ready> {
        let nics = self.resources.nics.iter().map(|nic| {
            // SAFETY: the context stays open as long as `resources` exists.
            unsafe { BorrowedFd::borrow_raw(nic.port.context.event_fd()) }
        });
        let clients = self.clients.iter().map(|client| client.stream.as_fd());
        let mut fds: Vec<PollFd<'_>> = [self.stop.fd(), self.listener.as_fd()]
            .into_iter()
            .chain(nics)
            .chain(clients)
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        let is_ready: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let (nics, clients) = is_ready[2..].split_at(self.resources.nics.len());
        let indices = |ready: &[bool]| (0..ready.len()).filter(|index| ready[*index]).collect();
        Ok(Ready { listener: is_ready[1], nics: indices(nics), clients: indices(clients) })
    }

    fn handle_event(&self, nic: usize) {
        let Ok((event, text)) = self.resources.nics[nic].port.context.event() else { return };
        match event {
            ibv_event_type::DEVICE_FATAL | ibv_event_type::CQ_ERR | ibv_event_type::SRQ_ERR => {
                self.resources.set_lost(nic, text);
            }
            // The rank does not poll now, and peers continue to send.
            ibv_event_type::SRQ_LIMIT_REACHED => {
                // Requested before the poll: if all buffers were used in between, no message could arrive
                // that causes the event.
                self.resources.nics[nic].request_low_event();
                // An error is returned again to the next caller that polls.
                let _ = self.resources.receiver.poll();
            }
            ibv_event_type::PORT_ERR => self.resources.nics[nic].set_down(true),
            ibv_event_type::PORT_ACTIVE => self.resources.nics[nic].set_down(false),
            _ => {}
        }
    }

    fn accept(&mut self) {
        let Ok((stream, _)) = self.listener.accept() else { return };
        let ready = stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true));
        if ready.is_ok() {
            self.clients.push(Client {
                stream,
                bytes: Vec::new(),
                rank: None,
                queue_pairs: Vec::new(),
            });
        }
    }

    fn answer_requests(&mut self, index: usize) -> std::io::Result<()> {
        let client = &mut self.clients[index];
        let mut buffer = [0; 4096];
        let count = match client.stream.read(&mut buffer) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            // The next poll finds the bytes again.
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => return Ok(()),
            read => read?,
        };
        client.bytes.extend_from_slice(&buffer[..count]);
        while let Some(request) = client.request()? {
            let response = client.response(&self.resources, &request);
            DeadlineSocket::new(&client.stream, Deadline::after(RESPONSE_TIMEOUT))
                .write_all(&framed(&response.encode()))?;
        }
        Ok(())
    }
}

struct Ready {
    listener: bool,
    nics: Vec<usize>,
    clients: Vec<usize>,
}

impl Client {
    fn request(&mut self) -> std::io::Result<Option<Request>> {
        let Some((length, rest)) = self.bytes.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > FRAME_BYTES_MAX {
            return Err(std::io::Error::other(format!(
                "a request of {length} bytes, expected at most {FRAME_BYTES_MAX}"
            )));
        }
        let Some(request) = rest.get(..length) else { return Ok(None) };
        let request = Request::decode(request).map_err(std::io::Error::other)?;
        self.bytes.drain(..4 + length);
        Ok(Some(request))
    }

    fn response(&mut self, resources: &Arc<Resources>, request: &Request) -> Response {
        match (*request, self.rank) {
            (Request::Hello { token, rank, ranks }, _) => {
                if token != resources.token {
                    return Response::Refused(
                        "the address is of a fabric that was closed there".to_owned(),
                    );
                }
                if ranks as usize != resources.ranks {
                    let expected = resources.ranks;
                    return Response::Refused(format!("it was opened for {expected} ranks"));
                }
                self.rank = Some(rank);
                Response::Yes
            }
            (_, None) => Response::Refused("it expects the token first".to_owned()),
            (Request::Import(key), _) => {
                let known = key.rank == resources.rank && registration::find(&key).is_some();
                let known = known && key.region_bytes() == key.bytes;
                if known { Response::Yes } else { Response::Freed }
            }
            (Request::Open(request), _) => match self.open(resources, &request) {
                Ok((address, signal)) => Response::Opened { address, signal },
                Err(error) => Response::Refused(error.to_string()),
            },
            (Request::Close { primary }, _) => {
                close(
                    resources,
                    self.queue_pairs.extract_if(.., |qp| qp.primary == primary).collect(),
                );
                Response::Yes
            }
        }
    }

    fn open(
        &mut self,
        resources: &Resources,
        request: &OpenRequest,
    ) -> Result<(QpAddress, SignalBy), Error> {
        let OpenRequest { address: remote, role, nic: nic_index, signal } = request;
        let (nic_index, receiver) = (usize::from(*nic_index), &resources.receiver);
        let nic = resources.nics.get(nic_index).ok_or_else(|| {
            let count = resources.nics.len();
            Error::argument(format!(
                "the index of the NIC is {nic_index}, expected less than {count}"
            ))
        })?;
        let is_open = |primary| self.queue_pairs.iter().any(|open| open.primary == primary);
        if role.primary.is_some_and(|primary| !is_open(primary)) {
            return Err(Error::argument(format!("the primary queue pair of {role:?} is not open")));
        }
        let sizes = QpSizes { sends: 1, inline_bytes: 0 };
        let qp = Qp::create(&nic.domain, &nic.cq, Some(&nic.srq), sizes)?;
        let local = QpAddress::new(&qp, &nic.port)?;
        // Added before a message can arrive.
        receiver.open((nic_index, qp.number()), *role);
        let primary = role.primary.unwrap_or(qp.number());
        let passive_qp = PassiveQp { qp, nic: nic_index, primary };
        if let Err(error) =
            nic::move_to_rtr(&passive_qp.qp, &nic.port, &resources.options, &local, remote)
        {
            close(resources, vec![passive_qp]);
            return Err(error);
        }
        let signal = signal.unwrap_or_else(|| {
            if passive_qp.qp.writes_in_order() { SignalBy::Write } else { SignalBy::Message }
        });
        let signal = match signal {
            SignalBy::Write if !receiver.allow_direct_writes() => SignalBy::Message,
            signal => signal,
        };
        self.queue_pairs.push(passive_qp);
        Ok((local, signal))
    }
}

/// Processes the messages that have arrived before it closes queue pairs, because destroying a queue pair may
/// discard them.
fn close(resources: &Resources, queue_pairs: Vec<PassiveQp>) {
    queue_pairs.iter().for_each(|qp| qp.qp.fail());
    resources.receiver.close(queue_pairs.iter().map(|qp| (qp.nic, qp.qp.number())));
}
