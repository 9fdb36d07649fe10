//! Registered memory, local and imported.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::deadline::Deadline;
use crate::error::Error;
use crate::held::{DmaBuf, Flush, Held};
use crate::key::RemoteKey;
use crate::rank::Rank;

/// What a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Bytes that are put and received.
    Data,
    /// Aligned 64-bit words that are signalled and waited for; zero at first.
    Flags,
}

/// Where the bytes of a region lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// The host can load and store them.
    Host,
    /// Only a device can.
    Device,
}

/// Of a device whose backend has not said more: bytes of a card might be announced too early.
#[derive(Debug)]
struct Unsaid;

impl Flush for Unsaid {
    fn flush(&self) -> Result<(), String> {
        Err("its backend does not say when the device sees what network cards have written"
            .to_owned())
    }
}

/// Registered memory of this rank.
pub trait Region: Send + Sync + 'static {
    /// The first byte, in the address space that [`space`](Self::space) names.
    fn base(&self) -> NonNull<u8>;

    /// The length in bytes.
    fn bytes(&self) -> u64;

    /// Who can load and store the bytes.
    fn space(&self) -> Space;

    /// The region as flags that the host can read, where it was registered as [`Role::Flags`] and
    /// the host sees it; an executor polls these where waits cannot be queued, and names the
    /// missing one when a deadline passes.
    fn flags(&self) -> Option<&[AtomicU64]>;

    /// What the flag `word` holds now, also where the host cannot load it; `None` where there is no
    /// such flag, or it cannot be found out within a short bound. For diagnosis only: it may be
    /// slow, and orders nothing.
    fn flag_value(&self, word: u64) -> Option<u64> {
        let word = usize::try_from(word).ok()?;
        Some(self.flags()?.get(word)?.load(Ordering::Acquire))
    }

    /// Memory of a device as a fabric of another backend registers it.
    ///
    /// # Errors
    /// Why there is no dma-buf of it.
    fn dma_buf(&self) -> Result<DmaBuf, String> {
        Err("its backend makes no dma-bufs".to_owned())
    }

    /// What has to be done before the device sees what others have written to this memory; `None`
    /// where it sees it as soon as they say that it has come. Regions of one device give one and the
    /// same. Where nothing is known to help, it fails, and nothing is to be received there.
    fn flush(&self) -> Option<Arc<dyn Flush>> {
        match self.space() {
            Space::Host => None,
            Space::Device => Some(Arc::new(Unsaid)),
        }
    }
}

/// Makes memory reachable for peers, and peers' memory reachable from here.
pub trait PeerMemory: Send + Sync + 'static {
    /// The backend's error.
    type Error: Error;
    /// What a peer needs to import a region.
    type Key: RemoteKey;
    /// Registered memory of this rank.
    type Local: Region;
    /// Imported memory of a peer; dropping it ends the import.
    type Remote: Send + Sync + 'static;

    /// Allocates zeroed memory that every peer of the fabric can import.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory), naming the bytes wanted.
    fn allocate(&self, bytes: u64, role: Role) -> Result<Self::Local, Self::Error>;

    /// The same, as flags of an engine without [`queued_wait`](crate::Caps::queued_wait): they lie
    /// where the host reads them.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    fn allocate_polled_flags(&self, bytes: u64) -> Result<Self::Local, Self::Error> {
        self.allocate(bytes, Role::Flags)
    }

    /// Registers the caller's own memory, at any offset inside its allocation.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the fabric cannot use such memory,
    /// or flags are not aligned to 8 bytes.
    ///
    /// # Safety
    /// `base..base + bytes` stays allocated until the result is dropped and every importer has
    /// dropped its import. As [`Role::Flags`], it is zero, and only engines touch it.
    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Self::Local, Self::Error>;

    /// Registers memory that another fabric of this rank holds, by whatever way leads there: for memory
    /// of a device its base alone may not be enough.
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As [`register`](Self::register). What keeps `held` keeps the memory.
    unsafe fn adopt(&self, held: &Held, role: Role) -> Result<Self::Local, Self::Error> {
        let region = held.region();
        // SAFETY: the caller's.
        unsafe { self.register(region.base(), region.bytes(), role) }
    }

    /// The key of a region. It names this registration only: once the region is dropped, the key is
    /// refused, also when other memory is registered at the same address.
    ///
    /// # Errors
    /// The vendor's refusal.
    fn export(&self, local: &Self::Local) -> Result<Self::Key, Self::Error>;

    /// Opens a region of `peer`, which must be connected; one's own key gives an alias.
    ///
    /// # Errors
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey): the key is of freed memory or of another rank.
    /// [`PeerLost`](crate::ErrorKind::PeerLost): the peer is gone or not connected.
    /// [`Timeout`](crate::ErrorKind::Timeout): it did not answer in time.
    fn import(
        &self,
        peer: Rank,
        key: &Self::Key,
        deadline: Deadline,
    ) -> Result<Self::Remote, Self::Error>;
}
