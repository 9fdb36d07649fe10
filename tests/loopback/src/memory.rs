//! Registers memory of this rank and imports memory of peers.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use peerlane_hal::{
    Deadline, DmaBuf, DynRegion, Flush, Generation, PeerMemory, Rank, Region, Role, Space,
};
use peerlane_toolkit::handover::{self, Claim, Entry, Handover};
use peerlane_toolkit::{EngineRegion, RegionBounds};

use crate::device::Allocation;
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
    /// `None` for memory of the caller.
    _allocation: Option<Allocation>,
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, String> {
        Err("memory of this backend cannot leave its process yet".to_owned())
    }
}

impl Registration {
    /// Returns the registration of this process that a generation names, or `None` if it was dropped.
    pub(crate) fn find(generation: Generation, owner: Rank, role: Role) -> Option<Arc<Self>> {
        handover::find(&Claim { backend: BACKEND, generation, owner, role })
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
    pub(crate) fn allocate(owner: Rank, bytes: u64, role: Role) -> Result<Self, Error> {
        let allocation = Allocation::zeroed(bytes)
            .ok_or(Error::HostOutOfMemory { requested: bytes, available: 0 })?;
        let (address, allocation) = (allocation.address(), Some(allocation));
        let registration = Registration { address, bytes, owner, role, _allocation: allocation };
        Ok(Self::publish(registration))
    }

    fn publish(registration: Registration) -> Self {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let entry = handover::enter(BACKEND, owner, role, Arc::clone(&registration) as _);
        Self { registration, entry }
    }

    pub(crate) fn generation(&self) -> Generation {
        self.entry.generation()
    }
}

// SAFETY: the registration keeps the memory allocated, or the caller of `register` does.
unsafe impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        let address = self.registration.address as usize;
        NonNull::new(std::ptr::with_exposed_provenance_mut(address)).unwrap_or(NonNull::dangling())
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        let words = (self.registration.bytes / 8) as usize;
        // SAFETY: flags are aligned words (`register`), live as long as the region, and are accessed as atomics only.
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

    fn allow_reuse(&self) {}
}

/// Implements the bounds and the addresses of a region by its registration.
macro_rules! region_of_engine {
    ($region:ty, $field:tt) => {
        impl RegionBounds for $region {
            fn bytes(&self) -> u64 {
                self.$field.bytes
            }

            fn role(&self) -> Role {
                self.$field.role
            }
        }

        impl EngineRegion for $region {
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
        Local::allocate(self.rank, bytes, role)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        let address = base.as_ptr().expose_provenance() as u64;
        if role == Role::Flags && !address.is_multiple_of(8) {
            let text = format!("flags begin at {base:p}, expected a multiple of 8 bytes");
            return Err(Error::Argument(text));
        }
        let owner = self.rank;
        Ok(Local::publish(Registration { address, bytes, owner, role, _allocation: None }))
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
        let Registration { owner: rank, role, bytes, .. } = *local.registration;
        Ok(Key { generation: local.generation(), rank, role, bytes })
    }

    fn import(&self, peer: Rank, key: &Key, _deadline: Deadline) -> Result<Remote, Error> {
        if self.connected().get(peer.index()) != Some(&true) {
            return Err(Error::NotConnected { peer });
        }
        if key.rank != peer {
            let (expected, found) = (format!("a key of rank {peer}"), format!("rank {}", key.rank));
            return Err(Error::ForeignKey { expected, found });
        }
        let found = Registration::find(key.generation, peer, key.role);
        let found = found.filter(|found| found.bytes == key.bytes);
        found.map(Remote).ok_or(Error::Freed { peer, generation: key.generation.0 })
    }
}
