//! Registers local host memory and imports the memory of peers.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::doorbell::{Doorbell, Peers};
use super::error::Error;
use super::key::{Access, Key};
use super::registration::{Backing, Registration};
use peerlane_hal::{
    BackendId, Deadline, DmaBuf, DynRegion, Flush, Generation, PeerMemory, Rank, Region, Role,
    Space,
};
use peerlane_toolkit::handover::{self, Claim, Entry, ProcessToken};
use peerlane_toolkit::mapping::{self, Mapping};
use peerlane_toolkit::{EngineRegion, RegionBounds};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The memory of a host fabric, which registers regions of this rank and imports regions of peers.
#[derive(Debug)]
pub struct Memory {
    pub(super) rank: Rank,
    pub(super) peers: Arc<Peers>,
}

/// A registered region of this rank in host memory.
#[derive(Debug)]
pub struct Local {
    registration: Arc<Registration>,
    entry: Entry,
}

/// An imported region of a peer in host memory.
pub struct Remote {
    registration: Arc<Registration>,
    /// The doorbell that wakes the region's owner after a flag of this region was signalled.
    doorbell: Arc<Doorbell>,
    peer: Rank,
}

impl Local {
    pub(super) fn allocate(owner: Rank, bytes: u64, role: Role) -> Result<Self, Error> {
        let mapping = Mapping::create(bytes).map_err(Error::of_mapping(owner))?;
        Ok(Self::mapped(owner, bytes, role, mapping))
    }

    fn mapped(owner: Rank, bytes: u64, role: Role, mapping: Mapping) -> Self {
        let backing = Backing::Mapped(mapping, 0);
        Self::publish(Registration { backing, bytes, owner, role })
    }

    fn publish(registration: Registration) -> Self {
        let (owner, role) = (registration.owner, registration.role);
        let registration = Arc::new(registration);
        let shared = Arc::clone(&registration);
        let entry = handover::enter(BackendId::HOST, owner, role, shared);
        Self { registration, entry }
    }

    pub(super) fn generation(&self) -> Generation {
        self.entry.generation()
    }

    pub(super) fn role(&self) -> Role {
        self.registration.role
    }

    /// Returns a pointer to byte `offset` of the region, which the caller has checked to be in
    /// bounds.
    pub(super) fn pointer(&self, offset: u64) -> *mut u8 {
        self.registration.pointer(offset)
    }

    pub(super) fn share(&self) -> Arc<Registration> {
        Arc::clone(&self.registration)
    }
}

// SAFETY: the region keeps its memory allocated until it is dropped.
unsafe impl Region for Local {
    unsafe fn allow_reuse(&self) {}

    fn base(&self) -> NonNull<u8> {
        self.registration.base()
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        Space::Host
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        (self.role() == Role::Flags).then(|| {
            let words = self.registration.bytes / WORD_BYTES;
            let words = usize::try_from(words).expect("a mapped region fits the address space");
            // SAFETY: `register` checked the alignment of flags and made their lifetime the
            // caller's duty; engines access flags as atomics only.
            unsafe { std::slice::from_raw_parts(self.base().as_ptr().cast(), words) }
        })
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("the region is host memory, which has no dma-buf; register it by its address"
            .to_owned())
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        None
    }
}

// SAFETY: length and role are those of the registration, which `self` keeps and which has checked
// the alignment of flags.
unsafe impl RegionBounds for Local {
    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn role(&self) -> Role {
        self.registration.role
    }
}

// SAFETY: the address is that of the registration, which keeps the memory mapped.
unsafe impl EngineRegion for Local {
    fn address(&self) -> u64 {
        self.registration.base().as_ptr() as u64
    }

    fn host_address(&self) -> Option<u64> {
        Some(self.address())
    }
}

// SAFETY: length and role are those of the registration, which `self` keeps and which has checked
// the alignment of flags.
unsafe impl RegionBounds for Remote {
    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn role(&self) -> Role {
        self.registration.role
    }
}

// SAFETY: the address is that of the registration, which keeps the memory mapped.
unsafe impl EngineRegion for Remote {
    fn address(&self) -> u64 {
        self.registration.base().as_ptr() as u64
    }

    fn host_address(&self) -> Option<u64> {
        Some(self.address())
    }
}

impl Remote {
    /// Returns a pointer to byte `offset` of the region, which the caller has checked to be in
    /// bounds.
    pub(super) fn pointer(&self, offset: u64) -> *mut u8 {
        self.registration.pointer(offset)
    }

    pub(super) fn doorbell(&self) -> &Arc<Doorbell> {
        &self.doorbell
    }

    /// Returns the rank that owns the memory.
    pub fn peer(&self) -> Rank {
        self.peer
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Remote")
            .field("peer", &self.peer)
            .field("bytes", &self.registration.bytes)
            .finish()
    }
}

/// Opens the memory that a key names: finds its registration if it is of this process, and
/// otherwise maps the file that the process of the peer sends.
pub(super) fn open(peer: Rank, key: &Key, deadline: Deadline) -> Result<Arc<Registration>, Error> {
    let (bytes, owner, role) = (key.bytes, peer, key.role);
    let claim = Claim { backend: BackendId::HOST, generation: key.generation, owner, role };
    if key.process == ProcessToken::own() {
        let found = handover::find::<Registration>(&claim).filter(|found| found.bytes == bytes);
        return found.ok_or(Error::Freed { peer, generation: key.generation.0 });
    }

    let Access::Shared { head, guard } = key.access else {
        let why = format!(
            "rank {peer} registered its own memory instead of calling `allocate`, so only ranks of \
             its process can import it; let rank {peer} allocate this memory with `allocate`, or \
             register a file that holds it with `register_descriptor`"
        );
        return Err(Error::PrivateMemory { peer, why });
    };

    let fds = handover::ask(key.process, &claim, deadline)
        .map_err(Error::of_handover(peer, key.generation.0))?;
    let count = fds.len();
    let Ok([fd]) = <[_; 1]>::try_from(fds) else {
        let how = format!("the peer sent {count} file descriptors for one region, expected 1");
        return Err(Error::PeerLost { peer, how });
    };

    let mapped = Mapping::import(fd, head, bytes, guard).map_err(Error::of_mapping(peer));
    let (mapping, head) = mapped?;
    let backing = Backing::Mapped(mapping, head);
    Ok(Arc::new(Registration { backing, bytes, owner, role }))
}

// SAFETY: allocations are new, and a key is checked against the registration that it names.
unsafe impl PeerMemory for Memory {
    type Error = Error;
    type Key = Key;
    type Local = Local;
    type Remote = Remote;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        Local::allocate(self.rank, bytes, role)
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<Local, Error> {
        let mapping = Mapping::create_on_demand(bytes).map_err(Error::of_mapping(self.rank))?;
        Ok(Local::mapped(self.rank, bytes, role, mapping))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local, Error> {
        self.allocate(bytes, Role::Flags)
    }

    unsafe fn register(&self, base: NonNull<u8>, bytes: u64, role: Role) -> Result<Local, Error> {
        if role == Role::Flags && !(base.as_ptr() as u64).is_multiple_of(WORD_BYTES) {
            let text = format!(
                "misaligned flags: their address is {base:p}, expected a multiple of {WORD_BYTES} \
                 bytes"
            );
            return Err(Error::Argument(text));
        }
        let backing = match mapping::find(base, bytes) {
            Some(span) => Backing::Span(base, span),
            None => Backing::Borrowed(base),
        };
        Ok(Local::publish(Registration { backing, bytes, owner: self.rank, role }))
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Local, Error> {
        if region.space() == Space::Device {
            let (bytes, base) = (region.bytes(), region.base());
            return Err(Error::Argument(format!(
                "cannot adopt {bytes} bytes at {base:p}: the region is device memory, expected \
                 host memory"
            )));
        }
        // SAFETY: the caller's promise.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    fn export(&self, local: &Local) -> Result<Key, Error> {
        Ok(Key {
            process: ProcessToken::own(),
            generation: local.generation(),
            rank: local.registration.owner,
            role: local.role(),
            access: local.registration.access(),
            bytes: local.registration.bytes,
        })
    }

    fn import(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<Remote, Error> {
        let Some(doorbell) = self.peers.doorbell(peer) else {
            return Err(Error::NotConnected { peer });
        };
        if key.rank != peer {
            return Err(Error::ForeignKey {
                expected: format!("a key of rank {peer}"),
                found: format!("rank {}", key.rank),
            });
        }
        Ok(Remote { registration: open(peer, key, deadline)?, doorbell, peer })
    }
}
