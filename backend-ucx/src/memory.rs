//! Registers host memory of this rank, exports it to peers, and imports memory of peers.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    BackendId, Deadline, DmaBuf, DynRegion, Flush, PeerMemory, Rank, Region, RemoteKey as _, Role,
    Space,
};
use peerlane_toolkit::handover::{self, Entry};
use peerlane_toolkit::mapping::Mapping;
use peerlane_toolkit::{Fault, RegionBounds};

use crate::error::Error;
use crate::key::Key;
use crate::network::{Address, Network};
use crate::registration::{self, Registration};

/// Registers memory of this rank and imports memory of its peers.
#[derive(Debug)]
pub struct Memory {
    pub(crate) network: Arc<Network>,
}

/// A region of this rank.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    /// Removes the region from the table of the process when it is dropped.
    entry: Entry,
    network: Arc<Network>,
}

/// A region of a peer, imported by its remote key.
#[derive(Debug)]
pub struct Remote {
    pub(crate) key: Key,
    /// The address of the owner.
    pub(crate) owner: Arc<Address>,
    /// The region itself, if it is of this rank.
    pub(crate) alias: Option<Arc<Registration>>,
}

impl Memory {
    fn publish(&self, registration: Registration) -> Result<Local, Error> {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let entry = handover::enter(BackendId::UCX, owner, role, Arc::clone(&registration) as _);
        let network = Arc::clone(&self.network);
        network.lock().add_region(entry.generation().0, &registration)?;
        Ok(Local { registration, entry, network })
    }
}

impl Local {
    pub(crate) fn registration(&self) -> &Arc<Registration> {
        &self.registration
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        self.network.forget(self.entry.generation().0, &self.registration);
    }
}

// SAFETY: the registration keeps the memory, or the caller of `register` does.
unsafe impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        self.registration.base
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.registration.flags()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        Some(self.registration.flag(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("it is host memory, which fabrics register by its address".to_owned())
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        None
    }

    unsafe fn allow_reuse(&self) {}
}

// SAFETY: length and role are those of the registration, which has checked the alignment of flags.
unsafe impl RegionBounds for Local {
    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn role(&self) -> Role {
        self.registration.role
    }
}

// SAFETY: length and role are those that the owner has put into the key of its registration.
unsafe impl RegionBounds for Remote {
    fn bytes(&self) -> u64 {
        self.key.bytes
    }

    fn role(&self) -> Role {
        self.key.role
    }
}

// SAFETY: allocations are new, and a key is compared with the registration that it names.
unsafe impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let owner = self.network.rank;
        let mapping = Mapping::create(bytes).map_err(Fault::of_mapping(owner))?;
        let base = mapping.base();
        self.publish(Registration { base, bytes, owner, role, mapping: Some(mapping) })
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let owner = self.network.rank;
        let mapping = Mapping::create_on_demand(bytes).map_err(Fault::of_mapping(owner))?;
        let base = mapping.base();
        self.publish(Registration { base, bytes, owner, role, mapping: Some(mapping) })
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        if role == Role::Flags && !base.cast::<u64>().is_aligned() {
            let text = format!("flags begin at {base:p}, expected a multiple of 8 bytes");
            return Err(Error::argument(text));
        }
        let end = isize::try_from(bytes)
            .ok()
            .and_then(|bytes| base.addr().get().checked_add(bytes.unsigned_abs()));
        if end.is_none() {
            return Err(Error::argument(format!(
                "a region of {bytes} bytes at {base:p} has no end"
            )));
        }

        let owner = self.network.rank;
        self.publish(Registration { base, bytes, owner, role, mapping: None })
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        if region.space() == Space::Device {
            return Err(Fault::Unavailable(format!(
                "cannot adopt {region:?}: it is device memory, and messages of UCX are copied to host memory; use a \
                 fabric that stages device memory"
            ))
            .into());
        }
        // SAFETY: the caller's.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        let Registration { bytes, owner: rank, role, .. } = *local.registration;
        Ok(Key { generation: local.entry.generation(), rank, role, bytes })
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        let owner = self.network.peer(peer)?;
        if key.rank != peer {
            let (expected, found) = (format!("rank {peer}"), format!("rank {}", key.rank));
            return Err(Fault::ForeignKey { expected, found }.into());
        }

        let alias = if peer == self.network.rank {
            let found = registration::find(key);
            Some(found.ok_or(Fault::Freed { peer, generation: key.generation().0 })?)
        } else {
            self.network.import(&owner, key, deadline)?;
            None
        };
        Ok(Remote { key: *key, owner, alias })
    }
}
