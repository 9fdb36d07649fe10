//! Registers host and device memory with RDMA NICs, exports it to peers, and imports memory of peers.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    BackendId, Deadline, DmaBuf, DynRegion, Flush, Generation, PeerMemory, Rank, Region,
    RemoteKey as _, Role, Space,
};
use peerlane_toolkit::Fault;
use peerlane_toolkit::RegionBounds;
use peerlane_toolkit::handover::{self, Entry};
use peerlane_toolkit::mapping::Mapping;

use crate::connection::{Connections, Peer};
use crate::error::Error;
use crate::key::Key;
use crate::registration::{self, Registration};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Registers memory of this rank and imports memory of its peers.
#[derive(Debug)]
pub struct Memory {
    pub(crate) connections: Arc<Connections>,
}

/// A region of this rank's memory that is registered with its NICs.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    /// Removes the region from the process-wide table of registrations when dropped.
    entry: Entry,
    connections: Arc<Connections>,
}

/// A peer's memory region, imported through a remote key.
pub struct Remote {
    pub(crate) key: Key,
    pub(crate) alias: Option<Arc<Registration>>,
}

impl Memory {
    fn publish(&self, registration: Registration) -> Local {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let handover = Arc::clone(&registration);
        let entry = handover::enter(BackendId::RDMA, owner, role, handover);
        if role == Role::Flags {
            self.connections.receiver().add_flags(entry.generation().0, &registration);
        }
        Local { registration, entry, connections: Arc::clone(&self.connections) }
    }
}

impl Local {
    pub(crate) fn registration(&self) -> &Registration {
        &self.registration
    }

    fn generation(&self) -> Generation {
        self.entry.generation()
    }
}

impl Drop for Local {
    fn drop(&mut self) {
        // Signals that are still in flight to these flags are ignored from now on.
        self.connections.receiver().remove_flags(self.generation().0);
    }
}

// SAFETY: the region keeps its memory allocated until it is dropped.
unsafe impl Region for Local {
    unsafe fn allow_reuse(&self) {}

    fn base(&self) -> NonNull<u8> {
        self.registration.base
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        if self.registration.is_device_memory() { Space::Device } else { Space::Host }
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        (self.registration.role == Role::Flags).then(|| {
            let words = self.registration.bytes / WORD_BYTES;
            let words = usize::try_from(words).expect("a region fits the address space");
            // SAFETY: `register` checked the alignment of flags, and its caller keeps them allocated. Engines
            // and NICs access flags as whole words only.
            unsafe { std::slice::from_raw_parts(self.base().as_ptr().cast(), words) }
        })
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        match self.registration.device_region() {
            Some(region) => region.dma_buf(),
            None => Err("it is host memory, which fabrics register by its address".to_owned()),
        }
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.registration.device_region()?.flush()
    }
}

// SAFETY: length and role are those of the registration, which `self` keeps and which has checked the alignment of flags.
unsafe impl RegionBounds for Local {
    fn bytes(&self) -> u64 {
        Region::bytes(self)
    }

    fn role(&self) -> Role {
        self.registration().role
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

impl Remote {
    /// Returns the rank that owns the imported memory.
    pub fn peer(&self) -> Rank {
        self.key.rank
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("peer", &self.key.rank)
            .field("bytes", &self.key.bytes)
            .finish_non_exhaustive()
    }
}

// SAFETY: allocations are new, and a key is checked against the registration that it names.
unsafe impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let mapping = Mapping::create(bytes).map_err(Error::mapping)?;
        let base = mapping.base();
        let (nics, owner) = (self.connections.nics(), self.connections.rank());
        // SAFETY: the registration keeps the mapping.
        let registration =
            unsafe { Registration::new(nics, base, bytes, owner, role, Some(mapping)) };
        Ok(self.publish(registration?))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        if role == Role::Flags && !(base.as_ptr() as u64).is_multiple_of(WORD_BYTES) {
            let text = format!("flags at {base:p} are not aligned to {WORD_BYTES} bytes");
            return Err(Error::argument(text));
        }
        let (nics, owner) = (self.connections.nics(), self.connections.rank());
        // SAFETY: the caller upholds the same contract.
        let registration = unsafe { Registration::new(nics, base, bytes, owner, role, None) };
        Ok(self.publish(registration?))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        if region.space() == Space::Host {
            // SAFETY: the caller upholds the same contract.
            return unsafe { self.register(region.base(), region.bytes(), role) };
        }
        if role == Role::Flags {
            let text = format!(
                "flags at {:p} are memory of a device, expected memory of the host",
                region.base()
            );
            return Err(Error::argument(text));
        }
        let (nics, owner) = (self.connections.nics(), self.connections.rank());
        let method = self.connections.resources.options.device_memory;
        let flush = region.flush();
        // A flush that fails now would fail when bytes arrive.
        flush.as_ref().map_or(Ok(()), |flush| flush.flush()).map_err(|reasons| {
            let device = Arc::clone(&nics[0].port.context.name);
            Error::DeviceMemory { bytes: region.bytes(), device, reasons }
        })?;
        let registration = Registration::for_device(nics, region, owner, method)?;
        if let Some(flush) = flush {
            self.connections.receiver().add_flush(flush)?;
        }
        Ok(self.publish(registration))
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        Ok(local.registration.key(local.generation()))
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        let connected = self.connections.peer(peer)?;
        if key.rank != peer {
            return Err(Error::foreign_key(peer, key.rank));
        }
        let alias = match connected {
            Peer::Own => {
                let found = registration::find(key);
                Some(found.ok_or(Fault::Freed { peer, generation: key.generation().0 })?)
            }
            Peer::Other(control) => {
                control.import(key, deadline)?;
                None
            }
        };
        Ok(Remote { key: *key, alias })
    }
}
