//! Registers memory of this rank and imports memory of peers.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use peerlane_hal::{
    Deadline, DmaBuf, DynError, DynRegion, Flush, PeerMemory, Rank, Region, Role, Space,
};
use peerlane_toolkit::handover::{self, Claim, Entry, Handover, ProcessToken};
use peerlane_toolkit::mapping::LengthGuard;
use peerlane_toolkit::{EngineRegion, RegionBounds};

use crate::device::{self, Allocation};
use crate::{BACKEND, Error, Key};

/// The memory of a fabric.
#[derive(Debug)]
pub struct Memory {
    pub(crate) rank: Rank,
    connected: Mutex<Vec<bool>>,
}

impl Memory {
    pub(crate) fn new(rank: Rank, ranks: usize) -> Self {
        Self { rank, connected: Mutex::new(vec![false; ranks]) }
    }

    /// Returns by rank whether a peer is connected.
    pub(crate) fn connected(&self) -> MutexGuard<'_, Vec<bool>> {
        self.connected.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

#[derive(Debug)]
pub(crate) struct Registration {
    address: u64,
    bytes: u64,
    owner: Rank,
    role: Role,
    /// `None` for memory of the caller that other processes cannot map.
    allocation: Option<Allocation>,
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        self.allocation.is_some().then_some(1)
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, DynError> {
        let Some(allocation) = &self.allocation else {
            let text = "the memory has no file descriptor".to_owned();
            return Err(DynError::new(Error::Argument(text)));
        };
        let failed = Error::io("cannot duplicate the file descriptor of the memory");
        allocation.descriptor().map_err(|error| DynError::new(failed(error)))
    }
}

impl Registration {
    /// Opens the memory that a key names, in this process or in another one.
    pub(crate) fn open(peer: Rank, key: &Key, deadline: Deadline) -> Result<Arc<Self>, Error> {
        let Key { generation, role, bytes, .. } = *key;
        let claim = Claim { backend: BACKEND, generation, owner: peer, role };

        // In its own process, a region is found by its number.
        if key.process == ProcessToken::own() {
            let found = handover::find::<Self>(&claim).filter(|found| found.bytes == bytes);
            return found.ok_or(Error::Freed { peer, generation: generation.0 });
        }

        let Some(head) = key.head else {
            let why = "another allocator has allocated it; let the fabric allocate it".to_owned();
            return Err(Error::PrivateMemory { peer, why });
        };

        let descriptors = handover::ask(key.process, &claim, deadline);
        let mut descriptors = descriptors.map_err(Error::of_handover(peer, generation.0))?;
        let Some(descriptor) = descriptors.pop() else {
            let how = "it sent no file descriptor for its memory".to_owned();
            return Err(Error::PeerLost { peer, how });
        };

        let (address, allocation) = Allocation::import(peer, descriptor, (head, bytes), key.guard)?;
        let allocation = Some(allocation);
        Ok(Arc::new(Self { address, bytes, owner: peer, role, allocation }))
    }
}

/// A registered region of this rank.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    entry: Entry,
}

/// An imported region of a peer.
#[derive(Debug)]
pub struct Remote(Arc<Registration>);

impl Local {
    fn publish(registration: Registration) -> Self {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let entry = handover::enter(BACKEND, owner, role, Arc::clone(&registration) as _);
        Self { registration, entry }
    }

    pub(crate) fn key(&self) -> Key {
        let Registration { owner: rank, role, bytes, ref allocation, .. } = *self.registration;
        let (generation, process) = (self.entry.generation(), ProcessToken::own());
        let head = allocation.as_ref().map(Allocation::head);
        let guard = allocation.as_ref().map_or(LengthGuard::Allocated, Allocation::guard);
        Key { generation, process, rank, role, bytes, head, guard }
    }
}

// SAFETY: the registration keeps the memory allocated, or the caller of `register` does.
unsafe impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(device::pointer(self.registration.address)).unwrap_or(NonNull::dangling())
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        let words = (self.registration.bytes / 8) as usize;
        // SAFETY: flags are aligned words (`register`), live as long as the region, and are
        // accessed as atomics only.
        (self.registration.role == Role::Flags)
            .then(|| unsafe { std::slice::from_raw_parts(self.base().as_ptr().cast(), words) })
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("memory of this backend has no dma-buf yet".to_owned())
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        None
    }

    unsafe fn allow_reuse(&self) {}
}

/// Implements the bounds and the addresses of a region by its registration.
macro_rules! region_of_engine {
    ($region:ty, $field:tt) => {
        // SAFETY: length and role are those of the registration, which `self` keeps and which has
        // checked the alignment of flags.
        unsafe impl RegionBounds for $region {
            fn bytes(&self) -> u64 {
                self.$field.bytes
            }

            fn role(&self) -> Role {
                self.$field.role
            }
        }

        // SAFETY: the address is that of the registration, which keeps the memory mapped.
        unsafe impl EngineRegion for $region {
            fn address(&self) -> u64 {
                self.$field.address
            }

            fn host_address(&self) -> Option<u64> {
                Some(self.$field.address)
            }
        }
    };
}
region_of_engine!(Local, registration);
region_of_engine!(Remote, 0);

// SAFETY: allocations are new, and a key is compared with the registration that it names.
unsafe impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let (address, allocation) = Allocation::zeroed(self.rank, bytes)?;
        let (owner, allocation) = (self.rank, Some(allocation));
        Ok(Local::publish(Registration { address, bytes, owner, role, allocation }))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        let address = device::address(base);
        if role == Role::Flags && !address.is_multiple_of(8) {
            let text = format!("flags begin at {base:p}, expected a multiple of 8 bytes");
            return Err(Error::Argument(text));
        }
        let (owner, allocation) = (self.rank, Allocation::holding(base, bytes));
        Ok(Local::publish(Registration { address, bytes, owner, role, allocation }))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        if region.space() == Space::Device {
            // An address of another device would be taken for one of this device.
            let text =
                format!("cannot adopt {region:?}: it is device memory, expected host memory");
            return Err(Error::Argument(text));
        }
        // SAFETY: the caller's.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        Ok(local.key())
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        if self.connected().get(peer.index()) != Some(&true) {
            return Err(Error::NotConnected { peer });
        }
        if key.rank != peer {
            let (expected, found) = (format!("a key of rank {peer}"), format!("rank {}", key.rank));
            return Err(Error::ForeignKey { expected, found });
        }
        Registration::open(peer, key, deadline).map(Remote)
    }
}
