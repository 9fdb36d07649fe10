//! Implements the ROCm calls for registering, exporting and importing device memory.
//!
//! The logic is `peerlane_toolkit::regions`. This file holds the calls of HIP and the HSA runtime that it
//! is made of.
//!
//! | memory | how it leaves the process |
//! | --- | --- |
//! | data, allocated by Peerlane | physical memory with a descriptor, mapped by each importer, if a test of it succeeds; else `hipMalloc` |
//! | flags, allocated by Peerlane | fine-grained memory of `hipExtMallocWithFlags`, with its IPC handle |
//! | of `hipMalloc` | its IPC handle, together with the caller's offset |
//! | mapped by the caller, such as expandable segments | a descriptor for every segment, if HIP can return the handles again (7.15 and newer) |
//! | allocated by Peerlane, if a peer's device has no access to this one | host memory with a descriptor, mapped by each importer and registered with its runtime |
//! | host memory of another fabric, as data or as flags | the descriptor that it was allocated with |
//! | the caller's own host memory, as flags | not exportable |
//!
//! Ranks of one process share addresses. An import there only gives the importer's device access.
//!
//! # IPC handles
//! A handle is requested only for the base of an allocation, and the key carries the offset. All regions of
//! one allocation then have one handle, which a peer opens once. Before an importer opens a handle it asks
//! the owner whether the memory still exists, because attaching freed memory may block forever
//! (ROCm/rocm-systems#9827). Handles of the HSA runtime (`hsa_amd_ipc_memory_create`) are not used: HIP does
//! not know memory that is attached by them, and a stream would treat it as pageable host memory.
//!
//! # NICs
//! The HSA runtime exports an allocation as a dma-buf since 6.1 and returns the offset of the span in it.
//! HIP does so since 7.2, for spans that start at the base of their allocation.
//!
//! Writes over PCI Express may be held in the host data path (HDP) of the device. A store to one of its
//! registers flushes it. A device that is connected to the processors by XGMI has no such register.

use std::ffi::{c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::Fault;
use peerlane_toolkit::device::{
    DeviceContext as _, DevicePtr, Extent, FreeBytes, IpcCalls, IpcHandle, MemoryCalls,
    MemoryHandle, VirtualCalls,
};
use peerlane_toolkit::regions::{self, Pointee, RegionDevice};

use crate::device::{Context, agent};
use crate::error::Error;
use crate::key::Rocm;
use crate::sys::Hsa;
use crate::sys::Version;
use crate::sys::hip::{
    self, hipError_t, hipIpcMemHandle_t, hipMemAccessDesc, hipMemAccessFlags,
    hipMemAllocationGranularity_flags, hipMemAllocationHandleType, hipMemAllocationProp,
    hipMemAllocationType, hipMemGenericAllocationHandle_t, hipMemLocation, hipMemLocationType,
    hipMemRangeHandleType, hipMemoryType, hipPointer_attribute, hipPointerAttribute_t,
};
use crate::sys::hsa::{
    hsa_agent_info_t, hsa_amd_agent_info_s, hsa_amd_hdp_flush_s,
    hsa_amd_memory_pool_global_flag_s as PoolFlags, hsa_amd_pointer_info_t, hsa_amd_pointer_type_t,
    hsa_status_t,
};

/// The first HIP release in which memory type 0 means memory that HIP does not know. In older releases it means host
/// memory.
const UNREGISTERED_SINCE: Version = Version { major: 6, minor: 0, patch: 0 };

/// The first HIP release whose `hipMemRetainAllocationHandle` can be called safely.
///
/// Older releases dereference a null pointer for memory that was not mapped. They also return a reference
/// that they do not count, so that releasing it takes the memory from its owner (release notes of HIP 7.14;
/// hip_vm.cpp of clr).
const RETAINS_SINCE: Version = Version { major: 7, minor: 15, patch: 0 };

const DESCRIPTOR: hipMemAllocationHandleType =
    hipMemAllocationHandleType::hipMemHandleTypePosixFileDescriptor;

static EXPORT_TESTS: Mutex<Vec<(i32, bool)>> = Mutex::new(Vec::new());

/// The memory of a ROCm fabric, which registers regions of this rank and imports regions of peers.
///
/// # Fine-grained and coarse-grained memory
/// Memory of `hipMalloc` is coarse-grained: a device may hold it in caches that writes of others do not
/// invalidate, and it becomes coherent between kernels and after a synchronisation. Fine-grained memory is
/// always coherent, and is cached less or not at all ([coherence control]).
///
/// | contents | may be coarse-grained | what makes them visible |
/// | --- | --- | --- |
/// | flags | no: a stream polls them while a peer writes | nothing is needed |
/// | data that a stream reads after its wait for a flag | yes | the work after the wait begins with an acquire |
/// | data that a kernel reads while they are written | no, and this crate does not support it | |
///
/// Flags that the fabric allocates are fine-grained. The caller's memory is accepted for flags unless the
/// HSA runtime reports that it is coarse-grained. Without that runtime the caller must ensure it.
///
/// HIP documents `hipStreamWaitValue64` for signal memory (`hipMallocSignalMemory`). Such memory comes as
/// single words of 8 bytes, each its own allocation, and cannot hold an array of flags. For other memory
/// the runtime polls with a kernel.
///
/// [coherence control]: https://rocm.docs.amd.com/projects/HIP/en/latest/how-to/hip_runtime_api/memory_management/coherence_control.html
pub type Memory = regions::Memory<Context>;

/// A registered region of this rank, in ROCm device memory or pinned host memory.
pub type Local = regions::Local<Context>;

/// An imported region of a peer.
pub type Remote = regions::Remote<Context>;

// SAFETY: `pointee` returns what `hipPointerGetAttributes` says of the address; `check_flags` refuses memory on which streams
// cannot wait; the dma-buf comes with the place of the span in it.
unsafe impl RegionDevice for Context {
    type Vendor = Rocm;

    fn uuid(&self) -> [u8; 16] {
        self.info.identity()
    }

    #[cold]
    fn out_of_memory(&self, requested: u64) -> Error {
        let FreeBytes { free, total } = self.free_bytes();
        let result = self.hip.result_of(hipError_t::hipErrorOutOfMemory);
        Error::OutOfMemory { requested, free, total, device: self.label().clone(), result }
    }

    fn has_flag_memory(&self) -> bool {
        true
    }

    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Error> {
        let mut attributes = hipPointerAttribute_t::default();
        let query = self.hip.calls.pointer_get_attributes;
        // SAFETY: HIP looks the address up; the result is stored in a local.
        let code = unsafe { query(&raw mut attributes, address as *const c_void) };
        if matches!(code, hipError_t::hipErrorInvalidValue | hipError_t::hipErrorNotFound) {
            self.forget_error();
            return Ok(Pointee::Unknown);
        }
        self.check("hipPointerGetAttributes", code)?;
        let (types, kind) = (&self.hip.memory_types, attributes.type_);
        Ok(if kind == hipMemoryType(0) && self.hip.version >= UNREGISTERED_SINCE {
            Pointee::Unknown
        } else if attributes.isManaged != 0 || kind == types.managed {
            Pointee::Managed
        } else if kind == types.host {
            Pointee::Host
        } else if kind == types.device {
            Pointee::Device(Some(attributes.device))
        } else {
            Pointee::Other(kind.0.into())
        })
    }

    /// Returns whether HIP has an IPC handle for an allocation.
    ///
    /// HIP defines an attribute for this but does not implement it. The HSA runtime distinguishes mapped
    /// memory from other memory; without it, a handle is requested as a test.
    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Error> {
        if let Some(info) = self.pointer_info(base) {
            return Ok(info.type_ == hsa_amd_pointer_type_t::HSA_EXT_POINTER_TYPE_HSA);
        }
        match self.request_ipc_handle(base).0 {
            hipError_t::hipSuccess => Ok(true),
            code if Error::loses_device(code) => Err(self.call_failed("hipIpcGetMemHandle", code)),
            _ => {
                self.forget_error();
                Ok(false)
            }
        }
    }

    fn check_flags(&self, address: DevicePtr) -> Result<(), Error> {
        let coarse = PoolFlags::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED.0;
        match self.pointer_info(address) {
            Some(info) if info.global_flags & coarse != 0 => {
                Err(Error::Fault(Fault::Argument(format!(
                    "flags at {address:#x} are in coarse-grained memory, where a stream may not \
                     see the writes of a peer; use fine-grained memory (hipExtMallocWithFlags with \
                     hipDeviceMallocFinegrained), or memory that the fabric allocates"
                ))))
            }
            _ => Ok(()),
        }
    }

    fn enable_peer(&self, owner: &Self) -> Result<(), Error> {
        // SAFETY: both numbers are those of devices, and HIP checks them.
        let code = unsafe { (self.hip.calls.device_enable_peer_access)(owner.device(), 0) };
        match code {
            hipError_t::hipErrorPeerAccessAlreadyEnabled => Ok(()),
            code => self.check("hipDeviceEnablePeerAccess", code),
        }
    }

    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
        export_dma_buf(self, address, bytes)
    }

    fn nic_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Error> {
        nic_flush(context)
    }

    fn is_refusal(error: &Error) -> bool {
        error.is_one_of(&[hipError_t::hipErrorNotSupported])
    }
}

impl Context {
    fn pointer_info(&self, address: DevicePtr) -> Option<hsa_amd_pointer_info_t> {
        let hsa = Hsa::load().ok()?;
        let mut info = hsa_amd_pointer_info_t {
            size: size_of::<hsa_amd_pointer_info_t>() as u32,
            ..hsa_amd_pointer_info_t::default()
        };
        let (query, no_allocator) = (hsa.calls.amd_pointer_info, None);
        let (count, agents) = (std::ptr::null_mut(), std::ptr::null_mut());
        let address = address as *const c_void;
        // SAFETY: the runtime looks the address up; no list of agents is requested, and the result is
        // stored in a local whose size it holds.
        let status = unsafe { query(address, &raw mut info, no_allocator, count, agents) };
        let known = info.type_ != hsa_amd_pointer_type_t::HSA_EXT_POINTER_TYPE_UNKNOWN;
        (status == hsa_status_t::HSA_STATUS_SUCCESS && known).then_some(info)
    }
}

// SAFETY: `hipMalloc`, `hipExtMallocWithFlags` and `hipHostMalloc` return new memory of the requested length, which lives until
// it is freed; `hipHostGetDevicePointer`, `hipMemGetAddressRange` and `hipPointerGetAttribute` describe the memory at the
// address.
unsafe impl MemoryCalls for Context {
    fn is_out_of_memory(error: &Error) -> bool {
        matches!(error, Error::Driver { result, .. }
            if result.code == hipError_t::hipErrorOutOfMemory.0)
    }

    fn free_bytes(&self) -> FreeBytes {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the results are stored in locals, which stay 0 if the call fails.
        let _ = unsafe { (self.hip.calls.mem_get_info)(&raw mut free, &raw mut total) };
        FreeBytes { free: free as u64, total: total as u64 }
    }

    fn allocate(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { (self.hip.calls.malloc)(&raw mut address, bytes) };
        self.check("hipMalloc", code)?;
        Ok(address as DevicePtr)
    }

    fn allocate_flags(&self, bytes: usize) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        let (allocate, flags) =
            (self.hip.calls.ext_malloc_with_flags, hip::hipDeviceMallocFinegrained);
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { allocate(&raw mut address, bytes, flags) };
        self.check("hipExtMallocWithFlags", code)?;
        Ok(address as DevicePtr)
    }

    unsafe fn free(&self, address: DevicePtr) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.free)(address as *mut c_void) };
    }

    /// Returns true, because `hipFree` and `hipHostFree` wait for all streams of the device.
    fn frees_wait(&self) -> bool {
        true
    }

    fn allocation_number(&self, address: DevicePtr) -> Option<u64> {
        let mut number = 0_u64;
        let attribute = hipPointer_attribute::HIP_POINTER_ATTRIBUTE_BUFFER_ID;
        let (out, at) = ((&raw mut number).cast(), address as *mut c_void);
        // SAFETY: the attribute is a 64-bit number, stored in a local.
        let code = unsafe { (self.hip.calls.pointer_get_attribute)(out, attribute, at) };
        if code != hipError_t::hipSuccess {
            self.forget_error();
            return None;
        }
        Some(number)
    }

    fn extent(&self, address: DevicePtr) -> Result<Option<Extent>, Error> {
        let (mut base, mut bytes) = (std::ptr::null_mut(), 0);
        let (range, at) = (self.hip.calls.mem_get_address_range, address as *mut c_void);
        // SAFETY: HIP looks the address up; the results are stored in locals.
        let code = unsafe { range(&raw mut base, &raw mut bytes, at) };
        if matches!(code, hipError_t::hipErrorInvalidValue | hipError_t::hipErrorNotFound) {
            self.forget_error();
            return Ok(None);
        }
        self.check("hipMemGetAddressRange", code)?;
        Ok(Some(Extent { address: base as DevicePtr, bytes: bytes as u64 }))
    }

    fn allocate_host(&self, bytes: usize) -> Result<NonNull<c_void>, Error> {
        let mut host = std::ptr::null_mut();
        let flags = hip::hipHostMallocPortable;
        // SAFETY: the device is current; the result is stored in a local.
        let code = unsafe { (self.hip.calls.host_malloc)(&raw mut host, bytes, flags) };
        self.check("hipHostMalloc", code)?;
        NonNull::new(host).ok_or_else(|| {
            Error::unavailable(format!("hipHostMalloc on {} returned a null pointer", self.label()))
        })
    }

    unsafe fn free_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.host_free)(host.as_ptr()) };
    }

    unsafe fn register_host(&self, host: NonNull<c_void>, bytes: usize) -> Result<(), Error> {
        let flags = hip::hipHostRegisterPortable | hip::hipHostRegisterMapped;
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { (self.hip.calls.host_register)(host.as_ptr(), bytes, flags) };
        self.check("hipHostRegister", code)
    }

    unsafe fn unregister_host(&self, host: NonNull<c_void>) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.host_unregister)(host.as_ptr()) };
    }

    unsafe fn host_pointer(&self, host: NonNull<c_void>) -> Result<DevicePtr, Error> {
        let mut address = std::ptr::null_mut();
        let get = self.hip.calls.host_get_device_pointer;
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code = unsafe { get(&raw mut address, host.as_ptr(), 0) };
        self.check("hipHostGetDevicePointer", code)?;
        Ok(address as DevicePtr)
    }
}

// SAFETY: `hipIpcOpenMemHandle` maps the allocation whose handle `hipIpcGetMemHandle` returned, until `hipIpcCloseMemHandle`.
unsafe impl IpcCalls for Context {
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Error> {
        let (code, handle) = self.request_ipc_handle(base);
        match code {
            hipError_t::hipSuccess => Ok(handle),
            code => Err(self.ipc_failed("hipIpcGetMemHandle", code)),
        }
    }

    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Error> {
        let handle =
            hipIpcMemHandle_t { reserved: handle.0.map(|byte| c_char::from_ne_bytes([byte])) };
        let (mut address, flags) = (std::ptr::null_mut(), hip::hipIpcMemLazyEnablePeerAccess);
        let open = self.hip.calls.ipc_open_mem_handle;
        // SAFETY: HIP checks the handle; the result is stored in a local.
        let code = unsafe { open(&raw mut address, handle, flags) };
        match code {
            hipError_t::hipSuccess => Ok(address as DevicePtr),
            code => Err(self.ipc_failed("hipIpcOpenMemHandle", code)),
        }
    }

    unsafe fn close_ipc(&self, base: DevicePtr) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.ipc_close_mem_handle)(base as *mut c_void) };
    }
}

impl Context {
    fn request_ipc_handle(&self, base: DevicePtr) -> (hipError_t, IpcHandle) {
        let mut handle = hipIpcMemHandle_t::default();
        let make = self.hip.calls.ipc_get_mem_handle;
        // SAFETY: HIP looks the address up; the result is stored in a local.
        let code = unsafe { make(&raw mut handle, base as *mut c_void) };
        (code, IpcHandle(handle.reserved.map(|byte| byte.to_ne_bytes()[0])))
    }

    /// HIP reports only an invalid pointer where a container prevents IPC, so the error text names that likely cause.
    #[cold]
    fn ipc_failed(&self, call: &'static str, code: hipError_t) -> Error {
        // These two results have other causes than a container.
        let other = [hipError_t::hipErrorOutOfMemory, hipError_t::hipErrorPeerAccessUnsupported];
        if Error::loses_device(code) || other.contains(&code) {
            return self.call_failed(call, code);
        }
        self.forget_error();
        let result = self.hip.result_of(code);
        let text = format!(
            "{call} failed on {}: {result}; {} cannot share memory with other processes: start all \
             containers with common PID, IPC and network namespaces and the same /dev/kfd and \
             /dev/dri (docker: --pid=host --ipc=host --network=host)",
            self.label(),
            self.hip.label()
        );
        Error::Unavailable { text, result: Some(result) }
    }
}

// SAFETY: each handle is a reference that the runtime counts until `hipMemRelease`; `hipMemAddressReserve` reserves a new
// range, and `hipMemMap` maps the memory of the handle.
unsafe impl VirtualCalls for Context {
    /// Tests whether the device can export memory as a file descriptor.
    ///
    /// An attribute of the device is not enough: releases up to 5.7 rejected memory with an exportable
    /// handle. Once per device, the smallest piece is therefore allocated, exported and freed.
    fn has_virtual_memory(&self) -> bool {
        if !self.info.virtual_memory {
            return false;
        }
        let mut tests = EXPORT_TESTS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let number = self.device();
        if let Some((_, works)) = tests.iter().find(|(device, _)| *device == number) {
            return *works;
        }
        let works = self.test_export().is_ok();
        tests.push((number, works));
        works
    }

    fn granularity(&self) -> Result<u64, Error> {
        let query = self.hip.calls.mem_get_allocation_granularity;
        let properties = properties(self, DESCRIPTOR);
        let option = hipMemAllocationGranularity_flags::hipMemAllocationGranularityMinimum;
        let mut least = 0;
        // SAFETY: both point to locals; the properties are filled as the header requires.
        let code = unsafe { query(&raw mut least, &raw const properties, option) };
        self.check("hipMemGetAllocationGranularity", code)?;
        Ok(least as u64)
    }

    fn create_memory(&self, bytes: u64) -> Result<MemoryHandle, Error> {
        let properties = properties(self, DESCRIPTOR);
        let mut made = std::ptr::null_mut();
        let create = self.hip.calls.mem_create;
        // SAFETY: both point to locals; the properties are filled as the header requires.
        let code = unsafe { create(&raw mut made, bytes as usize, &raw const properties, 0) };
        self.check("hipMemCreate", code)?;
        Ok(handle(made))
    }

    fn retain_memory(&self, address: DevicePtr) -> Result<Option<MemoryHandle>, Error> {
        if self.hip.version < RETAINS_SINCE {
            return Ok(None);
        }
        let mut found = std::ptr::null_mut();
        let retain = self.hip.calls.mem_retain_allocation_handle;
        // SAFETY: HIP looks the address up and does not follow it.
        let code = unsafe { retain(&raw mut found, address as *mut c_void) };
        // Releases may use different codes for memory that has no handle.
        if code != hipError_t::hipSuccess && !Error::loses_device(code) {
            self.forget_error();
            return Ok(None);
        }
        self.check("hipMemRetainAllocationHandle", code)?;
        Ok(Some(handle(found)))
    }

    unsafe fn release_memory(&self, memory: MemoryHandle) {
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { (self.hip.calls.mem_release)(raw(memory)) };
    }

    unsafe fn is_exportable(&self, memory: MemoryHandle) -> Result<bool, Error> {
        let mut properties = hipMemAllocationProp::default();
        let query = self.hip.calls.mem_get_allocation_properties_from_handle;
        // SAFETY: the caller upholds the contract; the result is stored in a local.
        let code = unsafe { query(&raw mut properties, raw(memory)) };
        self.check("hipMemGetAllocationPropertiesFromHandle", code)?;
        // SAFETY: both fields of the union have the same type.
        let kinds = unsafe { properties.__bindgen_anon_1.requestedHandleTypes };
        Ok(kinds.0 & DESCRIPTOR.0 != 0)
    }

    unsafe fn export_memory(&self, memory: MemoryHandle) -> Result<OwnedFd, Error> {
        let mut fd: c_int = -1;
        let (out, export) = ((&raw mut fd).cast(), self.hip.calls.mem_export_to_shareable_handle);
        // SAFETY: the caller upholds the contract of this function; a descriptor, which is a `c_int`, is
        // stored in a local.
        let code = unsafe { export(out, raw(memory), DESCRIPTOR, 0) };
        self.check("hipMemExportToShareableHandle", code)?;
        // SAFETY: the call above opened the descriptor for this caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import_memory(&self, fd: BorrowedFd<'_>) -> Result<MemoryHandle, Error> {
        let import = self.hip.calls.mem_import_from_shareable_handle;
        let mut found = std::ptr::null_mut();
        let mut number: c_int = fd.as_raw_fd();
        let shared: *mut c_void = match self.hip.imports_by_pointer {
            true => (&raw mut number).cast(),
            false => number as usize as *mut c_void,
        };
        // SAFETY: the descriptor is open during the call, and is passed in the form that this release
        // expects; the result is stored in a local.
        let code = unsafe { import(&raw mut found, shared, DESCRIPTOR) };
        self.check("hipMemImportFromShareableHandle", code)?;
        Ok(handle(found))
    }

    fn reserve(&self, bytes: u64) -> Result<DevicePtr, Error> {
        let (mut address, anywhere) = (std::ptr::null_mut(), std::ptr::null_mut());
        let reserve = self.hip.calls.mem_address_reserve;
        // SAFETY: HIP chooses the range; the result is stored in a local.
        let code = unsafe { reserve(&raw mut address, bytes as usize, 0, anywhere, 0) };
        self.check("hipMemAddressReserve", code)?;
        Ok(address as DevicePtr)
    }

    unsafe fn unreserve(&self, address: DevicePtr, bytes: u64) {
        let free = self.hip.calls.mem_address_free;
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { free(address as *mut c_void, bytes as usize) };
    }

    unsafe fn map(
        &self,
        address: DevicePtr,
        bytes: u64,
        memory: MemoryHandle,
    ) -> Result<(), Error> {
        let (map, at) = (self.hip.calls.mem_map, address as *mut c_void);
        // SAFETY: the caller upholds the contract of this function.
        let code = unsafe { map(at, bytes as usize, 0, raw(memory), 0) };
        self.check("hipMemMap", code)
    }

    unsafe fn unmap(&self, address: DevicePtr, bytes: u64) {
        let unmap = self.hip.calls.mem_unmap;
        // SAFETY: the caller upholds the contract of this function.
        let _ = unsafe { unmap(address as *mut c_void, bytes as usize) };
    }

    unsafe fn allow(&self, address: DevicePtr, bytes: u64) -> Result<(), Error> {
        let flags = hipMemAccessFlags::hipMemAccessFlagsProtReadWrite;
        let access = hipMemAccessDesc { location: own_location(self), flags };
        let (set, at) = (self.hip.calls.mem_set_access, address as *mut c_void);
        // SAFETY: the caller upholds the contract of this function; the description is a local.
        let code = unsafe { set(at, bytes as usize, &raw const access, 1) };
        self.check("hipMemSetAccess", code)
    }
}

impl Context {
    fn test_export(&self) -> Result<(), Error> {
        let memory = self.create_memory(self.granularity()?.max(1))?;
        // SAFETY: the reference is held until the call below.
        let exported = unsafe { self.export_memory(memory) };
        // SAFETY: the reference was created above and is released once.
        unsafe { self.release_memory(memory) };
        exported.map(drop)
    }
}

fn handle(raw: hipMemGenericAllocationHandle_t) -> MemoryHandle {
    MemoryHandle(raw as u64)
}

fn raw(handle: MemoryHandle) -> hipMemGenericAllocationHandle_t {
    handle.0 as hipMemGenericAllocationHandle_t
}

fn own_location(context: &Context) -> hipMemLocation {
    hipMemLocation { type_: hipMemLocationType::hipMemLocationTypeDevice, id: context.device() }
}

fn properties(context: &Context, kind: hipMemAllocationHandleType) -> hipMemAllocationProp {
    let mut properties = hipMemAllocationProp {
        type_: hipMemAllocationType::hipMemAllocationTypePinned,
        location: own_location(context),
        ..hipMemAllocationProp::default()
    };
    properties.__bindgen_anon_1.requestedHandleTypes = kind;
    // Lets an RDMA fabric register the same buffer; releases that do not know the field ignore it.
    properties.allocFlags.gpuDirectRDMACapable = 1;
    properties
}

fn export_dma_buf(context: &Context, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
    match Hsa::load() {
        Ok(hsa) if hsa.calls.amd_portable_export_dmabuf.is_some() => {
            export_by_hsa(context, hsa, address, bytes)
        }
        _ => export_by_hip(context, address),
    }
}

fn export_by_hsa(
    context: &Context,
    hsa: &Hsa,
    address: DevicePtr,
    bytes: u64,
) -> Result<DmaBuf, Error> {
    let call = "hsa_amd_portable_export_dmabuf";
    let Some(export) = hsa.calls.amd_portable_export_dmabuf else {
        return Err(Error::load_failed(&hsa.calls.lacks(call)));
    };
    let (mut fd, mut offset): (c_int, u64) = (-1, 0);
    let (fd_out, offset_out) = (&raw mut fd, &raw mut offset);
    // SAFETY: the runtime looks the span up; the results are stored in locals.
    let status = unsafe { export(address as *const c_void, bytes as usize, fd_out, offset_out) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, call, Some(context.label()), status));
    }
    // SAFETY: the call above opened the descriptor for this caller. The runtime's own function to close
    // it does nothing but close the descriptor.
    Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset })
}

fn export_by_hip(context: &Context, address: DevicePtr) -> Result<DmaBuf, Error> {
    let call = "hipMemGetHandleForAddressRange";
    let Some(export) = context.hip.calls.mem_get_handle_for_address_range else {
        return Err(Error::load_failed(&context.hip.calls.lacks(call)));
    };
    let Some(extent) = context.extent(address)? else {
        let text = format!(
            "{} has no allocation at {address:#x}; check that the memory was not freed",
            context.label()
        );
        return Err(Fault::Argument(text).into());
    };
    let mut fd: c_int = -1;
    let (out, kind) = ((&raw mut fd).cast(), hipMemRangeHandleType::hipMemRangeHandleTypeDmaBufFd);
    let (base, bytes) = (extent.address as *mut c_void, extent.bytes as usize);
    // SAFETY: HIP looks the span up and stores a descriptor, which is a `c_int`.
    let code = unsafe { export(out, base, bytes, kind, 0) };
    context.check(call, code)?;
    // SAFETY: the call above opened the descriptor for this caller.
    Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset: address - extent.address })
}

/// Returns `None` if the device sees the writes of a NIC without a flush.
fn nic_flush(context: &Context) -> Result<Option<Arc<dyn Flush>>, Error> {
    let hsa = Hsa::load()?;
    let agent = agent(&context.info)?;
    let mut registers = hsa_amd_hdp_flush_s::default();
    let attribute = hsa_agent_info_t(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_HDP_FLUSH.0);
    let get_info = hsa.calls.agent_get_info;
    // SAFETY: the agent is of this runtime; the local has the type of the attribute.
    let status = unsafe { get_info(agent.handle, attribute, (&raw mut registers).cast()) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(
            hsa,
            "hsa_agent_get_info (HDP registers)",
            Some(context.label()),
            status,
        ));
    }
    let register = NonNull::new(registers.HDP_MEM_FLUSH_CNTL);
    Ok(register.map(|register| Arc::new(HdpFlush(register)) as Arc<dyn Flush>))
}

/// Flushes NIC writes to a device by a register of its host data path (HDP).
#[derive(Debug)]
struct HdpFlush(NonNull<u32>);

// SAFETY: a store to the register has the same effect from every thread.
unsafe impl Send for HdpFlush {}
// SAFETY: as above.
unsafe impl Sync for HdpFlush {}

impl Flush for HdpFlush {
    fn flush(&self) -> Result<(), String> {
        // SAFETY: the runtime has mapped the register for such stores.
        unsafe { self.0.write_volatile(1) };
        Ok(())
    }
}
