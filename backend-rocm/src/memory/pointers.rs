//! What HIP says of an address, and of its refusals.

use std::ffi::c_void;
use std::sync::Arc;

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::device::{DeviceContext as _, DevicePtr, Fault, FreeBytes, MemoryCalls as _};
use peerlane_toolkit::regions::{Pointee, RegionDevice};

use super::cards;
use crate::device::{Context, Version};
use crate::error::Error;
use crate::key::Rocm;
use crate::sys::Hsa;
use crate::sys::hip::{hipError_t, hipMemoryType, hipPointerAttribute_t};
use crate::sys::hsa::{
    hsa_amd_memory_pool_global_flag_s as Grain, hsa_amd_pointer_info_t, hsa_amd_pointer_type_t,
    hsa_status_t,
};

/// Before, `hipMemoryTypeHost` was 0; since then 0 is memory that HIP does not know.
const UNREGISTERED_SINCE: Version = Version { major: 6, minor: 0, patch: 0 };

impl RegionDevice for Context {
    type Vendor = Rocm;

    fn uuid(&self) -> [u8; 16] {
        self.found.identity()
    }

    #[cold]
    fn out_of_memory(&self, wanted: u64) -> Error {
        let FreeBytes { free, total } = self.free_bytes();
        let result = self.hip.result_of(hipError_t::hipErrorOutOfMemory);
        Error::OutOfMemory { wanted, free, total, device: self.label().clone(), result }
    }

    fn has_flag_memory(&self) -> bool {
        true
    }

    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Error> {
        let mut found = hipPointerAttribute_t::default();
        let ask = self.hip.calls.pointer_get_attributes;
        // SAFETY: HIP looks the address up; the result is stored in a local.
        let code = unsafe { ask(&raw mut found, address as *const c_void) };
        if matches!(code, hipError_t::hipErrorInvalidValue | hipError_t::hipErrorNotFound) {
            self.forget_error();
            return Ok(Pointee::Unknown);
        }
        self.check("hipPointerGetAttributes", code)?;
        let (types, kind) = (&self.hip.memory_types, found.type_);
        Ok(if kind == hipMemoryType(0) && self.hip.version >= UNREGISTERED_SINCE {
            Pointee::Unknown
        } else if found.isManaged != 0 || kind == types.managed {
            Pointee::Managed
        } else if kind == types.host {
            Pointee::Host
        } else if kind == types.device {
            Pointee::Device(Some(found.device))
        } else {
            Pointee::Other(kind.0.into())
        })
    }

    /// HIP has an attribute for it that it does not answer. The HSA runtime tells mapped memory from
    /// other; without it, a handle is made for trial.
    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Error> {
        if let Some(info) = self.pointer_info(base) {
            return Ok(info.type_ == hsa_amd_pointer_type_t::HSA_EXT_POINTER_TYPE_HSA);
        }
        match self.make_handle(base).0 {
            hipError_t::hipSuccess => Ok(true),
            code if Error::loses_device(code) => Err(self.refused("hipIpcGetMemHandle", code)),
            _ => {
                self.forget_error();
                Ok(false)
            }
        }
    }

    fn check_flags(&self, address: DevicePtr) -> Result<(), Error> {
        let coarse = Grain::HSA_AMD_MEMORY_POOL_GLOBAL_FLAG_COARSE_GRAINED.0;
        match self.pointer_info(address) {
            Some(info) if info.global_flags & coarse != 0 => {
                Err(Error::Fault(Fault::Argument(format!(
                    "flags at {address:#x} lie in coarse-grained memory, where a stream that polls need \
                     not see what a peer writes; wanted fine-grained memory, of hipExtMallocWithFlags with \
                     hipDeviceMallocFinegrained, or memory that the fabric allocates"
                ))))
            }
            _ => Ok(()),
        }
    }

    fn enable_peer(&self, owner: &Self) -> Result<(), Error> {
        // SAFETY: both numbers are of devices; HIP checks them.
        let code = unsafe { (self.hip.calls.device_enable_peer_access)(owner.device(), 0) };
        match code {
            hipError_t::hipErrorPeerAccessAlreadyEnabled => Ok(()),
            code => self.check("hipDeviceEnablePeerAccess", code),
        }
    }

    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
        cards::dma_buf(self, address, bytes)
    }

    fn nic_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Error> {
        cards::flush(context)
    }

    fn is_refusal(error: &Error) -> bool {
        error.is_one_of(&[hipError_t::hipErrorNotSupported])
    }
}

impl Context {
    /// What the HSA runtime knows of an address; `None` without that runtime, or where it knows nothing.
    fn pointer_info(&self, address: DevicePtr) -> Option<hsa_amd_pointer_info_t> {
        let hsa = Hsa::load().ok()?;
        let mut info = hsa_amd_pointer_info_t {
            size: size_of::<hsa_amd_pointer_info_t>() as u32,
            ..hsa_amd_pointer_info_t::default()
        };
        let (ask, null) = (hsa.calls.amd_pointer_info, std::ptr::null_mut());
        let (at, agents) = (address as *const c_void, std::ptr::null_mut());
        // SAFETY: the runtime looks the address up; no list of agents is asked for, and the result is
        // stored in a local whose length it is told.
        let status = unsafe { ask(at, &raw mut info, None, null, agents) };
        let known = info.type_ != hsa_amd_pointer_type_t::HSA_EXT_POINTER_TYPE_UNKNOWN;
        (status == hsa_status_t::HSA_STATUS_SUCCESS && known).then_some(info)
    }
}
