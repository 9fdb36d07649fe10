//! IPC handles of HIP.
//!
//! A handle is asked for the base of an allocation only, and the offset travels in the key, so that all
//! regions of one allocation have one handle, which is opened once. Before an importer opens it, it has
//! asked the owner whether the memory lives: to attach freed memory may block for ever
//! (ROCm/rocm-systems#9827).
//!
//! Left out: handles of the HSA runtime (`hsa_amd_ipc_memory_create`). Memory that is attached by them is
//! none that HIP knows, and a stream would take it for pageable memory of the host.

use std::ffi::{c_char, c_void};

use peerlane_toolkit::device::{DeviceContext as _, DevicePtr, IpcCalls, IpcHandle};

use crate::device::Context;
use crate::error::Error;
use crate::sys::hip::{self, hipError_t, hipIpcMemHandle_t};

impl IpcCalls for Context {
    fn ipc_handle(&self, base: DevicePtr) -> Result<IpcHandle, Error> {
        let (code, handle) = self.make_handle(base);
        match code {
            hipError_t::hipSuccess => Ok(handle),
            code => Err(self.ipc_refused("hipIpcGetMemHandle", code)),
        }
    }

    fn open_ipc(&self, handle: &IpcHandle) -> Result<DevicePtr, Error> {
        let handle = hipIpcMemHandle_t { reserved: handle.0.map(u8::cast_signed) };
        let (mut address, flags) = (std::ptr::null_mut(), hip::hipIpcMemLazyEnablePeerAccess);
        let open = self.hip.calls.ipc_open_mem_handle;
        // SAFETY: HIP checks the handle; the result is stored in a local.
        let code = unsafe { open(&raw mut address, handle, flags) };
        match code {
            hipError_t::hipSuccess => Ok(address as DevicePtr),
            code => Err(self.ipc_refused("hipIpcOpenMemHandle", code)),
        }
    }

    unsafe fn close_ipc(&self, base: DevicePtr) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.ipc_close_mem_handle)(base as *mut c_void) };
    }
}

impl Context {
    pub(super) fn make_handle(&self, base: DevicePtr) -> (hipError_t, IpcHandle) {
        let mut handle = hipIpcMemHandle_t::default();
        let make = self.hip.calls.ipc_get_mem_handle;
        // SAFETY: HIP looks the address up; the result is stored in a local.
        let code = unsafe { make(&raw mut handle, base as *mut c_void) };
        (code, IpcHandle(handle.reserved.map(c_char::cast_unsigned)))
    }

    /// A refusal of IPC is most often the container's, and HIP says no more than that a pointer is
    /// invalid.
    #[cold]
    fn ipc_refused(&self, call: &'static str, code: hipError_t) -> Error {
        // That a device reaches another's memory not at all is no container's doing.
        let plain = [hipError_t::hipErrorOutOfMemory, hipError_t::hipErrorPeerAccessUnsupported];
        if Error::loses_device(code) || plain.contains(&code) {
            return self.refused(call, code);
        }
        self.forget_error();
        let result = self.hip.result_of(code);
        let text = format!(
            "{call} on {}: {result}; {} shares no memory with other processes here: ranks in \
             several containers need the PID, IPC and network namespaces of one, and the same /dev/kfd \
             and /dev/dri (docker: --pid=host --ipc=host --network=host)",
            self.label(),
            self.hip.named()
        );
        Error::Unavailable { text, result: Some(result) }
    }
}
