//! Physical memory apart from its addresses: what leaves the process as a descriptor.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::device::{RegionDevice, name_bytes};
use crate::device::{Extent, MemoryHandle};

/// A reference to physical memory, which lives as long as there is one, or a mapping.
#[derive(Debug)]
pub struct Physical<D: RegionDevice> {
    context: Arc<D>,
    raw: MemoryHandle,
    bytes: u64,
}

impl<D: RegionDevice> Physical<D> {
    /// Allocates at least `bytes`, exportable as a descriptor; the context is current.
    ///
    /// # Errors
    /// [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory), naming the bytes wanted, and the driver's refusal.
    pub fn create(context: &Arc<D>, bytes: u64) -> Result<Self, D::Error> {
        let least = context.granularity()?;
        let rounded = bytes.max(1).checked_next_multiple_of(least.max(1));
        // More than the address space holds is refused here, before a size wraps around.
        let Some(rounded) = rounded.filter(|rounded| i64::try_from(*rounded).is_ok()) else {
            return Err(context.out_of_memory(bytes));
        };
        let created = context.create_memory(rounded);
        let raw = created.map_err(|error| name_bytes(&**context, bytes, error))?;
        Ok(Self { context: Arc::clone(context), raw, bytes: rounded })
    }

    /// Another reference to the memory that is mapped there; `None` where it has no handle.
    pub(super) fn retain(context: &Arc<D>, extent: Extent) -> Result<Option<Self>, D::Error> {
        let raw = context.retain_memory(extent.address)?;
        let context = Arc::clone(context);
        Ok(raw.map(|raw| Self { context, raw, bytes: extent.bytes }))
    }

    /// The memory behind a peer's descriptor, which must hold exactly `bytes`.
    pub(super) fn import(
        context: &Arc<D>,
        fd: BorrowedFd<'_>,
        bytes: u64,
    ) -> Result<Self, D::Error> {
        let raw = context.import_memory(fd)?;
        Ok(Self { context: Arc::clone(context), raw, bytes })
    }

    pub(super) fn raw(&self) -> MemoryHandle {
        self.raw
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether the memory was made so that it can leave the process as a descriptor.
    pub(super) fn is_exportable(&self) -> Result<bool, D::Error> {
        // SAFETY: the reference is held by `self`.
        unsafe { self.context.is_exportable(self.raw) }
    }

    /// A new descriptor of the memory.
    ///
    /// # Errors
    /// The driver's refusal.
    pub fn export(&self) -> Result<OwnedFd, D::Error> {
        // SAFETY: the reference is held by `self`.
        unsafe { self.context.export_memory(self.raw) }
    }
}

impl<D: RegionDevice> Drop for Physical<D> {
    fn drop(&mut self) {
        // SAFETY: this reference is given up once.
        unsafe { self.context.release_memory(self.raw) };
    }
}
