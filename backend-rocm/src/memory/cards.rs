//! ROCm's memory for network cards: dma-bufs, and the flush of what cards have written.
//!
//! The HSA runtime makes a dma-buf of an allocation since 6.1 and says where the span begins in it. HIP does
//! since 7.2, for spans that begin where their allocation does.
//!
//! What comes over PCI Express may wait in the host data path (HDP) of the device, which a store to one of
//! its registers flushes. A device that is joined to the processors by XGMI has no such register.

use std::ffi::{c_int, c_void};
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::device::{DeviceContext as _, DevicePtr, Fault, MemoryCalls as _};

use crate::device::{Context, agent};
use crate::error::Error;
use crate::sys::Hsa;
use crate::sys::hip::hipMemRangeHandleType;
use crate::sys::hsa::{hsa_agent_info_t, hsa_amd_agent_info_s, hsa_amd_hdp_flush_s, hsa_status_t};

/// The dma-buf of the allocation that holds the span.
pub(super) fn dma_buf(context: &Context, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
    match Hsa::load() {
        Ok(hsa) if hsa.calls.amd_portable_export_dmabuf.is_some() => {
            of_hsa(context, hsa, address, bytes)
        }
        _ => of_hip(context, address),
    }
}

fn of_hsa(context: &Context, hsa: &Hsa, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
    let call = "hsa_amd_portable_export_dmabuf";
    let Some(export) = hsa.calls.amd_portable_export_dmabuf else {
        return Err(Error::no_library(&hsa.calls.lacks(call)));
    };
    let (mut fd, mut offset): (c_int, u64) = (-1, 0);
    let (out, place) = (&raw mut fd, &raw mut offset);
    // SAFETY: the runtime looks the span up; the results are stored in locals.
    let status = unsafe { export(address as *const c_void, bytes as usize, out, place) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, call, Some(context.label()), status));
    }
    // SAFETY: the runtime has just opened it for this call; its own call to close it closes a
    // descriptor and no more.
    Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset })
}

fn of_hip(context: &Context, address: DevicePtr) -> Result<DmaBuf, Error> {
    let call = "hipMemGetHandleForAddressRange";
    let Some(export) = context.hip.calls.mem_get_handle_for_address_range else {
        return Err(Error::no_library(&context.hip.calls.lacks(call)));
    };
    let Some(extent) = context.extent(address)? else {
        let text = format!("there is no allocation of {} at {address:#x}", context.label());
        return Err(Fault::Argument(text).into());
    };
    let mut fd: c_int = -1;
    let (out, kind) = ((&raw mut fd).cast(), hipMemRangeHandleType::hipMemRangeHandleTypeDmaBufFd);
    let (base, bytes) = (extent.address as *mut c_void, extent.bytes as usize);
    // SAFETY: HIP looks the span up; a descriptor is the number that is stored.
    let code = unsafe { export(out, base, bytes, kind, 0) };
    context.check(call, code)?;
    // SAFETY: HIP has just opened it for this call.
    Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset: address - extent.address })
}

/// What a device needs before it sees what cards have written.
pub(super) fn flush(context: &Context) -> Result<Option<Arc<dyn Flush>>, Error> {
    let hsa = Hsa::load()?;
    let agent = agent(&context.found)?;
    let mut registers = hsa_amd_hdp_flush_s::default();
    let attribute = hsa_agent_info_t(hsa_amd_agent_info_s::HSA_AMD_AGENT_INFO_HDP_FLUSH.0);
    let get_info = hsa.calls.agent_get_info;
    // SAFETY: the agent is of this runtime; the attribute is what the local is.
    let status = unsafe { get_info(agent.handle, attribute, (&raw mut registers).cast()) };
    if status != hsa_status_t::HSA_STATUS_SUCCESS {
        return Err(Error::hsa(hsa, "hsa_agent_get_info of HDP", Some(context.label()), status));
    }
    let register = NonNull::new(registers.HDP_MEM_FLUSH_CNTL);
    Ok(register.map(|register| Arc::new(HostDataPath(register)) as Arc<dyn Flush>))
}

/// The register that flushes the host data path; mapped as long as the process.
#[derive(Debug)]
struct HostDataPath(NonNull<u32>);

// SAFETY: a store to the register does the same from any thread.
unsafe impl Send for HostDataPath {}
// SAFETY: as above.
unsafe impl Sync for HostDataPath {}

impl Flush for HostDataPath {
    fn flush(&self) -> Result<(), String> {
        // SAFETY: the runtime has mapped the register for stores like this one.
        unsafe { self.0.write_volatile(1) };
        Ok(())
    }
}
