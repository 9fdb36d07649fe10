//! Memory operations of CUDA: the operations of one `cuStreamBatchMemOp` run in order.

use std::ffi::c_uint;

use peerlane_toolkit::device::{Batching, DevicePtr, StreamHandle, WordCalls};

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUstreamBatchMemOpParams as MemOp, Driver};

impl WordCalls for Context {
    type WordOp = MemOp;

    const WORD_OPS_MAX: usize = sys::STREAM_BATCH_OPS_MAX;

    fn check_words(&self) -> Result<(), Error> {
        let Driver { stream_batch_mem_op, stream_write_value_64, stream_wait_value_64, .. } =
            self.driver;
        let single = stream_write_value_64.is_some() && stream_wait_value_64.is_some();
        if stream_batch_mem_op.is_none() && !single {
            return Err(Error::unavailable(format!(
                "the driver of {} has neither cuStreamBatchMemOp_v2 nor cuStreamWaitValue64_v2, \
                 which signals and waits need; wanted a driver of CUDA 12.0 or newer",
                self.label()
            )));
        }
        let mut able = 0;
        let attribute = sys::ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
        // SAFETY: the result is stored in a local.
        let code =
            unsafe { (self.driver.device_get_attribute)(&raw mut able, attribute, self.device) };
        self.check("cuDeviceGetAttribute", code)?;
        if able == 0 {
            return Err(Error::unavailable(format!(
                "{} has no 64-bit memory operations on streams, which signals and waits need; \
                 wanted a GPU of compute capability 7.0 or newer",
                self.label()
            )));
        }
        Ok(())
    }

    /// Also of a driver without the call; whose plans would else differ from those of its peers.
    fn batching(&self) -> Batching {
        Batching::Trusted
    }

    fn word_write(address: DevicePtr, value: u64) -> MemOp {
        let (operation, flags) =
            (sys::STREAM_MEM_OP_WRITE_VALUE_64, sys::STREAM_WRITE_VALUE_DEFAULT);
        MemOp { operation, address, value, flags, ..MemOp::default() }
    }

    fn word_wait(address: DevicePtr, value: u64) -> MemOp {
        let (operation, flags) = (sys::STREAM_MEM_OP_WAIT_VALUE_64, sys::STREAM_WAIT_VALUE_GEQ);
        MemOp { operation, address, value, flags, ..MemOp::default() }
    }

    unsafe fn put_words(&self, stream: StreamHandle, ops: &mut [MemOp]) -> Result<(), Error> {
        let Some(call) = self.driver.stream_batch_mem_op else {
            // SAFETY: the caller's.
            return ops.iter().try_for_each(|op| unsafe { put_word(self, stream, op) });
        };
        let count = ops.len() as c_uint;
        // SAFETY: the array holds `count` operations and the driver reads it before it returns; the
        // rest is the caller's.
        let code = unsafe { call(stream.0, count, ops.as_mut_ptr(), 0) };
        self.check("cuStreamBatchMemOp", code)
    }

    fn is_write_refused(error: &Error) -> bool {
        let refusals = [
            sys::CUDA_ERROR_INVALID_VALUE,
            sys::CUDA_ERROR_NOT_PERMITTED,
            sys::CUDA_ERROR_NOT_SUPPORTED,
        ];
        matches!(error, Error::Driver { result, .. } if refusals.contains(&result.code))
    }
}

/// Without batches each operation is a call of its own.
///
/// # Safety
/// As [`WordCalls::put_words`].
unsafe fn put_word(context: &Context, stream: StreamHandle, op: &MemOp) -> Result<(), Error> {
    let (name, call) = match op.operation {
        sys::STREAM_MEM_OP_WAIT_VALUE_64 => {
            ("cuStreamWaitValue64_v2", context.driver.stream_wait_value_64)
        }
        _ => ("cuStreamWriteValue64_v2", context.driver.stream_write_value_64),
    };
    let call = context.need(name, call)?;
    // SAFETY: the caller's.
    let code = unsafe { call(stream.0, op.address, op.value, op.flags) };
    context.check(name, code)
}
