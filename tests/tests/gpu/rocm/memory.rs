//! Allocates memory as a caller does: on a device, and on the host where streams can access it.

use std::ffi::c_void;
use std::ptr::NonNull;

use hip_sys::Library;
use peerlane_tests::Outcome;

use super::gpu::{Gpu, granted};
use crate::support::data::POISON;

/// Memory of `hipMalloc`; poisoned at first.
pub(crate) struct DeviceMemory {
    hip: &'static Library,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl DeviceMemory {
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Outcome<Self> {
        let (size, mut address) = (bytes.max(1), std::ptr::null_mut());
        // SAFETY: the result is stored in a local.
        granted("hipMalloc", unsafe { (gpu.hip.malloc)(&raw mut address, size) })?;
        let memory = Self { hip: gpu.hip, address: address as u64, bytes };
        let stream = gpu.stream()?;
        stream.fill(memory.address, POISON, size)?;
        stream.finish()?;
        Ok(memory)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the tests finish their streams before. What cannot be freed is
        // the driver's.
        let _ = unsafe { (self.hip.free)(self.address as *mut c_void) };
    }
}

/// Host memory that copies of streams read and write on their own.
pub(crate) struct Pinned {
    hip: &'static Library,
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: usize,
}

impl Pinned {
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Outcome<Self> {
        let mut base = std::ptr::null_mut();
        // SAFETY: the result is stored in a local.
        let code = unsafe { (gpu.hip.host_malloc)(&raw mut base, bytes.max(1), 0) };
        granted("hipHostMalloc", code)?;
        let base = NonNull::new(base.cast()).expect("the driver allocates nothing at 0");
        let pinned = Self { hip: gpu.hip, base, bytes };
        // SAFETY: so many bytes were allocated, and nobody else knows them.
        unsafe { base.write_bytes(POISON, bytes) };
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by `new`; the tests finish their streams before.
        let _ = unsafe { (self.hip.host_free)(self.base.as_ptr().cast()) };
    }
}
