//! Inspects the files that hold shared memory: the size of their pages, their length, and why they
//! keep it.
//!
//! The kernel kills a process that accesses a mapped page behind the end of its file (`SIGBUS`). So
//! an importer needs a reason why a file does not become shorter. A memfd can be sealed against
//! it. A file of `/dev/shm` or of a hugetlbfs cannot, so there the caller promises it.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use peerlane_hal::KeyError;
use rustix::fs::{FileType, FsWord, OFlags, SealFlags, Stat};
use rustix::io::Errno;

use super::MappingError;

/// The type of a hugetlbfs in `statfs`: `HUGETLBFS_MAGIC` of Linux's `linux/magic.h`.
const HUGETLBFS_MAGIC: FsWord = 0x9584_58f6;

/// Says why a file of shared memory keeps its length while a peer maps it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LengthGuard {
    /// Peerlane created the file and sealed it, and changes nothing but its bytes.
    Allocated,
    /// The caller created the file, which is sealed against shrinking.
    Sealed,
    /// The caller created the file, and has promised not to shorten it while it is registered.
    Promised,
}

impl LengthGuard {
    /// Returns the number of the guard in the key of a region.
    pub const fn to_number(self) -> u32 {
        match self {
            Self::Allocated => 0,
            Self::Sealed => 1,
            Self::Promised => 2,
        }
    }

    /// Returns the guard of a number in a key.
    ///
    /// # Errors
    /// Returns [`KeyError::Field`] if no guard has the number.
    pub fn from_number(number: u32) -> Result<Self, KeyError> {
        match number {
            0 => Ok(Self::Allocated),
            1 => Ok(Self::Sealed),
            2 => Ok(Self::Promised),
            seen => Err(KeyError::Field {
                field: "length guard",
                found: seen.into(),
                expected: "0 to 2",
            }),
        }
    }
}

/// Returns the size of a page of a file, to which the offset of a mapping is aligned.
pub(super) fn page_bytes(fd: BorrowedFd<'_>) -> Result<u64, MappingError> {
    let system = rustix::fs::fstatfs(fd)
        .map_err(MappingError::system("cannot read the file system of shared memory"))?;
    // Other file systems report blocks here, which have nothing to do with pages.
    if system.f_type == HUGETLBFS_MAGIC {
        return Ok(u64::try_from(system.f_bsize).unwrap_or(1));
    }
    Ok(rustix::param::page_size() as u64)
}

/// Checks that a file of the caller can be mapped, and that it holds `bytes` bytes from `offset`
/// on.
///
/// # Errors
/// Returns [`MappingError::Refused`], which names the file, and [`MappingError::System`].
pub(super) fn check_caller_file(
    fd: BorrowedFd<'_>,
    offset: u64,
    bytes: u64,
) -> Result<(), MappingError> {
    let stat = status(fd)?;
    check_access(fd, FileType::from_raw_mode(stat.st_mode))?;

    let page = page_bytes(fd)?;
    if !offset.is_multiple_of(page) {
        let name = file_name(fd);
        return refuse(format!(
            "offset is {offset} bytes, expected a multiple of {page}, the page size of {name}"
        ));
    }
    if !holds(&stat, offset.saturating_add(bytes)) {
        let (name, length) = (file_name(fd), stat.st_size);
        return refuse(format!(
            "{name} has {length} bytes, expected at least {bytes} bytes from offset {offset}"
        ));
    }
    Ok(())
}

/// Checks that a descriptor is that of a file, and that a mapping of it can be readable, writable
/// and shared, because peers write to it.
fn check_access(fd: BorrowedFd<'_>, kind: FileType) -> Result<(), MappingError> {
    let name = file_name(fd);
    if kind != FileType::RegularFile {
        let found = kind_name(kind);
        return refuse(format!(
            "the descriptor is that of {found}, {name}, expected that of a memfd, or of a file of \
             /dev/shm or of a hugetlbfs"
        ));
    }

    let flags = rustix::fs::fcntl_getfl(fd)
        .map_err(MappingError::system("cannot read the flags of a descriptor"))?;
    let refused = match flags & OFlags::RWMODE {
        _ if flags.contains(OFlags::PATH) => Some("as a path only (O_PATH)"),
        OFlags::RDWR => None,
        OFlags::WRONLY => Some("for writing only (O_WRONLY)"),
        _ => Some("for reading only (O_RDONLY)"),
    };
    if let Some(way) = refused {
        return refuse(format!(
            "the descriptor of {name} was opened {way}, expected for reading and writing (O_RDWR)"
        ));
    }

    let found = seals(fd)?;
    for (seal, seal_name) in
        [(SealFlags::WRITE, "F_SEAL_WRITE"), (SealFlags::FUTURE_WRITE, "F_SEAL_FUTURE_WRITE")]
    {
        if found.contains(seal) {
            return refuse(format!(
                "{name} has the seal {seal_name}, expected a file that peers can write to"
            ));
        }
    }
    Ok(())
}

fn refuse<T>(why: String) -> Result<T, MappingError> {
    Err(MappingError::Refused { why })
}

/// Seals a file of the caller against shrinking if it can be sealed, and returns why it keeps its
/// length.
pub(super) fn guard_caller_file(fd: BorrowedFd<'_>) -> Result<LengthGuard, MappingError> {
    let found = seals(fd)?;
    if found.contains(SealFlags::SHRINK) {
        return Ok(LengthGuard::Sealed);
    }
    // Files of /dev/shm and of a hugetlbfs have this seal from the start, and other file systems
    // have no seals at all.
    if found.contains(SealFlags::SEAL) || !has_seals(fd) {
        return Ok(LengthGuard::Promised);
    }
    match rustix::fs::fcntl_add_seals(fd, SealFlags::SHRINK) {
        Ok(()) => Ok(LengthGuard::Sealed),
        // Another thread has closed the list of seals meanwhile.
        Err(Errno::PERM) => Ok(LengthGuard::Promised),
        Err(errno) => Err(MappingError::system("cannot seal a memfd against shrinking")(errno)),
    }
}

/// Checks that the file of a peer holds the bytes before `end`, and keeps them. Returns its status.
///
/// # Errors
/// Returns [`MappingError::Unsound`] and [`MappingError::System`].
pub(super) fn check_peer_file(
    fd: BorrowedFd<'_>,
    end: u64,
    guard: LengthGuard,
) -> Result<Stat, MappingError> {
    let stat = status(fd)?;
    let size = stat.st_size;
    let is_whole = holds(&stat, end);
    let unsound = |how: String| Err(MappingError::Unsound { how });

    // Its owner has promised the rest.
    if guard == LengthGuard::Promised {
        return match is_whole {
            true => Ok(stat),
            false => unsound(format!(
                "the peer sent a file of {size} bytes, expected at least {end} bytes, which its \
                 owner has promised to keep"
            )),
        };
    }
    let found = rustix::fs::fcntl_get_seals(fd)
        .map_err(MappingError::system("cannot read the seals of shared memory"))?;
    if !is_whole || !found.contains(SealFlags::SHRINK) {
        return unsound(format!(
            "the peer sent shared memory of {size} bytes with the seals {found:?}, expected at \
             least {end} bytes and the seal SHRINK"
        ));
    }
    Ok(stat)
}

/// Returns the numbers of the device and of the inode of a file, which identify it on this machine.
pub(crate) fn file_id(fd: &OwnedFd) -> Result<(u64, u64), MappingError> {
    let stat = rustix::fs::fstat(fd)
        .map_err(MappingError::system("cannot read the inode of shared memory"))?;
    Ok((stat.st_dev, stat.st_ino))
}

fn status(fd: BorrowedFd<'_>) -> Result<Stat, MappingError> {
    rustix::fs::fstat(fd).map_err(MappingError::system("cannot read the size of shared memory"))
}

fn holds(stat: &Stat, end: u64) -> bool {
    u64::try_from(stat.st_size).is_ok_and(|size| size >= end)
}

/// Returns the seals of a file, none for a file that can have none.
fn seals(fd: BorrowedFd<'_>) -> Result<SealFlags, MappingError> {
    match rustix::fs::fcntl_get_seals(fd) {
        Ok(found) => Ok(found),
        Err(Errno::INVAL) => Ok(SealFlags::empty()),
        Err(errno) => Err(MappingError::system("cannot read the seals of a file")(errno)),
    }
}

fn has_seals(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

/// Returns the name of a file for errors: its path, or what the kernel shows instead, such as
/// `/memfd:arena (deleted)`.
fn file_name(fd: BorrowedFd<'_>) -> String {
    let number = fd.as_raw_fd();
    match std::fs::read_link(format!("/proc/self/fd/{number}")) {
        Ok(path) => path.display().to_string(),
        Err(_) => format!("the file of descriptor {number}"),
    }
}

fn kind_name(kind: FileType) -> &'static str {
    match kind {
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::Directory => "a directory",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        _ => "no file",
    }
}
