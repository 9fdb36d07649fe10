//! A registration: memory that has a generation.

use std::ptr::NonNull;

use rustix::fd::OwnedFd;

use crate::key::Reach;
use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_toolkit::handover::Handover;
use peerlane_toolkit::mapping::{Mapping, Place};

/// Memory behind a registration.
#[derive(Debug)]
pub(super) enum Backing {
    /// Allocated here, or imported from another process; the region begins so far into it.
    Mapped(Mapping, usize),
    /// A part of what this process has mapped already.
    Part(NonNull<u8>, Place),
    /// The caller's own.
    Borrowed(NonNull<u8>),
}

/// One registration; importers in this process share it.
#[derive(Debug)]
pub(crate) struct Registration {
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
    pub(crate) fn base(&self) -> NonNull<u8> {
        match &self.backing {
            // SAFETY: a mapping holds the bytes of its region.
            Backing::Mapped(mapping, head) => unsafe { mapping.base().add(*head) },
            Backing::Part(base, _) | Backing::Borrowed(base) => *base,
        }
    }

    /// How another process reaches it.
    pub(super) fn reach(&self) -> Reach {
        match &self.backing {
            Backing::Mapped(_, head) => Reach::Shared { head: *head as u64 },
            Backing::Part(_, place) => Reach::Shared { head: place.head },
            Backing::Borrowed(_) => Reach::Private,
        }
    }
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        (!matches!(self.backing, Backing::Borrowed(_))).then_some(1)
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, String> {
        let fd = match &self.backing {
            Backing::Mapped(mapping, _) => mapping.fd(),
            Backing::Part(_, place) => place.fd(),
            Backing::Borrowed(_) => return Err("it is memory of its process alone".to_owned()),
        };
        fd.try_clone_to_owned()
            .map_err(|error| format!("cannot duplicate the descriptor of the memory: {error}"))
    }
}
