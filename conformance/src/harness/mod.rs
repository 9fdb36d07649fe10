//! Describes a backend to the checks: how it is opened, and how its memory is read and written.
//!
//! | file | harness |
//! | --- | --- |
//! | `host.rs` | of host memory, the reference backend |
//! | `layered.rs` | of a layer over another harness |
//! | `erased.rs` | of another harness without its types |

pub(crate) mod erased;
pub(crate) mod host;
pub(crate) mod layered;

use std::cell::UnsafeCell;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use peerlane_hal::{ErrorKind, Fabric, PeerMemory, Rank, Region, Space};

/// The fabric of a harness.
pub type FabricOf<H> = <H as Harness>::Fabric;
/// The memory of a harness's fabric.
pub type MemoryOf<H> = <FabricOf<H> as Fabric>::Memory;
/// The engine of a harness's fabric.
pub type EngineOf<H> = <FabricOf<H> as Fabric>::Engine;
/// The error of a harness's fabric.
pub type ErrorOf<H> = <FabricOf<H> as Fabric>::Error;
/// The local regions of a harness's fabric.
pub type LocalOf<H> = <MemoryOf<H> as PeerMemory>::Local;
/// The imported regions of a harness's fabric.
pub type RemoteOf<H> = <MemoryOf<H> as PeerMemory>::Remote;
/// The remote keys of a harness's fabric.
pub type KeyOf<H> = <MemoryOf<H> as PeerMemory>::Key;

/// Opens a backend under test, and accesses its memory.
///
/// All ranks of a check are threads of this process; each has its own fabric.
pub trait Harness: Send + Sync + 'static {
    /// The fabric under test.
    type Fabric: Fabric;

    /// Returns the first part of every check's name, such as `host` or `host+delay`.
    fn name(&self) -> &str;

    /// Opens the fabric as `rank` of `ranks`.
    ///
    /// # Errors
    /// Of kind [`Unavailable`](ErrorKind::Unavailable) if the hardware or a library is absent. The
    /// checks are then listed as ignored, with the error as the reason.
    fn open(&self, rank: Rank, ranks: usize) -> Result<Self::Fabric, ErrorOf<Self>>
    where
        Self: Sized;

    /// Returns whether an absent backend is a failure, as on a machine that exists to test it.
    fn required(&self) -> bool {
        false
    }

    /// Returns why no check can run although the backend is there, such as a layer that needs what the engines lack.
    fn not_applicable(&self) -> Option<String> {
        None
    }

    /// Returns the limit of each single wait of a check.
    fn timeout(&self) -> Duration {
        Duration::from_secs(10)
    }

    /// Returns the limit of one wait of a check, with what it waits for.
    ///
    /// A test of a check overrides it if its backend never does what one wait is for, and all other waits must not time out.
    fn limit_of(&self, wait: &str) -> Duration {
        let _ = wait;
        self.timeout()
    }

    /// Writes into a region of this rank. Backends with device memory override it.
    ///
    /// # Panics
    /// If the span leaves the region, or the region is in device memory and the method is not
    /// overridden.
    fn write(&self, region: &LocalOf<Self>, offset: u64, bytes: &[u8])
    where
        Self: Sized,
    {
        let pointer = host_pointer(region, offset, bytes.len());
        // SAFETY: `host_pointer` checked that the span lies inside a region of host memory. A check
        // never touches bytes that an op in flight may touch.
        unsafe { pointer.copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) }
    }

    /// Reads from a region of this rank. Backends with device memory override it.
    ///
    /// # Panics
    /// In the same cases as [`write`](Self::write).
    fn read(&self, region: &LocalOf<Self>, offset: u64, bytes: &mut [u8])
    where
        Self: Sized,
    {
        let pointer = host_pointer(region, offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { pointer.copy_to_nonoverlapping(NonNull::from(&mut *bytes).cast(), bytes.len()) }
    }

    /// Allocates zeroed memory of the device of `rank` outside the fabric, to be registered. It is aligned to at least 8
    /// bytes, and to [`put_align_bytes`](peerlane_hal::Caps::put_align_bytes).
    ///
    /// Returns `None` if the fabric cannot register memory.
    fn own_memory(&self, rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        let _ = rank;
        Some(Arc::new(HostMemory::zeroed(bytes)))
    }

    /// Returns whether an error of one engine ends all engines of the device. The checks then run one at a time, and
    /// [`open`](Self::open) resets the device.
    fn faults_are_device_wide(&self) -> bool {
        false
    }

    /// Makes the next submission to `engine` fail with an error that poisons it. Returns the kind
    /// of that error, or `None` if the harness cannot cause one.
    fn break_engine(&self, engine: &mut EngineOf<Self>) -> Option<ErrorKind>
    where
        Self: Sized,
    {
        let _ = engine;
        None
    }
}

fn host_pointer<R: Region>(region: &R, offset: u64, bytes: usize) -> NonNull<u8> {
    assert_eq!(
        region.space(),
        Space::Host,
        "the region is in device memory, which the host cannot access; override Harness::write and \
         Harness::read"
    );
    let end = offset.checked_add(bytes as u64).filter(|&end| end <= region.bytes());
    assert!(
        end.is_some(),
        "access out of range: {bytes} bytes at offset {offset}, but the region has {} bytes",
        region.bytes()
    );
    let offset = usize::try_from(offset).expect("a region of host memory fits the address space");
    // SAFETY: just checked to lie inside the region.
    unsafe { region.base().add(offset) }
}

/// Memory that was allocated outside a fabric; it lives until the last handle is dropped.
///
/// # Safety
/// `bytes` bytes from `base` are allocated on the device of the rank until the value is dropped, and no one else accesses them.
pub unsafe trait OwnMemory: Send + Sync {
    /// Returns the address of the first byte.
    fn base(&self) -> NonNull<u8>;
    /// Returns the length in bytes.
    fn bytes(&self) -> u64;
}

/// Own memory on the process's heap.
pub struct HostMemory {
    pages: Box<[Page]>,
    bytes: u64,
}

#[repr(align(4096))]
struct Page {
    _words: [UnsafeCell<u64>; 512],
}

// SAFETY: the words are only accessed through `base`, and such accesses keep the rules of a region.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates zeroed memory, aligned to 4096 bytes.
    ///
    /// # Panics
    /// If the bytes exceed the address space.
    pub fn zeroed(bytes: u64) -> Self {
        let pages = bytes.div_ceil(size_of::<Page>() as u64);
        let pages = usize::try_from(pages).expect("own memory fits the address space");
        let page = |_| Page { _words: [const { UnsafeCell::new(0) }; 512] };
        Self { pages: (0..pages).map(page).collect(), bytes }
    }
}

// SAFETY: the pages hold at least so many bytes, and the value owns them.
unsafe impl OwnMemory for HostMemory {
    fn base(&self) -> NonNull<u8> {
        NonNull::from(&*self.pages).cast()
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
