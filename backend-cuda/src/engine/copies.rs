//! Copies of CUDA. One call does whatever a copy is between, over addresses alone.

use peerlane_toolkit::device::{Between, Copies, CopyCalls, DevicePtr, StreamHandle};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUmemcpyAttributes};

impl CopyCalls for Context {
    fn may_copy_together(&self) -> bool {
        self.driver.memcpy_batch_async_v2.is_some() || self.driver.memcpy_batch_async.is_some()
    }

    unsafe fn copy(
        &self,
        stream: StreamHandle,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        between: Between,
    ) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.memcpy_async)(to, from, bytes, stream.0) };
        let call = match between {
            Between::Flags => "cuMemcpyAsync of a signal",
            _ => "cuMemcpyAsync",
        };
        self.check(call, code)
    }

    unsafe fn copy_together(&self, stream: StreamHandle, copies: Copies<'_>) -> Result<(), Error> {
        let driver = self.driver;
        let count = copies.to.len();
        let mut attributes = CUmemcpyAttributes {
            src_access_order: sys::MEMCPY_SRC_ACCESS_ORDER_STREAM,
            ..CUmemcpyAttributes::default()
        };
        // The attributes hold from the first copy on.
        let mut first = 0;
        let (to, from) = (copies.to.as_mut_ptr(), copies.from.as_mut_ptr());
        let bytes = copies.bytes.as_mut_ptr();
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        if let Some(call) = driver.memcpy_batch_async_v2 {
            // SAFETY: the arrays hold `count` copies and one attribute, which the driver reads before
            // it returns; the spans are the caller's.
            let code = unsafe { call(to, from, bytes, count, attributes, first, 1, stream.0) };
            return self.check("cuMemcpyBatchAsync_v2", code);
        }
        let call = self.need("cuMemcpyBatchAsync", driver.memcpy_batch_async)?;
        let mut failed = 0;
        let failed = &raw mut failed;
        // SAFETY: as above; the place of a failure is stored in a local.
        let code = unsafe { call(to, from, bytes, count, attributes, first, 1, failed, stream.0) };
        self.check("cuMemcpyBatchAsync", code)
    }

    unsafe fn clear(
        &self,
        stream: StreamHandle,
        address: DevicePtr,
        bytes: usize,
    ) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.memset_d8_async)(address, 0, bytes, stream.0) };
        self.check("cuMemsetD8Async", code)
    }
}
