//! Plain allocations shared between processes, by a handle of 64 bytes.

use std::ffi::c_uint;

use super::Cuda;
use super::types::{CUdeviceptr, CUipcMemHandle, CUresult};
use crate::device::memory::share::name;
use crate::runtime::call::enter;
use crate::runtime::out::{Out, store};
use crate::runtime::share;

/// It names the whole allocation, wherever in it the address is.
#[unsafe(no_mangle)]
extern "C" fn cuIpcGetMemHandle(out: Out<'_, CUipcMemHandle>, address: CUdeviceptr) -> CUresult {
    enter("cuIpcGetMemHandle", || {
        let range = share::shared::<Cuda>(address)?;
        store(out, share::Handle(name(&range.backing)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcOpenMemHandle_v2(
    address: Out<'_, CUdeviceptr>,
    handle: CUipcMemHandle,
    flags: c_uint,
) -> CUresult {
    enter("cuIpcOpenMemHandle_v2", || share::open::<Cuda>(address, &handle, flags, 0))
}

#[unsafe(no_mangle)]
extern "C" fn cuIpcCloseMemHandle(address: CUdeviceptr) -> CUresult {
    enter("cuIpcCloseMemHandle", || share::close::<Cuda>(|base| base == address))
}
