//! Handing descriptors of shared memory to other processes, by `SCM_RIGHTS`.
//!
//! Each process listens at an abstract socket that is named by its random token, so there is no file
//! that a killed process could leave behind. Only processes of the same user are answered. One
//! question and one answer a connection:
//!
//! | question | `PLRQ`, version, generation, the rank that owns it, its role |
//! | --- | --- |
//! | answer | status (0: here it is, 1: freed), and the descriptor |

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::registry::{self, Backing, Wanted};
use crate::deadline::Deadline;
use crate::host::error::Error;
use crate::host::key::ProcessToken;
use crate::rank::Rank;
use crate::wire::{Reader, Writer};

const MAGIC: [u8; 4] = *b"PLRQ";
const VERSION: u16 = 1;
const QUESTION_BYTES: usize = 4 + 2 + 8 + 4 + 4;
const HERE: u8 = 0;
const FREED: u8 = 1;
/// How long the server lets one asker keep the others waiting.
const ASKER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the name of the socket may stay taken.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);

fn name(process: ProcessToken) -> String {
    let hex = process.0.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("peerlane-{hex}")
}

/// Keeps the server of this process alive; it ends with the last fabric.
#[derive(Debug)]
pub(in crate::host) struct ServerUser(());

/// The server and its users. It starts and ends under the lock, so that the next one finds the name
/// of the socket free.
#[derive(Default)]
struct Shared {
    users: usize,
    server: Option<Server>,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { users: 0, server: None });

impl ServerUser {
    /// Starts the server if there is none.
    pub(in crate::host) fn enter() -> Result<Self, Error> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.server.is_none() {
            shared.server = Some(Server::start()?);
        }
        shared.users += 1;
        Ok(Self(()))
    }
}

impl Drop for ServerUser {
    fn drop(&mut self) {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.users -= 1;
        if shared.users == 0 {
            shared.server = None;
        }
    }
}

/// The thread that answers.
struct Server {
    listener: Arc<UnixListener>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start() -> Result<Self, Error> {
        let name = name(registry::process_token());
        let address = SocketAddr::from_abstract_name(&name)
            .map_err(Error::io(format!("name the abstract socket {name}")))?;
        let listener =
            bind(&address).map_err(Error::io(format!("listen at the abstract socket {name}")))?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let thread = std::thread::Builder::new()
            .name("peerlane-memory".to_owned())
            .spawn(move || serve(&accepting))
            .map_err(Error::io("start the thread that hands out shared memory"))?;
        Ok(Self { listener, thread: Some(thread) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ends the `accept`; the descriptor itself closes with the last reference.
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Listens once the name is free: a process that another thread is just starting holds the socket of
/// the server before this one between its fork and its exec.
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

fn serve(listener: &UnixListener) {
    loop {
        match listener.accept() {
            // An asker that fails has its own error to report.
            Ok((asker, _)) => drop(answer(&asker)),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) if is_passing(&error) => std::thread::sleep(Duration::from_millis(10)),
            Err(_) => return,
        }
    }
}

/// Whether `accept` can succeed later: descriptors ran out, or an asker gave up.
fn is_passing(error: &std::io::Error) -> bool {
    use rustix::io::Errno;
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::CONNABORTED))
}

fn answer(asker: &UnixStream) -> std::io::Result<()> {
    asker.set_read_timeout(Some(ASKER_TIMEOUT))?;
    asker.set_write_timeout(Some(ASKER_TIMEOUT))?;
    let user = sockopt::socket_peercred(asker)?.uid;
    if user != rustix::process::geteuid() {
        return Ok(());
    }
    let Some(wanted) = read_question(asker)? else { return Ok(()) };
    let registration = registry::find(&wanted);
    let fd = registration.as_deref().and_then(|registration| match &registration.backing {
        Backing::Mapped(mapping) => Some(mapping.fd()),
        Backing::Borrowed(_) => None,
    });
    let status = [if fd.is_some() { HERE } else { FREED }];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        rights.push(SendAncillaryMessage::ScmRights(fds));
    }
    rustix::net::sendmsg(asker, &[IoSlice::new(&status)], &mut rights, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn read_question(mut asker: &UnixStream) -> std::io::Result<Option<Wanted>> {
    let mut question = [0; QUESTION_BYTES];
    std::io::Read::read_exact(&mut asker, &mut question)?;
    let mut reader = Reader::new(&question);
    let known = reader.array("magic") == Ok(MAGIC) && reader.u16("version") == Ok(VERSION);
    Ok(Wanted::read(&mut reader).ok().filter(|_| known))
}

/// Asks another process for the descriptor of a region.
pub(super) fn ask(
    process: ProcessToken,
    wanted: &Wanted,
    deadline: Deadline,
) -> Result<OwnedFd, Error> {
    let peer = wanted.owner;
    let socket = connect(peer, process, deadline)?;
    let question = wanted.write(Writer::new().bytes(&MAGIC).u16(VERSION)).finish();
    rustix::net::send(&socket, &question, SendFlags::NOSIGNAL).map_err(broken(peer, deadline))?;

    let mut status = [u8::MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let mut slices = [IoSliceMut::new(&mut status)];
    let answer = rustix::net::recvmsg(&socket, &mut slices, &mut rights, flags)
        .map_err(broken(peer, deadline))?;
    let fd = rights.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match (answer.bytes, status, fd) {
        (1, [HERE], Some(fd)) => Ok(fd),
        (1, [FREED], _) => Err(Error::Freed { peer, generation: wanted.generation.0 }),
        (0, ..) => Err(Error::PeerLost {
            peer,
            how: "it closed the connection instead of handing over memory; all ranks of a host \
                  must run as one user"
                .to_owned(),
        }),
        (_, [seen], _) => Err(Error::PeerLost {
            peer,
            how: format!("it answered {seen} without memory, wanted {HERE} or {FREED}"),
        }),
    }
}

fn connect(peer: Rank, process: ProcessToken, deadline: Deadline) -> Result<OwnedFd, Error> {
    let name = name(process);
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(Error::system("name an abstract socket"))?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Error::system("open a unix socket"))?;
    // Zero would mean no timeout at all.
    let left = deadline.remaining().max(Duration::from_millis(1));
    for timeout in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
        sockopt::set_socket_timeout(socket.as_fd(), timeout, Some(left))
            .map_err(Error::system("set a socket timeout"))?;
    }
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(rustix::io::Errno::CONNREFUSED) => Err(Error::PeerLost {
            peer,
            how: format!(
                "nobody listens at the abstract socket {name}; its process has ended, or runs in \
                 another network namespace (containers must share one)"
            ),
        }),
        Err(errno) => Err(broken(peer, deadline)(errno)),
    }
}

fn broken(peer: Rank, deadline: Deadline) -> impl FnOnce(rustix::io::Errno) -> Error {
    use rustix::io::Errno;
    move |errno| match errno {
        Errno::AGAIN | Errno::INPROGRESS => {
            Error::Timeout { peer, what: "hand over its memory", timeout: deadline.timeout() }
        }
        Errno::CONNRESET | Errno::PIPE => {
            Error::PeerLost { peer, how: format!("its socket broke: {errno}") }
        }
        errno => Error::system(format!("ask rank {peer} for shared memory"))(errno),
    }
}
