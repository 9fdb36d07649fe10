//! Registers, exports and imports the memory of a device as regions.
//!
//! A backend implements [`RegionDevice`] and names its `Memory`, `Local`, `Remote` and `Key` by these types.
//! The toolkit decides everything else: how a region leaves its process, which registrations are alive, what
//! a key must contain, and which refusals have a fallback.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | allocated by Peerlane | physical memory with a descriptor, mapped by each importer; without virtual memory, as the next row |
//! | of the vendor's plain allocator | its IPC handle; the offset of the region is in the key |
//! | mapped by the caller, such as expandable segments | a descriptor for every segment |
//! | allocated by Peerlane, where a peer's device does not reach this one | host memory with a descriptor, mapped by each importer and registered with its driver |
//! | host memory that another fabric has allocated, or host memory for flags | the descriptor that it was allocated with; memory of the caller itself cannot leave |
//! | host memory in a file of the caller, mapped by [`Mapping::from_descriptor`](crate::mapping::Mapping::from_descriptor) | a duplicate of the caller's descriptor |
//! | of a stream-ordered pool | it cannot leave; it can be the source of puts, and the target of puts of its own rank |
//!
//! Ranks of one process share addresses, so an import there only permits the importer's device to access the
//! memory.
//!
//! The key of a dropped region is refused. Imports keep memory that Peerlane allocated, and mapped memory,
//! alive until they are dropped. The caller keeps memory of a plain allocator alive, see
//! [`PeerMemory::register`].
//!
//! | file | what it holds |
//! | --- | --- |
//! | `mod` | [`Memory`]: allocation, registration, export, checks of keys |
//! | `registration` | registered memory and its exported form; inspection of the caller's pointers |
//! | `allocation` | device memory: plain, physical, mapped |
//! | `host` | host memory: allocated by Peerlane, or registered where it is |
//! | `region` | local and imported regions, and what NICs need of them |
//! | `import` | opening the memory of a key |
//! | `key` | the bytes of a key |
//! | `transfer` | copies between the host and a region, for tests and tools |

mod allocation;
mod host;
mod import;
mod key;
mod region;
mod registration;
mod transfer;

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use crate::device::{Pointee, RegionDevice, Vendor};
pub use allocation::{Physical, Plain};
pub use import::Remote;
pub use key::Key;
#[cfg(test)]
pub(super) use key::TestVendor;
pub use region::Local;

use crate::Fault;
use crate::device::{DevicePtr, backend_id};
use crate::handover::{self, ProcessToken};
use host::AdoptedHost;
use key::Access;
use peerlane_hal::{Deadline, DynRegion, PeerMemory, Rank, Region as _, Role, Space};
use region::NicAccess;
use registration::Registration;
use transfer::Transfer;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The process and the device of a connected peer, which every remote key of the peer must name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owner {
    pub(crate) process: ProcessToken,
    pub(crate) device: [u8; 16],
}

#[derive(Debug)]
struct Connected {
    owner: Owner,
    /// The reason why the two devices cannot access each other's memory, or `None` if they can.
    unreachable: Option<String>,
    on_host: bool,
}

/// The memory of a device fabric, which registers regions of this rank and imports regions of peers.
#[derive(Debug)]
pub struct Memory<D: RegionDevice> {
    rank: Rank,
    context: Arc<D>,
    transfer: Arc<Transfer<D>>,
    nic_access: Arc<NicAccess<D>>,
    /// Whether an allocation fails if the device has virtual memory but cannot export it as a file descriptor.
    strict: bool,
    /// Whether flags are allocated in host memory, because only the host waits for them.
    flags_on_host: bool,
    peers: Mutex<Vec<Option<Connected>>>,
}

impl<D: RegionDevice> Memory<D> {
    /// Opens the memory of rank `rank` in a group of `ranks` ranks. With `strict`, a slower fallback is refused; with
    /// `flags_on_host`, flags are allocated in host memory.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn open(
        context: &Arc<D>,
        rank: Rank,
        ranks: usize,
        strict: bool,
        flags_on_host: bool,
    ) -> Result<Self, D::Error> {
        let transfer = Arc::new(Transfer::open(context)?);
        let nic_access = Arc::new(NicAccess::new(context));
        let peers = Mutex::new((0..ranks).map(|_| None).collect());
        let context = Arc::clone(context);
        Ok(Self { rank, context, transfer, nic_access, strict, flags_on_host, peers })
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Option<Connected>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the process and the device of a peer, so that its regions can be imported.
    ///
    /// `unreachable` is the reason why its device and this one do not reach each other; memory that is allocated from
    /// now on is then host memory.
    pub(super) fn connect(&self, peer: Rank, owner: Owner, unreachable: Option<String>) {
        if let Some(slot) = self.peers().get_mut(peer.index()) {
            *slot = Some(Connected { owner, unreachable, on_host: false });
        }
    }

    /// Returns whether transfers to a peer are staged in host memory, as far as this rank knows.
    ///
    /// The peer's memory may be host memory because of a third rank, which shows when it is imported.
    pub(super) fn is_on_host(&self, peer: Rank) -> bool {
        let peers = self.peers();
        let peer = peers.get(peer.index()).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.on_host || peer.unreachable.is_some())
    }

    fn needs_host(&self) -> bool {
        self.peers().iter().flatten().any(|peer| peer.unreachable.is_some())
    }

    /// Rejects a remote key that another peer exported, and a key of memory that this device does not reach.
    ///
    /// # Errors
    /// Returns [`Fault::NotConnected`], [`Fault::ForeignKey`] or [`Fault::Unavailable`].
    fn check_owner(&self, peer: Rank, key: &Key<D::Vendor>) -> Result<(), Fault> {
        let mut peers = self.peers();
        let connected = peers.get_mut(peer.index()).and_then(Option::as_mut);
        let connected = connected.ok_or(Fault::NotConnected { peer })?;
        if key.rank != peer {
            let (expected, found) = (format!("a key of rank {peer}"), format!("rank {}", key.rank));
            return Err(Fault::ForeignKey { expected, found });
        }
        if (Owner { process: key.process, device: key.device }) != connected.owner {
            return Err(Fault::ForeignKey {
                expected: format!(
                    "a key of the process and device that rank {peer} was connected with"
                ),
                found: "another process or device".to_owned(),
            });
        }
        match (&key.access, &connected.unreachable) {
            (Access::Nothing, _) => {}
            // Flags may be in host memory because the host waits for them.
            (Access::Host { .. }, _) => {
                connected.on_host |= peer != self.rank && key.role == Role::Data;
            }
            (_, Some(unreachable)) => {
                return Err(Fault::Unavailable(format!(
                    "cannot import device memory of rank {peer}: {unreachable}; allocate the \
                     memory with Peerlane after all peers are connected, or use devices with peer \
                     access"
                )));
            }
            _ => {}
        }
        Ok(())
    }

    fn publish(&self, registration: Registration<D>) -> Local<D> {
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(backend_id::<D>(), self.rank, registration.role, shared);
        let (transfer, nic_access) = (Arc::clone(&self.transfer), Arc::clone(&self.nic_access));
        Local { registration, transfer, nic_access, entry }
    }

    fn allocate_on_host(&self, bytes: u64, role: Role) -> Result<Local<D>, D::Error> {
        let _current = self.context.enter_relaxed()?;
        // A new memfd is zeroed.
        let registration = Registration::allocate_on_host(&self.context, bytes, self.rank, role)?;
        Ok(self.publish(registration))
    }
}

// SAFETY: allocations are new, and a key is checked against the registration that it names.
unsafe impl<D: RegionDevice> PeerMemory for Memory<D> {
    type Error = D::Error;
    type Key = Key<D::Vendor>;
    type Local = Local<D>;
    type Remote = Remote<D>;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local<D>, D::Error> {
        if self.needs_host() || (role == Role::Flags && self.flags_on_host) {
            return self.allocate_on_host(bytes, role);
        }
        let _current = self.context.enter_relaxed()?;
        let registration =
            Registration::allocate(&self.context, bytes, self.rank, role, self.strict)?;
        self.transfer.zero(registration.address, registration.allocated_bytes())?;
        Ok(self.publish(registration))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local<D>, D::Error> {
        self.allocate_on_host(bytes, Role::Flags)
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Local<D>, D::Error> {
        let address = base.as_ptr() as DevicePtr;
        if role == Role::Flags && !address.is_multiple_of(WORD_BYTES) {
            let text = format!(
                "misaligned flags: their address is {address:#x}, expected a multiple of \
                 {WORD_BYTES} bytes"
            );
            return Err(Fault::Argument(text).into());
        }
        let _current = self.context.enter_relaxed()?;
        let (context, rank) = (&self.context, self.rank);
        let registration = match AdoptedHost::find(context, base, bytes, role)? {
            Some(adopted) => Registration::adopt(context, adopted, bytes, rank, role),
            None => Registration::borrow(context, address, bytes, rank, role)?,
        };
        Ok(self.publish(registration))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local<D>, D::Error> {
        if region.space() == Space::Device && region.downcast::<Local<D>>().is_none() {
            let text = format!(
                "cannot adopt {} bytes of device memory at {:p}: they are not of a region of {}, and an address alone can belong to any device",
                region.bytes(),
                region.base(),
                backend_id::<D>(),
            );
            return Err(Fault::Argument(text).into());
        }
        // SAFETY: the caller upholds the same contract.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    fn export(&self, local: &Local<D>) -> Result<Key<D::Vendor>, D::Error> {
        let registration = &local.registration;
        Ok(Key {
            process: ProcessToken::own(),
            generation: local.entry.generation(),
            rank: registration.owner,
            role: registration.role,
            device: registration.context.uuid(),
            bytes: registration.bytes,
            access: registration.export()?,
            vendor: PhantomData,
        })
    }

    fn import(
        &self,
        peer: Rank,
        key: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<Remote<D>, D::Error> {
        self.check_owner(peer, key)?;
        self.open_key(peer, key, deadline)
    }
}
