//! What regions ask of a device beside the calls of its driver.

use std::fmt;
use std::hash::Hash;
use std::sync::Arc;

use crate::device::{CopyCalls, DevicePtr, IpcCalls, VirtualCalls};
use peerlane_hal::BackendId;
use peerlane_hal::{DmaBuf, Flush};

/// A vendor, as a type: what differs in words and numbers and not in calls.
pub trait Vendor: Copy + fmt::Debug + Eq + Hash + Send + Sync + 'static {
    /// The backend, as keys and addresses name it.
    const BACKEND: BackendId;
    /// The plain allocator of the vendor's users, such as `cudaMalloc`.
    const ALLOCATOR: &'static str;
    /// Why mapped memory without a handle stays in its process, and what to do.
    const NO_HANDLE: &'static str;
    /// The same of memory of a stream-ordered pool.
    const POOL: &'static str;
}

/// What the driver takes an address for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pointee {
    /// Nothing that it knows.
    Unknown,
    /// Memory of the host that was allocated or registered with the driver.
    Host,
    /// Memory that moves between host and device.
    Managed,
    /// Memory of the device with that number, where the driver says which.
    Device(Option<i32>),
    /// Something newer than the backend, as the driver numbers it.
    Other(u64),
}

/// A device whose memory becomes regions. The context is current in every call.
pub trait RegionDevice: CopyCalls + IpcCalls + VirtualCalls {
    /// The vendor.
    type Vendor: Vendor;

    /// Names the device for all processes.
    fn uuid(&self) -> [u8; 16];

    /// Refuses memory of the caller in which flags would not be seen.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument), saying which memory is wanted.
    fn check_flags(&self, address: DevicePtr) -> Result<(), Self::Error> {
        let _ = address;
        Ok(())
    }

    /// Whether flags must lie in memory of
    /// [`allocate_flags`](crate::device::MemoryCalls::allocate_flags), because a stream that
    /// polls others need not see what peers write there.
    fn has_flag_memory(&self) -> bool {
        false
    }

    /// The device has no room for so many bytes; says what it has.
    fn out_of_memory(&self, wanted: u64) -> Self::Error;

    /// What the driver takes an address for.
    ///
    /// # Errors
    /// The driver's refusal; that it knows nothing there is none.
    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Self::Error>;

    /// Whether the allocation that begins at `base` has an IPC handle.
    ///
    /// # Errors
    /// The driver's refusal.
    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Self::Error>;

    /// Lets this device reach what [`allocate`](crate::device::MemoryCalls::allocate) and
    /// the caller's plain allocator give `owner`, of the same process; again is no error.
    ///
    /// # Errors
    /// The driver's refusal.
    fn enable_peer(&self, owner: &Self) -> Result<(), Self::Error>;

    /// A dma-buf that holds the span, and where the span begins in it.
    ///
    /// # Errors
    /// The driver's refusal, or that it makes none.
    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Self::Error>;

    /// What makes the device see what a network card has written to its memory; `None` where it sees
    /// that as soon as the card says that it has come.
    ///
    /// # Errors
    /// It cannot be found out, or nothing does.
    fn card_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Self::Error>;

    /// Whether the driver is able but not willing, or the other way round: another way may work.
    fn is_refusal(error: &Self::Error) -> bool;
}

/// The backend of a device's vendor.
pub(super) const fn backend<D: RegionDevice>() -> BackendId {
    <D::Vendor as Vendor>::BACKEND
}

/// The error of memory that is not to be had, with the bytes that the caller wanted.
pub(super) fn name_bytes<D: RegionDevice>(device: &D, bytes: u64, error: D::Error) -> D::Error {
    if D::is_out_of_memory(&error) { device.out_of_memory(bytes) } else { error }
}
