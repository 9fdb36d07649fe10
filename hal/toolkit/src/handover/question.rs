//! Asking another process, and the bytes of question and answer.

use std::io::{IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, sockopt,
};

use super::process::ProcessToken;
use super::{
    Claim, DESCRIPTORS_MAX, FAILED, FREED, HERE, MESSAGE_FDS_MAX, Refusal, role_number, role_of,
};
use peerlane_hal::Deadline;
use peerlane_hal::Rank;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Generation, KeyError};

const MAGIC: [u8; 4] = *b"PLRQ";
const VERSION: u16 = 2;
const QUESTION_BYTES: usize = 4 + 2 + 2 + 8 + 4 + 4;
/// How much of an owner's reason is read.
const WHY_BYTES_MAX: u64 = 4096;

fn write(claim: &Claim) -> Vec<u8> {
    Writer::new()
        .bytes(&MAGIC)
        .u16(VERSION)
        .u16(claim.backend.0)
        .u64(claim.generation.0)
        .u32(claim.owner.0)
        .u32(role_number(claim.role))
        .finish()
}

/// The question of an asker; `None` if it is none that this build understands.
pub(super) fn read(mut asker: &UnixStream) -> std::io::Result<Option<Claim>> {
    let mut question = [0; QUESTION_BYTES];
    asker.read_exact(&mut question)?;
    Ok(parse(&question).ok().flatten())
}

fn parse(question: &[u8]) -> Result<Option<Claim>, KeyError> {
    let mut reader = Reader::new(question);
    if reader.array("magic")? != MAGIC || reader.u16("version")? != VERSION {
        return Ok(None);
    }
    let backend = BackendId(reader.u16("backend")?);
    let generation = Generation(reader.u64("generation")?);
    let owner = Rank(reader.u32("rank")?);
    Ok(Some(Claim { backend, generation, owner, role: role_of(reader.u32("role")?)? }))
}

/// The start of an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Header {
    pub(super) status: u8,
    pub(super) count: u32,
}

impl Header {
    const BYTES: usize = 1 + 4;

    pub(super) fn encode(self) -> Vec<u8> {
        Writer::new().bytes(&[self.status]).u32(self.count).finish()
    }

    fn decode(bytes: [u8; Self::BYTES]) -> Self {
        let [status, count @ ..] = bytes;
        Self { status, count: u32::from_le_bytes(count) }
    }
}

/// Asks another process for the descriptors of a registration: as many as its owner says.
///
/// # Errors
/// The [`Refusal`].
pub fn ask(
    process: ProcessToken,
    claim: &Claim,
    deadline: Deadline,
) -> Result<Vec<OwnedFd>, Refusal> {
    let socket = UnixStream::from(connect(process, deadline)?);
    let asking = Asking { socket: &socket, deadline };
    rustix::net::send(&socket, &write(claim), SendFlags::NOSIGNAL)
        .map_err(|errno| asking.broken(errno))?;
    let header = Header::decode(asking.read_exact()?);
    match header.status {
        HERE if header.count <= DESCRIPTORS_MAX => asking.descriptors(header.count),
        FREED => Err(Refusal::Freed),
        status => Err(Refusal::Gone {
            how: format!(
                "it answered {status} with {} descriptors, wanted {HERE} with at most \
                 {DESCRIPTORS_MAX}, or {FREED}",
                header.count
            ),
        }),
    }
}

/// A question that is being answered.
struct Asking<'a> {
    socket: &'a UnixStream,
    deadline: Deadline,
}

impl Asking<'_> {
    fn descriptors(&self, count: u32) -> Result<Vec<OwnedFd>, Refusal> {
        let mut fds = Vec::new();
        while fds.len() < count as usize {
            let before = fds.len();
            match self.message(&mut fds)? {
                Some(HERE) if fds.len() > before && fds.len() <= count as usize => {}
                Some(FAILED) => return Err(Refusal::Failed { why: self.reason() }),
                Some(HERE) if fds.len() == before => return Err(self.no_descriptor()),
                Some(status) => {
                    let how = format!(
                        "it handed over {} of {count} descriptors with status {status}",
                        fds.len()
                    );
                    return Err(Refusal::Gone { how });
                }
                None => {
                    let how = format!("it closed after {before} of {count} descriptors");
                    return Err(Refusal::Gone { how });
                }
            }
        }
        Ok(fds)
    }

    /// A message came and its descriptors did not: the kernel drops them when this process may not
    /// open more.
    fn no_descriptor(&self) -> Refusal {
        Refusal::System {
            what: "receive the descriptors of a peer's memory (see ulimit -n)".to_owned(),
            errno: Errno::MFILE,
        }
    }

    /// The status of the next message, whose descriptors are appended; `None` at the end.
    fn message(&self, fds: &mut Vec<OwnedFd>) -> Result<Option<u8>, Refusal> {
        self.bound()?;
        let mut status = [u8::MAX];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MESSAGE_FDS_MAX))];
        let mut rights = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let mut slices = [IoSliceMut::new(&mut status)];
        let answer = rustix::net::recvmsg(self.socket, &mut slices, &mut rights, flags)
            .map_err(|errno| self.broken(errno))?;
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(more) = message {
                fds.extend(more);
            }
        }
        Ok((answer.bytes == 1).then_some(status[0]))
    }

    fn reason(&self) -> String {
        let mut why = Vec::new();
        // What came before a timeout is better than nothing.
        let _ = self.socket.take(WHY_BYTES_MAX).read_to_end(&mut why);
        String::from_utf8_lossy(&why).into_owned()
    }

    fn read_exact<const N: usize>(&self) -> Result<[u8; N], Refusal> {
        let mut bytes = [0; N];
        let mut filled = 0;
        while filled < N {
            self.bound()?;
            match rustix::io::read(self.socket, &mut bytes[filled..]) {
                Ok(0) => {
                    return Err(Refusal::Gone {
                        how: "it closed the connection instead of handing over memory; all ranks \
                              of a host must run as one user"
                            .to_owned(),
                    });
                }
                Ok(more) => filled += more,
                Err(errno) => return Err(self.broken(errno)),
            }
        }
        Ok(bytes)
    }

    /// Lets the next call wait no longer than the deadline.
    fn bound(&self) -> Result<(), Refusal> {
        set_timeouts(self.socket, self.deadline)
    }

    fn broken(&self, errno: Errno) -> Refusal {
        broken(errno, self.deadline)
    }
}

fn set_timeouts(socket: impl AsFd, deadline: Deadline) -> Result<(), Refusal> {
    // Zero would mean no timeout at all.
    let left = deadline.remaining().max(Duration::from_millis(1));
    for timeout in [sockopt::Timeout::Send, sockopt::Timeout::Recv] {
        sockopt::set_socket_timeout(socket.as_fd(), timeout, Some(left))
            .map_err(Refusal::system("set a socket timeout"))?;
    }
    Ok(())
}

fn connect(process: ProcessToken, deadline: Deadline) -> Result<OwnedFd, Refusal> {
    let name = process.socket_name();
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes())
        .map_err(Refusal::system("name an abstract socket"))?;
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
        .map_err(Refusal::system("open a unix socket"))?;
    set_timeouts(&socket, deadline)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) => Ok(socket),
        Err(Errno::CONNREFUSED) => Err(Refusal::Gone {
            how: format!(
                "nobody listens at the abstract socket {name}; its process has ended, or runs in \
                 another network namespace (containers must share one)"
            ),
        }),
        Err(errno) => Err(broken(errno, deadline)),
    }
}

fn broken(errno: Errno, deadline: Deadline) -> Refusal {
    match errno {
        Errno::AGAIN | Errno::INPROGRESS => Refusal::Late { timeout: deadline.timeout() },
        Errno::CONNRESET | Errno::PIPE => {
            Refusal::Gone { how: format!("its socket broke: {errno}") }
        }
        errno => Refusal::system("ask a peer for its memory")(errno),
    }
}
