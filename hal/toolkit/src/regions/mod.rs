//! Memory of a device as regions: registration, export and import, over the calls of its driver.
//!
//! A backend says what its driver does in [`RegionDevice`] and the traits below it, and names its
//! `Memory`, `Local`, `Remote` and `Key` by these. Everything that is no call is here: which of several
//! ways a region leaves its process, who still holds it, what a key must say, which refusals have
//! another way.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | that Peerlane allocates | physical memory with a descriptor, mapped by each importer; where there is none, as the next |
//! | of the vendor's plain allocator | its IPC handle; the caller's offset travels beside it |
//! | that the caller mapped, such as expandable segments | a descriptor for every segment |
//! | that Peerlane allocates, where a peer's device does not reach this one | host memory with a descriptor, mapped by each importer and registered with its driver |
//! | of the host, that another fabric has allocated; of the host as flags | the descriptor that it was allocated with; the caller's own not at all |
//! | of a stream-ordered pool | not at all; it can be put from, and received into by oneself |
//!
//! Ranks of one process share addresses: an import there only lets the importer's device reach them.
//!
//! Once a region is dropped, its key is refused. Who has imported it keeps what Peerlane allocated,
//! and mapped memory, alive until the import is dropped. Memory of a plain allocator is the caller's to
//! keep, see [`PeerMemory::register`].

mod adopted;
mod borrowed;
mod cards;
mod device;
mod import;
mod key;
mod local;
mod mapped;
mod open;
mod physical;
mod pinned;
mod places;
mod plain;
mod registration;
mod remote;
mod transfer;

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use adopted::Adopted;
use cards::Cards;
use key::Reach;
use registration::Registration;
use transfer::Transfer;

use crate::device::{DevicePtr, Fault};
use crate::handover::{self, ProcessToken};
use peerlane_hal::Deadline;
use peerlane_hal::Rank;
use peerlane_hal::{DynRegion, PeerMemory, Region as _, Role};

use device::backend;
pub use device::{Pointee, RegionDevice, Vendor};
pub use key::Key;
#[cfg(test)]
pub(super) use key::Trial;
pub use local::Local;
pub use physical::Physical;
pub use plain::Plain;
pub use remote::Remote;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

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
    /// It has handed out memory of the host for bytes.
    on_host: bool,
}

/// Registers memory of this rank's device and imports that of its peers.
#[derive(Debug)]
pub struct Memory<D: RegionDevice> {
    rank: Rank,
    context: Arc<D>,
    transfer: Arc<Transfer<D>>,
    cards: Arc<Cards<D>>,
    /// Whether memory without a descriptor is refused where the device says that it has them.
    strict: bool,
    /// Whether flags lie where the host reads them, because nothing else does.
    flags_on_host: bool,
    peers: Mutex<Vec<Option<Connected>>>,
}

impl<D: RegionDevice> Memory<D> {
    /// The memory of `rank` of `ranks`. With `strict`, a way that is only second best is refused; with
    /// `flags_on_host`, flags that are allocated here are for the host to read.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn open(
        context: &Arc<D>,
        rank: Rank,
        ranks: usize,
        strict: bool,
        flags_on_host: bool,
    ) -> Result<Self, D::Error> {
        let transfer = Arc::new(Transfer::open(context)?);
        let cards = Arc::new(Cards::new(context));
        let peers = Mutex::new((0..ranks).map(|_| None).collect());
        let context = Arc::clone(context);
        Ok(Self { rank, context, transfer, cards, strict, flags_on_host, peers })
    }

    pub(super) fn rank(&self) -> Rank {
        self.rank
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Option<Connected>>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on regions of `peer` can be imported, if they are this owner's. With `apart`, the
    /// reason why its device and this one do not reach each other, what is allocated from now on
    /// lies on the host.
    pub(super) fn connect(&self, peer: Rank, owner: Owner, apart: Option<String>) {
        if let Some(place) = self.peers().get_mut(peer.index()) {
            *place = Some(Connected { owner, apart, on_host: false });
        }
    }

    /// Whether bytes to that peer go through memory of the host, as far as it is known: its memory
    /// may lie there because of a third rank, and that shows when it is imported.
    pub(super) fn is_on_host(&self, peer: Rank) -> bool {
        let peers = self.peers();
        let peer = peers.get(peer.index()).and_then(Option::as_ref);
        peer.is_some_and(|peer| peer.on_host || peer.apart.is_some())
    }

    fn needs_host(&self) -> bool {
        self.peers().iter().flatten().any(|peer| peer.apart.is_some())
    }

    /// Refuses a key that is not of this peer, or of memory that this device does not reach.
    fn check_owner(&self, peer: Rank, key: &Key<D::Vendor>) -> Result<(), Fault> {
        let mut peers = self.peers();
        let connected = peers.get_mut(peer.index()).and_then(Option::as_mut);
        let connected = connected.ok_or(Fault::NotConnected { peer })?;
        if key.rank != peer {
            let (wanted, seen) = (format!("rank {peer}"), format!("rank {}", key.rank));
            return Err(Fault::ForeignKey { wanted, seen });
        }
        if (Owner { process: key.process, device: key.device }) != connected.owner {
            return Err(Fault::ForeignKey {
                wanted: format!("rank {peer} as it is connected"),
                seen: "another process or device of it".to_owned(),
            });
        }
        match (&key.reach, &connected.apart) {
            (Reach::Nothing, _) => {}
            // Flags may lie there because the host waits for them.
            (Reach::Host { .. }, _) => {
                connected.on_host |= peer != self.rank && key.role == Role::Data;
            }
            (_, Some(apart)) => {
                return Err(Fault::Unavailable(format!(
                    "cannot import memory of rank {peer}: {apart}, and it is memory of a device; \
                     let Peerlane allocate it, after all peers are connected, or use devices that \
                     reach each other"
                )));
            }
            _ => {}
        }
        Ok(())
    }

    fn enter(&self, registration: Registration<D>) -> Local<D> {
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(backend::<D>(), self.rank, registration.role, shared);
        let (transfer, cards) = (Arc::clone(&self.transfer), Arc::clone(&self.cards));
        Local { registration, transfer, cards, entry }
    }

    fn allocate_on_host(&self, bytes: u64, role: Role) -> Result<Local<D>, D::Error> {
        let _current = self.context.enter_relaxed()?;
        // A new memfd is zero.
        let registration = Registration::allocate_on_host(&self.context, bytes, self.rank, role)?;
        Ok(self.enter(registration))
    }
}

impl<D: RegionDevice> PeerMemory for Memory<D> {
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
        Ok(self.enter(registration))
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
            let text = format!("flags at {address:#x} are not aligned to {WORD_BYTES} bytes");
            return Err(Fault::Argument(text).into());
        }
        let _current = self.context.enter_relaxed()?;
        let (context, rank) = (&self.context, self.rank);
        let registration = match Adopted::find(context, base, bytes, role)? {
            Some(adopted) => Registration::adopt(context, adopted, bytes, rank, role),
            None => Registration::borrow(context, address, bytes, rank, role)?,
        };
        Ok(self.enter(registration))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local<D>, D::Error> {
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
            reach: registration.export()?,
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
