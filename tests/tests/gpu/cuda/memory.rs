//! Allocates memory as a caller does: on a device, and on the host where streams can access it.

use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::{CudaContext, result};
use peerlane_tests::Outcome;

use super::gpu::{Gpu, refused};
use crate::support::data::POISON;

/// Memory of `cuMemAlloc`, the same as that of `cudaMalloc`; poisoned at first.
pub(crate) struct DeviceMemory {
    context: Arc<CudaContext>,
    pub(crate) address: u64,
    pub(crate) bytes: usize,
}

impl DeviceMemory {
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Outcome<Self> {
        let context = Arc::clone(&gpu.context);
        let size = bytes.max(1);
        // SAFETY: the context is current on this thread.
        let address = unsafe { result::malloc_sync(size) }.map_err(refused("allocate"))?;
        let memory = Self { context, address, bytes };
        let stream = gpu.stream()?;
        stream.fill(address, POISON, size)?;
        stream.finish()?;
        Ok(memory)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`; the tests finish their streams before. What cannot be
            // freed is the driver's.
            let _ = unsafe { result::free_sync(self.address) };
        }
    }
}

/// Host memory that copies of streams read and write on their own.
pub(crate) struct Pinned {
    context: Arc<CudaContext>,
    pub(crate) base: NonNull<u8>,
    pub(crate) bytes: usize,
}

impl Pinned {
    pub(super) fn new(gpu: &Gpu, bytes: usize) -> Outcome<Self> {
        let context = Arc::clone(&gpu.context);
        // SAFETY: the context is current on this thread.
        let base = unsafe { result::malloc_host(bytes.max(1), 0) }.map_err(refused("pin"))?;
        let base = NonNull::new(base.cast()).expect("the driver allocates nothing at 0");
        let pinned = Self { context, base, bytes };
        // SAFETY: so many bytes were allocated, and nobody else knows them.
        unsafe { base.write_bytes(POISON, bytes) };
        Ok(pinned)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: allocated by `new`; the tests finish their streams before.
            let _ = unsafe { result::free_host(self.base.as_ptr().cast()) };
        }
    }
}
