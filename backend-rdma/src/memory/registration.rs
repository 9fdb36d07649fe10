//! A registration: memory that the card knows and that has a generation.

use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::mechanics::handover::{self, Handover};
use peerlane_hal::mechanics::mapping::Mapping;
use peerlane_hal::{Generation, Rank, Role};
use rustix::fd::OwnedFd;

use crate::error::Error;
use crate::key::Key;
use crate::sys::{Domain, Mr};

/// One registration; aliases in this process share it.
#[derive(Debug)]
pub(crate) struct Registration {
    /// Dropped before the memory goes. `None` for a region without bytes, which the card refuses and
    /// nobody can touch.
    mr: Option<Mr>,
    _mapping: Option<Mapping>,
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: u64,
    pub(crate) owner: Rank,
    pub(crate) role: Role,
}

// SAFETY: a registration only names memory; who may touch which byte when is the contract of the
// ops and of `register`.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    /// # Safety
    /// The memory stays allocated as long as the registration, which holds the mapping where there is
    /// one.
    pub(super) unsafe fn new(
        domain: &Arc<Domain>,
        base: NonNull<u8>,
        bytes: u64,
        owner: Rank,
        role: Role,
        mapping: Option<Mapping>,
    ) -> Result<Self, Error> {
        let length = usize::try_from(bytes)
            .ok()
            .filter(|length| (base.as_ptr() as usize).checked_add(*length).is_some())
            .ok_or_else(|| {
                Error::Argument(format!("a region of {bytes} bytes at {base:p} has no end"))
            })?;
        // SAFETY: the caller's.
        let mr = if length == 0 { None } else { Some(unsafe { domain.register(base, length) }?) };
        Ok(Self { mr, _mapping: mapping, base, bytes, owner, role })
    }

    /// What requests of this rank name it by.
    pub(crate) fn local_key(&self) -> u32 {
        self.mr.as_ref().map_or(0, Mr::local_key)
    }

    pub(super) fn key(&self, generation: Generation) -> Key {
        Key {
            generation,
            rank: self.owner,
            role: self.role,
            address: self.base.as_ptr() as u64,
            bytes: self.bytes,
            remote_key: self.mr.as_ref().map_or(0, Mr::remote_key),
        }
    }
}

/// The registration of this process that a key names, if it lives and the key is true.
pub(crate) fn find(key: &Key) -> Option<Arc<Registration>> {
    let found = handover::find::<Registration>(&super::claim(key))?;
    (found.key(key.generation) == *key).then_some(found)
}

impl Handover for Registration {
    /// The card reaches it; nothing is handed over.
    fn descriptors(&self) -> Option<u32> {
        None
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, String> {
        Err("memory registered for RDMA is reached by the card".to_owned())
    }
}
