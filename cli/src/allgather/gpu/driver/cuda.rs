//! The CUDA driver, through the crate `cudarc`.
//!
//! `cudarc` panics without a driver, so this is opened only for a device that the backend has
//! found.

use std::sync::Arc;

use cudarc::driver::result::{self, event, graph, stream};
use cudarc::driver::sys::{
    CUdevice_attribute, CUevent_flags, CUevent_wait_flags, CUgraphInstantiate_flags,
    CUipcMem_flags, CUipcMemHandle, CUresult, CUstreamCaptureMode,
};
use cudarc::driver::{CudaContext, DriverError, sys};

use super::{CallError, CallResult, Direction, Driver, Handle, Transfer};

/// An NVIDIA GPU.
pub(in super::super) struct Cuda(Arc<CudaContext>);

impl Cuda {
    /// Opens a GPU that the backend has found.
    pub(in super::super) fn open(ordinal: u32) -> CallResult<Self> {
        CudaContext::new(ordinal as usize).map(Self).map_err(refusal)
    }
}

impl Driver for Cuda {
    fn enter(&self) -> CallResult {
        self.0.bind_to_thread().map_err(refusal)
    }

    fn copy_engines(&self) -> CallResult<i32> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT;
        self.0.attribute(attribute).map_err(refusal)
    }

    fn free_bytes(&self) -> CallResult<usize> {
        self.0.mem_get_info().map(|(free, _)| free).map_err(refusal)
    }

    fn create_stream(&self) -> CallResult<Handle> {
        stream::create(stream::StreamKind::NonBlocking).map(<*mut _>::cast).map_err(refusal)
    }

    unsafe fn destroy_stream(&self, stream: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { stream::destroy(stream.cast()) };
    }

    fn create_event(&self, timed: bool) -> CallResult<Handle> {
        let flags = if timed {
            CUevent_flags::CU_EVENT_DEFAULT
        } else {
            CUevent_flags::CU_EVENT_DISABLE_TIMING
        };
        event::create(flags).map(<*mut _>::cast).map_err(refusal)
    }

    unsafe fn destroy_event(&self, event: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { event::destroy(event.cast()) };
    }

    unsafe fn record(&self, event: Handle, stream: Handle) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { event::record(event.cast(), stream.cast()) }.map_err(refusal)
    }

    unsafe fn stream_wait_event(&self, stream: Handle, event: Handle) -> CallResult {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { stream::wait_event(stream.cast(), event.cast(), flags) }.map_err(refusal)
    }

    unsafe fn is_complete(&self, event: Handle) -> CallResult<bool> {
        // SAFETY: the rules of [`Driver`] hold.
        match unsafe { event::query(event.cast()) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(refusal(error)),
        }
    }

    unsafe fn milliseconds(&self, begin: Handle, end: Handle) -> CallResult<f32> {
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { event::elapsed(begin.cast(), end.cast()) }.map_err(refusal)
    }

    fn allocate(&self, bytes: usize) -> CallResult<u64> {
        // SAFETY: the call has no preconditions; the memory is written before it is read.
        unsafe { result::malloc_sync(bytes) }.map_err(refusal)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { result::free_sync(address) };
    }

    unsafe fn set(&self, stream: Handle, address: u64, value: u8, bytes: usize) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { result::memset_d8_async(address, value, bytes, stream.cast()) }.map_err(refusal)
    }

    unsafe fn copy(&self, stream: Handle, transfer: Transfer) -> CallResult {
        let Transfer { to, from, bytes, direction } = transfer;
        let stream = stream.cast();
        let code = match direction {
            // SAFETY: the rules of [`Driver`] hold.
            Direction::ToDevice => unsafe {
                sys::cuMemcpyHtoDAsync_v2(to, from as *const _, bytes, stream)
            },
            // SAFETY: the rules of [`Driver`] hold.
            Direction::ToHost => unsafe {
                sys::cuMemcpyDtoHAsync_v2(to as *mut _, from, bytes, stream)
            },
            // SAFETY: the rules of [`Driver`] hold.
            Direction::Devices => unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream) },
        };
        code.result().map_err(refusal)
    }

    unsafe fn ipc_handle(&self, address: u64) -> CallResult<[u8; 64]> {
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: `handle` is a local variable; the rules of [`Driver`] hold for the address.
        let code = unsafe { sys::cuIpcGetMemHandle(&raw mut handle, address) };
        code.result().map_err(refusal)?;
        Ok(handle.reserved.map(|byte| byte.cast_unsigned()))
    }

    fn open_ipc(&self, handle: [u8; 64]) -> CallResult<u64> {
        let raw = CUipcMemHandle { reserved: handle.map(u8::cast_signed) };
        let flags = CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        // SAFETY: `address` is a local variable; the driver checks the handle.
        let code = unsafe { sys::cuIpcOpenMemHandle_v2(&raw mut address, raw, flags) };
        code.result().map_err(refusal)?;
        Ok(address)
    }

    unsafe fn close_ipc(&self, address: u64) {
        // SAFETY: the rules of [`Driver`] hold.
        let _: CUresult = unsafe { sys::cuIpcCloseMemHandle(address) };
    }

    unsafe fn begin_capture(&self, stream: Handle) -> CallResult {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { stream::begin_capture(stream.cast(), mode) }.map_err(refusal)
    }

    unsafe fn end_capture(&self, stream: Handle) -> CallResult<Handle> {
        // SAFETY: the rules of [`Driver`] hold.
        let recorded = unsafe { stream::end_capture(stream.cast()) }.map_err(refusal)?;
        let flags = CUgraphInstantiate_flags(0);
        // SAFETY: the graph was just captured.
        let exec = unsafe { graph::instantiate(recorded, flags) }.map_err(refusal);
        // SAFETY: this is the only handle of the captured graph; the executable graph does not need it.
        let _ = unsafe { graph::destroy(recorded) };
        exec.map(<*mut _>::cast)
    }

    unsafe fn launch(&self, graph: Handle, stream: Handle) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        unsafe { graph::launch(graph.cast(), stream.cast()) }.map_err(refusal)
    }

    unsafe fn destroy_graph(&self, graph: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { graph::exec_destroy(graph.cast()) };
    }
}

fn refusal(error: DriverError) -> CallError {
    let DriverError(code) = error;
    let text = match error.error_string() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => "unknown error of the driver".to_owned(),
    };
    let number = code as u32;
    let out_of_memory = code == CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    CallError { text: format!("{code:?} ({number}), {text}"), out_of_memory }
}
