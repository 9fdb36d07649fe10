//! A registration: memory that has a generation.

use std::ptr::NonNull;

use rustix::fd::OwnedFd;

use crate::mechanics::handover::Handover;
use crate::mechanics::mapping::Mapping;
use crate::memory::Role;
use crate::rank::Rank;

/// Memory behind a registration.
#[derive(Debug)]
pub(super) enum Backing {
    /// Allocated here, or imported from another process.
    Mapped(Mapping),
    /// The caller's own.
    Borrowed(NonNull<u8>),
}

/// One registration; importers in this process share it.
#[derive(Debug)]
pub(in crate::host) struct Registration {
    pub(super) backing: Backing,
    pub(super) bytes: u64,
    pub(super) owner: Rank,
    pub(super) role: Role,
}

// SAFETY: a registration only names memory; who may touch which byte when is the contract of the
// ops and of `register`.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    pub(in crate::host) fn base(&self) -> NonNull<u8> {
        match &self.backing {
            Backing::Mapped(mapping) => mapping.base(),
            Backing::Borrowed(base) => *base,
        }
    }
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        matches!(self.backing, Backing::Mapped(_)).then_some(1)
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, String> {
        match &self.backing {
            Backing::Mapped(mapping) => mapping
                .fd()
                .try_clone_to_owned()
                .map_err(|error| format!("cannot duplicate the descriptor of the memory: {error}")),
            Backing::Borrowed(_) => Err("it is memory of its process alone".to_owned()),
        }
    }
}
