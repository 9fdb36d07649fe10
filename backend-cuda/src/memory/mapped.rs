//! A range of addresses with physical memory behind it.

use std::sync::{Arc, Mutex, PoisonError};

use super::handle::{Handle, on_device};
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr, CUmemAccessDesc};

/// Segments, mapped one behind the other; unmapped when dropped.
#[derive(Debug)]
pub(crate) struct Mapped {
    context: Arc<Context>,
    address: CUdeviceptr,
    reserved_bytes: u64,
    /// The lengths of what is mapped.
    segments: Vec<u64>,
}

impl Mapped {
    /// Maps the segments in order, for the context's device to read and write. The mapping holds
    /// the memory; the handles may go.
    pub(super) fn map(context: &Arc<Context>, handles: &[Handle]) -> Result<Self, Error> {
        let driver = context.driver;
        let reserve = context.need("cuMemAddressReserve", driver.mem_address_reserve)?;
        let map = context.need("cuMemMap", driver.mem_map)?;
        let reserved_bytes = handles.iter().map(Handle::bytes).sum();
        let mut address = 0;
        // SAFETY: the driver chooses the range; the result is stored in a local.
        let code = unsafe { reserve(&raw mut address, reserved_bytes as usize, 0, 0, 0) };
        context.check("cuMemAddressReserve", code)?;
        let segments = Vec::with_capacity(handles.len());
        // From here on, dropping it undoes what is done.
        let mut mapped = Self { context: Arc::clone(context), address, reserved_bytes, segments };
        let mut at = address;
        for handle in handles {
            // SAFETY: the sum of all lengths was reserved, and nothing is mapped at `at` yet.
            let code = unsafe { map(at, handle.bytes() as usize, 0, handle.raw(), 0) };
            context.check("cuMemMap", code)?;
            mapped.segments.push(handle.bytes());
            at += handle.bytes();
        }
        allow(context, context, address, reserved_bytes)?;
        Ok(mapped)
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub(super) fn bytes(&self) -> u64 {
        self.reserved_bytes
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        let driver = self.context.driver;
        let mut at = self.address;
        for bytes in &self.segments {
            if let Some(unmap) = driver.mem_unmap {
                // SAFETY: exactly one mapping of `map`, which nobody uses any more: the region is
                // dropped, and the contract of `submit` keeps it until its tickets are complete.
                let _ = unsafe { unmap(at, *bytes as usize) };
            }
            at += bytes;
        }
        if let Some(free) = driver.mem_address_free {
            // SAFETY: the range of `map`, in which nothing is mapped now.
            let _ = unsafe { free(self.address, self.reserved_bytes as usize) };
        }
    }
}

/// One change of access at a time: two threads that let one device reach the same mapping at once are
/// told CUDA_ERROR_ALREADY_MAPPED (seen with driver 580).
static CHANGING: Mutex<()> = Mutex::new(());

/// Lets the device of `reader` read and write whole mappings that belong to a range of `owner`.
pub(super) fn allow(
    owner: &Context,
    reader: &Context,
    address: CUdeviceptr,
    bytes: u64,
) -> Result<(), Error> {
    let set_access = owner.need("cuMemSetAccess", owner.driver.mem_set_access)?;
    let flags = sys::MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = CUmemAccessDesc { location: on_device(reader.device), flags };
    let _alone = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the range holds whole mappings; the description is a local.
    let code = unsafe { set_access(address, bytes as usize, &raw const access, 1) };
    reader.check("cuMemSetAccess", code)
}
