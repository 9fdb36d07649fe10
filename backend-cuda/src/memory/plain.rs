//! Memory of `cuMemAlloc`: where a device has no virtual memory management.

use std::sync::Arc;

use super::out_of_memory;
use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr, CUipcMemHandle};

/// An allocation; freed when dropped.
#[derive(Debug)]
pub(crate) struct Plain {
    context: Arc<Context>,
    address: CUdeviceptr,
}

impl Plain {
    pub(crate) fn allocate(context: &Arc<Context>, bytes: u64) -> Result<Self, Error> {
        let mut address = 0;
        if i64::try_from(bytes).is_err() {
            return Err(out_of_memory(context, bytes));
        }
        // SAFETY: the context is current, as its callers see to; the result is stored in a local.
        let code = unsafe { (context.driver.mem_alloc)(&raw mut address, bytes.max(1) as usize) };
        if code == sys::CUDA_ERROR_OUT_OF_MEMORY {
            return Err(out_of_memory(context, bytes));
        }
        context.check("cuMemAlloc_v2", code)?;
        Ok(Self { context: Arc::clone(context), address })
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }

    pub(crate) fn ipc_handle(&self) -> Result<CUipcMemHandle, Error> {
        ipc_handle(&self.context, self.address)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // Failures mean that the device is gone, and its memory with it.
        let Ok(_current) = self.context.enter_relaxed() else { return };
        // SAFETY: allocated by `allocate` and freed once; nobody uses it any more, as for a mapping.
        let _ = unsafe { (self.context.driver.mem_free)(self.address) };
    }
}

/// The handle with which another process opens the allocation that begins at `base`.
pub(super) fn ipc_handle(context: &Context, base: CUdeviceptr) -> Result<CUipcMemHandle, Error> {
    let mut handle = CUipcMemHandle { reserved: [0; 64] };
    // SAFETY: the driver looks the address up; the result is stored in a local.
    let code = unsafe { (context.driver.ipc_get_mem_handle)(&raw mut handle, base) };
    context.check("cuIpcGetMemHandle", code)?;
    Ok(handle)
}
