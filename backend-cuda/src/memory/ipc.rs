//! Legacy IPC handles of CUDA.

use peerlane_toolkit::device::{DevicePtr, IpcCalls, IpcHandle};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUipcMemHandle};

impl IpcCalls for Context {
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
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.ipc_close_mem_handle)(base) };
    }
}
