//! Plain allocations shared between processes, by a handle of 64 bytes that also holds how far
//! behind the base the address was.

use std::ffi::c_uint;

use super::Hip;
use super::call::enter;
use super::types::{hipDeviceptr_t, hipError_t, hipIpcMemHandle_t};
use crate::device::machine::memory;
use crate::device::memory::share::{name, offset, with_offset};
use crate::runtime::out::{Out, store};
use crate::runtime::share;

#[unsafe(no_mangle)]
extern "C" fn hipIpcGetMemHandle(
    out: Out<'_, hipIpcMemHandle_t>,
    address: hipDeviceptr_t,
) -> hipError_t {
    enter("hipIpcGetMemHandle", || {
        let range = share::shared::<Hip>(address)?;
        store(out, share::Handle(with_offset(name(&range.backing), address - range.base)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn hipIpcOpenMemHandle(
    address: Out<'_, hipDeviceptr_t>,
    handle: hipIpcMemHandle_t,
    flags: c_uint,
) -> hipError_t {
    enter("hipIpcOpenMemHandle", || share::open::<Hip>(address, &handle, flags, offset(&handle.0)))
}

#[unsafe(no_mangle)]
extern "C" fn hipIpcCloseMemHandle(address: hipDeviceptr_t) -> hipError_t {
    enter("hipIpcCloseMemHandle", || {
        let base = memory().find(address).map(|range| range.base);
        share::close::<Hip>(|opened| Some(opened) == base)
    })
}
