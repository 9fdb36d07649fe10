//! What a backend says of itself so that the checks can run on it.

use std::cell::UnsafeCell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Fabric, PeerMemory, Rank, Region, Space};

/// The fabric of a harness.
pub type FabricOf<H> = <H as Harness>::Fabric;
/// Its memory.
pub type MemoryOf<H> = <FabricOf<H> as Fabric>::Memory;
/// Its engine.
pub type EngineOf<H> = <FabricOf<H> as Fabric>::Engine;
/// Its error.
pub type ErrorOf<H> = <FabricOf<H> as Fabric>::Error;
/// Its local regions.
pub type LocalOf<H> = <MemoryOf<H> as PeerMemory>::Local;
/// Its imported regions.
pub type RemoteOf<H> = <MemoryOf<H> as PeerMemory>::Remote;
/// Its remote keys.
pub type KeyOf<H> = <MemoryOf<H> as PeerMemory>::Key;

/// A backend under test: how to open it, and how to look at its memory.
///
/// All ranks of a check are threads of this process, each with a fabric of its own.
pub trait Harness: Send + Sync + 'static {
    /// The fabric under test.
    type Fabric: Fabric;

    /// The first part of every check's name, such as `host` or `host+delay`.
    fn name(&self) -> &str;

    /// Opens the fabric as `rank` of `ranks`.
    ///
    /// # Errors
    /// Of kind [`Unavailable`](ErrorKind::Unavailable) where the hardware or a library is absent:
    /// then the checks are listed as ignored, with the error as the reason.
    fn open(&self, rank: Rank, ranks: usize) -> Result<Self::Fabric, ErrorOf<Self>>
    where
        Self: Sized;

    /// Whether absent hardware is a failure, as on a machine that is there to test it.
    fn required(&self) -> bool {
        false
    }

    /// How long any single thing may take that a check waits for.
    fn timeout(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// Writes into a region of this rank. Backends with device memory replace it.
    ///
    /// # Panics
    /// If the span leaves the region, or the region is a device's and the method was not replaced.
    fn write(&self, region: &LocalOf<Self>, offset: u64, bytes: &[u8])
    where
        Self: Sized,
    {
        let place = host_place(region, offset, bytes.len());
        // SAFETY: `host_place` checked that the span lies inside a region of host memory, and a
        // check never touches bytes that an op in flight may touch.
        unsafe { place.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) }
    }

    /// Reads from a region of this rank. Backends with device memory replace it.
    ///
    /// # Panics
    /// As [`write`](Self::write).
    fn read(&self, region: &LocalOf<Self>, offset: u64, bytes: &mut [u8])
    where
        Self: Sized,
    {
        let place = host_place(region, offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { place.copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    /// Zeroed memory as a caller would allocate it itself, to be registered; at least aligned to 8
    /// bytes. `None` where the fabric takes none.
    fn own_memory(&self, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        Some(Arc::new(HostMemory::zeroed(bytes)))
    }

    /// Makes the next submission to `engine` fail with an error that poisons, and says with which
    /// kind; `None` where that cannot be brought about.
    fn break_engine(&self, engine: &mut EngineOf<Self>) -> Option<ErrorKind>
    where
        Self: Sized,
    {
        let _ = engine;
        None
    }
}

fn host_place<R: Region>(region: &R, offset: u64, bytes: usize) -> NonNull<u8> {
    assert_eq!(
        region.space(),
        Space::Host,
        "the harness of a backend with device memory replaces Harness::write and Harness::read"
    );
    let end = offset.checked_add(bytes as u64).filter(|&end| end <= region.bytes());
    assert!(end.is_some(), "{bytes} bytes from {offset} leave a region of {}", region.bytes());
    let offset = usize::try_from(offset).expect("a region of host memory fits the address space");
    // SAFETY: just checked to lie inside the region.
    unsafe { region.base().add(offset) }
}

/// Memory that the caller allocated; it lives until the last handle is dropped.
pub trait OwnMemory: Send + Sync {
    /// The first byte.
    fn base(&self) -> NonNull<u8>;
    /// The length in bytes.
    fn bytes(&self) -> u64;
}

/// Own memory in the process's heap.
pub struct HostMemory {
    words: Box<[UnsafeCell<u64>]>,
    bytes: u64,
}

// SAFETY: the words are only reached through `base`, by whoever keeps the rules of a region.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory, aligned to 8 bytes.
    ///
    /// # Panics
    /// If the bytes exceed the address space.
    pub fn zeroed(bytes: u64) -> Self {
        let words = usize::try_from(bytes.div_ceil(8)).expect("own memory fits the address space");
        Self { words: (0..words).map(|_| UnsafeCell::new(0)).collect(), bytes }
    }
}

impl OwnMemory for HostMemory {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&*self.words).cast()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
