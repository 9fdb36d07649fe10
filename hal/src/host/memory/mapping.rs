//! Shared mappings: a sealed memfd and its place in this address space.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::host::device::MemoryInfo;
use crate::host::error::Error;
use crate::rank::Rank;

/// Below this the check of free memory costs more than it can tell.
const CHECKED_BYTES_MIN: u64 = 16 << 20;
/// The size of a transparent huge page; smaller regions gain nothing from one.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: u64 = 4096;

/// A memfd, mapped and resident. Its size is sealed, so that no owner can pull pages away from
/// under an importer.
#[derive(Debug)]
pub(super) struct Mapping {
    base: NonNull<u8>,
    mapped_bytes: usize,
    fd: OwnedFd,
}

// SAFETY: a mapping is plain memory; who may touch which byte when is the contract of the ops.
unsafe impl Send for Mapping {}
// SAFETY: as above; the type itself has no interior state.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Creates zeroed memory.
    pub(super) fn create(bytes: u64) -> Result<Self, Error> {
        let mapped = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        if mapped >= CHECKED_BYTES_MIN {
            let available = MemoryInfo::read()?.available_bytes;
            // Over-commit would let the allocation pass and kill a process later.
            if mapped > available {
                return Err(Error::OutOfMemory { wanted: bytes, available });
            }
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("peerlane", flags)
            .map_err(Error::system("create a memfd for shared memory"))?;
        rustix::fs::ftruncate(&fd, mapped)
            .map_err(Error::system(format!("size shared memory to {mapped} bytes")))?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals).map_err(Error::system("seal shared memory"))?;
        Self::map(fd, mapped)
    }

    /// Maps a memfd that `peer` handed over, which must hold at least `bytes`.
    pub(super) fn import(fd: OwnedFd, bytes: u64, peer: Rank) -> Result<Self, Error> {
        let mapped = bytes.max(1).next_multiple_of(PAGE_BYTES);
        let size = rustix::fs::fstat(&fd).map_err(Error::system("stat shared memory"))?.st_size;
        let seals = rustix::fs::fcntl_get_seals(&fd)
            .map_err(Error::system(format!("read the seals of rank {peer}'s memory")))?;
        let whole = u64::try_from(size).is_ok_and(|size| size >= mapped);
        if !whole || !seals.contains(SealFlags::SHRINK) {
            return Err(Error::PeerLost {
                peer,
                how: format!(
                    "it handed over memory of {size} bytes with seals {seals:?}, wanted at least \
                     {mapped} bytes that cannot shrink"
                ),
            });
        }
        Self::map(fd, mapped)
    }

    fn map(fd: OwnedFd, mapped: u64) -> Result<Self, Error> {
        let mapped_bytes = usize::try_from(mapped)
            .map_err(|_| Error::Argument(format!("{mapped} bytes exceed the address space")))?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                access,
                MapFlags::SHARED,
                fd.as_fd(),
                0,
            )
        };
        let base = base.map_err(Error::system(format!("map {mapped_bytes} bytes")))?;
        let base = NonNull::new(base.cast()).expect("mmap never maps page zero by choice");
        let mapping = Self { base, mapped_bytes, fd };
        mapping.make_resident()?;
        Ok(mapping)
    }

    /// Faults every page in now, in huge pages where the system gives them, so that the first
    /// gather is no slower than the next.
    fn make_resident(&self) -> Result<(), Error> {
        if self.mapped_bytes >= HUGE_PAGE_BYTES {
            // A hint: where shared memory has no huge pages it changes nothing.
            let _ = self.advise(Advice::LinuxHugepage);
        }
        match self.advise(Advice::LinuxPopulateWrite) {
            // Linux before 5.14 does not know it; the pages come on first touch.
            Ok(()) | Err(rustix::io::Errno::INVAL) => Ok(()),
            Err(errno) => Err(Error::system("make shared memory resident")(errno)),
        }
    }

    fn advise(&self, advice: Advice) -> rustix::io::Result<()> {
        // SAFETY: the range is this mapping; neither advice changes its content.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.mapped_bytes, advice) }
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is this mapping, and whoever holds a pointer into it holds the mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}
