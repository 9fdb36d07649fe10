//! The driver calls that the measurement needs: streams, events, memory and graphs of one GPU.
//!
//! They are independent of the backend, so that the measured code does not also measure the time.

use std::ffi::c_void;

mod cuda;
mod hip;

pub(super) use cuda::Cuda;
pub(super) use hip::Hip;

/// A stream, an event or a graph of the driver.
pub(super) type Handle = *mut c_void;

/// An error of the driver with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CallError {
    pub(super) text: String,
    pub(super) out_of_memory: bool,
}

type CallResult<T = ()> = Result<T, CallError>;

/// Direction of a copy.
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

/// Calls the driver of one GPU. All methods except [`enter`](Self::enter) need the GPU to be
/// current on the thread.
///
/// # Safety
/// For the unsafe methods: handles were created by this driver and not destroyed; ranges are memory
/// that stays allocated until the stream has completed the work that uses it.
pub(super) trait Driver: Send + Sync {
    /// Makes the GPU current on this thread.
    fn enter(&self) -> CallResult;
    /// Returns the number of copies that the GPU can make at the same time.
    fn copy_engines(&self) -> CallResult<i32>;
    fn free_bytes(&self) -> CallResult<usize>;

    /// Creates a stream that does not synchronise with the default stream.
    fn create_stream(&self) -> CallResult<Handle>;
    unsafe fn destroy_stream(&self, stream: Handle);
    fn create_event(&self, timed: bool) -> CallResult<Handle>;
    unsafe fn destroy_event(&self, event: Handle);
    unsafe fn record(&self, event: Handle, stream: Handle) -> CallResult;
    /// Makes later work on the stream wait for the event.
    unsafe fn stream_wait_event(&self, stream: Handle, event: Handle) -> CallResult;
    unsafe fn is_complete(&self, event: Handle) -> CallResult<bool>;
    unsafe fn milliseconds(&self, begin: Handle, end: Handle) -> CallResult<f32>;

    fn allocate(&self, bytes: usize) -> CallResult<u64>;
    unsafe fn free(&self, address: u64);
    unsafe fn set(&self, stream: Handle, address: u64, value: u8, bytes: usize) -> CallResult;
    unsafe fn copy(&self, stream: Handle, transfer: Transfer) -> CallResult;
    unsafe fn ipc_handle(&self, address: u64) -> CallResult<[u8; 64]>;
    fn open_ipc(&self, handle: [u8; 64]) -> CallResult<u64>;
    unsafe fn close_ipc(&self, address: u64);

    /// Starts to capture the work of this thread on the stream.
    unsafe fn begin_capture(&self, stream: Handle) -> CallResult;
    /// Ends the capture and returns an executable graph.
    unsafe fn end_capture(&self, stream: Handle) -> CallResult<Handle>;
    unsafe fn launch(&self, graph: Handle, stream: Handle) -> CallResult;
    unsafe fn destroy_graph(&self, graph: Handle);
}
