//! Implements registered host memory, which importers of the same process share.

use std::ptr::NonNull;

use rustix::fd::OwnedFd;

use super::error::Error;
use super::key::Access;
use peerlane_hal::{DynError, Rank, Role};
use peerlane_toolkit::handover::Handover;
use peerlane_toolkit::mapping::{MappedSpan, Mapping};

#[derive(Debug)]
pub(crate) enum Backing {
    Mapped(Mapping, usize),
    Span(NonNull<u8>, MappedSpan),
    /// Memory that the caller allocated and keeps alive.
    Borrowed(NonNull<u8>),
}

/// Registered host memory, which all importers of the same process share.
#[derive(Debug)]
pub(crate) struct Registration {
    pub(crate) backing: Backing,
    pub(crate) bytes: u64,
    pub(crate) owner: Rank,
    pub(crate) role: Role,
}

// SAFETY: a registration only names memory. The contracts of the ops and of `register` govern
// concurrent access.
unsafe impl Send for Registration {}
// SAFETY: as above.
unsafe impl Sync for Registration {}

impl Registration {
    pub(crate) fn base(&self) -> NonNull<u8> {
        match &self.backing {
            // SAFETY: a mapping holds the bytes of its region.
            Backing::Mapped(mapping, head) => unsafe { mapping.base().add(*head) },
            Backing::Span(base, _) | Backing::Borrowed(base) => *base,
        }
    }

    /// Returns a pointer to byte `offset` of the region, which the caller has checked to be in
    /// bounds.
    pub(crate) fn pointer(&self, offset: u64) -> *mut u8 {
        // The offset lies in a mapped region, so it fits.
        self.base().as_ptr().wrapping_add(offset as usize)
    }

    pub(crate) fn access(&self) -> Access {
        match &self.backing {
            Backing::Mapped(mapping, head) => {
                Access::Shared { head: *head as u64, guard: mapping.guard() }
            }
            Backing::Span(_, span) => Access::Shared { head: span.head, guard: span.guard() },
            Backing::Borrowed(_) => Access::Private,
        }
    }
}

impl Handover for Registration {
    fn descriptors(&self) -> Option<u32> {
        (!matches!(self.backing, Backing::Borrowed(_))).then_some(1)
    }

    fn descriptor(&self, _index: u32) -> Result<OwnedFd, DynError> {
        let fd = match &self.backing {
            Backing::Mapped(mapping, _) => mapping.fd(),
            Backing::Span(_, span) => span.fd(),
            Backing::Borrowed(_) => {
                let text = "the memory was registered from another allocator, so it has no file descriptor that a peer \
                            can map";
                return Err(DynError::new(Error::Argument(text.to_owned())));
            }
        };
        let failed = Error::io("cannot duplicate the file descriptor of the memory");
        fd.try_clone_to_owned().map_err(|error| DynError::new(failed(error)))
    }
}
