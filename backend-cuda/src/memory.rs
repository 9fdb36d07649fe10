//! Registration, export and import of device memory.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | that Peerlane allocates | physical memory with a descriptor, mapped by each importer |
//! | of `cudaMalloc` | its legacy IPC handle; the caller's offset travels beside it |
//! | that the caller mapped, such as expandable segments | a descriptor for every segment |
//! | of a stream-ordered pool | not at all; it can be put from, and received into by oneself |
//!
//! Ranks of one process share addresses: an import there only lets the importer's device reach them.
//!
//! Once a region is dropped, its key is refused. Who has imported it keeps what Peerlane allocated,
//! and mapped memory, alive until the import is dropped. Memory of `cudaMalloc` is the caller's to
//! keep, see [`PeerMemory::register`].

mod borrowed;
mod handle;
mod import;
mod mapped;
mod plain;
mod registration;
mod transfer;

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use peerlane_hal::mechanics::handover::{self, Claim, Entry, ProcessToken};
use peerlane_hal::{BackendId, Deadline, PeerMemory, Rank, Region, Role, Space};

use import::{Allocation, Identity, Import, Opened};
use mapped::Mapped;
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

/// Registers memory of this rank's device and imports that of its peers.
#[derive(Debug)]
pub struct Memory {
    rank: Rank,
    context: Arc<Context>,
    transfer: Arc<Transfer>,
    /// Whether memory without a descriptor is refused where the device says that it has them.
    strict: bool,
    /// The connected peers.
    owners: Mutex<Vec<Option<Owner>>>,
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
        let owners = Mutex::new(vec![None; ranks]);
        Ok(Self { rank, context: Arc::clone(context), transfer, strict, owners })
    }

    pub(crate) fn rank(&self) -> Rank {
        self.rank
    }

    /// From now on regions of `peer` can be imported, if they are this owner's.
    pub(crate) fn connect(&self, peer: Rank, owner: Owner) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = owners.get_mut(peer.index()) {
            *place = Some(owner);
        }
    }

    fn owner(&self, peer: Rank) -> Result<Owner, Error> {
        let owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        owners.get(peer.index()).copied().flatten().ok_or(Error::NotConnected { peer })
    }

    fn enter(&self, registration: Registration) -> Local {
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(BackendId::CUDA, self.rank, registration.role, shared);
        Local { registration, transfer: Arc::clone(&self.transfer), entry }
    }

    /// Imports a region of a peer that need not be connected.
    pub(crate) fn open_key(
        &self,
        peer: Rank,
        key: &Key,
        deadline: Deadline,
    ) -> Result<Remote, Error> {
        let (role, bytes) = (key.role, key.bytes);
        let claim =
            Claim { backend: BackendId::CUDA, generation: key.generation, owner: peer, role };
        if key.process == ProcessToken::own() {
            let found = handover::find::<Registration>(&claim).filter(|found| found.bytes == bytes);
            let Some(registration) = found else {
                return Err(Error::Freed { peer, generation: key.generation.0 });
            };
            registration.allow(&self.context)?;
            let address = registration.address;
            let hold = Hold::SameProcess { _registration: registration };
            return Ok(Remote { peer, role, address, bytes, _hold: hold });
        }
        if let Reach::Private(why) = key.reach {
            let why = why.text().to_owned();
            return Err(Error::PrivateMemory { peer, why });
        }
        let refused = Error::of_handover(peer, key.generation.0);
        let fds = handover::ask(key.process, &claim, deadline).map_err(refused)?;
        let _current = self.context.enter_relaxed()?;
        let identity = |allocation| {
            let (process, device) = (key.process, self.context.device);
            Identity { process, allocation, device }
        };
        let (head, import) = match &key.reach {
            Reach::Nothing | Reach::Private(_) => {
                return Ok(Remote { peer, role, address: 0, bytes: 0, _hold: Hold::Nothing });
            }
            Reach::Segments { head, segments } => {
                let identity = identity(Allocation::Segments(key.generation));
                let open = || self.map_segments(peer, segments, &fds);
                (*head, Import::share(identity, open)?)
            }
            Reach::Ipc { head, handle } => {
                let identity = identity(Allocation::Ipc(*handle));
                let import = Import::share(identity, || Opened::ipc(&self.context, *handle))?;
                self.check_extent(peer, import.address(), *head, bytes)?;
                (*head, import)
            }
        };
        let address = import.address() + head;
        Ok(Remote { peer, role, address, bytes, _hold: Hold::OtherProcess { _import: import } })
    }

    fn map_segments(
        &self,
        peer: Rank,
        segments: &[u64],
        fds: &[std::os::fd::OwnedFd],
    ) -> Result<Opened, Error> {
        if fds.len() != segments.len() {
            let (seen, wanted) = (fds.len(), segments.len());
            let how = format!("it handed over {seen} descriptors, its key has {wanted} segments");
            return Err(Error::PeerLost { peer, how });
        }
        let handles: Result<Vec<Handle>, Error> = segments
            .iter()
            .zip(fds)
            .map(|(bytes, fd)| Handle::import(&self.context, std::os::fd::AsFd::as_fd(fd), *bytes))
            .collect();
        Ok(Opened::Mapped(Mapped::map(&self.context, &handles?)?))
    }

    /// Refuses a key that claims more than the allocation has, as far as the driver tells.
    fn check_extent(
        &self,
        peer: Rank,
        address: CUdeviceptr,
        head: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        match borrowed::extent(&self.context, address)? {
            Some(extent) if head + bytes > extent.bytes - (address - extent.address) => {
                Err(Error::ForeignKey {
                    wanted: format!("an allocation of at least {} bytes", head + bytes),
                    seen: format!("one of rank {peer} with {} bytes", extent.bytes),
                })
            }
            _ => Ok(()),
        }
    }
}

impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let _current = self.context.enter_relaxed()?;
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
        let registration = Registration::borrow(&self.context, address, bytes, self.rank, role)?;
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
        let owner = self.owner(peer)?;
        if key.rank != peer {
            let (wanted, seen) = (format!("rank {peer}"), format!("rank {}", key.rank));
            return Err(Error::ForeignKey { wanted, seen });
        }
        if (Owner { process: key.process, device: key.device }) != owner {
            return Err(Error::ForeignKey {
                wanted: format!("rank {peer} as it is connected"),
                seen: "another process or device of it".to_owned(),
            });
        }
        self.open_key(peer, key, deadline)
    }
}

impl Local {
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
        self.transfer.upload(self.span(offset, bytes.len())?, bytes)
    }

    /// Copies from the region, in the same way.
    ///
    /// # Errors
    /// As [`upload`](Self::upload).
    pub fn download(&self, offset: u64, bytes: &mut [u8]) -> Result<(), Error> {
        self.transfer.download(self.span(offset, bytes.len())?, bytes)
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

    fn space(&self) -> Space {
        Space::Device
    }

    fn flags(&self) -> Option<&[std::sync::atomic::AtomicU64]> {
        None
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        if self.role() != Role::Flags {
            return None;
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
