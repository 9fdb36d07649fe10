//! Hands memory of this process to other processes as file descriptors.
//!
//! - [`enter`] adds a registration and assigns its [`Generation`], a random number; dropping the returned
//!   [`Entry`] removes it. A key contains the generation, so a key of freed memory finds nothing, even if new
//!   memory has the old address, and a process without the key cannot request the memory.
//! - [`find`] opens a registration of the same process, [`ask`] one of another process.
//! - [`Host`] identifies the host and the network namespace, outside of which no process can be asked.
//! - [`Server`] is the thread that answers requests; a fabric keeps it running while it is open.
//!
//! A descriptor gives access to the whole file or allocation that contains the registered memory, for as long
//! as the other process keeps it open.
//!
//! Each process listens at an abstract socket named by the first half of its random token, so a killed process
//! leaves no file behind. Only processes of the same user get an answer, and only they are asked. Whoever has a
//! key of a process gets descriptors only from that process: the other half of the token proves that the answer
//! is not that of a process which has taken the name. A connection carries one request and one answer:
//!
//! | message | content |
//! | --- | --- |
//! | request | `PLRQ`, version, backend, generation, rank of the owner, role |
//! | answer, repeated until all descriptors were sent | status (0: found, 1: freed, 2 and a text: export failed, 3 and a text: export failed because memory or a limit has run out), number of all descriptors, second half of the token (zeros if freed), and up to 250 of the descriptors by `SCM_RIGHTS` |

mod exchange;
mod host;

use std::any::Any;
use std::collections::{HashMap, hash_map};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fd::OwnedFd;
use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

use peerlane_hal::{BackendId, DynError, ErrorKind, Generation, KeyError, Rank, Role};

use crate::PerProcess;
use crate::limits::SystemError;

pub use exchange::{Server, ask};
pub use host::Host;
pub(crate) use host::{read_name, write_name};

/// The largest number of file descriptors in one message, of which the kernel accepts 253.
const MESSAGE_FDS_MAX: usize = 250;
/// The largest number of file descriptors of one memory registration, more than allocators need for one buffer.
pub const DESCRIPTORS_MAX: u32 = 1 << 16;

const HERE: u8 = 0;
const FREED: u8 = 1;
const FAILED: u8 = 2;
const EXHAUSTED: u8 = 3;

/// A request for memory of another process, with the fields of its remote key.
///
/// The generation alone identifies it. The other fields are checked too, so that a corrupt key is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The number of the backend that registered the memory.
    pub backend: BackendId,
    /// The number that identifies the registration.
    pub generation: Generation,
    /// The rank that owns the registration.
    pub owner: Rank,
    /// The role with which the memory was registered.
    pub role: Role,
}

/// A registration whose memory can be handed to another process as file descriptors.
pub trait Handover: Any + Send + Sync {
    /// Returns the number of file descriptors that another process needs, at most [`DESCRIPTORS_MAX`]. Returns 0 where
    /// the importer needs to know only that the memory is alive, and `None` where the memory cannot leave this process.
    fn descriptors(&self) -> Option<u32>;

    /// Creates the file descriptor number `index` of the memory, below [`descriptors`](Self::descriptors).
    ///
    /// Called by the thread of the [`Server`].
    ///
    /// # Errors
    /// Returns the reason why there is none, whose text the importer gets.
    fn descriptor(&self, index: u32) -> Result<OwnedFd, DynError>;
}

/// The reason why another process did not hand over its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The registration of the memory no longer exists.
    Freed,
    /// The owner's process has ended or has violated the protocol.
    Gone {
        /// The way in which the end or the protocol violation was detected.
        how: String,
    },
    /// The owner's process did not answer in time.
    Late {
        /// The time limit for the owner's answer.
        timeout: std::time::Duration,
    },
    /// The owner's process has the memory but failed to export it.
    Failed {
        /// [`OutOfMemory`](ErrorKind::OutOfMemory) if memory or a limit of the owner has run out, or
        /// [`Other`](ErrorKind::Other).
        kind: ErrorKind,
        /// The reason that the owner reported.
        why: String,
    },
    /// A system call of this process failed.
    System(SystemError),
}

impl Refusal {
    fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System(SystemError::new(what, errno))
    }

    fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        move |error| Self::System(SystemError::of_io(what, &error))
    }
}

/// Returns the number that stands for a role in remote keys.
pub const fn role_number(role: Role) -> u32 {
    match role {
        Role::Data => 0,
        Role::Flags => 1,
    }
}

/// Returns the role for its number in remote keys.
///
/// # Errors
/// Returns [`KeyError::Field`] for an unknown number.
pub fn role_of(number: u32) -> Result<Role, KeyError> {
    match number {
        0 => Ok(Role::Data),
        1 => Ok(Role::Flags),
        seen => Err(KeyError::Field { field: "role", found: seen.into(), expected: "0 or 1" }),
    }
}

/// A random number that identifies a process, because process ids are reused.
///
/// Every process of the host sees its first half, which names a socket. The second half is known to processes that have
/// a key or an address of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ProcessToken(pub [u8; 16]);

impl ProcessToken {
    /// Returns the random number that identifies this process.
    ///
    /// # Panics
    /// Panics if the kernel has no random numbers, which it has once it has booted.
    pub fn own() -> Self {
        // A forked child is another process, with memory of its own at the same addresses.
        static TOKEN: PerProcess<ProcessToken> = PerProcess::new();
        *TOKEN.value_or_create(|| Self(random()))
    }

    pub(super) fn socket_name(self) -> String {
        let [name @ .., _, _, _, _, _, _, _, _] = self.0;
        format!("peerlane-{:016x}", u64::from_be_bytes(name))
    }

    /// Returns the half that is not in the name of the socket.
    fn proof(self) -> ProcessProof {
        let [_, _, _, _, _, _, _, _, proof @ ..] = self.0;
        proof
    }
}

/// The half of a [`ProcessToken`] with which the process proves that it is the one.
type ProcessProof = [u8; 8];

struct Registered {
    backend: BackendId,
    owner: Rank,
    role: Role,
    memory: Arc<dyn Handover>,
}

type Live = HashMap<Generation, Registered>;

fn live() -> MutexGuard<'static, Live> {
    static LIVE: PerProcess<Mutex<Live>> = PerProcess::new();
    // The map is consistent after every statement, so a panic elsewhere does not harm it.
    LIVE.value_or_create(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// The entry of a memory registration in the table of this process, from which other processes
/// request memory. Dropping it removes the registration.
#[derive(Debug)]
pub struct Entry(Generation);

impl Entry {
    /// Returns the random number that identifies the registration.
    pub const fn generation(&self) -> Generation {
        self.0
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // Removed first, since unmapping under the lock would stall other ranks of the process.
        let registered = live().remove(&self.0);
        drop(registered);
    }
}

/// Adds a registration to the table of this process, so that other processes can request its memory.
pub fn enter(backend: BackendId, owner: Rank, role: Role, memory: Arc<dyn Handover>) -> Entry {
    let mut live = live();
    loop {
        // Random, so that a process without the key cannot guess it, and a changed bit opens nothing.
        let generation = Generation(u64::from_ne_bytes(random()));
        if let hash_map::Entry::Vacant(entry) = live.entry(generation) {
            entry.insert(Registered { backend, owner, role, memory });
            return Entry(generation);
        }
    }
}

/// Returns random bytes that other processes cannot predict.
///
/// # Panics
/// Panics if the kernel has no random numbers, which it has once it has booted.
fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    // Soon after the boot, it waits.
    let filled = retry_on_intr(|| getrandom(&mut bytes, GetRandomFlags::empty()));
    assert_eq!(filled, Ok(N), "the kernel has random numbers once it has booted");
    bytes
}

/// Returns the registration of this process that a remote key names, or `None` if it is freed or of another type.
pub fn find<M: Handover>(claim: &Claim) -> Option<Arc<M>> {
    let memory: Arc<dyn Any + Send + Sync> = find_any(claim)?;
    memory.downcast().ok()
}

pub(super) fn find_any(claim: &Claim) -> Option<Arc<dyn Handover>> {
    let live = live();
    let found = live.get(&claim.generation)?;
    let seen = (found.backend, found.owner, found.role);
    (seen == (claim.backend, claim.owner, claim.role)).then(|| Arc::clone(&found.memory))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::{Read as _, Write as _};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::sync::Arc;
    use std::time::Duration;

    use peerlane_test_support::{Stopwatch, not_covered};
    use rustix::fs::MemfdFlags;

    use super::*;
    use peerlane_hal::Deadline;

    /// A test registration with `count` segments, each a file as long as its index, of which one may fail to export.
    struct Segments {
        count: Option<u32>,
        broken: Option<u32>,
        errno: Errno,
    }

    impl Handover for Segments {
        fn descriptors(&self) -> Option<u32> {
            self.count
        }

        fn descriptor(&self, index: u32) -> Result<OwnedFd, DynError> {
            if self.broken == Some(index) {
                let what = format!("segment {index} is broken");
                return Err(DynError::new(SystemError::new(what, self.errno)));
            }
            let fd = rustix::fs::memfd_create("segment", MemfdFlags::CLOEXEC).unwrap();
            rustix::fs::ftruncate(&fd, index.into()).unwrap();
            Ok(fd)
        }
    }

    const OWNER: Rank = Rank(3);

    fn enter_segments(count: Option<u32>, broken: Option<u32>) -> (Entry, Claim) {
        enter_failing(count, broken, Errno::IO)
    }

    fn enter_failing(count: Option<u32>, broken: Option<u32>, errno: Errno) -> (Entry, Claim) {
        let memory = Arc::new(Segments { count, broken, errno });
        let entry = enter(BackendId::CUDA, OWNER, Role::Data, memory);
        let generation = entry.generation();
        (entry, Claim { backend: BackendId::CUDA, generation, owner: OWNER, role: Role::Data })
    }

    /// Requests memory over the socket although this process owns the memory itself.
    fn ask_self(claim: &Claim) -> Result<Vec<OwnedFd>, Refusal> {
        ask(ProcessToken::own(), claim, Deadline::after(Duration::from_secs(10)))
    }

    #[test]
    fn every_descriptor_arrives_in_order() {
        let _server = Server::enter().unwrap();
        let most = MESSAGE_FDS_MAX as u32;
        for count in [0, 1, 2, most - 1, most, most + 1, 2 * most + 3] {
            let (_entry, claim) = enter_segments(Some(count), None);
            let fds = ask_self(&claim).unwrap();
            let lengths: Vec<_> =
                fds.iter().map(|fd| rustix::fs::fstat(fd).unwrap().st_size).collect();
            assert_eq!(lengths, (0..i64::from(count)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_segment_that_cannot_be_exported_says_so() {
        let _server = Server::enter().unwrap();
        for broken in [0, MESSAGE_FDS_MAX as u32 + 7] {
            for (errno, kind, reason) in [
                (Errno::IO, ErrorKind::Other, "Input/output error (os error 5)"),
                (Errno::NOSPC, ErrorKind::OutOfMemory, "No space left on device (os error 28)"),
            ] {
                let count = Some(2 * MESSAGE_FDS_MAX as u32);
                let (_entry, claim) = enter_failing(count, Some(broken), errno);
                let why = format!("segment {broken} is broken: {reason}");
                assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Failed { kind, why });
            }
        }
    }

    #[test]
    fn freed_private_and_tampered_are_refused() {
        let _server = Server::enter().unwrap();
        let (entry, claim) = enter_segments(Some(1), None);
        for other in [
            Claim { backend: BackendId::HOST, ..claim },
            Claim { owner: Rank(4), ..claim },
            Claim { role: Role::Flags, ..claim },
            Claim { generation: Generation(u64::MAX), ..claim },
        ] {
            assert_eq!(ask_self(&other).unwrap_err(), Refusal::Freed);
            assert!(find::<Segments>(&other).is_none());
        }
        assert!(find::<Segments>(&claim).is_some());
        drop(entry);
        assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Freed);
        assert!(find::<Segments>(&claim).is_none());
        let (_private, claim) = enter_segments(None, None);
        assert_eq!(ask_self(&claim).unwrap_err(), Refusal::Freed);
        assert!(find::<Segments>(&claim).is_some());
    }

    #[test]
    fn generations_never_come_again() {
        let generations: HashSet<_> =
            (0..100).map(|_| enter_segments(None, None).0.generation()).collect();
        assert_eq!(generations.len(), 100);
    }

    #[test]
    fn neighbours_of_a_generation_open_nothing() {
        let _server = Server::enter().unwrap();
        let entered: Vec<_> = (0..64).map(|_| enter_segments(Some(1), None)).collect();
        for (_, claim) in &entered {
            for bit in 0..64 {
                let generation = Generation(claim.generation.0 ^ 1 << bit);
                assert!(find::<Segments>(&Claim { generation, ..*claim }).is_none());
            }
            for generation in (0..200).map(Generation) {
                assert!(find::<Segments>(&Claim { generation, ..*claim }).is_none());
            }
        }
    }

    #[test]
    fn idle_clients_delay_neither_others_nor_the_end() {
        let server = Server::enter().unwrap();
        let name = ProcessToken::own().socket_name();
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let idle: Vec<_> = (0..40).map(|_| UnixStream::connect_addr(&address).unwrap()).collect();
        let (_entry, claim) = enter_segments(Some(3), None);
        let watch = Stopwatch::start();
        assert_eq!(ask_self(&claim).unwrap().len(), 3);
        drop(server);
        // One client that is waited for would take 2 s.
        watch.assert_within(Duration::from_secs(1));
        drop(idle);
    }

    /// Runs `body` in a thread of another user, and returns none if this process may not change its user, which `cargo xtask test`
    /// counts and lists as a test that did not run.
    fn as_other_user<T: Send>(test: &str, body: impl FnOnce() -> T + Send) -> Option<T> {
        const OTHER: u32 = 65_534;
        let run = || {
            rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(OTHER)).ok()?;
            Some(body())
        };
        let result = std::thread::scope(|scope| scope.spawn(run).join().unwrap());
        if result.is_none() {
            not_covered(test, &format!("this user may not change to user {OTHER}"));
        }
        result
    }

    fn listen(process: ProcessToken) -> UnixListener {
        let address = SocketAddr::from_abstract_name(process.socket_name()).unwrap();
        UnixListener::bind_addr(&address).unwrap()
    }

    #[test]
    fn a_socket_of_another_user_is_not_asked() {
        let process = ProcessToken(random());
        let Some(listener) =
            as_other_user("a_socket_of_another_user_is_not_asked", || listen(process))
        else {
            return;
        };
        let (_entry, claim) = enter_segments(Some(1), None);
        let refusal = ask(process, &claim, Deadline::after(Duration::from_secs(10))).unwrap_err();
        let Refusal::Gone { how } = refusal else { panic!("{refusal:?}") };
        let own = rustix::process::geteuid().as_raw();
        let expected = format!("expected user {own}, that of this process");
        assert!(how.starts_with("a process of user 65534 listens at the abstract socket"), "{how}");
        assert!(how.contains(&expected), "{how}");
        // No request was sent.
        let (mut asked, _) = listener.accept().unwrap();
        assert_eq!(asked.read(&mut [0]).unwrap(), 0);
    }

    #[test]
    fn a_client_of_another_user_gets_no_answer() {
        let _server = Server::enter().unwrap();
        let (_entry, claim) = enter_segments(Some(1), None);
        let address = SocketAddr::from_abstract_name(ProcessToken::own().socket_name()).unwrap();
        let answer = as_other_user("a_client_of_another_user_gets_no_answer", || {
            let mut client = UnixStream::connect_addr(&address).unwrap();
            // The server may have closed the connection already.
            let _ = client.write_all(&exchange::encode_request(&claim));
            client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let mut answer = Vec::new();
            client.read_to_end(&mut answer).map(|_| answer)
        });
        let Some(answer) = answer else { return };
        match answer {
            Ok(answer) => assert!(answer.is_empty(), "{answer:?}"),
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
        }
    }

    /// A process of the same user sees the names of sockets, and can listen at one whose process has ended.
    #[test]
    fn an_answer_of_another_process_at_the_same_name_is_refused() {
        let (process, (_entry, claim)) = (ProcessToken(random()), enter_segments(Some(1), None));
        let listener = listen(process);
        for status in [HERE, FAILED] {
            let refusal = std::thread::scope(|scope| {
                scope.spawn(|| {
                    let (mut client, _) = listener.accept().unwrap();
                    let mut request = exchange::encode_request(&claim);
                    client.read_exact(&mut request).unwrap();
                    client.write_all(&exchange::answer_of_this_process(status)).unwrap();
                });
                ask(process, &claim, Deadline::after(Duration::from_secs(10))).unwrap_err()
            });
            let Refusal::Gone { how } = refusal else { panic!("{refusal:?}") };
            assert!(how.contains("does not know the peer's key"), "{how}");
        }
    }

    #[test]
    fn a_process_that_is_gone_is_named() {
        let gone = ProcessToken([7; 16]);
        let (_entry, claim) = enter_segments(Some(1), None);
        let refusal = ask(gone, &claim, Deadline::after(Duration::from_secs(1))).unwrap_err();
        let Refusal::Gone { how } = refusal else { panic!("{refusal:?}") };
        assert!(how.contains("peerlane-07070707"), "{how}");
    }
}
