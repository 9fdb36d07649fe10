//! CUDA's memory for network cards: dma-bufs, and the flush of what cards have written.

use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::Arc;

use peerlane_hal::{DmaBuf, Flush};
use peerlane_toolkit::device::{DeviceContext as _, DevicePtr};

use crate::device::{Context, attribute};
use crate::error::Error;
use crate::sys;

/// A dma-buf holds whole pages of the host; no page of one is larger.
const PAGE_BYTES_MAX: u64 = 64 << 10;

/// The dma-buf of the pages that hold the span.
pub(super) fn dma_buf(context: &Context, address: DevicePtr, bytes: u64) -> Result<DmaBuf, Error> {
    let symbol = "cuMemGetHandleForAddressRange";
    let export = context.need(symbol, context.driver.mem_get_handle_for_address_range)?;
    let start = address / PAGE_BYTES_MAX * PAGE_BYTES_MAX;
    let end = (address + bytes).next_multiple_of(PAGE_BYTES_MAX);
    let mut fd: c_int = -1;
    let (out, length) = ((&raw mut fd).cast(), (end - start) as usize);
    // SAFETY: the driver looks the range up; a descriptor is the number that is stored.
    let code = unsafe { export(out, start, length, sys::MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) };
    context.check(symbol, code)?;
    // SAFETY: the driver has just opened it for this call.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(DmaBuf { fd, offset: address - start })
}

/// What a device of this context needs before it sees what cards have written.
pub(super) fn flush(context: &Arc<Context>) -> Result<Option<Arc<dyn Flush>>, Error> {
    let ask = |number| attribute(context.driver, context.device, number);
    if ask(sys::ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?
        >= sys::GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    {
        return Ok(None);
    }
    let options = ask(sys::ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
    if options & sys::FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST == 0 {
        return Err(Error::unavailable(format!(
            "{} neither keeps the order of what network cards write nor lets the host flush it",
            context.label()
        )));
    }
    context.need("cuFlushGPUDirectRDMAWrites", context.driver.flush_gpu_direct_rdma_writes)?;
    Ok(Some(Arc::new(Writes(Arc::clone(context)))))
}

/// What cards have written to memory of a device.
#[derive(Debug)]
struct Writes(Arc<Context>);

impl Flush for Writes {
    fn flush(&self) -> Result<(), String> {
        let Self(context) = self;
        let flush = || -> Result<(), Error> {
            let symbol = "cuFlushGPUDirectRDMAWrites";
            let call = context.need(symbol, context.driver.flush_gpu_direct_rdma_writes)?;
            let _current = context.enter_relaxed()?;
            let target = sys::FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX;
            // SAFETY: the context is current.
            let code = unsafe { call(target, sys::FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER) };
            context.check(symbol, code)
        };
        flush().map_err(|error| error.to_string())
    }
}
