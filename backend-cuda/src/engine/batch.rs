//! Neighbouring signals, waits and resets as one batched memory operation.
//!
//! The operations of a batch run in order, and a write takes effect after everything before it in
//! the stream. One call costs about as much as one operation of its own (facts of the measurement
//! pages), so that a batch stays open until something else has to go onto the stream.

use std::ffi::c_uint;

use crate::device::Context;
use crate::error::Error;
use crate::sys::{self, CUdeviceptr, CUstream, CUstreamBatchMemOpParams as MemOp, Driver};

/// From here on, a value is below 0 in the driver's comparison.
const UPPER_HALF: u64 = 1 << 63;
/// Memory operations that fit where one command of another kind does.
const OPS_A_COMMAND: usize = 8;

/// What is wanted of a driver for signals and waits on streams.
pub(super) fn check_ability(context: &Context) -> Result<(), Error> {
    let Driver { stream_batch_mem_op, stream_write_value_64, stream_wait_value_64, .. } =
        context.driver;
    let single = stream_write_value_64.is_some() && stream_wait_value_64.is_some();
    if stream_batch_mem_op.is_none() && !single {
        return Err(Error::unavailable(format!(
            "the driver of {} has neither cuStreamBatchMemOp_v2 nor cuStreamWaitValue64_v2, which \
             signals and waits need; wanted a driver of CUDA 12.0 or newer",
            context.label()
        )));
    }
    let mut able = 0;
    let attribute = sys::ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS;
    // SAFETY: the result is stored in a local.
    let code =
        unsafe { (context.driver.device_get_attribute)(&raw mut able, attribute, context.device) };
    context.check("cuDeviceGetAttribute", code)?;
    if able == 0 {
        return Err(Error::unavailable(format!(
            "{} has no 64-bit memory operations on streams, which signals and waits need; wanted a \
             GPU of compute capability 7.0 or newer",
            context.label()
        )));
    }
    Ok(())
}

/// Memory operations that go onto a stream together.
#[derive(Debug)]
pub(super) struct Batch {
    ops: Vec<MemOp>,
}

impl Batch {
    pub(super) fn new() -> Self {
        Self { ops: Vec::with_capacity(sys::STREAM_BATCH_OPS_MAX) }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ops.is_empty()
    }

    /// How many more fit.
    pub(super) fn room(&self) -> usize {
        sys::STREAM_BATCH_OPS_MAX - self.ops.len()
    }

    pub(super) fn clear(&mut self) {
        self.ops.clear();
    }

    /// How much of a stream's queue it takes.
    pub(super) fn commands(&self) -> usize {
        1 + self.ops.len() / OPS_A_COMMAND
    }

    pub(super) fn write(&mut self, address: CUdeviceptr, value: u64) {
        let flags = sys::STREAM_WRITE_VALUE_DEFAULT;
        self.push(sys::STREAM_MEM_OP_WRITE_VALUE_64, address, value, flags);
    }

    /// Waits until the word is at least `value`; at most two operations.
    ///
    /// The driver compares cyclically: it passes if the word is less than 2^63 ahead of the value.
    /// Of a value in the upper half, small words would therefore be ahead; they are held first. A
    /// word that is 2^63 or more beyond a value in the lower half does not pass: nobody counts so
    /// far.
    pub(super) fn wait(&mut self, address: CUdeviceptr, value: u64) {
        if value > UPPER_HALF {
            self.hold(address, UPPER_HALF);
        }
        if value > 0 {
            self.hold(address, value);
        }
    }

    fn hold(&mut self, address: CUdeviceptr, value: u64) {
        self.push(sys::STREAM_MEM_OP_WAIT_VALUE_64, address, value, sys::STREAM_WAIT_VALUE_GEQ);
    }

    fn push(&mut self, operation: c_uint, address: CUdeviceptr, value: u64, flags: c_uint) {
        debug_assert!(self.room() > 0, "a batch is put onto its stream before it overflows");
        self.ops.push(MemOp { operation, address, value, flags, ..MemOp::default() });
    }

    /// Puts the batch onto a stream and empties it; nothing if it is empty.
    pub(super) fn issue(&mut self, context: &Context, stream: CUstream) -> Result<(), Error> {
        if self.ops.is_empty() {
            return Ok(());
        }
        let issued = match context.driver.stream_batch_mem_op {
            Some(call) => {
                let count = self.ops.len() as c_uint;
                // SAFETY: the array holds `count` operations and the driver reads it before it
                // returns; the addresses are words of regions or pages that live (`submit`).
                let code = unsafe { call(stream, count, self.ops.as_mut_ptr(), 0) };
                context.check("cuStreamBatchMemOp", code)
            }
            None => self.ops.iter().try_for_each(|op| issue_one(context, stream, op)),
        };
        self.ops.clear();
        issued
    }
}

/// Without batches each operation is a call of its own.
fn issue_one(context: &Context, stream: CUstream, op: &MemOp) -> Result<(), Error> {
    let (name, call) = match op.operation {
        sys::STREAM_MEM_OP_WAIT_VALUE_64 => {
            ("cuStreamWaitValue64_v2", context.driver.stream_wait_value_64)
        }
        _ => ("cuStreamWriteValue64_v2", context.driver.stream_write_value_64),
    };
    let call = context.need(name, call)?;
    // SAFETY: as in `issue`.
    let code = unsafe { call(stream, op.address, op.value, op.flags) };
    context.check(name, code)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ops(value: u64) -> Vec<(u32, u64)> {
        let mut batch = Batch::new();
        batch.wait(64, value);
        batch.ops.iter().map(|op| (op.operation, op.value)).collect()
    }

    #[test]
    fn a_wait_compares_without_sign() {
        let wait = sys::STREAM_MEM_OP_WAIT_VALUE_64;
        assert_eq!(ops(0), []);
        assert_eq!(ops(1), [(wait, 1)]);
        assert_eq!(ops(UPPER_HALF - 1), [(wait, UPPER_HALF - 1)]);
        assert_eq!(ops(UPPER_HALF), [(wait, UPPER_HALF)]);
        assert_eq!(ops(u64::MAX), [(wait, UPPER_HALF), (wait, u64::MAX)]);
    }

    #[test]
    fn a_long_batch_counts_as_several_commands() {
        let mut batch = Batch::new();
        batch.write(0, 1);
        assert_eq!(batch.commands(), 1);
        (0..15).for_each(|word| batch.write(word, 1));
        assert_eq!((batch.commands(), batch.room()), (3, sys::STREAM_BATCH_OPS_MAX - 16));
    }
}
