//! The thread that answers other processes.

use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, sockopt};

use super::process::ProcessToken;
use super::question::{self, Header};
use super::{DESCRIPTORS_MAX, FAILED, FREED, HERE, Handover, MESSAGE_FDS_MAX, Refusal, registry};
use peerlane_hal::Deadline;

/// How long the server lets one asker keep the others waiting.
const ASKER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the name of the socket may stay taken.
const BIND_TIMEOUT: Duration = Duration::from_secs(2);

/// Keeps the thread of this process that hands out memory; it ends with the last of these.
#[derive(Debug)]
pub struct Server(());

/// The thread and its users. It starts and ends under the lock, so that the next one finds the name
/// of the socket free.
#[derive(Default)]
struct Shared {
    users: usize,
    thread: Option<Thread>,
}

static SHARED: Mutex<Shared> = Mutex::new(Shared { users: 0, thread: None });

impl Server {
    /// Starts the thread if there is none.
    ///
    /// # Errors
    /// [`Refusal::System`]: a socket or a thread is not to be had.
    pub fn enter() -> Result<Self, Refusal> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        if shared.thread.is_none() {
            shared.thread = Some(Thread::start()?);
        }
        shared.users += 1;
        Ok(Self(()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.users -= 1;
        if shared.users == 0 {
            shared.thread = None;
        }
    }
}

struct Thread {
    listener: Arc<UnixListener>,
    handle: Option<JoinHandle<()>>,
}

impl Thread {
    fn start() -> Result<Self, Refusal> {
        let name = ProcessToken::own().socket_name();
        let address = SocketAddr::from_abstract_name(&name)
            .map_err(Refusal::io(format!("name the abstract socket {name}")))?;
        let listener =
            bind(&address).map_err(Refusal::io(format!("listen at the abstract socket {name}")))?;
        let listener = Arc::new(listener);
        let accepting = Arc::clone(&listener);
        let handle = std::thread::Builder::new()
            .name("peerlane-memory".to_owned())
            .spawn(move || serve(&accepting))
            .map_err(Refusal::io("start the thread that hands out memory"))?;
        Ok(Self { listener, handle: Some(handle) })
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        // Ends the `accept`; the descriptor itself closes with the last reference.
        let _ = rustix::net::shutdown(&*self.listener, Shutdown::Both);
        if let Some(handle) = self.handle.take() {
            let _ = handle.join();
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

fn answer(mut asker: &UnixStream) -> std::io::Result<()> {
    asker.set_read_timeout(Some(ASKER_TIMEOUT))?;
    asker.set_write_timeout(Some(ASKER_TIMEOUT))?;
    let user = sockopt::socket_peercred(asker)?.uid;
    if user != rustix::process::geteuid() {
        return Ok(());
    }
    let Some(claim) = question::read(asker)? else { return Ok(()) };
    let memory = registry::find_any(&claim);
    let found = memory.as_deref().and_then(|memory| Some((memory, memory.descriptors()?)));
    let Some((memory, count)) = found.filter(|(_, count)| *count <= DESCRIPTORS_MAX) else {
        return asker.write_all(&Header { status: FREED, count: 0 }.encode());
    };
    asker.write_all(&Header { status: HERE, count }.encode())?;
    hand_over(asker, memory, count)
}

/// Sends the descriptors a message at a time, so that no more than that many are open here.
fn hand_over(mut asker: &UnixStream, memory: &dyn Handover, count: u32) -> std::io::Result<()> {
    let mut next = 0;
    while next < count {
        let last = count.min(next + MESSAGE_FDS_MAX as u32);
        let fds: Result<Vec<OwnedFd>, String> =
            (next..last).map(|it| memory.descriptor(it)).collect();
        match fds {
            Ok(fds) => send(asker, &fds)?,
            Err(why) => {
                asker.write_all(&[FAILED])?;
                return asker.write_all(why.as_bytes());
            }
        }
        next = last;
    }
    Ok(())
}

fn send(asker: &UnixStream, fds: &[OwnedFd]) -> std::io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    rights.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(asker, &[IoSlice::new(&[HERE])], &mut rights, SendFlags::NOSIGNAL)?;
    Ok(())
}
