//! Registration, export and import of device memory.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | that Peerlane allocates | physical memory with a descriptor, mapped by each importer |
//! | of `cudaMalloc` | its legacy IPC handle; the caller's offset travels beside it |
//! | that the caller mapped, such as expandable segments | a descriptor for every segment |
//! | that Peerlane allocates, where a peer's device does not reach this one | host memory with a descriptor, mapped by each importer and registered with its driver |
//! | of the host, that another fabric has allocated; of the host as flags | the descriptor that it was allocated with; the caller's own not at all |
//! | of a stream-ordered pool | not at all; it can be put from, and received into by oneself |
//!
//! Ranks of one process share addresses: an import there only lets the importer's device reach them.
//!
//! Once a region is dropped, its key is refused. Who has imported it keeps what Peerlane allocated,
//! and mapped memory, alive until the import is dropped. Memory of `cudaMalloc` is the caller's to
//! keep, see [`PeerMemory::register`].

mod adopted;
mod borrowed;
mod handle;
mod import;
mod mapped;
mod open;
mod pinned;
mod plain;
mod registration;
mod transfer;

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::mechanics::handover::{self, Entry, ProcessToken};
use peerlane_hal::{BackendId, Deadline, PeerMemory, Rank, Region, Role, Space};

use adopted::Adopted;
use import::Import;
use registration::Registration;
use transfer::Transfer;

use crate::device::Context;
use crate::error::Error;
use crate::key::{Key, Reach};
use crate::sys::CUdeviceptr;

pub(crate) use handle::Handle;
pub(crate) use plain::Plain;

const WORD_BYTES: u64 = size_of::<u64>() as u64;
/// How long a look at one flag may take.
const LOOK: Duration = Duration::from_secs(1);

/// Who a connected peer is, as far as its memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) process: ProcessToken,
    pub(crate) device: [u8; 16],
}

/// A connected peer.
#[derive(Debug)]
struct Connected {
    owner: Owner,
    /// Why the two devices do not reach each other, if they do not.
    apart: Option<String>,
    /// It has handed out memory of the host.
    on_host: bool,
}

/// Registers memory of this rank's device and imports that of its peers.
#[derive(Debug)]
pub struct Memory {
    rank: Rank,
    context: Arc<Context>,
    transfer: Arc<Transfer>,
    /// Whether memory without a descriptor is refused where the device says that it has them.
    strict: bool,
    peers: Mutex<Vec<Option<Connected>>>,
}

/// Registered memory of this rank.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    transfer: Arc<Transfer>,
    /// Taken out of the process's registrations when this is dropped.
    entry: Entry,
}

/// Imported memory of a peer.
#[derive(Debug)]
pub struct Remote {
    peer: Rank,
    role: Role,
    address: CUdeviceptr,
    bytes: u64,
    /// It is host memory.
    pinned: bool,
    _hold: Hold,
}

/// What keeps imported memory where it is.
#[derive(Debug)]
enum Hold {
    SameProcess { _registration: Arc<Registration> },
    OtherProcess { _import: Import },
    Nothing,
}

impl Memory {
    pub(crate) fn open(
        context: &Arc<Context>,
        rank: Rank,
        ranks: usize,
        strict: bool,
    ) -> Result<Self, Error> {
        let transfer = Arc::new(Transfer::open(context)?);
        let peers = Mutex::new((0..ranks).map(|_| None).collect());
        Ok(Self { rank, context: Arc::clone(context), transfer, strict, peers })
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Option<Connected>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on regions of `peer` can be imported, if they are this owner's. With `apart`, the
    /// reason why its device and this one do not reach each other, what is allocated from now on
    /// lies on the host.
    pub(crate) fn connect(&self, peer: Rank, owner: Owner, apart: Option<String>) {
        if let Some(place) = self.peers().get_mut(peer.index()) {
            *place = Some(Connected { owner, apart, on_host: false });
        }
    }

    /// Whether bytes to that peer go through memory of the host, as far as it is known: its memory
    /// may lie there because of a third rank, and that shows when it is imported.
    pub(crate) fn is_on_host(&self, peer: Rank) -> bool {
        let peers = self.peers();
        let peer = peers.get(peer.index()).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.on_host || peer.apart.is_some())
    }

    fn needs_host(&self) -> bool {
        self.peers().iter().flatten().any(|peer| peer.apart.is_some())
    }

    /// Refuses a key that is not of this peer, or of memory that this device does not reach.
    fn check_owner(&self, peer: Rank, key: &Key) -> Result<(), Error> {
        let mut peers = self.peers();
        let connected = peers.get_mut(peer.index()).and_then(Option::as_mut);
        let connected = connected.ok_or(Error::NotConnected { peer })?;
        if key.rank != peer {
            let (wanted, seen) = (format!("rank {peer}"), format!("rank {}", key.rank));
            return Err(Error::ForeignKey { wanted, seen });
        }
        if (Owner { process: key.process, device: key.device }) != connected.owner {
            return Err(Error::ForeignKey {
                wanted: format!("rank {peer} as it is connected"),
                seen: "another process or device of it".to_owned(),
            });
        }
        match (&key.reach, &connected.apart) {
            (Reach::Nothing, _) => {}
            (Reach::Host { .. }, _) => connected.on_host |= peer != self.rank,
            (_, Some(apart)) => {
                return Err(Error::unavailable(format!(
                    "cannot import memory of rank {peer}: {apart}, and it is memory of a device; \
                     let Peerlane allocate it, after all peers are connected, or use devices that \
                     reach each other"
                )));
            }
            _ => {}
        }
        Ok(())
    }

    fn enter(&self, registration: Registration) -> Local {
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(BackendId::CUDA, self.rank, registration.role, shared);
        Local { registration, transfer: Arc::clone(&self.transfer), entry }
    }
}

impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let _current = self.context.enter_relaxed()?;
        if self.needs_host() {
            // A new memfd is zero.
            let registration =
                Registration::allocate_on_host(&self.context, bytes, self.rank, role)?;
            return Ok(self.enter(registration));
        }
        let registration =
            Registration::allocate(&self.context, bytes, self.rank, role, self.strict)?;
        self.transfer.zero(registration.address, registration.allocated_bytes())?;
        Ok(self.enter(registration))
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        let address = base.as_ptr() as CUdeviceptr;
        if role == Role::Flags && !address.is_multiple_of(WORD_BYTES) {
            let text = format!("flags at {address:#x} are not aligned to {WORD_BYTES} bytes");
            return Err(Error::Argument(text));
        }
        let _current = self.context.enter_relaxed()?;
        let (context, rank) = (&self.context, self.rank);
        let registration = match Adopted::find(context, base, bytes, role)? {
            Some(adopted) => Registration::adopt(context, adopted, bytes, rank, role),
            None => Registration::borrow(context, address, bytes, rank, role)?,
        };
        Ok(self.enter(registration))
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        let registration = &local.registration;
        Ok(Key {
            process: ProcessToken::own(),
            generation: local.entry.generation(),
            rank: registration.owner,
            role: registration.role,
            device: registration.context.found.uuid,
            bytes: registration.bytes,
            reach: registration.export()?,
        })
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        self.check_owner(peer, key)?;
        self.open_key(peer, key, deadline)
    }
}

impl Local {
    /// Whether it is host memory.
    pub(crate) fn is_pinned(&self) -> bool {
        self.registration.host().is_some()
    }

    pub(crate) fn address(&self) -> CUdeviceptr {
        self.registration.address
    }

    pub(crate) fn role(&self) -> Role {
        self.registration.role
    }

    /// The first byte, as the driver's and the runtime's calls take it.
    pub fn device_ptr(&self) -> u64 {
        self.address()
    }

    /// Copies to the region, beside all engines and streams; complete when it returns. For tests and
    /// tools: it orders nothing, and is slow.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): the span leaves the region.
    /// [`Timeout`](peerlane_hal::ErrorKind::Timeout): the device is stuck. The driver's refusal.
    pub fn upload(&self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            Some(host) => host.write(offset, bytes),
            None => self.transfer.upload(address, bytes)?,
        }
        Ok(())
    }

    /// Copies from the region, in the same way.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        let address = self.span(offset, bytes.len())?;
        match self.registration.host() {
            Some(host) => host.read(offset, bytes),
            None => self.transfer.download(address, bytes)?,
        }
        Ok(())
    }

    fn span(&self, offset: u64, length: usize) -> Result<CUdeviceptr, Error> {
        let all = self.registration.bytes;
        if offset.checked_add(length as u64).is_none_or(|end| end > all) {
            return Err(Error::Argument(format!(
                "{length} bytes from offset {offset} on leave the region of {all} bytes"
            )));
        }
        Ok(self.address() + offset)
    }
}

impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.address() as *mut u8).expect("the driver allocates nothing at 0")
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    /// The host, where it reaches the memory at the address that the device has for it: whoever
    /// has the base may take it for either.
    fn space(&self) -> Space {
        match self.registration.host() {
            Some(host) if host.is_unified() => Space::Host,
            _ => Space::Device,
        }
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.registration.words()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        if self.role() != Role::Flags {
            return None;
        }
        if let Some(flags) = self.flags() {
            return Some(flags.get(usize::try_from(word).ok()?)?.load(Ordering::Acquire));
        }
        let mut value = [0; 8];
        let address = self.span(word.checked_mul(WORD_BYTES)?, value.len()).ok()?;
        self.transfer.download_within(address, &mut value, LOOK).ok()?;
        Some(u64::from_le_bytes(value))
    }
}

impl Remote {
    pub(crate) fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub(crate) fn is_pinned(&self) -> bool {
        self.pinned
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn role(&self) -> Role {
        self.role
    }

    /// Whose memory it is.
    pub fn peer(&self) -> Rank {
        self.peer
    }
}

/// The device has no room for so many bytes.
#[cold]
fn out_of_memory(context: &Context, wanted: u64) -> Error {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the results are stored in locals, which stay 0 if the driver refuses.
    let _ = unsafe { (context.driver.mem_get_info)(&raw mut free, &raw mut total) };
    let (free, total, device) = (free as u64, total as u64, context.label());
    Error::out_of_memory(context.driver, device, wanted, free, total)
}
