//! Memory operations of HIP.
//!
//! Until the middle of 2026 runtimes ran the operations of one `hipStreamBatchMemOp` at once and not in
//! order (ROCm/rocm-systems#8911), and earlier ones refused every such call (#2633, #3099). So a trial
//! tells whether several go into one call; without it each is a `hipStreamWriteValue64` or a
//! `hipStreamWaitValue64`. HIP compares without a sign.

use std::ffi::c_void;

use peerlane_toolkit::device::{
    Batching, DeviceContext as _, DevicePtr, Fault, StreamHandle, WordCalls,
};

use super::queue::raw;
use crate::device::{Context, attribute};
use crate::error::Error;
use crate::sys::hip::{self, hipDeviceAttribute_t, hipError_t, hipStreamBatchMemOpType as Kind};

/// One operation. The form that the batched call takes has the same members in the same places for
/// the two operations that are used here.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct WordOp {
    kind: Kind,
    address: *mut c_void,
    value: u64,
    /// 0 is "at least" of a wait, and nothing special of a write.
    flags: u32,
    /// For the runtime's own use; null.
    alias: *mut c_void,
    /// Up to the size of the union, six 64-bit words.
    rest: u64,
}

// SAFETY: the addresses are of a device, and never followed here.
unsafe impl Send for WordOp {}

const _: () = {
    use hip::{
        hipStreamBatchMemOpParams as Params,
        hipStreamBatchMemOpParams_union_hipStreamMemOpWaitValueParams_t as Wait,
        hipStreamBatchMemOpParams_union_hipStreamMemOpWriteValueParams_t as Write,
    };
    use std::mem::offset_of;
    assert!(size_of::<WordOp>() == size_of::<Params>());
    assert!(offset_of!(WordOp, address) == offset_of!(Wait, address));
    assert!(offset_of!(WordOp, address) == offset_of!(Write, address));
    assert!(offset_of!(WordOp, value) == offset_of!(Wait, __bindgen_anon_1));
    assert!(offset_of!(WordOp, value) == offset_of!(Write, __bindgen_anon_1));
    assert!(offset_of!(WordOp, flags) == offset_of!(Wait, flags));
    assert!(offset_of!(WordOp, flags) == offset_of!(Write, flags));
    assert!(offset_of!(WordOp, alias) == offset_of!(Wait, alias));
    assert!(offset_of!(WordOp, alias) == offset_of!(Write, alias));
    assert!(hip::hipStreamWaitValueGte == 0);
};

impl WordOp {
    const fn new(kind: Kind, address: DevicePtr, value: u64) -> Self {
        let alias = std::ptr::null_mut();
        Self { kind, address: address as *mut c_void, value, flags: 0, alias, rest: 0 }
    }
}

impl WordCalls for Context {
    type WordOp = WordOp;

    /// As CUDA documents it; HIP names no bound.
    const WORD_OPS_MAX: usize = 255;

    fn check_words(&self) -> Result<(), Error> {
        let able = hipDeviceAttribute_t::hipDeviceAttributeCanUseStreamWaitValue;
        if attribute(self.hip, self.device(), able)? != 0 {
            return Ok(());
        }
        Err(Error::Fault(Fault::Unavailable(format!(
            "{} cannot wait for words on streams (hipDeviceAttributeCanUseStreamWaitValue is 0), which \
             signals and waits need; wanted a GPU of gfx9 or newer on Linux",
            self.label()
        ))))
    }

    fn batching(&self) -> Batching {
        match self.hip.calls.stream_batch_mem_op {
            Some(_) => Batching::Probe,
            None => Batching::Never,
        }
    }

    fn word_write(address: DevicePtr, value: u64) -> WordOp {
        WordOp::new(Kind::hipStreamMemOpWriteValue64, address, value)
    }

    fn word_wait(address: DevicePtr, value: u64) -> WordOp {
        WordOp::new(Kind::hipStreamMemOpWaitValue64, address, value)
    }

    unsafe fn put_words(&self, stream: StreamHandle, ops: &mut [WordOp]) -> Result<(), Error> {
        let calls = self.hip.calls;
        if let ([_, _, ..], Some(batch)) = (&*ops, calls.stream_batch_mem_op) {
            let (count, params) = (ops.len() as u32, ops.as_mut_ptr().cast());
            // SAFETY: the array holds `count` operations in the form of the union, as the assertions
            // above show, and the runtime reads it before it returns; the rest is the caller's.
            let code = unsafe { batch(raw(stream), count, params, 0) };
            return self.check("hipStreamBatchMemOp", code);
        }
        for op in ops {
            let (stream, address) = (raw(stream), op.address);
            let (call, code) = match op.kind {
                Kind::hipStreamMemOpWaitValue64 => {
                    let (wait, all) = (calls.stream_wait_value_64, u64::MAX);
                    // SAFETY: the caller's.
                    let code = unsafe { wait(stream, address, op.value, op.flags, all) };
                    ("hipStreamWaitValue64", code)
                }
                _ => {
                    let write = calls.stream_write_value_64;
                    // SAFETY: the caller's.
                    let code = unsafe { write(stream, address, op.value, op.flags) };
                    ("hipStreamWriteValue64", code)
                }
            };
            self.check(call, code)?;
        }
        Ok(())
    }

    fn is_write_refused(error: &Error) -> bool {
        let refusals = [
            hipError_t::hipErrorInvalidValue,
            hipError_t::hipErrorNotSupported,
            hipError_t::hipErrorInvalidDevicePointer,
        ];
        matches!(error, Error::Driver { result, .. }
            if refusals.iter().any(|refusal| refusal.0 == result.code))
    }
}
