//! Exports the memory operations of streams. All become operations of one batch, because in that
//! form both vendors have the same structure and numbers.

use std::ffi::{c_uint, c_void};

use hip_sys::{hipStream_t, hipStreamBatchMemOpParams};

use crate::calls::hip;
use crate::cuda::{CUresult, Cuda};
use crate::result::INVALID_VALUE;

/// What an operation does, and on how many bits.
#[derive(Clone, Copy)]
#[repr(u32)]
enum Kind {
    Wait32 = 1,
    Write32 = 2,
    Wait64 = 4,
    Write64 = 5,
}

/// cuda.h's operation, and HIP's.
#[repr(C)]
struct Operation {
    kind: u32,
    address: u64,
    value: u64,
    flags: u32,
    alias: u64,
    pad: u64,
}

const _: () = assert!(size_of::<Operation>() == size_of::<hipStreamBatchMemOpParams>());

/// # Safety
/// The stream lives; the word may be written, or read, until it is complete.
unsafe fn one(
    cuda: &Cuda,
    stream: hipStream_t,
    kind: Kind,
    word: *mut c_void,
    value: u64,
    flags: c_uint,
) -> CUresult {
    let mut operation =
        Operation { kind: kind as u32, address: word as u64, value, flags, alias: 0, pad: 0 };
    // SAFETY: the caller's; the driver reads one operation.
    unsafe { (cuda.cuStreamBatchMemOp)(stream.cast(), 1, (&raw mut operation).cast(), 0) }
}

/// A wait for all bits; CUDA has no mask.
///
/// # Safety
/// As [`one`].
unsafe fn wait(
    cuda: &Cuda,
    stream: hipStream_t,
    kind: Kind,
    word: *mut c_void,
    value: u64,
    flags: c_uint,
    all_bits: bool,
) -> CUresult {
    if !all_bits {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's.
    unsafe { one(cuda, stream, kind, word, value, flags) }
}

hip! {
    fn hipStreamWriteValue32(stream: hipStream_t, word: *mut c_void, value: u32, _flags: c_uint) =
        |cuda| one(cuda, stream, Kind::Write32, word, value.into(), 0);
    fn hipStreamWriteValue64(stream: hipStream_t, word: *mut c_void, value: u64, _flags: c_uint) =
        |cuda| one(cuda, stream, Kind::Write64, word, value, 0);
    fn hipStreamWaitValue32(
        stream: hipStream_t,
        word: *mut c_void,
        value: u32,
        flags: c_uint,
        mask: u32,
    ) = |cuda| wait(cuda, stream, Kind::Wait32, word, value.into(), flags, mask == u32::MAX);
    fn hipStreamWaitValue64(
        stream: hipStream_t,
        word: *mut c_void,
        value: u64,
        flags: c_uint,
        mask: u64,
    ) = |cuda| wait(cuda, stream, Kind::Wait64, word, value, flags, mask == u64::MAX);
    fn hipStreamBatchMemOp(
        stream: hipStream_t,
        count: c_uint,
        operations: *mut hipStreamBatchMemOpParams,
        flags: c_uint,
    ) = |cuda| (cuda.cuStreamBatchMemOp)(stream.cast(), count, operations.cast(), flags);
}
