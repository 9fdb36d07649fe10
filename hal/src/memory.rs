//! Defines registered memory, both regions of this rank and imported regions of peers.

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use crate::deadline::Deadline;
use crate::error::Error;
use crate::key::RemoteKey;
use crate::rank::Rank;

/// The use of a region, either for data or for flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Memory that puts and gets copy.
    Data,
    /// Aligned 64-bit flag words for signals and waits, initially zero.
    Flags,
}

/// The processors that can load and store the bytes of a region directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    /// Memory that the host can load and store.
    Host,
    /// Memory that only a device can load and store.
    Device,
}

/// A dma-buf with device memory, which drivers of other devices can map.
#[derive(Debug)]
pub struct DmaBuf {
    /// The file descriptor of a dma-buf that holds a whole allocation or a part of it.
    pub fd: OwnedFd,
    /// The offset of the region in the dma-buf in bytes.
    pub offset: u64,
}

/// Makes bytes that another device wrote to a device's memory visible to that device.
///
/// A NIC reports that bytes have arrived when it has handed them to the bus. Not every device sees them at once.
pub trait Flush: Send + Sync + fmt::Debug {
    /// Blocks until the device sees every byte that was written to its memory before this call.
    ///
    /// # Errors
    /// Returns why the device may not see it, for example because the device is lost.
    fn flush(&self) -> Result<(), String>;
}

/// A registered memory region of this rank.
///
/// # Safety
/// Until the region is dropped, its memory stays allocated, and the host can read and write `bytes` bytes from `base` in the space
/// that [`space`](Self::space) returns. All methods describe this memory and never return anything else.
pub unsafe trait Region: Send + Sync + 'static {
    /// Returns the address of the region's first byte, in the address space that [`space`](Self::space) names.
    ///
    /// [`register`](PeerMemory::register) of the same backend takes it. The address of device memory is a number that only its
    /// backend understands. A backend whose device has addresses from 0 adds a constant to them, which is chosen so that no
    /// address of the host has the same number.
    fn base(&self) -> NonNull<u8>;

    /// Returns the length of the region in bytes.
    fn bytes(&self) -> u64;

    /// Returns which processors can load and store the bytes of the region.
    fn space(&self) -> Space;

    /// Returns the flag words of a region that was registered as [`Role::Flags`], if the host can read them.
    ///
    /// An executor polls them if the engine cannot queue waits, and names the missing one if a deadline passes.
    fn flags(&self) -> Option<&[AtomicU64]>;

    /// Returns the current value of a flag for diagnosis, even if the host cannot load the flag directly.
    ///
    /// It is for diagnosis: it may be slow and has no memory order. It returns `None` if there is no such flag, or if the value
    /// cannot be read within a short time.
    fn flag_value(&self, word: u64) -> Option<u64>;

    /// Reads adjacent flags from the word `first`, in the byte order of the host, as [`flag_value`](Self::flag_value) does. Returns
    /// false if one of them cannot be read.
    ///
    /// A backend whose flags the host cannot load reads them by one copy.
    fn flag_values(&self, first: u64, values: &mut [[u8; 8]]) -> bool {
        (first..).zip(values).all(|(word, value)| {
            let found = self.flag_value(word);
            found.map(|found| *value = found.to_ne_bytes()).is_some()
        })
    }

    /// Returns the region as a dma-buf, with which a fabric of another backend can register it.
    ///
    /// # Errors
    /// Returns why there is no dma-buf of it.
    fn dma_buf(&self) -> Result<DmaBuf, String>;

    /// Returns the flush that makes data from other devices visible to this device, or `None` if it needs none.
    ///
    /// All regions of one device return the same flush. If no way to flush is known, the flush fails, and the memory must not
    /// receive data from other devices.
    fn flush(&self) -> Option<Arc<dyn Flush>>;

    /// Lets the backend reuse the memory for another region after this region is dropped.
    ///
    /// Without this call, memory that peers may still write to is not used again.
    ///
    /// ```compile_fail,E0133
    /// fn free<R: peerlane_hal::Region>(region: R) {
    ///     region.allow_reuse(); // Only the caller knows that no peer writes to it.
    /// }
    /// ```
    ///
    /// # Safety
    /// No peer writes to this region any more.
    unsafe fn allow_reuse(&self);
}

/// Registers memory of this rank, and imports memory that peers have registered.
///
/// # Safety
/// Memory that [`allocate`](Self::allocate) returns belongs to no one else. An imported region stands for the bytes that the peer
/// registered under that key and for no others, and a key of freed memory cannot be imported.
pub unsafe trait PeerMemory: Send + Sync + 'static {
    /// The error type of the backend.
    type Error: Error;
    /// The type of the remote key with which a peer imports a region.
    type Key: RemoteKey;
    /// The type of a registered region of this rank.
    type Local: Region;
    /// The type of an imported region of a peer. Dropping a region ends its import.
    type Remote: Send + Sync + 'static;

    /// Allocates and registers zeroed memory that every peer of the fabric can import. It may have no bytes.
    ///
    /// # Errors
    /// [`OutOfMemory`](crate::ErrorKind::OutOfMemory), which names the size.
    fn allocate(&self, bytes: u64, role: Role) -> Result<Self::Local, Self::Error>;

    /// Allocates as [`allocate`](Self::allocate), but takes a page of the memory from the system only when it is first used, where the
    /// backend can. So a large allocation that is used in part takes only that part.
    ///
    /// The first use of a page then takes longer, and fails with a signal if the system has no page left. The default calls
    /// `allocate`.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<Self::Local, Self::Error> {
        self.allocate(bytes, role)
    }

    /// Allocates and registers zeroed flag words that the host can read and write.
    ///
    /// They are for an engine without [`queued_wait`](crate::Caps::queued_wait), and for waits in graphs, which the host releases.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    fn allocate_polled_flags(&self, bytes: u64) -> Result<Self::Local, Self::Error>;

    /// Registers memory that the caller allocated, which may begin anywhere inside an allocation.
    ///
    /// `base` is an address of the host or what [`Region::base`] returns for memory of this device.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::ErrorKind::InvalidArgument) if the fabric cannot use such memory, or if flags are not aligned
    /// to 8 bytes.
    ///
    /// # Safety
    /// `base..base + bytes` must stay allocated until the region is dropped and every importer has dropped its import. Memory for
    /// [`Role::Flags`] must be zero, and only engines may access it.
    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Self::Local, Self::Error>;

    /// Registers a region of another fabric of this rank with this fabric.
    ///
    /// The address alone may not be enough for device memory, so the backend can use the region's
    /// [dma-buf](Region::dma_buf), or recognise a region of its own with [`DynRegion::downcast`].
    ///
    /// # Errors
    /// As [`register`](Self::register).
    ///
    /// # Safety
    /// As [`register`](Self::register). A clone of `region` keeps the memory allocated.
    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Self::Local, Self::Error>;

    /// Returns the remote key with which a peer imports the region.
    ///
    /// The key names this registration only: it is refused after the region is dropped, even if other memory is registered at
    /// the same address.
    ///
    /// # Errors
    /// The error of the vendor's call.
    fn export(&self, local: &Self::Local) -> Result<Self::Key, Self::Error>;

    /// Imports a region of a connected peer by its remote key. A key of this rank gives an alias.
    ///
    /// # Errors
    /// [`InvalidKey`](crate::ErrorKind::InvalidKey) if the memory has been freed or the key is of another rank;
    /// [`PeerLost`](crate::ErrorKind::PeerLost) if the peer is gone or not connected;
    /// [`Timeout`](crate::ErrorKind::Timeout).
    fn import(
        &self,
        peer: Rank,
        key: &Self::Key,
        deadline: Deadline,
    ) -> Result<Self::Remote, Self::Error>;
}

/// A type-erased local region of any backend. Clones share the registration, which ends with the last of them.
#[derive(Clone)]
pub struct DynRegion {
    region: Arc<dyn Region>,
    typed: Arc<dyn Any + Send + Sync>,
    /// What owns the memory; dropped last, because the memory may be freed with it.
    owner: Option<Arc<dyn Any + Send + Sync>>,
}

/// Regions are equal if they share a registration.
impl PartialEq for DynRegion {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.typed, &other.typed)
    }
}

impl DynRegion {
    /// Erases the type of a shared region.
    pub fn new<R: Region>(region: Arc<R>) -> Self {
        let typed: Arc<dyn Any + Send + Sync> = Arc::clone(&region) as _;
        match typed.downcast::<Self>() {
            Ok(inner) => Self::clone(&inner),
            Err(typed) => Self { region, typed, owner: None },
        }
    }

    /// Keeps `owner`, such as the allocation of the memory, until the last clone of the region has been dropped.
    ///
    /// ```
    /// use std::ptr::NonNull;
    /// use std::sync::Arc;
    /// use peerlane::hal::{Fabric, PeerMemory, Role};
    /// use peerlane::{DynFabric, Rank, host};
    ///
    /// let fabric = DynFabric::new(host::Fabric::open(Rank(0), 1)?);
    /// let allocation = Arc::new([0_u8; 64]);
    /// let base = NonNull::from(&*allocation).cast();
    /// // SAFETY: the region keeps the memory, and no peer imports it.
    /// let region = unsafe { fabric.memory().register(base, 64, Role::Data) }?;
    /// let region = region.keep_alive(Arc::clone(&allocation));
    /// assert_eq!(Arc::strong_count(&allocation), 2);
    /// drop(region);
    /// assert_eq!(Arc::strong_count(&allocation), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn keep_alive(self, owner: impl Send + Sync + 'static) -> Self {
        let owner: Arc<dyn Any + Send + Sync> = match self.owner {
            Some(first) => Arc::new((first, owner)),
            None => Arc::new(owner),
        };
        Self { owner: Some(owner), ..self }
    }

    /// Returns the region as the backend's type `R`, or `None` if it belongs to another backend.
    pub fn downcast<R: Region>(&self) -> Option<Arc<R>> {
        let typed = Arc::clone(&self.typed).downcast().ok();
        // `R` can be this type.
        typed.or_else(|| (Arc::new(self.clone()) as Arc<dyn Any + Send + Sync>).downcast().ok())
    }

    pub(crate) fn typed<R: Region>(&self) -> Option<&R> {
        self.typed.downcast_ref().or_else(|| (self as &dyn Any).downcast_ref())
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl Region for DynRegion {
    fn base(&self) -> NonNull<u8> {
        self.region.base()
    }

    fn bytes(&self) -> u64 {
        self.region.bytes()
    }

    fn space(&self) -> Space {
        self.region.space()
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.region.flags()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        self.region.flag_value(word)
    }

    fn flag_values(&self, first: u64, values: &mut [[u8; 8]]) -> bool {
        self.region.flag_values(first, values)
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        self.region.dma_buf()
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.region.flush()
    }

    unsafe fn allow_reuse(&self) {
        // SAFETY: the caller guarantees that no peer writes to the region any more.
        unsafe { self.region.allow_reuse() };
    }
}

impl fmt::Debug for DynRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynRegion")
            .field("base", &self.base())
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

/// A type-erased imported region of any backend. Clones share the import, which ends with the last
/// of them.
#[derive(Clone)]
pub struct DynImport(pub(crate) Arc<dyn Any + Send + Sync>);

impl fmt::Debug for DynImport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynImport").finish_non_exhaustive()
    }
}
