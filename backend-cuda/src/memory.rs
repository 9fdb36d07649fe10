//! Implements the CUDA calls for registering, exporting and importing device memory.
//!
//! The logic is `peerlane_toolkit::regions`. This file holds the CUDA calls that it is made of.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | allocated by Peerlane | physical memory with a descriptor, mapped by each importer |
//! | of `cudaMalloc` | its legacy IPC handle, together with the caller's offset |
//! | mapped by the caller, such as expandable segments | a descriptor for every segment |
//! | allocated by Peerlane, if a peer's device has no access to this one | host memory with a descriptor, mapped by each importer and registered with its driver |
//! | host memory of another fabric, as data or as flags | the descriptor that it was allocated with |
//! | the caller's own host memory, as flags | not exportable |
//! | of a stream-ordered pool | not exportable; the rank itself can put from it and receive into it |
//!
//! Ranks of one process share addresses. An import there only gives the importer's device access.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::device::{
    DeviceContext as _, DevicePtr, Extent, FreeBytes, IpcCalls, IpcHandle, MemoryCalls,
    MemoryHandle, VirtualCalls,
};
use peerlane_toolkit::regions::{self, Pointee, RegionDevice};

use crate::device::{Context, device_attribute};
use crate::error::Error;
use crate::key::Cuda;
use crate::sys::{
    self, CUipcMemHandle, CUmemAccessDesc, CUmemAllocationProp, CUmemFabricHandle, CUmemHandle,
    CUmemLocation,
};

/// A dma-buf consists of whole host pages, which have at most this many bytes.
const PAGE_BYTES_MAX: u64 = 64 << 10;
const DESCRIPTOR: c_int = sys::MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// The memory of a CUDA fabric, which registers regions of this rank and imports regions of peers.
pub type Memory = regions::Memory<Context>;

/// A registered region of this rank, in CUDA device memory or pinned host memory.
pub type Local = regions::Local<Context>;

/// An imported region of a peer.
pub type Remote = regions::Remote<Context>;

// SAFETY: `pointee` returns what `cuPointerGetAttribute` says of the address; streams read and write any memory that the driver
// knows; `cuMemGetHandleForAddressRange` exports the pages of the span, of which `export_dma_buf` names the place.
unsafe impl RegionDevice for Context {
    type Vendor = Cuda;

    fn uuid(&self) -> [u8; 16] {
        self.info.uuid
    }

    #[cold]
    fn out_of_memory(&self, requested: u64) -> Error {
        let FreeBytes { free, total } = self.free_bytes();
        Error::out_of_memory(self.driver, self.label(), requested, free, total)
    }

    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Error> {
        let attribute = |number| pointer_attribute(self, number, address);
        let kind = attribute(sys::POINTER_ATTRIBUTE_MEMORY_TYPE)?.map(|kind| kind as u32);
        let device = match kind {
            None => return Ok(Pointee::Unknown),
            Some(sys::MEMORYTYPE_HOST) => return Ok(Pointee::Host),
            Some(sys::MEMORYTYPE_DEVICE) => attribute(sys::POINTER_ATTRIBUTE_DEVICE_ORDINAL)?,
            Some(other) => return Ok(Pointee::Other(other.into())),
        };
        if attribute(sys::POINTER_ATTRIBUTE_IS_MANAGED)?.is_some_and(|managed| managed != 0) {
            return Ok(Pointee::Managed);
        }
        Ok(Pointee::Device(device.map(|ordinal| ordinal as u32 as c_int)))
    }

    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Error> {
        let legacy = sys::POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        Ok(pointer_attribute(self, legacy, base)?.is_some_and(|capable| capable != 0))
    }

    fn enable_peer(&self, owner: &Self) -> Result<(), Error> {
        // SAFETY: `self` and `owner` retain both contexts.
        let code = unsafe { (self.driver.ctx_enable_peer_access)(owner.raw(), 0) };
        match code {
            sys::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check("cuCtxEnablePeerAccess", code),
        }
    }

    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
        export_dma_buf(self, address, bytes)
    }

    fn nic_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Error> {
        nic_flush(context)
    }

    fn is_refusal(error: &Error) -> bool {
        error.is_one_of(&[sys::CUDA_ERROR_NOT_PERMITTED, sys::CUDA_ERROR_NOT_SUPPORTED])
    }
}

/// Reads an attribute of a pointer, or returns `None` if the driver does not know the pointer or the attribute.
fn pointer_attribute(
    context: &Context,
    number: c_int,
    address: DevicePtr,
) -> Result<Option<u64>, Error> {
    // Attributes have 1 to 8 bytes; the rest of the local stays zero.
    let mut value = 0_u64;
    // SAFETY: none of the attributes that this file reads is larger than the local.
    let code =
        unsafe { (context.driver.pointer_get_attribute)((&raw mut value).cast(), number, address) };
    if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_SUPPORTED) {
        return Ok(None);
    }
    context.check("cuPointerGetAttribute", code)?;
    Ok(Some(value))
}

// SAFETY: `cuMemAlloc` and `cuMemHostAlloc` return new memory of the requested length, which lives until it is freed;
// `cuMemHostGetDevicePointer`, `cuMemGetAddressRange` and the buffer id of `cuPointerGetAttribute` describe the memory at the
// address.
unsafe impl MemoryCalls for Context {
    fn is_out_of_memory(error: &Error) -> bool {
        matches!(error, Error::Driver { result, .. }
            if result.code == sys::CUDA_ERROR_OUT_OF_MEMORY)
    }

    fn free_bytes(&self) -> FreeBytes {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results are stored in locals, which stay 0 if the call fails.
        let _ = unsafe { (self.driver.mem_get_info)(&raw mut free, &raw mut total) };
        FreeBytes { free: free as u64, total: total as u64 }
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = 0;
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.mem_alloc)(&raw mut address, bytes) };
        self.check("cuMemAlloc_v2", code)?;
        Ok(address)
    }

    unsafe fn free(&self, address: DevicePtr) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.driver.mem_free)(address) };
    }

    fn allocation_number(&self, address: DevicePtr) -> Option<u64> {
        let mut number = 0_u64;
        let attribute = sys::POINTER_ATTRIBUTE_BUFFER_ID;
        let out: *mut c_void = (&raw mut number).cast();
        // SAFETY: the attribute is a 64-bit number, stored in a local.
        let code = unsafe { (self.driver.pointer_get_attribute)(out, attribute, address) };
        (code == sys::CUDA_SUCCESS).then_some(number)
    }

    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Error> {
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: the driver looks the address up; the results are stored in locals.
        let code =
            unsafe { (self.driver.mem_get_address_range)(&raw mut base, &raw mut bytes, address) };
        if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_FOUND) {
            return Ok(None);
        }
        self.check("cuMemGetAddressRange_v2", code)?;
        Ok(Some(Extent { address: base, bytes: bytes as u64 }))
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Error> {
        let mut host = std::ptr::null_mut();
        let flags = sys::MEMHOSTALLOC_PORTABLE;
        // SAFETY: the context is current; the result is stored in a local.
        let code = unsafe { (self.driver.mem_host_alloc)(&raw mut host, bytes, flags) };
        self.check("cuMemHostAlloc", code)?;
        NonNull::new(host)
            .ok_or_else(|| Error::unavailable("cuMemHostAlloc returned a null pointer"))
    }

    unsafe fn free_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.driver.mem_free_host)(host.as_ptr()) };
    }

    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        let flags = sys::MEMHOSTREGISTER_PORTABLE | sys::MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.driver.mem_host_register)(host.as_ptr(), bytes, flags) };
        self.check("cuMemHostRegister_v2", code)
    }

    unsafe fn unregister_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.driver.mem_host_unregister)(host.as_ptr()) };
    }

    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Error> {
        let mut address = 0;
        let get = self.driver.mem_host_get_device_pointer;
        // SAFETY: the caller vouches for the argument; the result is stored in a local.
        let code = unsafe { get(&raw mut address, host.as_ptr(), 0) };
        self.check("cuMemHostGetDevicePointer_v2", code)?;
        Ok(address)
    }
}

// SAFETY: `cuIpcOpenMemHandle` maps the allocation whose handle `cuIpcGetMemHandle` returned, until `cuIpcCloseMemHandle`.
unsafe impl IpcCalls for Context {
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Error> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver looks the address up; the result is stored in a local.
        let code = unsafe { (self.driver.ipc_get_mem_handle)(&raw mut handle, base) };
        self.check("cuIpcGetMemHandle", code)?;
        Ok(IpcHandle(handle.reserved))
    }

    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Error> {
        let mut address = 0;
        let handle = CUipcMemHandle { reserved: handle.0 };
        let flags = sys::IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the driver checks the handle; the result is stored in a local.
        let code = unsafe { (self.driver.ipc_open_mem_handle)(&raw mut address, handle, flags) };
        self.check("cuIpcOpenMemHandle_v2", code)?;
        Ok(address)
    }

    unsafe fn close_ipc(&self, base: DevicePtr) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.driver.ipc_close_mem_handle)(base) };
    }
}

// SAFETY: each handle is a reference that the driver counts until `cuMemRelease`; `cuMemAddressReserve` reserves a new range,
// and `cuMemMap` maps the memory of the handle.
unsafe impl VirtualCalls for Context {
    fn has_virtual_memory(&self) -> bool {
        let abilities = self.info.abilities;
        abilities.virtual_memory && abilities.posix_handles && self.driver.mem_create.is_some()
    }

    fn granularity(&self) -> Result<u64, Error> {
        granularity(self, DESCRIPTOR)
    }

    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Error> {
        create(self, bytes, DESCRIPTOR)
    }

    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Error> {
        let Some(retain) = self.driver.mem_retain_allocation_handle else { return Ok(None) };
        let mut raw = 0;
        // SAFETY: the driver looks the address up and does not dereference it.
        let code = unsafe { retain(&raw mut raw, address as *mut c_void) };
        // Drivers differ in the code that reports memory without a handle.
        if code != sys::CUDA_SUCCESS && Error::device_survives(code) {
            return Ok(None);
        }
        self.check("cuMemRetainAllocationHandle", code)?;
        Ok(Some(MemoryHandle(raw)))
    }

    unsafe fn release_memory(&self, handle: MemoryHandle) {
        if let Some(release) = self.driver.mem_release {
            // SAFETY: the caller upholds the contract of this function.
            let _ = unsafe { release(handle.0) };
        }
    }

    unsafe fn is_exportable(&self, handle: MemoryHandle) -> Result<bool, Error> {
        let symbol = "cuMemGetAllocationPropertiesFromHandle";
        let ask = self.require(symbol, self.driver.mem_get_allocation_properties)?;
        let mut properties = allocation_properties(self, sys::MEM_HANDLE_TYPE_NONE);
        // SAFETY: the caller vouches for the argument; the result is stored in a local.
        let code = unsafe { ask(&raw mut properties, handle.0) };
        self.check(symbol, code)?;
        Ok(properties.requested_handle_types & DESCRIPTOR != 0)
    }

    unsafe fn export_memory(&self, handle: MemoryHandle) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        // SAFETY: the caller holds the handle; the driver stores a descriptor, which is a `c_int`.
        unsafe { export(self, handle.0, DESCRIPTOR, (&raw mut fd).cast()) }?;
        // SAFETY: the call above opened the descriptor for this caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Error> {
        let symbol = "cuMemImportFromShareableHandle";
        let import = self.require(symbol, self.driver.mem_import_from_shareable_handle)?;
        let mut raw = 0;
        // cuda.h passes the descriptor's number as the pointer itself.
        let number = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the borrow keeps the descriptor open; the result is stored in a local.
        let code = unsafe { import(&raw mut raw, number, DESCRIPTOR) };
        self.check(symbol, code)?;
        Ok(MemoryHandle(raw))
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let reserve = self.require("cuMemAddressReserve", self.driver.mem_address_reserve)?;
        let mut address = 0;
        // SAFETY: the driver chooses the range; the result is stored in a local.
        let code = unsafe { reserve(&raw mut address, bytes as usize, 0, 0, 0) };
        self.check("cuMemAddressReserve", code)?;
        Ok(address)
    }

    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64) {
        if let Some(free) = self.driver.mem_address_free {
            // SAFETY: the caller upholds the contract of this function.
            let _ = unsafe { free(address, bytes as usize) };
        }
    }

    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        handle: MemoryHandle,
    ) -> Result<(), Error> {
        let map = self.require("cuMemMap", self.driver.mem_map)?;
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { map(address, bytes as usize, 0, handle.0, 0) };
        self.check("cuMemMap", code)
    }

    unsafe fn unmap(&self, address: DevicePtr, bytes: u64) {
        if let Some(unmap) = self.driver.mem_unmap {
            // SAFETY: the caller upholds the contract of this function.
            let _ = unsafe { unmap(address, bytes as usize) };
        }
    }

    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Error> {
        let set_access = self.require("cuMemSetAccess", self.driver.mem_set_access)?;
        let flags = sys::MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: own_location(self), flags };
        // SAFETY: the caller vouches for the range; the description is a local.
        let code = unsafe { set_access(address, bytes as usize, &raw const access, 1) };
        self.check("cuMemSetAccess", code)
    }
}

/// Allocates `bytes` bytes of physical device memory, a multiple of the allocation granularity.
fn create(context: &Context, bytes: u64, kind: c_int) -> Result<MemoryHandle, Error> {
    let create = context.require("cuMemCreate", context.driver.mem_create)?;
    let properties = allocation_properties(context, kind);
    let mut raw = 0;
    // SAFETY: both point to locals; the properties are filled in as cuda.h requires.
    let code = unsafe { create(&raw mut raw, bytes as usize, &raw const properties, 0) };
    context.check("cuMemCreate", code)?;
    Ok(MemoryHandle(raw))
}

/// The results of test exports, one for each kind of memory handle.
///
/// A device attribute may claim a kind that the driver then refuses, for instance fabric handles without
/// a channel to the fabric manager. An error says why the kind does not work.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct HandleTrials {
    /// The result for a file descriptor, which other processes of this host can import.
    /// [`Memory::allocate`](crate::Memory) prefers this kind.
    pub posix: Result<(), Error>,
    /// The result for a fabric handle, which other hosts of an NVLink domain can import. Not used yet.
    pub fabric: Result<(), Error>,
    /// The result for a legacy IPC handle, which exports memory of `cudaMalloc`.
    pub legacy: Result<(), Error>,
}

/// Tests every kind of memory handle by exporting an allocation of the minimum size.
///
/// # Errors
/// Fails if the device cannot be opened.
pub fn try_handles(ordinal: u32) -> Result<HandleTrials, Error> {
    let context = Context::open(ordinal)?;
    let _current = context.enter_relaxed()?;
    Ok(HandleTrials {
        posix: regions::Physical::create(&context, 1).and_then(|memory| memory.export()).map(drop),
        fabric: try_fabric(&context),
        legacy: regions::Plain::allocate(&context, 1)
            .and_then(|plain| plain.ipc_handle())
            .map(drop),
    })
}

fn try_fabric(context: &Context) -> Result<(), Error> {
    let kind = sys::MEM_HANDLE_TYPE_FABRIC;
    let handle = create(context, granularity(context, kind)?, kind)?;
    let mut exported = CUmemFabricHandle { data: [0; 64] };
    // SAFETY: `handle` is held, and `exported` has the size of a handle of this kind.
    let result = unsafe { export(context, handle.0, kind, (&raw mut exported).cast()) };
    // SAFETY: created above and not released yet.
    unsafe { context.release_memory(handle) };
    result
}

fn granularity(context: &Context, kind: c_int) -> Result<u64, Error> {
    let ask = context
        .require("cuMemGetAllocationGranularity", context.driver.mem_get_allocation_granularity)?;
    let properties = allocation_properties(context, kind);
    let mut least = 0;
    // SAFETY: both point to locals; the properties are filled in as cuda.h requires.
    let code =
        unsafe { ask(&raw mut least, &raw const properties, sys::MEM_ALLOC_GRANULARITY_MINIMUM) };
    context.check("cuMemGetAllocationGranularity", code)?;
    Ok(least as u64)
}

/// Exports physical device memory to other processes as a handle of type `kind`.
///
/// # Safety
/// The caller holds `handle`, and `result` has room for a handle of that kind.
unsafe fn export(
    context: &Context,
    handle: CUmemHandle,
    kind: c_int,
    result: *mut c_void,
) -> Result<(), Error> {
    let symbol = "cuMemExportToShareableHandle";
    let export = context.require(symbol, context.driver.mem_export_to_shareable_handle)?;
    // SAFETY: the caller upholds the contract of this function.
    let code = unsafe { export(result, handle, kind, 0) };
    context.check(symbol, code)
}

fn own_location(context: &Context) -> CUmemLocation {
    CUmemLocation { kind: sys::MEM_LOCATION_TYPE_DEVICE, id: context.device }
}

fn allocation_properties(context: &Context, kind: c_int) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: sys::MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: kind,
        location: own_location(context),
        win32_handle_meta_data: std::ptr::null_mut(),
        compression_type: 0,
        // Lets an RDMA fabric register the same buffer.
        gpu_direct_rdma_capable: context.info.abilities.rdma_virtual_memory.into(),
        usage: 0,
        reserved: [0; 4],
    }
}

fn export_dma_buf(context: &Context, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
    let symbol = "cuMemGetHandleForAddressRange";
    let export = context.require(symbol, context.driver.mem_get_handle_for_address_range)?;
    let start = address / PAGE_BYTES_MAX * PAGE_BYTES_MAX;
    let end = (address + bytes).next_multiple_of(PAGE_BYTES_MAX);
    let mut fd: c_int = -1;
    let (out, length) = ((&raw mut fd).cast(), (end - start) as usize);
    // SAFETY: the driver looks the range up and stores a descriptor, which is a `c_int`.
    let code = unsafe { export(out, start, length, sys::MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) };
    context.check(symbol, code)?;
    // SAFETY: the call above opened the descriptor for this caller.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(DmaBuf { fd, offset: address - start })
}

/// Returns `None` if the device sees the writes of a NIC in order without a flush.
fn nic_flush(context: &Arc<Context>) -> Result<Option<Arc<dyn Flush>>, Error> {
    let attribute = |number| device_attribute(context.driver, context.device, number);
    if attribute(sys::ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?
        >= sys::GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    {
        return Ok(None);
    }
    let options = attribute(sys::ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
    if options & sys::FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST == 0 {
        return Err(Error::unavailable(format!(
            "{} does not order the writes of NICs, and the host cannot flush them; NICs cannot \
             write to its memory",
            context.label()
        )));
    }
    context.require("cuFlushGPUDirectRDMAWrites", context.driver.flush_gpu_direct_rdma_writes)?;
    Ok(Some(Arc::new(NicWrites(Arc::clone(context)))))
}

#[derive(Debug)]
struct NicWrites(Arc<Context>);

impl Flush for NicWrites {
    fn flush(&self) -> Result<(), String> {
        let Self(context) = self;
        let flush = || -> Result<(), Error> {
            let symbol = "cuFlushGPUDirectRDMAWrites";
            let call = context.require(symbol, context.driver.flush_gpu_direct_rdma_writes)?;
            let _current = context.enter_relaxed()?;
            let target = sys::FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
            // SAFETY: the context is current.
            let code = unsafe { call(target, sys::FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) };
            context.check(symbol, code)
        };
        flush().map_err(|error| error.to_string())
    }
}
