//! Shared mappings: a sealed memfd and its place in this address space.
//!
//! Every mapping of the process can be found by its addresses, so that memory which one fabric has
//! allocated can be registered with another and leave the process from there too.

mod place;

use std::fs;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, SealFlags};
pub use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

pub use place::{Place, find};

/// Below this the check of free memory costs more than it can tell.
const CHECKED_BYTES_MIN: u64 = 16 << 20;
/// The size of a transparent huge page; smaller regions gain nothing from one.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: u64 = 4096;

/// Why memory of the host is not mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappingError {
    /// This system refused something.
    System {
        /// What was asked of it.
        what: String,
        /// Its answer.
        errno: Errno,
    },
    /// The machine has too little memory.
    Full {
        /// Bytes wanted.
        wanted: u64,
        /// Bytes that can be had without swapping.
        available: u64,
    },
    /// What a peer handed over is not what it should be.
    Unsound {
        /// What it is, and what was wanted.
        how: String,
    },
}

impl MappingError {
    fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System { what: what.into(), errno }
    }
}

/// A memfd, mapped and resident. Its size is sealed, so that no owner can pull pages away from
/// under an importer.
#[derive(Debug)]
pub struct Mapping {
    pages: Arc<Pages>,
}

/// What is mapped; a [`Place`] in it keeps it mapped.
#[derive(Debug)]
struct Pages {
    base: NonNull<u8>,
    mapped_bytes: usize,
    fd: OwnedFd,
}

// SAFETY: a mapping is plain memory; who may touch which byte when is the contract of the ops.
unsafe impl Send for Pages {}
// SAFETY: as above; the type itself has no interior state.
unsafe impl Sync for Pages {}

impl Mapping {
    /// Creates zeroed memory.
    ///
    /// # Errors
    /// The machine has too little memory, or the system refuses.
    pub fn create(bytes: u64) -> Result<Self, MappingError> {
        let mapped = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        if mapped >= CHECKED_BYTES_MIN {
            let memory = MemoryInfo::read().map_err(|error| {
                let errno = Errno::from_io_error(&error).unwrap_or(Errno::IO);
                MappingError::System { what: "read /proc/meminfo".to_owned(), errno }
            });
            let available = memory?.available_bytes;
            // Over-commit would let the allocation pass and kill a process later.
            if mapped > available {
                return Err(MappingError::Full { wanted: bytes, available });
            }
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("peerlane", flags)
            .map_err(MappingError::system("create a memfd for shared memory"))?;
        rustix::fs::ftruncate(&fd, mapped)
            .map_err(MappingError::system(format!("size shared memory to {mapped} bytes")))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(MappingError::system("seal shared memory"))?;
        Self::map(fd, 0, mapped)
    }

    /// Maps the `bytes` behind the first `head` of a memfd that a peer handed over, which must hold
    /// them; and says how far into the mapping they begin, since a mapping begins with a page.
    ///
    /// # Errors
    /// It is shorter, or could be shortened; or the system refuses.
    pub fn import(fd: OwnedFd, head: u64, bytes: u64) -> Result<(Self, usize), MappingError> {
        let start = head / PAGE_BYTES * PAGE_BYTES;
        let end = head.saturating_add(bytes.max(1));
        let end = end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        let size =
            rustix::fs::fstat(&fd).map_err(MappingError::system("stat shared memory"))?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(MappingError::system("read the seals of shared memory"))?;
        let whole = u64::try_from(size).is_ok_and(|size| size >= end);
        if !whole || !seals.contains(SealFlags::SHRINK) {
            return Err(MappingError::Unsound {
                how: format!(
                    "it handed over memory of {size} bytes with seals {seals:?}, wanted at least \
                     {end} bytes that cannot shrink"
                ),
            });
        }
        // Less than a page.
        Ok((Self::map(fd, start, end - start)?, (head - start) as usize))
    }

    fn map(fd: OwnedFd, start: u64, mapped: u64) -> Result<Self, MappingError> {
        let mapped_bytes = usize::try_from(mapped).map_err(|_| Errno::NOMEM);
        let mapped_bytes =
            mapped_bytes.map_err(MappingError::system(format!("map {mapped} bytes")))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                access,
                MapFlags::SHARED,
                fd.as_fd(),
                start,
            )
        };
        let base = base.map_err(MappingError::system(format!("map {mapped_bytes} bytes")))?;
        let base = NonNull::new(base.cast()).expect("mmap never maps page zero by choice");
        let pages = Arc::new(Pages { base, mapped_bytes, fd });
        place::enter(&pages, start);
        pages.make_resident()?;
        Ok(Self { pages })
    }

    /// The first byte.
    pub fn base(&self) -> NonNull<u8> {
        self.pages.base
    }

    /// The bytes that are mapped: whole pages.
    pub fn mapped_bytes(&self) -> usize {
        self.pages.mapped_bytes
    }

    /// What another process maps.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd.as_fd()
    }
}

impl Pages {
    /// Faults every page in now, in huge pages where the system gives them, so that the first
    /// gather is no slower than the next.
    fn make_resident(&self) -> Result<(), MappingError> {
        if self.mapped_bytes >= HUGE_PAGE_BYTES {
            // A hint: where shared memory has no huge pages it changes nothing.
            let _ = self.advise(Advice::LinuxHugepage);
        }
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14 does not know it; the pages come on first touch.
            Ok(()) | Err(Errno::INVAL) => Ok(()),
            Err(errno) => Err(MappingError::system("make shared memory resident")(errno)),
        }
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is this mapping; neither advice changes its content.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.mapped_bytes, advice) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Before the kernel can give the addresses to another one.
        place::leave(self);
        // SAFETY: the range is this mapping, and whoever holds a pointer into it holds the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// The memory of this machine, from `/proc/meminfo`.
#[derive(Clone, Copy, Debug)]
pub struct MemoryInfo {
    /// All memory, in bytes.
    pub total_bytes: u64,
    /// Memory that can be allocated without swapping, in bytes.
    pub available_bytes: u64,
}

impl MemoryInfo {
    /// Reads `/proc/meminfo`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read() -> std::io::Result<Self> {
        let text = fs::read_to_string("/proc/meminfo")?;
        let bytes = |name: &str| {
            let kib = text.lines().find_map(|line| line.strip_prefix(name));
            let kib =
                kib.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
            kib.map_or(0, |kib| kib * 1024)
        };
        Ok(Self { total_bytes: bytes("MemTotal:"), available_bytes: bytes("MemAvailable:") })
    }
}
