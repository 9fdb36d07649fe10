//! What CUDA says of an address, and of its refusals.

use std::ffi::c_int;
use std::sync::Arc;

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::device::{DevicePtr, FreeBytes, MemoryCalls as _};
use peerlane_toolkit::regions::{Pointee, RegionDevice};

use super::cards;
use crate::device::Context;
use crate::error::Error;
use crate::key::Cuda;
use crate::sys;

impl RegionDevice for Context {
    type Vendor = Cuda;

    fn uuid(&self) -> [u8; 16] {
        self.found.uuid
    }

    #[cold]
    fn out_of_memory(&self, wanted: u64) -> Error {
        let FreeBytes { free, total } = self.free_bytes();
        Error::out_of_memory(self.driver, self.label(), wanted, free, total)
    }

    fn pointee(&self, address: DevicePtr) -> Result<Pointee, Error> {
        let ask = |number| attribute(self, number, address);
        let kind = ask(sys::POINTER_ATTRIBUTE_MEMORY_TYPE)?.map(|kind| kind as u32);
        let device = match kind {
            None => return Ok(Pointee::Unknown),
            Some(sys::MEMORYTYPE_HOST) => return Ok(Pointee::Host),
            Some(sys::MEMORYTYPE_DEVICE) => ask(sys::POINTER_ATTRIBUTE_DEVICE_ORDINAL)?,
            Some(other) => return Ok(Pointee::Other(other.into())),
        };
        if ask(sys::POINTER_ATTRIBUTE_IS_MANAGED)?.is_some_and(|managed| managed != 0) {
            return Ok(Pointee::Managed);
        }
        Ok(Pointee::Device(device.map(|ordinal| ordinal as u32 as c_int)))
    }

    fn has_ipc_handle(&self, base: DevicePtr) -> Result<bool, Error> {
        let legacy = sys::POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE;
        Ok(attribute(self, legacy, base)?.is_some_and(|capable| capable != 0))
    }

    fn enable_peer(&self, owner: &Self) -> Result<(), Error> {
        // SAFETY: both contexts are retained by who holds them.
        let code = unsafe { (self.driver.ctx_enable_peer_access)(owner.raw(), 0) };
        match code {
            sys::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check("cuCtxEnablePeerAccess", code),
        }
    }

    fn dma_buf(&self, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
        cards::dma_buf(self, address, bytes)
    }

    fn card_flush(context: &Arc<Self>) -> Result<Option<Arc<dyn Flush>>, Error> {
        cards::flush(context)
    }

    fn is_refusal(error: &Error) -> bool {
        error.is_one_of(&[sys::CUDA_ERROR_NOT_PERMITTED, sys::CUDA_ERROR_NOT_SUPPORTED])
    }
}

/// An attribute of a pointer; `None` where the driver does not know the pointer, or the attribute.
fn attribute(context: &Context, number: c_int, address: DevicePtr) -> Result<Option<u64>, Error> {
    // The attributes have between 1 and 8 bytes; the rest stays zero.
    let mut value = 0_u64;
    // SAFETY: no attribute that is asked for here is larger than the local.
    let code =
        unsafe { (context.driver.pointer_get_attribute)((&raw mut value).cast(), number, address) };
    if matches!(code, sys::CUDA_ERROR_INVALID_VALUE | sys::CUDA_ERROR_NOT_SUPPORTED) {
        return Ok(None);
    }
    context.check("cuPointerGetAttribute", code)?;
    Ok(Some(value))
}
