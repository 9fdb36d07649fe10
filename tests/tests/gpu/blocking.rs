//! Copies synchronously, on the current device.

use std::ffi::c_void;

use hip_sys::{Library, hipError_t, hipMemcpyKind};
use peerlane_collectives::group::MemoryRange;

/// Makes a device current on this thread; the backend sets its own at each of its calls.
pub(crate) fn make_current(device: u32) {
    let library = Library::load().expect("the backend has loaded it");
    let device = i32::try_from(device).expect("a small number");
    // SAFETY: changes what this thread has current.
    let current = unsafe { (library.set_device)(device) };
    assert_eq!(current, hipError_t::hipSuccess);
}

fn copy(to: *mut c_void, from: *const c_void, bytes: usize) {
    let library = Library::load().expect("the backend has loaded it");
    let kind = hipMemcpyKind::hipMemcpyDefault;
    // SAFETY: both spans are so long, and nobody else uses them now.
    let code = unsafe { (library.memcpy)(to, from, bytes, kind) };
    assert_eq!(code, hipError_t::hipSuccess);
}

/// Before a start, or after it.
pub(crate) fn write(place: MemoryRange, bytes: &[u8]) {
    assert_eq!(place.bytes, bytes.len() as u64);
    copy(place.base.as_ptr().cast(), bytes.as_ptr().cast(), bytes.len());
}

/// After a start.
pub(crate) fn read(place: MemoryRange) -> Vec<u8> {
    let mut bytes = vec![0; place.bytes as usize];
    copy(bytes.as_mut_ptr().cast(), place.base.as_ptr().cast_const().cast(), bytes.len());
    bytes
}
