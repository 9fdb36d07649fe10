//! What the measurement asks of a vendor's driver: streams, events, memory and graphs of one GPU.
//!
//! Overlap the backend and independent of it, so that what is timed does not stream_wait_event the clock.

use std::ffi::c_void;

mod cuda;
mod hip;

pub(super) use cuda::Cuda;
pub(super) use hip::Hip;

/// A stream, an event or a graph, as the driver names it.
pub(super) type Handle = *mut c_void;

/// The driver's refusal, in its own words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallError {
    pub(super) text: String,
    pub(super) out_of_memory: bool,
}

type CallResult<T = ()> = Result<T, CallError>;

/// From where to where a copy goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToDevice,
    ToHost,
    /// Between two GPUs, or within one.
    Devices,
}

/// A copy between two addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Transfer {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) bytes: usize,
    pub(super) direction: Direction,
}

/// One GPU. Every call but [`enter`](Self::enter) wants it to be current on the thread.
///
/// # Safety
/// Of all methods that are unsafe: handles were created by this driver and not destroyed, spans are
/// memory that lives until the stream has passed what uses it.
pub(super) trait Driver: Send + Sync {
    /// Makes the GPU current on this thread.
    fn enter(&self) -> CallResult;
    /// Copies that it makes at a time.
    fn copy_engines(&self) -> CallResult<i32>;
    fn free_bytes(&self) -> CallResult<usize>;

    /// One that does not wait for the default stream.
    fn create_stream(&self) -> CallResult<Handle>;
    unsafe fn destroy_stream(&self, stream: Handle);
    fn create_event(&self, timed: bool) -> CallResult<Handle>;
    unsafe fn destroy_event(&self, event: Handle);
    unsafe fn record(&self, event: Handle, stream: Handle) -> CallResult;
    /// What the stream gets next comes after the event.
    unsafe fn stream_wait_event(&self, stream: Handle, event: Handle) -> CallResult;
    unsafe fn has_passed(&self, event: Handle) -> CallResult<bool>;
    unsafe fn milliseconds(&self, begin: Handle, end: Handle) -> CallResult<f32>;

    fn allocate(&self, bytes: usize) -> CallResult<u64>;
    unsafe fn free(&self, address: u64);
    unsafe fn set(&self, stream: Handle, address: u64, value: u8, bytes: usize) -> CallResult;
    unsafe fn copy(&self, stream: Handle, transfer: Transfer) -> CallResult;
    unsafe fn ipc_handle(&self, address: u64) -> CallResult<[u8; 64]>;
    fn open_ipc(&self, handle: [u8; 64]) -> CallResult<u64>;
    unsafe fn close_ipc(&self, address: u64);

    /// Records what this thread puts on the stream.
    unsafe fn begin_capture(&self, stream: Handle) -> CallResult;
    /// What was recorded, ready to be launched.
    unsafe fn end_capture(&self, stream: Handle) -> CallResult<Handle>;
    unsafe fn launch(&self, graph: Handle, stream: Handle) -> CallResult;
    unsafe fn destroy_graph(&self, graph: Handle);
}
