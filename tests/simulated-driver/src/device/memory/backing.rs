//! Holds the bytes of an allocation: a memfd, which any process with its descriptor can map.
//!
//! The memfd's name holds what an importer must know. The kernel shows it for every descriptor, and
//! it cannot be changed: the device, the permitted kinds of sharing, and a random token that
//! identifies the memory, also after the descriptor's number was reused.

use std::ffi::c_void;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::MemfdFlags;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::rand::GetRandomFlags;

use crate::device::counters::{Counter, NO_DEVICE};
use crate::device::settings::Setting;

const NAME: &str = "simulated-device-memory";
/// The rest of larger memory is left zeroed, so that its pages are not touched needlessly.
const JUNK_BYTES_MAX: u64 = 256 << 10;

/// The memory, alive as long as anything is mapped from it or names it.
#[derive(Debug)]
pub(crate) struct Backing {
    fd: OwnedFd,
    bytes: u64,
    identity: Identity,
    /// True if another process created it.
    imported: bool,
}

/// What the name of the memfd says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    /// The device that it belongs to, numbered as the machine does; [`NO_DEVICE`] for host memory.
    pub(crate) device: u32,
    /// The kinds of handle that it was made for, by the vendor's numbers.
    pub(crate) handle_kinds: u32,
    pub(crate) token: u128,
}

impl Backing {
    /// Creates memory whose first bytes are junk; returns `None` if the system or the device has too little.
    pub(crate) fn create(device: u32, bytes: u64, handle_kinds: u32) -> Option<Self> {
        let identity = Identity { device, handle_kinds, token: random()? };
        let fd = rustix::fs::memfd_create(identity.name(), MemfdFlags::CLOEXEC).ok()?;
        rustix::fs::ftruncate(&fd, bytes).ok()?;
        let backing = Self { fd, bytes, identity, imported: false };
        Counter::LiveBytes.add(device, bytes.cast_signed());
        backing.fill_with_junk()?;
        Some(backing)
    }

    /// Memory of another process, or of this one, by a descriptor of it; `None` if it is not ours.
    pub(crate) fn open(fd: OwnedFd) -> Option<Self> {
        let identity = Identity::of(&fd)?;
        let bytes = u64::try_from(rustix::fs::fstat(&fd).ok()?.st_size).ok()?;
        Counter::OpenImports.add(identity.device, 1);
        Some(Self { fd, bytes, identity, imported: true })
    }

    pub(crate) fn identity(&self) -> Identity {
        self.identity
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn is_imported(&self) -> bool {
        self.imported
    }

    /// The number of the descriptor in this process.
    pub(crate) fn raw_fd(&self) -> i32 {
        self.fd.as_raw_fd()
    }

    /// Duplicates the descriptor for an importer.
    pub(crate) fn duplicate(&self) -> Option<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned().ok()
    }

    /// Maps a part of it: anywhere, or over a range that the caller has reserved.
    pub(crate) fn map(&self, offset: u64, bytes: u64, over: Option<u64>) -> Option<u64> {
        let length = usize::try_from(bytes).ok()?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        let (at, flags) = match over {
            Some(address) => (address as *mut c_void, MapFlags::SHARED | MapFlags::FIXED),
            None => (std::ptr::null_mut(), MapFlags::SHARED),
        };
        // SAFETY: at an address of the kernel's choice, or over a reservation of this process that
        // holds nothing else (see `AddressSpace::map`).
        let mapped = unsafe { rustix::mm::mmap(at, length, access, flags, &self.fd, offset) };
        mapped.ok().map(|address| address as u64)
    }

    fn fill_with_junk(&self) -> Option<()> {
        let junk = u8::try_from(Setting::Junk.value()).ok()?;
        let bytes = self.bytes.min(JUNK_BYTES_MAX);
        if junk == 0 || bytes == 0 {
            return Some(());
        }
        let address = self.map(0, bytes, None)?;
        // SAFETY: the mapping was just created with this length, and only this function knows it.
        unsafe { std::ptr::write_bytes(address as *mut u8, junk, bytes as usize) };
        unmap(address, bytes);
        Some(())
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        let device = self.identity.device;
        if self.imported {
            Counter::OpenImports.add(device, -1);
        } else {
            Counter::LiveBytes.add(device, -self.bytes.cast_signed());
        }
    }
}

impl Identity {
    fn name(self) -> String {
        let Self { device, handle_kinds, token } = self;
        format!("{NAME},{device},{handle_kinds},{token:032x}")
    }

    /// Reads what the kernel shows of the descriptor.
    pub(crate) fn of(fd: &OwnedFd) -> Option<Self> {
        let shown = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        let name = shown.to_str()?.strip_prefix("/memfd:")?.strip_suffix(" (deleted)")?;
        let mut fields = name.split(',');
        if fields.next() != Some(NAME) {
            return None;
        }
        Some(Self {
            device: fields.next()?.parse().ok().filter(|device| *device <= NO_DEVICE)?,
            handle_kinds: fields.next()?.parse().ok()?,
            token: u128::from_str_radix(fields.next()?, 16).ok()?,
        })
    }
}

fn random() -> Option<u128> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty()).ok()?;
    Some(u128::from_ne_bytes(bytes))
}

/// Ends a mapping; the caller ensures that it is not in use.
pub(super) fn unmap(address: u64, bytes: u64) {
    // SAFETY: the caller made this mapping and holds the only way to it.
    let _ = unsafe { rustix::mm::munmap(address as *mut c_void, bytes as usize) };
}

/// Reserves a range of addresses without memory, over a mapping of the caller or anywhere.
pub(super) fn reserve(bytes: u64, over: Option<u64>) -> Option<u64> {
    let length = usize::try_from(bytes).ok()?;
    let (at, flags) = match over {
        Some(address) => (address as *mut c_void, MapFlags::FIXED),
        None => (std::ptr::null_mut(), MapFlags::empty()),
    };
    let flags = flags | MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: at an address of the kernel's choice, or over a mapping that the caller has given up.
    let reserved = unsafe { rustix::mm::mmap_anonymous(at, length, ProtFlags::empty(), flags) };
    reserved.ok().map(|address| address as u64)
}
