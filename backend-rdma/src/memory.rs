//! Registers, exports and imports host memory, and device memory that another fabric of the rank holds.

mod device;
mod registration;

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    BackendId, Deadline, DmaBuf, DynRegion, Flush, Generation, PeerMemory, Rank, Region,
    RemoteKey as _, Role, Space,
};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::handover::{self, Claim, Entry};
use peerlane_toolkit::mapping::Mapping;

use crate::error::Error;
use crate::fabric::Shared;
use crate::key::Key;

pub(crate) use registration::{Registration, find};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Registers memory of this rank and imports memory of its peers.
#[derive(Debug)]
pub struct Memory {
    pub(crate) shared: Arc<Shared>,
}

/// A registered region of this rank.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    /// The entry in the registrations of the process, removed when this is dropped.
    entry: Entry,
    shared: Arc<Shared>,
}

/// An imported region of a peer.
pub struct Remote {
    pub(crate) key: Key,
    /// The registration, if the region is of this rank.
    pub(crate) own: Option<Arc<Registration>>,
}

impl Memory {
    fn enter(&self, registration: Registration) -> Local {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(BackendId::RDMA, owner, role, shared);
        if role == Role::Flags {
            self.shared.arrivals().enter(entry.generation().0, &registration);
        }
        Local { registration, entry, shared: Arc::clone(&self.shared) }
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
        // What is still under way to these flags is dropped from now on.
        self.shared.arrivals().forget(self.generation().0);
    }
}

impl Region for Local {
    fn base(&self) -> NonNull<u8> {
        self.registration.base
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        if self.registration.is_of_device() { Space::Device } else { Space::Host }
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        (self.registration.role == Role::Flags).then(|| {
            let words = self.registration.bytes / WORD_BYTES;
            let words = usize::try_from(words).expect("a region fits the address space");
            // SAFETY: `register` checked the alignment of flags and made their lifetime the caller's
            // duty; engines and the card touch flags as whole words only.
            unsafe { std::slice::from_raw_parts(self.base().as_ptr().cast(), words) }
        })
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        match self.registration.device() {
            Some(region) => region.dma_buf(),
            None => Err("it is host memory, which fabrics register by its address".to_owned()),
        }
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.registration.device()?.flush()
    }
}

impl Remote {
    /// Returns the rank that owns the memory.
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

impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let mapping = Mapping::create(bytes).map_err(Error::of_mapping)?;
        let base = mapping.base();
        let (cards, owner) = (self.shared.cards(), self.shared.rank());
        // SAFETY: the registration keeps the mapping.
        let registration =
            unsafe { Registration::new(cards, base, bytes, owner, role, Some(mapping)) };
        Ok(self.enter(registration?))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        if role == Role::Flags && !(base.as_ptr() as u64).is_multiple_of(WORD_BYTES) {
            let text = format!("flags at {base:p} are not aligned to {WORD_BYTES} bytes");
            return Err(Error::argument(text));
        }
        let (cards, owner) = (self.shared.cards(), self.shared.rank());
        // SAFETY: the caller's.
        let registration = unsafe { Registration::new(cards, base, bytes, owner, role, None) };
        Ok(self.enter(registration?))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        if region.space() == Space::Host {
            // SAFETY: the caller's.
            return unsafe { self.register(region.base(), region.bytes(), role) };
        }
        if role == Role::Flags {
            let text = format!(
                "flags at {:p} are memory of a device, expected memory of the host",
                region.base()
            );
            return Err(Error::argument(text));
        }
        let (cards, owner) = (self.shared.cards(), self.shared.rank());
        let ways = self.shared.inner.options.device_memory;
        let flush = region.flush();
        // One that fails now would fail when bytes have come.
        flush.as_ref().map_or(Ok(()), |flush| flush.flush()).map_err(|reasons| {
            let place = Arc::clone(&cards[0].place.context.name);
            Error::OfDevice { bytes: region.bytes(), place, reasons }
        })?;
        let with = if region.bytes() == 0 { &[] } else { cards };
        let mrs = with.iter().map(|card| device::register(&card.domain, region, ways));
        let mrs = mrs.collect::<Result<_, _>>()?;
        if let Some(flush) = flush {
            self.shared.arrivals().flush_with(flush)?;
        }
        Ok(self.enter(Registration::of_device(mrs, cards.len(), region.clone(), owner)))
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        Ok(local.registration.key(local.generation()))
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        let connected = self.shared.peer(peer)?;
        if key.rank != peer {
            return Err(Error::foreign_key(peer, key.rank));
        }
        let Some(control) = &connected.control else {
            let own = find(key).ok_or(Fault::Freed { peer, generation: key.generation().0 })?;
            return Ok(Remote { key: *key, own: Some(own) });
        };
        control.import(key, deadline)?;
        Ok(Remote { key: *key, own: None })
    }
}

/// Returns the registration that a key of this process names.
fn claim(key: &Key) -> Claim {
    Claim { backend: BackendId::RDMA, generation: key.generation, owner: key.rank, role: key.role }
}
