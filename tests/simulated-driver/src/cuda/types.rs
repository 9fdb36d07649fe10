//! The driver's types and constants that this face understands, laid out as cuda.h has them.
//!
//! Handles are integers here: they are looked up and never followed.

use std::ffi::{c_int, c_uint};
use std::mem::MaybeUninit;

use super::code::{INVALID_VALUE, Outcome};

pub(crate) type CUdevice = c_int;
pub(crate) type CUdeviceptr = u64;
pub(crate) type CUcontext = usize;
pub(crate) type CUstream = usize;
pub(crate) type CUevent = usize;
pub(crate) type CUgraph = usize;
pub(crate) type CUgraphExec = usize;
pub(crate) type CUmemHandle = u64;

/// Where a call puts a result: a pointer that may be null.
pub(crate) type Out<'a, T> = Option<&'a mut MaybeUninit<T>>;

/// Stores a result; without a place for it the argument is invalid.
pub(crate) fn store<T>(out: Out<'_, T>, value: T) -> Outcome {
    out.ok_or(INVALID_VALUE)?.write(value);
    Ok(())
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUuuid(pub(crate) [u8; 16]);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUipcMemHandle(pub(crate) [u8; 64]);

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemLocation {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAllocationProp {
    pub(crate) kind: c_int,
    pub(crate) requested_handle_types: c_int,
    pub(crate) location: CUmemLocation,
    pub(crate) win32_handle_meta_data: usize,
    /// Compression, GPUDirect, usage and what is reserved: not simulated.
    pub(crate) flags: [u8; 8],
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUmemAccessDesc {
    pub(crate) location: CUmemLocation,
    pub(crate) flags: c_int,
}

/// One word of a batch: the members that writes and waits share.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CUstreamBatchMemOpParams {
    pub(crate) operation: c_uint,
    pub(crate) address: CUdeviceptr,
    pub(crate) value: u64,
    pub(crate) flags: c_uint,
    pub(crate) alias: CUdeviceptr,
    pub(crate) rest: u64,
}

const _: () = {
    assert!(size_of::<CUstreamBatchMemOpParams>() == 48);
    assert!(size_of::<CUmemAllocationProp>() == 32);
    assert!(size_of::<CUmemAccessDesc>() == 12);
};

pub(crate) const MEM_ALLOCATION_TYPE_PINNED: c_int = 1;
pub(crate) const MEM_LOCATION_TYPE_DEVICE: c_int = 1;
pub(crate) const MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: c_int = 1;
pub(crate) const MEM_HANDLE_TYPE_FABRIC: c_int = 8;
pub(crate) const MEM_ACCESS_FLAGS_PROT_READWRITE: c_int = 3;

pub(crate) const MEMORYTYPE_HOST: c_uint = 1;
pub(crate) const MEMORYTYPE_DEVICE: c_uint = 2;

/// Null, 1 (legacy) and this stand for default streams.
pub(crate) const STREAM_PER_THREAD: CUstream = 2;
pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;
