//! Maps files that share host memory between processes: sealed memfds that are created here, and
//! files of the caller.
//!
//! Every mapping of the process can be found by its addresses, so that memory that one fabric has
//! allocated can be registered with another fabric and exported from there too.

mod file;

use std::collections::BTreeMap;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, ProtFlags};

pub use file::LengthGuard;
pub(crate) use file::file_id;

use crate::PerProcess;
use crate::limits::{AvailableMemory, GroupLock, SystemError, check_file_bytes};

/// An allocation of at least this many bytes first checks how much memory is free. For smaller
/// allocations the check costs too much.
const CHECKED_BYTES_MIN: u64 = 4 << 20;
/// Pages are allocated in steps of this many bytes, with a check before each, because other
/// processes of the machine or the control group allocate at the same time.
const POPULATED_BYTES: usize = 16 << 20;
/// The memory that stays free, for page tables and for smaller allocations.
const RESERVE_BYTES: u64 = 8 << 20;
/// The size of a transparent huge page in bytes; smaller regions gain nothing from one.
const HUGE_PAGE_BYTES: usize = 2 << 20;
const PAGE_BYTES: u64 = 4096;
/// The unit of `st_blocks`, whatever the block size of the file system.
const STAT_BLOCK_BYTES: i64 = 512;

/// The reason why host memory could not be allocated or mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MappingError {
    /// A system call returned an error.
    System(SystemError),
    /// The machine or a control group has less free memory than the allocation needs.
    Full {
        /// The number of bytes that were requested.
        requested: u64,
        /// The memory that is available, and where.
        available: AvailableMemory,
    },
    /// The file that a peer sent is too short or can be shortened.
    Unsound {
        /// The size and seals that were found, and those that were expected.
        how: String,
    },
    /// The file of the caller cannot be mapped as shared memory.
    Refused {
        /// What was found and what was expected.
        why: String,
    },
}

impl MappingError {
    fn system(what: impl Into<String>) -> impl FnOnce(Errno) -> Self {
        move |errno| Self::System(SystemError::new(what, errno))
    }
}

/// A file that is mapped into this process. A [`LengthGuard`] keeps its owner from removing pages
/// that an importer uses.
#[derive(Debug)]
pub struct Mapping {
    pages: Arc<Pages>,
}

/// The mapped pages of a file, which stay mapped while a [`MappedSpan`] refers to them.
#[derive(Debug)]
struct Pages {
    base: NonNull<u8>,
    mapped_bytes: usize,
    fd: OwnedFd,
    guard: LengthGuard,
}

// SAFETY: a mapping is plain memory; the contract of the ops governs concurrent access.
unsafe impl Send for Pages {}
// SAFETY: as for `Send`; the type has no interior state.
unsafe impl Sync for Pages {}

impl Mapping {
    /// Allocates and maps zeroed memory in a new memfd.
    ///
    /// # Errors
    /// Returns [`MappingError::Full`] or [`MappingError::System`].
    pub fn create(bytes: u64) -> Result<Self, MappingError> {
        Self::new(bytes, Residence::New)
    }

    /// Maps zeroed memory in a new memfd, whose pages the system allocates at their first use.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_on_demand(bytes: u64) -> Result<Self, MappingError> {
        Self::new(bytes, Residence::AtFirstUse)
    }

    fn new(bytes: u64, residence: Residence) -> Result<Self, MappingError> {
        let mapped = bytes.max(1).checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
        if mapped >= CHECKED_BYTES_MIN {
            check_available(mapped)?;
        }

        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("peerlane", flags)
            .map_err(MappingError::system("cannot create a memfd for shared memory"))?;
        let resized = check_file_bytes(mapped)
            .and_then(|()| retry_on_intr(|| rustix::fs::ftruncate(&fd, mapped)));
        resized.map_err(|errno| {
            MappingError::system(format!("cannot resize shared memory to {mapped} bytes"))(errno)
        })?;
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&fd, seals)
            .map_err(MappingError::system("cannot seal shared memory"))?;
        Self::map(fd, LengthGuard::Allocated, 0, mapped, residence)
    }

    /// Maps `bytes` bytes of a file of the caller, from `offset` on, which is a multiple of the
    /// file's page size. The caller's own mappings of the file show the same bytes.
    ///
    /// A memfd that can be sealed is sealed against shrinking (`F_SEAL_SHRINK`), which lasts as
    /// long as the file. The system allocates pages that the file does not have yet at their first
    /// use.
    ///
    /// # Errors
    /// Returns [`MappingError::Refused`] if the file cannot be mapped for reading and writing, is
    /// too short, or has larger pages than the offset; and [`MappingError::System`].
    ///
    /// # Safety
    /// Until the mapping is dropped, as well as every [`MappedSpan`] of it and every import of a
    /// peer, the file is not shortened and keeps its pages: nobody punches holes into it.
    pub unsafe fn from_descriptor(
        fd: BorrowedFd<'_>,
        offset: u64,
        bytes: u64,
    ) -> Result<Self, MappingError> {
        file::check_caller_file(fd, offset, bytes)?;
        let guard = file::guard_caller_file(fd)?;
        let page = file::page_bytes(fd)?;
        let mapped = bytes.max(1).checked_next_multiple_of(page).unwrap_or(u64::MAX);

        let kept = rustix::io::fcntl_dupfd_cloexec(fd, 0)
            .map_err(MappingError::system("cannot duplicate the descriptor of shared memory"))?;
        Self::map(kept, guard, offset, mapped, Residence::AtFirstUse)
    }

    /// Maps `bytes` bytes of a peer's file, which begin `head` bytes after its start. Returns the
    /// mapping and the offset of the bytes in it, since a mapping begins at a page.
    ///
    /// `guard` says what the peer has promised of the length of the file.
    ///
    /// # Errors
    /// Returns [`MappingError::Unsound`] if the file is shorter, or could be shortened although the
    /// guard says that it is sealed, and [`MappingError::System`].
    pub fn import(
        fd: OwnedFd,
        head: u64,
        bytes: u64,
        guard: LengthGuard,
    ) -> Result<(Self, usize), MappingError> {
        let stat = file::check_peer_file(fd.as_fd(), head.saturating_add(bytes), guard)?;

        let page = file::page_bytes(fd.as_fd())?;
        let start = head / page * page;
        let end = head.saturating_add(bytes.max(1));
        let end = end.checked_next_multiple_of(page).unwrap_or(u64::MAX);

        // Every rank maps the memory of every other, but may use little of it. So the pages of a
        // small mapping are faulted in by their first use. So are those that the owner has not
        // allocated, because a fault of this process would allocate them.
        let allocated = stat.st_blocks.saturating_mul(STAT_BLOCK_BYTES);
        let is_resident = end - start > HUGE_PAGE_BYTES as u64 && allocated >= stat.st_size;
        let residence = if is_resident { Residence::OfPeer } else { Residence::AtFirstUse };

        // The offset is less than a page.
        let offset = (head - start) as usize;
        Ok((Self::map(fd, guard, start, end - start, residence)?, offset))
    }

    fn map(
        fd: OwnedFd,
        guard: LengthGuard,
        start: u64,
        mapped: u64,
        residence: Residence,
    ) -> Result<Self, MappingError> {
        let failed = |errno| {
            MappingError::system(format!("cannot map {mapped} bytes of shared memory"))(errno)
        };
        let mapped_bytes = usize::try_from(mapped).map_err(|_| failed(Errno::NOMEM))?;

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
        let base = base.map_err(failed)?;
        let base = NonNull::new(base.cast()).expect("mmap never maps page zero by choice");
        let pages = Arc::new(Pages { base, mapped_bytes, fd, guard });
        insert_mapping(&pages, start);

        match residence {
            Residence::AtFirstUse => {}
            Residence::OfPeer => pages.make_resident(mapped_bytes, |_| Ok(None))?,
            Residence::New if mapped >= CHECKED_BYTES_MIN => {
                pages.make_resident(POPULATED_BYTES, check_available)?;
            }
            Residence::New => pages.make_resident(mapped_bytes, |_| Ok(None))?,
        }
        Ok(Self { pages })
    }

    /// Returns the address of the first mapped byte.
    pub fn base(&self) -> NonNull<u8> {
        self.pages.base
    }

    /// Returns the length of the mapping in bytes, a multiple of the page size.
    pub fn mapped_bytes(&self) -> usize {
        self.pages.mapped_bytes
    }

    /// Returns the descriptor of the file, which another process can map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd.as_fd()
    }

    /// Returns why the file keeps its length.
    pub fn guard(&self) -> LengthGuard {
        self.pages.guard
    }
}

impl Pages {
    /// Faults in all pages ahead of use, as huge pages where the system provides them, so that the
    /// first operation is as fast as the next.
    ///
    /// It allocates `step` bytes at a time, and passes the number of bytes that are left to `check`
    /// before each step, which holds the lock that `check` returns.
    fn make_resident(
        &self,
        step: usize,
        check: impl Fn(u64) -> Result<Option<GroupLock>, MappingError>,
    ) -> Result<(), MappingError> {
        if self.mapped_bytes >= HUGE_PAGE_BYTES {
            // Only a hint: it changes nothing where shared memory has no huge pages.
            let _ = self.advise(0..self.mapped_bytes, Advice::LinuxHugepage);
        }

        let mut populated = 0;
        while populated < self.mapped_bytes {
            let _lock = check((self.mapped_bytes - populated) as u64)?;
            let end = self.mapped_bytes.min(populated + step);
            match retry_on_intr(|| self.advise(populated..end, Advice::LinuxPopulateWrite)) {
                Ok(()) => populated = end,
                // Linux before 5.14 does not support it; the pages are allocated at the first
                // access.
                Err(Errno::INVAL) => return Ok(()),
                Err(errno) => {
                    let what = "cannot allocate the pages of shared memory";
                    return Err(MappingError::system(what)(errno));
                }
            }
        }
        Ok(())
    }

    /// Advises the kernel on a range of bytes, which begins at a page and is part of the mapping.
    fn advise(&self, range: Range<usize>, advice: Advice) -> rustix::io::Result<()> {
        let start = self.base.as_ptr().wrapping_add(range.start);
        // SAFETY: the range is part of this mapping, and neither advice changes its content.
        unsafe { rustix::mm::madvise(start.cast(), range.len(), advice) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // Removed before the kernel can reuse the addresses.
        remove_mapping(self);
        // SAFETY: the range is this mapping, and every holder of a pointer into it holds the
        // mapping.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped_bytes) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// When the pages of a mapping are allocated.
#[derive(Clone, Copy, Debug)]
enum Residence {
    /// The first access to each page allocates it, or finds that of the owner.
    AtFirstUse,
    /// Now, and the owner has allocated the memory.
    OfPeer,
    /// Now, and the memory is new.
    New,
}

/// Checks that `bytes` bytes of new memory are available. With over-commit the allocation would
/// succeed, and the kernel would kill a process later.
///
/// The returned lock, if there is one, keeps other processes from allocating what was found.
fn check_available(bytes: u64) -> Result<Option<GroupLock>, MappingError> {
    let read = || {
        AvailableMemory::read().map_err(|error| {
            MappingError::System(SystemError::of_io("cannot read /proc/meminfo", &error))
        })
    };
    let mut available = read()?;
    let lock = available.lock_if_tight(bytes);
    if lock.is_some() {
        available = read()?;
    }
    if bytes.saturating_add(RESERVE_BYTES) > available.bytes {
        return Err(MappingError::Full { requested: bytes, available });
    }
    Ok(lock)
}

/// A part of a mapping that can be handed to another process. The part stays mapped while this
/// value lives.
#[derive(Clone, Debug)]
pub struct MappedSpan {
    pages: Arc<Pages>,
    /// The number of bytes of the file before the span.
    pub head: u64,
    /// The address of the first byte of the whole mapping.
    pub mapping_base: NonNull<u8>,
    /// The length of the whole mapping in bytes, a multiple of the page size.
    pub mapped_bytes: usize,
}

// SAFETY: a span only names memory; the contract of the ops governs concurrent access.
unsafe impl Send for MappedSpan {}
// SAFETY: as above.
unsafe impl Sync for MappedSpan {}

impl MappedSpan {
    /// Returns the descriptor of the file, which another process can map.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.pages.fd.as_fd()
    }

    /// Returns why the file keeps its length.
    pub fn guard(&self) -> LengthGuard {
        self.pages.guard
    }
}

/// Mappings by their first address, each with its offset in its file in bytes.
type Mappings = BTreeMap<usize, (Weak<Pages>, u64)>;

/// Returns all mappings that this process has created or imported.
fn mappings() -> MutexGuard<'static, Mappings> {
    // A forked child drops mappings of its parent, a thread of which may have the lock.
    static MAPPINGS: PerProcess<Mutex<Mappings>> = PerProcess::new();

    // Each change is one call, so the map stays consistent if another thread panics.
    MAPPINGS.value_or_create(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the part of a mapping that holds `base..base + bytes`, or `None` if no mapping holds all
/// of it.
pub fn find(base: NonNull<u8>, bytes: u64) -> Option<MappedSpan> {
    let address = base.as_ptr().addr();
    let (place, pages, head) = {
        let mappings = mappings();
        let (start, (pages, head)) = mappings.range(..=address).next_back()?;
        ((address - start) as u64, pages.upgrade()?, *head)
    };

    // Outside of the lock, since dropping the last reference to the pages takes it too.
    let (mapping_base, mapped_bytes) = (pages.base, pages.mapped_bytes);
    let inside = place.checked_add(bytes.max(1)).is_some_and(|end| end <= mapped_bytes as u64);
    inside.then(|| MappedSpan { pages, head: head + place, mapping_base, mapped_bytes })
}

fn insert_mapping(pages: &Arc<Pages>, head: u64) {
    mappings().insert(pages.base.as_ptr().addr(), (Arc::downgrade(pages), head));
}

fn remove_mapping(pages: &Pages) {
    mappings().remove(&pages.base.as_ptr().addr());
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::Barrier;
    use std::thread;

    use peerlane_test_support::ends_in_child;
    use rustix::fs::OFlags;

    use super::*;

    fn at(mapping: &Mapping, offset: usize) -> NonNull<u8> {
        NonNull::new(mapping.base().as_ptr().wrapping_add(offset)).unwrap()
    }

    #[test]
    fn a_span_is_found_in_its_mapping_and_not_beyond() {
        let mapping = Mapping::create(10_000).unwrap();
        let whole = mapping.mapped_bytes() as u64;
        assert_eq!(find(mapping.base(), whole).unwrap().head, 0);
        assert_eq!(find(at(&mapping, 5001), 100).unwrap().head, 5001);
        assert!(find(mapping.base(), whole + 1).is_none());
        assert!(find(at(&mapping, 1), u64::MAX).is_none());
        assert!(find(at(&mapping, 12_287), 1).is_some());
        let heap = Box::new(0_u64);
        assert!(find(NonNull::from(&*heap).cast(), 8).is_none());
        let base = mapping.base();
        let span = find(base, 1).unwrap();
        drop(mapping);
        // SAFETY: the span keeps it mapped, and no other code knows it.
        unsafe { base.write(1) };

        let pages = Arc::downgrade(&span.pages);
        drop(span);
        assert!(pages.upgrade().is_none());
        // A mapping of another test may have the address by now.
        let is_listed = mappings().values().any(|(known, _)| known.ptr_eq(&pages));
        assert!(!is_listed);
    }

    #[test]
    fn a_forked_child_waits_for_no_lock_of_its_parent() {
        let mut mapping = Some(Mapping::create(10_000).unwrap());
        let (held, forked) = (Barrier::new(2), Barrier::new(2));
        let is_ended = thread::scope(|scope| {
            // Another thread of the parent has the lock when the process is forked.
            scope.spawn(|| {
                let _mappings = mappings();
                held.wait();
                forked.wait();
            });
            held.wait();

            let is_ended = ends_in_child(|| drop(mapping.take()));
            forked.wait();
            is_ended
        });
        assert!(is_ended);
    }

    #[test]
    fn pages_on_demand_are_allocated_by_their_first_use() {
        let allocated =
            |mapping: &Mapping| rustix::fs::fstat(mapping.fd()).unwrap().st_blocks * 512;
        let bytes = 4 * HUGE_PAGE_BYTES as u64;
        let mapping = Mapping::create_on_demand(bytes).unwrap();
        let fd = || mapping.fd().try_clone_to_owned().unwrap();
        let (part, _) = Mapping::import(fd(), 0, bytes, LengthGuard::Allocated).unwrap();
        assert_eq!(allocated(&mapping), 0);

        // SAFETY: inside of the mapping, which no other code knows.
        unsafe { at(&part, 5000).write(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { at(&mapping, 5000).read() }, 7);
        let used = allocated(&mapping);
        assert!(used > 0 && used <= HUGE_PAGE_BYTES as i64, "{used}");

        let whole = Mapping::create(bytes).unwrap();
        assert_eq!(allocated(&whole), bytes as i64);
    }

    #[test]
    fn a_part_is_the_same_memory_at_another_address() {
        let mapping = Mapping::create(3 * 4096).unwrap();
        for head in [0_usize, 1, 4095, 4096, 5000, 8192] {
            let span = find(at(&mapping, head), 1000).unwrap();
            let fd = span.fd().try_clone_to_owned().unwrap();
            let (part, begin) = Mapping::import(fd, span.head, 1000, span.guard()).unwrap();
            // SAFETY: inside both mappings, which no other code knows.
            unsafe { at(&mapping, head + 7).write(head as u8 | 1) };
            // SAFETY: as above.
            assert_eq!(unsafe { at(&part, begin + 7).read() }, head as u8 | 1);
            // A part of a part has its offset in the whole memfd.
            assert_eq!(find(at(&part, begin), 1000).unwrap().head, head as u64);
        }
        let fd = find(mapping.base(), 1).unwrap().fd().try_clone_to_owned().unwrap();
        for (head, bytes) in [(4096, 8193), (u64::MAX, 1), (1, u64::MAX)] {
            let fd = fd.try_clone().unwrap();
            assert!(
                Mapping::import(fd, head, bytes, LengthGuard::Allocated).is_err(),
                "{bytes} from {head}"
            );
        }
    }

    /// Creates a memfd of the caller.
    fn memfd(bytes: u64, flags: MemfdFlags) -> OwnedFd {
        let fd = rustix::fs::memfd_create("arena", flags | MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&fd, bytes).unwrap();
        fd
    }

    fn mapped(fd: &OwnedFd, offset: u64, bytes: u64) -> Result<Mapping, MappingError> {
        // SAFETY: the tests neither shorten the file nor remove its pages while it is mapped.
        unsafe { Mapping::from_descriptor(fd.as_fd(), offset, bytes) }
    }

    #[test]
    fn a_part_of_a_file_of_the_caller_is_found_and_can_be_imported() {
        let page = rustix::param::page_size();
        let whole = 3 * page as u64 + 100;
        let sealed = SealFlags::SHRINK;
        for (flags, guard, seals) in [
            (MemfdFlags::ALLOW_SEALING, LengthGuard::Sealed, sealed),
            (MemfdFlags::empty(), LengthGuard::Promised, SealFlags::SEAL),
        ] {
            let fd = memfd(whole, flags);
            let all = mapped(&fd, 0, whole).unwrap();
            let part = mapped(&fd, page as u64, whole - page as u64).unwrap();
            assert_eq!((part.guard(), part.mapped_bytes()), (guard, 3 * page));
            assert_eq!(rustix::fs::fcntl_get_seals(&fd), Ok(seals));

            // SAFETY: inside of the mapping, which no other code knows.
            unsafe { at(&part, 7).write(77) };
            // SAFETY: as above, for the other mapping of the byte.
            assert_eq!(unsafe { at(&all, page + 7).read() }, 77);

            // The caller closes its descriptor, and a span keeps the pages mapped.
            drop(fd);
            let span = find(at(&part, 5), whole - page as u64 - 5).unwrap();
            assert_eq!((span.head, span.guard()), (page as u64 + 5, guard));
            drop(part);
            let sent = span.fd().try_clone_to_owned().unwrap();
            let length = whole - span.head;
            let (imported, begin) = Mapping::import(sent, span.head, length, span.guard()).unwrap();
            // SAFETY: inside of the imported bytes, which no other code knows.
            assert_eq!(unsafe { at(&imported, begin + 2).read() }, 77);

            let sent = span.fd().try_clone_to_owned().unwrap();
            let error = Mapping::import(sent, span.head, length + 1, guard).unwrap_err();
            let MappingError::Unsound { how } = error else { panic!("{error:?}") };
            let expected = format!("of {whole} bytes");
            assert!(how.contains(&expected) && how.contains("expected at least"), "{how}");
        }
    }

    #[test]
    fn an_importer_believes_in_no_seal_that_is_missing() {
        let fd = memfd(8192, MemfdFlags::empty());
        let import = |guard| Mapping::import(fd.try_clone().unwrap(), 0, 8192, guard);
        for guard in [LengthGuard::Allocated, LengthGuard::Sealed] {
            let error = import(guard).unwrap_err();
            let MappingError::Unsound { how } = error else { panic!("{error:?}") };
            assert!(how.contains("expected at least 8192 bytes and the seal SHRINK"), "{how}");
        }
        import(LengthGuard::Promised).unwrap();
    }

    #[test]
    fn what_cannot_be_shared_is_refused_with_what_was_expected() {
        let refused = |fd: &OwnedFd, offset, bytes| match mapped(fd, offset, bytes).unwrap_err() {
            MappingError::Refused { why } => why,
            error => panic!("{error:?}"),
        };
        let page = rustix::param::page_size() as u64;
        let fd = memfd(2 * page, MemfdFlags::ALLOW_SEALING);

        assert_eq!(
            refused(&fd, 100, 8),
            format!(
                "offset is 100 bytes, expected a multiple of {page}, the page size of \
                 /memfd:arena (deleted)"
            )
        );
        for (offset, bytes) in [(page, page + 1), (3 * page, 0), (page, u64::MAX)] {
            let length = 2 * page;
            assert_eq!(
                refused(&fd, offset, bytes),
                format!(
                    "/memfd:arena (deleted) has {length} bytes, expected at least {bytes} bytes \
                     from offset {offset}"
                )
            );
        }
        assert_eq!(mapped(&fd, 2 * page, 0).unwrap().mapped_bytes() as u64, page);

        let (pipe, _writer) = std::io::pipe().unwrap();
        let pipe = OwnedFd::from(pipe);
        let expected = "expected that of a memfd, or of a file of /dev/shm or of a hugetlbfs";
        let text = refused(&pipe, 0, 8);
        assert!(text.starts_with("the descriptor is that of a pipe, pipe:["), "{text}");
        assert!(text.ends_with(expected), "{text}");
        let folder = open("/", OFlags::RDONLY);
        let text = format!("the descriptor is that of a directory, /, {expected}");
        assert_eq!(refused(&folder, 0, 8), text);
        let device = open("/dev/zero", OFlags::RDWR);
        let text = format!("the descriptor is that of a device, /dev/zero, {expected}");
        assert_eq!(refused(&device, 0, 8), text);

        let own = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let expected = "expected for reading and writing (O_RDWR)";
        for (flags, way) in [
            (OFlags::RDONLY, "for reading only (O_RDONLY)"),
            (OFlags::WRONLY, "for writing only (O_WRONLY)"),
            (OFlags::PATH, "as a path only (O_PATH)"),
        ] {
            let name = "/memfd:arena (deleted)";
            let text = format!("the descriptor of {name} was opened {way}, {expected}");
            assert_eq!(refused(&open(&own, flags), 0, 8), text);
        }

        rustix::fs::fcntl_add_seals(&fd, SealFlags::WRITE).unwrap();
        let text = refused(&fd, 0, 8);
        assert!(text.contains("has the seal F_SEAL_WRITE, expected"), "{text}");
    }

    fn open(path: &str, flags: OFlags) -> OwnedFd {
        rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty()).unwrap()
    }

    #[test]
    fn huge_pages_are_mapped_as_a_whole() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let fd = rustix::fs::memfd_create("arena", flags | MemfdFlags::CLOEXEC);
        let is_reserved = |fd: &OwnedFd| {
            let page = file::page_bytes(fd.as_fd()).unwrap();
            rustix::fs::ftruncate(fd, 2 * page).unwrap();
            mapped(fd, 0, 2 * page).is_ok()
        };
        let Some(fd) = fd.ok().filter(is_reserved) else {
            let why = "the machine has no 2 huge pages: see vm.nr_hugepages";
            peerlane_test_support::not_covered("huge_pages_are_mapped_as_a_whole", why);
            return;
        };

        let page = file::page_bytes(fd.as_fd()).unwrap();
        let part = mapped(&fd, page, 100).unwrap();
        assert_eq!((part.guard(), part.mapped_bytes() as u64), (LengthGuard::Sealed, page));
        let sent = part.fd().try_clone_to_owned().unwrap();
        let (imported, begin) = Mapping::import(sent, page + 50, 50, part.guard()).unwrap();
        assert_eq!((imported.mapped_bytes() as u64, begin), (page, 50));
        // SAFETY: inside of the mapping, which no other code knows.
        unsafe { at(&part, 50).write(5) };
        // SAFETY: as above, for the other mapping of the byte.
        assert_eq!(unsafe { at(&imported, begin).read() }, 5);
        let error = mapped(&fd, 4096, 100).unwrap_err();
        let MappingError::Refused { why } = error else { panic!("{error:?}") };
        assert!(why.contains(&format!("expected a multiple of {page}")), "{why}");
    }
}
