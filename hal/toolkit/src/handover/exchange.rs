//! Requests file descriptors of another process's memory, and answers such requests in a thread.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut, Read, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, sockopt,
};

use super::{
    Claim, DESCRIPTORS_MAX, EXHAUSTED, FAILED, FREED, HERE, Handover, Host, MESSAGE_FDS_MAX,
    ProcessProof, ProcessToken, Refusal, find_any, role_number, role_of,
};
use crate::PerProcess;
use crate::limits::{SpareDescriptor, SystemError, spawn};
use crate::socket::{DeadlineSocket, peer_user};
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Deadline, DynError, Error, ErrorKind, Generation, KeyError, Rank};

const MAGIC: [u8; 4] = *b"PLRQ";
const VERSION: u16 = 4;
const REQUEST_BYTES: usize = 4 + 2 + 2 + 8 + 4 + 4;
/// The largest error text in bytes that is read from a process that failed to export its memory.
const WHY_BYTES_MAX: u64 = 4096;

pub(super) fn encode_request(claim: &Claim) -> Vec<u8> {
    Writer::new()
        .bytes(&MAGIC)
        .u16(VERSION)
        .u16(claim.backend.0)
        .u64(claim.generation.0)
        .u32(claim.owner.0)
        .u32(role_number(claim.role))
        .finish()
}

fn parse_request(request: &[u8]) -> Result<Option<Claim>, KeyError> {
    let mut reader = Reader::new(request);
    if reader.array("magic")? != MAGIC || reader.u16("version")? != VERSION {
        return Ok(None);
    }
    let backend = BackendId(reader.u16("backend")?);
    let generation = Generation(reader.u64("generation")?);
    let owner = Rank(reader.u32("rank")?);
    Ok(Some(Claim { backend, generation, owner, role: role_of(reader.u32("role")?)? }))
}

#[derive(Clone, Copy, Debug)]
struct Header {
    status: u8,
    count: u32,
    proof: ProcessProof,
}

impl Header {
    const BYTES: usize = 1 + 4 + size_of::<ProcessProof>();

    /// Creates the answer to a process that has the key of memory of this process.
    fn known(status: u8, count: u32) -> Self {
        Self { status, count, proof: ProcessToken::own().proof() }
    }

    /// Creates the answer to a process that has named no memory of this process, and does not learn the proof.
    fn unknown() -> Self {
        Self { status: FREED, count: 0, proof: ProcessProof::default() }
    }

    fn encode(self) -> Vec<u8> {
        Writer::new().bytes(&[self.status]).u32(self.count).bytes(&self.proof).finish()
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let [status, a, b, c, d, proof @ ..] = bytes;
        Self { status, count: u32::from_le_bytes([a, b, c, d]), proof }
    }
}

/// Requests the file descriptors of a registration from the process that owns it.
///
/// # Errors
/// Returns the [`Refusal`].
pub fn ask(
    process: ProcessToken,
    claim: &Claim,
    deadline: Deadline,
) -> Result<Vec<OwnedFd>, Refusal> {
    let mut socket = connect(process, deadline)?;
    check_user(process, &socket)?;
    socket.write_all(&encode_request(claim)).map_err(|error| socket_error(error, deadline))?;
    Request { process, socket, deadline }.receive_all()
}

/// Checks that the process that listens at the socket of `process` belongs to the user of this process.
///
/// Once a process has ended, every process of the network namespace can listen at its name.
fn check_user(process: ProcessToken, socket: &DeadlineSocket<OwnedFd>) -> Result<(), Refusal> {
    let found = socket.peer_user().map_err(Refusal::io("cannot find the user of a peer"))?;
    let expected = rustix::process::geteuid().as_raw();
    if found == expected {
        return Ok(());
    }
    let name = process.socket_name();
    let how = format!(
        "a process of user {found} listens at the abstract socket {name}, expected user {expected}, that of this process; \
         run all ranks of a host as the same user. If they are, the peer has ended, and another process has its name"
    );
    Err(Refusal::Gone { how })
}

struct Request {
    process: ProcessToken,
    socket: DeadlineSocket<OwnedFd>,
    deadline: Deadline,
}

impl Request {
    fn receive_all(&mut self) -> Result<Vec<OwnedFd>, Refusal> {
        let mut fds = Vec::new();
        loop {
            let before = fds.len();
            let Header { status, count, proof } = self.receive(&mut fds)?;

            // Another process can have the name of one that has ended, and then has no memory to share.
            let is_known = proof == self.process.proof();
            match status {
                HERE | FAILED | EXHAUSTED if !is_known => return Err(self.no_proof()),
                HERE if fds.len() == count as usize => return Ok(fds),
                HERE if fds.len() > before && fds.len() < count.min(DESCRIPTORS_MAX) as usize => {}
                FREED => return Err(Refusal::Freed),
                FAILED => return Err(self.failed(ErrorKind::Other)),
                EXHAUSTED => return Err(self.failed(ErrorKind::OutOfMemory)),
                status => {
                    let how = format!(
                        "the peer answered with status {status} and {} of {count} file descriptors, expected status \
                         {HERE} and at most {DESCRIPTORS_MAX}, or a status from {FREED} to {EXHAUSTED}",
                        fds.len()
                    );
                    return Err(Refusal::Gone { how });
                }
            }
        }
    }

    /// Creates the error for a message of which the kernel dropped descriptors at the limit of open files.
    fn no_descriptor(&self) -> Refusal {
        let what = "cannot receive the file descriptors of a peer's memory";
        Refusal::System(SystemError::new(what, Errno::MFILE))
    }

    fn no_proof(&self) -> Refusal {
        let name = self.process.socket_name();
        let how = format!(
            "the process that listens at the abstract socket {name} does not know the peer's key: the peer has ended, and \
             another process has its name"
        );
        Refusal::Gone { how }
    }

    fn receive(&self, fds: &mut Vec<OwnedFd>) -> Result<Header, Refusal> {
        let mut header = [0; Header::BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let mut slices = [IoSliceMut::new(&mut header)];
        let answer = self
            .socket
            .call(sockopt::Timeout::Recv, |socket| {
                rustix::net::recvmsg(socket, &mut slices, &mut rights, RecvFlags::CMSG_CLOEXEC)
            })
            .map_err(|error| socket_error(error, self.deadline))?;
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        // The kernel drops the descriptors that do not fit below the limit of open files.
        if answer.flags.contains(ReturnFlags::CTRUNC) {
            return Err(self.no_descriptor());
        }
        match answer.bytes {
            Header::BYTES => Ok(Header::decode(header)),
            // Each message arrives as a whole.
            bytes => Err(Refusal::Gone {
                how: format!(
                    "the peer closed the connection after {bytes} bytes of an answer and {} file descriptors; run all \
                     ranks of a host as the same user",
                    fds.len()
                ),
            }),
        }
    }

    /// Reads the reason of a peer that failed to export its memory.
    fn failed(&mut self, kind: ErrorKind) -> Refusal {
        let mut why = Vec::new();
        // A part of the text is better than none.
        let _ = (&mut self.socket).take(WHY_BYTES_MAX).read_to_end(&mut why);
        Refusal::Failed { kind, why: String::from_utf8_lossy(&why).into_owned() }
    }
}

fn connect(process: ProcessToken, deadline: Deadline) -> Result<DeadlineSocket<OwnedFd>, Refusal> {
    let name = process.socket_name();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(Refusal::system("cannot create the name of an abstract socket"))?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Refusal::system("cannot open a Unix socket"))?;
    let socket = DeadlineSocket::new(socket, deadline);

    // The timeout of sends also limits the connection, which waits for a place in the queue of the peer.
    let connected =
        socket.call(sockopt::Timeout::Send, |socket| rustix::net::connect(socket, &address));
    match connected {
        Ok(()) => Ok(socket),
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => Err(Refusal::Gone {
            how: format!("no process listens at the abstract socket {name}: the peer has ended"),
        }),
        Err(error) => Err(socket_error(error, deadline)),
    }
}

fn socket_error(error: std::io::Error, deadline: Deadline) -> Refusal {
    use std::io::ErrorKind::{BrokenPipe, ConnectionReset, TimedOut, WouldBlock};
    match error.kind() {
        WouldBlock | TimedOut => Refusal::Late { timeout: deadline.timeout() },
        ConnectionReset | BrokenPipe => {
            Refusal::Gone { how: format!("the socket to the peer failed: {error}") }
        }
        _ => Refusal::io("cannot request memory from a peer")(error),
    }
}

const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time in which a client must receive each message of its answer, since other clients wait for the thread.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// The largest number of clients whose request has not arrived; the oldest client is dropped for a new one.
const CLIENTS_MAX: usize = 256;
/// The pause after a failed system call of the server thread, for example because file descriptors ran out.
const POLL_PAUSE: Duration = Duration::from_millis(10);
/// The time that a new server waits until the name of its Unix socket is free.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps a thread running that sends file descriptors of this process's memory to other processes. The thread ends when
/// the last server is dropped.
#[derive(Debug)]
pub struct Server {
    /// The process of the thread, which does not exist in a forked child.
    process: u32,
}

/// The server thread starts and ends under this lock, so that the next thread finds the name of the socket free.
#[derive(Default)]
struct Shared {
    users: usize,
    thread: Option<Thread>,
}

impl Shared {
    fn lock() -> MutexGuard<'static, Self> {
        static SHARED: PerProcess<Mutex<Shared>> = PerProcess::new();
        SHARED.value_or_create(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Server {
    /// Starts the server thread unless it runs, and keeps it running until the returned value is dropped.
    ///
    /// # Errors
    /// Returns [`Refusal::System`] if the system has no socket or thread.
    pub fn enter() -> Result<Self, Refusal> {
        Host::load_own().map_err(Refusal::System)?;
        let mut shared = Shared::lock();
        if shared.thread.is_none() {
            shared.thread = Some(Thread::start()?);
        }
        shared.users += 1;
        Ok(Self { process: std::process::id() })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if self.process != std::process::id() {
            return;
        }

        let mut shared = Shared::lock();
        shared.users -= 1;
        if shared.users == 0 {
            shared.thread = None;
        }
    }
}

struct Thread {
    listener: Arc<UnixListener>,
    closing: Arc<AtomicBool>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    fn start() -> Result<Self, Refusal> {
        let name = ProcessToken::own().socket_name();
        let address = SocketAddr::from_abstract_name(&name)
            .map_err(Refusal::io(format!("cannot create the abstract socket {name}")))?;
        let listener = bind(&address)
            .map_err(Refusal::io(format!("cannot listen at the abstract socket {name}")))?;
        listener.set_nonblocking(true).map_err(Refusal::io("cannot use the abstract socket"))?;
        let spare = SpareDescriptor::reserve().map_err(Refusal::System)?;
        let (listener, closing) = (Arc::new(listener), Arc::new(AtomicBool::new(false)));
        let (accepting, ends) = (Arc::clone(&listener), Arc::clone(&closing));
        let handle = spawn("peerlane-memory", move || serve(&accepting, spare, &ends))
            .map_err(Refusal::System)?;
        Ok(Self { listener, closing, handle: Some(handle) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        self.closing.store(true, Ordering::Release);
        // Ends the `poll`. The descriptor closes with the last reference.
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
        }
    }
}

/// Waits until the name of the server socket is free, because a process that another thread just starts
/// holds the socket of the previous server between its fork and its exec.
fn bind(address: &SocketAddr) -> std::io::Result<UnixListener> {
    let deadline = Deadline::after(BIND_TIMEOUT);
    loop {
        match UnixListener::bind_addr(address) {
            Err(error)
                if error.kind() == std::io::ErrorKind::AddrInUse && !deadline.has_passed() =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            bound => return bound,
        }
    }
}

struct Client {
    stream: UnixStream,
    request: Vec<u8>,
    deadline: Deadline,
}

/// Answers every client when its request has arrived, so that an idle client does not delay others.
fn serve(listener: &UnixListener, mut spare: SpareDescriptor, closing: &AtomicBool) {
    let mut clients: VecDeque<Client> = VecDeque::new();
    while !closing.load(Ordering::Acquire) {
        let mut polled = vec![PollFd::new(listener, PollFlags::IN)];
        polled.extend(clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
        // The deadlines of the clients are in the order of their arrival.
        let limit = clients.front().map(|client| client.deadline.remaining());
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        match rustix::event::poll(&mut polled, limit.as_ref()) {
            Ok(_) => {}
            // A signal; the next wait takes the time that is left then.
            Err(Errno::INTR) => continue,
            Err(_) => {
                std::thread::sleep(POLL_PAUSE);
                continue;
            }
        }
        let ready: Vec<bool> = polled.iter().map(|polled| !polled.revents().is_empty()).collect();
        let mut is_ready = ready[1..].iter();
        clients.retain_mut(|client| {
            let is_ready = is_ready.next() == Some(&true);
            !client.deadline.has_passed()
                && (!is_ready || client.read_and_answer().is_ok_and(|done| !done))
        });
        if ready[0] && !closing.load(Ordering::Acquire) {
            accept(listener, &mut spare, &mut clients);
        }
    }
}

fn accept(listener: &UnixListener, spare: &mut SpareDescriptor, clients: &mut VecDeque<Client>) {
    match listener.accept() {
        Ok((stream, _)) => {
            let deadline = Deadline::after(CLIENT_TIMEOUT);
            let mut client = Client { stream, request: Vec::new(), deadline };
            // Clients of other users take no place. The request has often arrived with the connection.
            if is_own_user(&client.stream)
                && client.stream.set_nonblocking(true).is_ok()
                && client.read_and_answer().is_ok_and(|done| !done)
            {
                clients.push_back(client);
            }
            if clients.len() > CLIENTS_MAX {
                clients.pop_front();
            }
        }
        Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
        // The thread serves the clients that it has, and ends only when it is closed.
        Err(error) => {
            let error = SystemError::of_io("cannot accept the connection of a peer", &error);
            if !error.is_exhausted() {
                std::thread::sleep(POLL_PAUSE);
                return;
            }
            match spare.lend(|| listener.accept()) {
                Ok((client, _)) if is_own_user(&client) => {
                    // A client that is gone needs no answer.
                    let _ = refuse_request(&client, &DynError::new(error));
                }
                _ => std::thread::sleep(POLL_PAUSE),
            }
            spare.take_back();
        }
    }
}

fn is_own_user(client: &UnixStream) -> bool {
    peer_user(client).is_ok_and(|user| user == rustix::process::geteuid().as_raw())
}

impl Client {
    fn read_and_answer(&mut self) -> std::io::Result<bool> {
        use std::io::ErrorKind::{Interrupted, WouldBlock};
        let mut bytes = [0; REQUEST_BYTES];
        let wanted = REQUEST_BYTES - self.request.len();
        match (&self.stream).read(&mut bytes[..wanted]) {
            Ok(0) => return Err(std::io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => self.request.extend_from_slice(&bytes[..read]),
            // The bytes that are here now are polled again.
            Err(error) if matches!(error.kind(), WouldBlock | Interrupted) => return Ok(false),
            Err(error) => return Err(error),
        }
        if self.request.len() < REQUEST_BYTES {
            return Ok(false);
        }
        answer(&self.stream, &self.request)?;
        Ok(true)
    }
}

fn answer(mut client: &UnixStream, request: &[u8]) -> std::io::Result<()> {
    let Some(claim) = parse_request(request).ok().flatten() else { return Ok(()) };
    let memory = find_any(&claim);
    let found = memory.as_deref().and_then(|memory| Some((memory, memory.descriptors()?)));
    let Some((memory, count)) = found.filter(|(_, count)| *count <= DESCRIPTORS_MAX) else {
        return client.write_all(&Header::unknown().encode());
    };
    hand_over(client, memory, count)
}

/// Sends the descriptors in several messages, so that only those of one message are open in this process.
fn hand_over(client: &UnixStream, memory: &dyn Handover, count: u32) -> std::io::Result<()> {
    // More than one message may not fit into the buffer of the socket.
    client.set_nonblocking(false)?;
    let mut next = 0;
    loop {
        let last = count.min(next + MESSAGE_FDS_MAX as u32);
        let fds: Result<Vec<OwnedFd>, DynError> =
            (next..last).map(|it| memory.descriptor(it)).collect();
        let client = DeadlineSocket::new(client, Deadline::after(ANSWER_TIMEOUT));
        match fds {
            Ok(fds) => send(&client, Header::known(HERE, count), &fds)?,
            Err(why) => return refuse(client, &why),
        }
        next = last;
        if next == count {
            return Ok(());
        }
    }
}

/// Reads a request, and tells a client that knows memory of this process that it cannot be served.
fn refuse_request(client: &UnixStream, why: &DynError) -> std::io::Result<()> {
    client.set_nonblocking(false)?;
    let mut client = DeadlineSocket::new(client, Deadline::after(ANSWER_TIMEOUT));
    let mut request = [0; REQUEST_BYTES];
    client.read_exact(&mut request)?;
    match parse_request(&request).ok().flatten().and_then(|claim| find_any(&claim)) {
        Some(_) => refuse(client, why),
        None => client.write_all(&Header::unknown().encode()),
    }
}

/// Answers that the memory cannot be exported, and why.
fn refuse(mut client: DeadlineSocket<&UnixStream>, why: &DynError) -> std::io::Result<()> {
    let is_exhausted = why.kind() == ErrorKind::OutOfMemory;
    let status = if is_exhausted { EXHAUSTED } else { FAILED };
    client.write_all(&Header::known(status, 0).encode())?;
    client.write_all(why.to_string().as_bytes())
}

fn send(
    client: &DeadlineSocket<&UnixStream>,
    header: Header,
    fds: &[OwnedFd],
) -> std::io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        rights.push(SendAncillaryMessage::ScmRights(&fds));
    }
    let header = header.encode();
    client.call(sockopt::Timeout::Send, |client| {
        rustix::net::sendmsg(client, &[IoSlice::new(&header)], &mut rights, SendFlags::NOSIGNAL)
    })?;
    Ok(())
}

/// Returns an answer without descriptors that proves to be of this process.
#[cfg(test)]
pub(super) fn answer_of_this_process(status: u8) -> Vec<u8> {
    Header::known(status, 0).encode()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_that_the_kernel_drops_are_no_fault_of_the_peer() {
        let (socket, peer) = UnixStream::pair().unwrap();
        // The space for the descriptors of one message is too small, which looks like a limit that is reached after the first.
        let count = MESSAGE_FDS_MAX + 3;
        let fds = vec![peer.as_fd(); count];
        let mut space = vec![MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(count))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        assert!(rights.push(SendAncillaryMessage::ScmRights(&fds)));
        let header = Header::known(HERE, u32::try_from(count).unwrap()).encode();
        let slices = [IoSlice::new(&header)];
        rustix::net::sendmsg(&peer, &slices, &mut rights, SendFlags::NOSIGNAL).unwrap();
        drop(peer);

        let deadline = Deadline::after(Duration::from_secs(60));
        let socket = DeadlineSocket::new(OwnedFd::from(socket), deadline);
        let mut request = Request { process: ProcessToken::own(), socket, deadline };
        let refusal = request.receive_all().unwrap_err();
        assert!(matches!(&refusal, Refusal::System(error) if error.is_exhausted()), "{refusal:?}");
    }
}
