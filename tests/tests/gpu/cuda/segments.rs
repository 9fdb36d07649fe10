//! Maps memory in consecutive segments, as the expandable segments of an allocator do.

use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use peerlane_tests::{Failure, Outcome};

use super::gpu::Gpu;

/// Segments that lie one behind the other in the address space.
pub(crate) struct Segments {
    context: Arc<CudaContext>,
    pub(crate) address: u64,
    pub(crate) segment_bytes: usize,
    whole: usize,
    handles: Vec<u64>,
}

impl Segments {
    pub(crate) fn new(gpu: &Gpu, count: usize) -> Outcome<Self> {
        let location = sys::CUmemLocation {
            type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: gpu.context.cu_device(),
        };
        let handle_types = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        let properties = sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: handle_types,
            location,
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        };
        let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut unit = 0;
        // SAFETY: the result is stored in a local.
        let code = unsafe {
            sys::cuMemGetAllocationGranularity(&raw mut unit, &raw const properties, least)
        };
        granted("cuMemGetAllocationGranularity", code)?;
        let mut address = 0;
        // SAFETY: the result is stored in a local.
        let code = unsafe { sys::cuMemAddressReserve(&raw mut address, count * unit, 0, 0, 0) };
        granted("cuMemAddressReserve", code)?;
        let context = Arc::clone(&gpu.context);
        // From here on, dropping it undoes what is done.
        let mut segments = Self {
            context,
            address,
            segment_bytes: unit,
            whole: count * unit,
            handles: Vec::new(),
        };
        for index in 0..count {
            let mut handle = 0;
            // SAFETY: both are locals.
            let code = unsafe { sys::cuMemCreate(&raw mut handle, unit, &raw const properties, 0) };
            granted("cuMemCreate", code)?;
            // SAFETY: inside what was reserved, and free.
            let code =
                unsafe { sys::cuMemMap(address + (index * unit) as u64, unit, 0, handle, 0) };
            granted("cuMemMap", code)?;
            segments.handles.push(handle);
        }
        let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = sys::CUmemAccessDesc { location, flags };
        // SAFETY: all of it is mapped.
        let code = unsafe { sys::cuMemSetAccess(address, count * unit, &raw const access, 1) };
        granted("cuMemSetAccess", code)?;
        Ok(segments)
    }
}

impl Drop for Segments {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_err() {
            return;
        }
        for (index, handle) in self.handles.iter().enumerate() {
            let at = self.address + (index * self.segment_bytes) as u64;
            // SAFETY: one of the mappings above; the tests finish their streams before.
            unsafe { sys::cuMemUnmap(at, self.segment_bytes) };
            // SAFETY: created above.
            unsafe { sys::cuMemRelease(*handle) };
        }
        // SAFETY: reserved above, and nothing is mapped there now.
        unsafe { sys::cuMemAddressFree(self.address, self.whole) };
    }
}

fn granted(call: &str, code: sys::CUresult) -> Outcome {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Failure::new(format!("{call}: {code:?}"))),
    }
}
