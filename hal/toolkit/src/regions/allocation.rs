//! Allocates device memory with the plain allocator or as physical memory that is mapped to addresses.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::deferred_free;
use crate::device::{DevicePtr, Extent, IpcHandle, MemoryHandle, RegionDevice, name_bytes};

/// The time for which an allocation waits until the background thread has freed device memory.
const FREE_WAIT: Duration = Duration::from_secs(2);

/// An allocation of the vendor's plain allocator, for a device without virtual memory management. Dropping it
/// frees the memory.
#[derive(Debug)]
pub struct Plain<D: RegionDevice> {
    context: Arc<D>,
    address: DevicePtr,
}

impl<D: RegionDevice> Plain<D> {
    /// Allocates `bytes` bytes with the plain allocator of the vendor. The context is current.
    ///
    /// # Errors
    /// Returns an error of kind [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory) with the requested
    /// bytes, and the driver's error.
    pub fn allocate(context: &Arc<D>, bytes: u64) -> Result<Self, D::Error> {
        Self::allocate_with(context, bytes, |bytes| context.allocate(bytes))
    }

    pub(super) fn allocate_flags(context: &Arc<D>, bytes: u64) -> Result<Self, D::Error> {
        Self::allocate_with(context, bytes, |bytes| context.allocate_flags(bytes))
    }

    fn allocate_with(
        context: &Arc<D>,
        bytes: u64,
        allocate: impl Fn(usize) -> Result<DevicePtr, D::Error>,
    ) -> Result<Self, D::Error> {
        // More than the address space holds is refused here, before a size wraps around.
        let Some(length) = i64::try_from(bytes).ok().and_then(|_| usize::try_from(bytes).ok())
        else {
            return Err(context.out_of_memory(bytes));
        };
        let allocated = match allocate(length.max(1)) {
            // Dropped memory may not be free yet.
            Err(error)
                if D::is_out_of_memory(&error) && deferred_free::wait(&**context, FREE_WAIT) =>
            {
                allocate(length.max(1))
            }
            allocated => allocated,
        };
        let address = allocated.map_err(|error| name_bytes(&**context, bytes, error))?;
        Ok(Self { context: Arc::clone(context), address })
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    /// Returns the IPC handle by which another process opens the allocation.
    ///
    /// # Errors
    /// Returns the driver's error.
    pub fn ipc_handle(&self) -> Result<IpcHandle, D::Error> {
        self.context.ipc_handle(self.address)
    }
}

impl<D: RegionDevice> Drop for Plain<D> {
    fn drop(&mut self) {
        // An error means that the device is lost, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: allocated by `allocate`, freed once, and no longer in use: the region is dropped, and the
        // contract of `submit` keeps it until its tickets are complete.
        unsafe { self.context.free(self.address) };
    }
}

/// A reference to physical device memory, which is freed with its last reference and mapping.
#[derive(Debug)]
pub struct Physical<D: RegionDevice> {
    context: Arc<D>,
    raw: MemoryHandle,
    bytes: u64,
}

impl<D: RegionDevice> Physical<D> {
    /// Allocates at least `bytes` bytes of physical memory that can be exported as a file descriptor. The
    /// context is current.
    ///
    /// # Errors
    /// Returns an error of kind [`OutOfMemory`](peerlane_hal::ErrorKind::OutOfMemory) with the requested
    /// bytes, and the driver's error.
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

    pub(super) fn retain(context: &Arc<D>, extent: Extent) -> Result<Option<Self>, D::Error> {
        let raw = context.retain_memory(extent.address)?;
        let context = Arc::clone(context);
        Ok(raw.map(|raw| Self { context, raw, bytes: extent.bytes }))
    }

    /// Imports a peer's physical memory from a file descriptor, which must hold exactly `bytes` bytes.
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

    pub(super) fn is_exportable(&self) -> Result<bool, D::Error> {
        // SAFETY: the reference is held by `self`.
        unsafe { self.context.is_exportable(self.raw) }
    }

    /// Exports the physical memory as a file descriptor.
    ///
    /// # Errors
    /// Returns the driver's error.
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

/// Segments of physical memory that are mapped to consecutive addresses until dropped.
#[derive(Debug)]
pub(super) struct Mapped<D: RegionDevice> {
    context: Arc<D>,
    address: DevicePtr,
    reserved_bytes: u64,
    segments: Vec<u64>,
}

impl<D: RegionDevice> Mapped<D> {
    /// Maps physical memory to consecutive device addresses; the mapping keeps the memory alive, so the
    /// references may be dropped.
    pub(super) fn map(context: &Arc<D>, physical: &[Physical<D>]) -> Result<Self, D::Error> {
        let reserved_bytes = physical.iter().map(Physical::bytes).sum();
        let address = context.reserve(reserved_bytes)?;
        let segments = Vec::with_capacity(physical.len());
        // From here on, a drop undoes what is done.
        let mut mapped = Self { context: Arc::clone(context), address, reserved_bytes, segments };
        let mut at = address;
        for segment in physical {
            // SAFETY: the sum of all lengths is reserved, and nothing is mapped at `at` yet.
            unsafe { context.map(at, segment.bytes(), segment.raw()) }?;
            mapped.segments.push(segment.bytes());
            at += segment.bytes();
        }
        allow(&**context, address, reserved_bytes)?;
        Ok(mapped)
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    pub(super) fn bytes(&self) -> u64 {
        self.reserved_bytes
    }
}

impl<D: RegionDevice> Drop for Mapped<D> {
    fn drop(&mut self) {
        // An error means that the device is lost, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        let mut at = self.address;
        for bytes in &self.segments {
            // SAFETY: exactly one mapping of `map`, no longer in use: the region is dropped, and the contract
            // of `submit` keeps it until its tickets are complete.
            unsafe { self.context.unmap(at, *bytes) };
            at += bytes;
        }
        // SAFETY: the range of `map`, in which nothing is mapped now.
        unsafe { self.context.unreserve(self.address, self.reserved_bytes) };
    }
}

/// Of two threads that permit one device to access the same mapping at the same time, one gets
/// CUDA_ERROR_ALREADY_MAPPED (seen with driver 580), so changes of access hold this lock.
static ACCESS_CHANGE: Mutex<()> = Mutex::new(());

pub(super) fn allow<D: RegionDevice>(
    reader: &D,
    address: DevicePtr,
    bytes: u64,
) -> Result<(), D::Error> {
    let _serialized = ACCESS_CHANGE.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: whole mappings (the callers' duty).
    unsafe { reader.allow(address, bytes) }
}
