//! Memory of a device, and of the host as the device sees it.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use super::{DeviceContext, DevicePtr};

/// One allocation of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Where it begins.
    pub address: DevicePtr,
    /// How long it is.
    pub bytes: u64,
}

impl Extent {
    /// Where it ends.
    pub const fn end(self) -> DevicePtr {
        self.address + self.bytes
    }
}

/// How much memory a device has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeBytes {
    /// Not allocated now.
    pub free: u64,
    /// All.
    pub total: u64,
}

/// Allocations. The context is current in every call.
pub trait MemoryCalls: DeviceContext {
    /// Whether an error says that the device has no room.
    fn is_out_of_memory(error: &Self::Error) -> bool;

    /// How much memory the device has; zeros where the driver does not say.
    fn free_bytes(&self) -> FreeBytes;

    /// An allocation of at least 1 byte.
    ///
    /// # Errors
    /// The driver's refusal.
    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Self::Error>;

    /// The same for words that streams wait for, where they want memory of a kind of its own.
    ///
    /// # Errors
    /// The driver's refusal.
    fn allocate_flags(&self, bytes: usize) -> Result<DevicePtr, Self::Error> {
        self.allocate(bytes)
    }

    /// A refusal means that the device is gone.
    ///
    /// # Safety
    /// It was allocated by [`allocate`](Self::allocate) or [`allocate_flags`](Self::allocate_flags), is
    /// freed once, and nobody uses it.
    unsafe fn free(&self, address: DevicePtr);

    /// Whether giving memory back waits for every stream of the device, also for one that waits for a
    /// peer.
    fn frees_wait(&self) -> bool {
        false
    }

    /// A number that no other allocation of this process has or had; `None` where the driver knows
    /// no allocation there.
    fn allocation_number(&self, address: DevicePtr) -> Option<u64>;

    /// The allocation that holds `address`, for mapped memory the one mapping; `None` where the
    /// driver knows none.
    ///
    /// # Errors
    /// The driver's refusal.
    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Self::Error>;

    /// Pinned host memory, for all devices of the process.
    ///
    /// # Errors
    /// The driver's refusal.
    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Self::Error>;

    /// # Safety
    /// It was allocated by [`allocate_host`](Self::allocate_host), is freed once, and nobody uses it.
    unsafe fn free_host(&self, host: NonNull<c_void>);

    /// Pins the process's own memory, for all devices of the process.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// Whole pages, which stay mapped until they are unregistered.
    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Self::Error>;

    /// A refusal means that the device is gone.
    ///
    /// # Safety
    /// Registered once, unregistered once, and nobody uses it.
    unsafe fn unregister_host(&self, host: NonNull<c_void>);

    /// Where this device reaches pinned host memory.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// It is pinned.
    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Self::Error>;
}

/// What another process opens an allocation with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

/// Allocations that other processes open as a whole.
pub trait IpcCalls: MemoryCalls {
    /// The handle of the allocation that begins at `base`.
    ///
    /// # Errors
    /// The driver's refusal.
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Self::Error>;

    /// Opens a handle, once in a process; where its allocation begins here.
    ///
    /// # Errors
    /// The driver's refusal.
    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Self::Error>;

    /// A refusal means that the device is gone.
    ///
    /// # Safety
    /// Opened once, closed once, and nobody uses it.
    unsafe fn close_ipc(&self, base: DevicePtr);
}

/// A reference to physical memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemoryHandle(pub u64);

/// Physical memory and addresses apart.
pub trait VirtualCalls: MemoryCalls {
    /// Whether the driver has the calls and the device the ability, memory that leaves the process
    /// as a descriptor included. The deed may be refused all the same.
    fn has_virtual_memory(&self) -> bool;

    /// Lengths are multiples of it.
    ///
    /// # Errors
    /// The driver's refusal.
    fn granularity(&self) -> Result<u64, Self::Error>;

    /// Allocates physical memory that can leave the process as a descriptor.
    ///
    /// # Errors
    /// The driver's refusal.
    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Self::Error>;

    /// Another reference to what is mapped at `address`; `None` where it has no handle.
    ///
    /// # Errors
    /// The driver's refusal, if the device no longer works.
    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Self::Error>;

    /// # Safety
    /// The reference is given up once.
    unsafe fn release_memory(&self, handle: MemoryHandle);

    /// Whether the memory was made so that it can leave the process as a descriptor.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn is_exportable(&self, handle: MemoryHandle) -> Result<bool, Self::Error>;

    /// A new descriptor of the memory.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The reference is held.
    unsafe fn export_memory(&self, handle: MemoryHandle) -> Result<OwnedFd, Self::Error>;

    /// The memory behind a descriptor.
    ///
    /// # Errors
    /// The driver's refusal.
    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Self::Error>;

    /// A range of addresses without memory.
    ///
    /// # Errors
    /// The driver's refusal.
    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Self::Error>;

    /// # Safety
    /// A whole range, in which nothing is mapped.
    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64);

    /// Puts memory behind addresses.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The span is reserved, nothing is mapped there, and the reference is held.
    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        handle: MemoryHandle,
    ) -> Result<(), Self::Error>;

    /// # Safety
    /// Exactly one mapping, which nobody uses.
    unsafe fn unmap(&self, address: DevicePtr, bytes: u64);

    /// Lets this device read and write whole mappings, also of a range that another context of the
    /// process has mapped.
    ///
    /// # Errors
    /// The driver's refusal.
    ///
    /// # Safety
    /// The span holds whole mappings.
    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Self::Error>;
}
