//! Memory of the host that every process of it can map and every device reaches: the way between
//! devices that do not reach each other.
//!
//! A sealed memfd, mapped and registered with the driver. A put to it goes over PCI Express to the
//! host, and whoever reads it fetches it from there.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::RegionDevice;
use crate::device::{DevicePtr, Fault};
use crate::mapping::Mapping;
use peerlane_hal::Rank;

/// Host memory as host and device find it.
#[derive(Clone, Copy, Debug)]
pub(super) struct HostView {
    /// For the host.
    pub(super) base: NonNull<u8>,
    /// For the device of its registration.
    pub(super) address: DevicePtr,
}

impl HostView {
    /// Whether host and device have the same address for it.
    pub(super) fn is_unified(self) -> bool {
        self.address == self.base.as_ptr() as DevicePtr
    }

    /// Copies to the memory; the caller has checked the span against the region.
    pub(super) fn write(self, offset: u64, bytes: &[u8]) {
        let to = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: inside the region, as the caller has checked; who may touch which byte when is
        // the contract of the ops.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
    }

    /// Copies from the memory, in the same way.
    pub(super) fn read(self, offset: u64, bytes: &mut [u8]) {
        let from = self.base.as_ptr().wrapping_add(offset as usize);
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) };
    }
}

/// Where a device reaches what was registered at `start`; its context is current.
pub(super) fn device_pointer<D: RegionDevice>(
    reader: &D,
    start: NonNull<u8>,
) -> Result<DevicePtr, D::Error> {
    // SAFETY: registered for all devices, by who calls this.
    unsafe { reader.host_pointer(start.cast()) }
}

/// Mapped and registered; given back when dropped.
#[derive(Debug)]
pub(super) struct Pinned<D: RegionDevice> {
    context: Arc<D>,
    address: DevicePtr,
    registered: bool,
    mapping: Mapping,
    /// The region begins so far into the mapping.
    begin: usize,
}

impl<D: RegionDevice> Pinned<D> {
    /// Zeroed memory; the context is current.
    pub(super) fn create(context: &Arc<D>, bytes: u64, owner: Rank) -> Result<Self, D::Error> {
        let mapping = Mapping::create(bytes).map_err(Fault::of_mapping(owner))?;
        Self::register(context, mapping, 0)
    }

    /// The `bytes` behind the first `head` of a peer's descriptor, which must hold them.
    pub(super) fn import(
        context: &Arc<D>,
        fd: OwnedFd,
        (head, bytes): (u64, u64),
        peer: Rank,
    ) -> Result<Self, D::Error> {
        let imported = Mapping::import(fd, head, bytes).map_err(Fault::of_mapping(peer));
        let (mapping, begin) = imported?;
        Self::register(context, mapping, begin)
    }

    fn register(context: &Arc<D>, mapping: Mapping, begin: usize) -> Result<Self, D::Error> {
        let context = Arc::clone(context);
        let mut pinned = Self { context, address: 0, registered: false, mapping, begin };
        let (context, mapping) = (&pinned.context, &pinned.mapping);
        // SAFETY: whole pages, which stay mapped until they are unregistered.
        unsafe { context.register_host(mapping.base().cast(), mapping.mapped_bytes()) }?;
        pinned.registered = true;
        pinned.address = pinned.address_for(&pinned.context)?;
        Ok(pinned)
    }

    /// Where another device of this process reaches it; that context is current.
    pub(super) fn address_for(&self, reader: &D) -> Result<DevicePtr, D::Error> {
        Ok(device_pointer(reader, self.mapping.base())? + self.begin as u64)
    }

    pub(super) fn view(&self) -> HostView {
        let base = self.mapping.base().as_ptr().wrapping_add(self.begin);
        let base = NonNull::new(base).expect("a mapping does not wrap around");
        HostView { base, address: self.address }
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.mapping.fd()
    }
}

impl<D: RegionDevice> Drop for Pinned<D> {
    fn drop(&mut self) {
        if !self.registered {
            return;
        }
        // Failures mean that the device is gone; the pages are the process's own.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: registered once by `register`; nobody uses it any more, as for a mapping.
        unsafe { self.context.unregister_host(self.mapping.base().cast()) };
    }
}
