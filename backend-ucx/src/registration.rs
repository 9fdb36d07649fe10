//! Holds the memory of a region, which the messages of peers name by its number.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use peerlane_hal::{BackendId, DynError, Rank, Role};
use peerlane_toolkit::handover::{self, Claim, Handover};
use peerlane_toolkit::mapping::Mapping;
use rustix::fd::OwnedFd;

use crate::error::Error;
use crate::key::Key;

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// Host memory of this rank.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: u64,
    pub(crate) owner: Rank,
    pub(crate) role: Role,
    /// The memory, or `None` if it is the caller's.
    pub(crate) mapping: Option<Mapping>,
}

// SAFETY: a registration only names memory. The contracts of the ops and of `register` say which
// thread may access which byte.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// Returns whether so many bytes from an offset are in the region.
    pub(crate) fn contains(&self, offset: u64, bytes: u64) -> bool {
        offset.checked_add(bytes).is_some_and(|end| end <= self.bytes)
    }

    /// Returns the address of the byte at an offset in the region.
    pub(crate) fn address_at(&self, offset: u64) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset as usize)
    }

    /// Returns the flags of the region, or `None` if it is one of data.
    pub(crate) fn flags(&self) -> Option<&[AtomicU64]> {
        let words = (self.bytes / WORD_BYTES) as usize;
        // SAFETY: flags are aligned and live as long as the region. All accesses to them are
        // atomic.
        (self.role == Role::Flags)
            .then(|| unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), words) })
    }

    /// Returns a flag, or `None` if there is none at this word.
    pub(crate) fn flag(&self, word: u64) -> Option<&AtomicU64> {
        self.flags()?.get(usize::try_from(word).ok()?)
    }
}

/// Returns the region of this process that a key names, or `None` if it was freed.
pub(crate) fn find(key: &Key) -> Option<Arc<Registration>> {
    let Key { generation, rank: owner, role, bytes } = *key;
    let claim = Claim { backend: BackendId::UCX, generation, owner, role };
    handover::find::<Registration>(&claim).filter(|found| found.bytes == bytes)
}

impl Handover for Registration {
    /// Returns `None`, because peers send messages for the memory.
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, DynError> {
        Err(DynError::new(Error::argument("peers access memory of UCX by messages")))
    }
}
