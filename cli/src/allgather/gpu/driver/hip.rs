//! The HIP runtime, through the crate `hip-sys`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;

use hip_sys::{
    Library, hipDeviceAttribute_t, hipError_t, hipEventDefault, hipEventDisableTiming,
    hipIpcMemHandle_t, hipIpcMemLazyEnablePeerAccess, hipMemcpyKind, hipStreamCaptureMode,
    hipStreamNonBlocking,
};

use super::{CallError, CallResult, Direction, Driver, Handle, Transfer};

/// An AMD GPU.
pub(in super::super) struct Hip {
    calls: &'static Library,
    device: c_int,
}

impl Hip {
    /// Opens a GPU that the backend has found.
    pub(in super::super) fn open(ordinal: u32) -> CallResult<Self> {
        let plain = |text: String| CallError { text, out_of_memory: false };
        let calls = Library::load().map_err(|error| plain(error.to_string()))?;
        let device = c_int::try_from(ordinal).map_err(|error| plain(error.to_string()))?;
        Ok(Self { calls, device })
    }

    fn done(&self, code: hipError_t) -> CallResult {
        if code == hipError_t::hipSuccess { Ok(()) } else { Err(self.refusal(code)) }
    }

    /// Returns the value that a successful call stores.
    fn made<T>(&self, mut value: T, call: impl FnOnce(*mut T) -> hipError_t) -> CallResult<T> {
        self.done(call(&raw mut value))?;
        Ok(value)
    }

    fn refusal(&self, code: hipError_t) -> CallError {
        let text = |call: unsafe extern "C" fn(hipError_t) -> *const c_char| {
            // SAFETY: both functions take any code.
            let text = unsafe { call(code) };
            if text.is_null() {
                return String::new();
            }
            // SAFETY: the text is a static string of the runtime.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let (name, why) = (text(self.calls.get_error_name), text(self.calls.get_error_string));
        let out_of_memory = code == hipError_t::hipErrorOutOfMemory;
        CallError { text: format!("{name} ({}), {why}", code.0), out_of_memory }
    }
}

impl Driver for Hip {
    fn enter(&self) -> CallResult {
        // SAFETY: the call checks the device number.
        self.done(unsafe { (self.calls.set_device)(self.device) })
    }

    fn copy_engines(&self) -> CallResult<i32> {
        let attribute = hipDeviceAttribute_t::hipDeviceAttributeAsyncEngineCount;
        // SAFETY: the result is stored in a local variable.
        self.made(0, |out| unsafe {
            (self.calls.device_get_attribute)(out, attribute, self.device)
        })
    }

    fn free_bytes(&self) -> CallResult<usize> {
        let mut total = 0;
        // SAFETY: the results are stored in local variables.
        self.made(0, |free| unsafe { (self.calls.mem_get_info)(free, &raw mut total) })
    }

    fn create_stream(&self) -> CallResult<Handle> {
        let create = self.calls.stream_create_with_flags;
        // SAFETY: the result is stored in a local variable.
        self.made(null_mut(), |out| unsafe { create(out, hipStreamNonBlocking) })
            .map(<*mut _>::cast)
    }

    unsafe fn destroy_stream(&self, stream: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { (self.calls.stream_destroy)(stream.cast()) };
    }

    fn create_event(&self, timed: bool) -> CallResult<Handle> {
        let flags = if timed { hipEventDefault } else { hipEventDisableTiming };
        let create = self.calls.event_create_with_flags;
        // SAFETY: the result is stored in a local variable.
        self.made(null_mut(), |out| unsafe { create(out, flags) }).map(<*mut _>::cast)
    }

    unsafe fn destroy_event(&self, event: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { (self.calls.event_destroy)(event.cast()) };
    }

    unsafe fn record(&self, event: Handle, stream: Handle) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.event_record)(event.cast(), stream.cast()) })
    }

    unsafe fn stream_wait_event(&self, stream: Handle, event: Handle) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.stream_wait_event)(stream.cast(), event.cast(), 0) })
    }

    unsafe fn is_complete(&self, event: Handle) -> CallResult<bool> {
        // SAFETY: the rules of [`Driver`] hold.
        match unsafe { (self.calls.event_query)(event.cast()) } {
            hipError_t::hipSuccess => Ok(true),
            hipError_t::hipErrorNotReady => Ok(false),
            code => Err(self.refusal(code)),
        }
    }

    unsafe fn milliseconds(&self, begin: Handle, end: Handle) -> CallResult<f32> {
        let elapsed = self.calls.event_elapsed_time;
        // SAFETY: the rules of [`Driver`] hold; the result is stored in a local variable.
        self.made(0.0, |out| unsafe { elapsed(out, begin.cast(), end.cast()) })
    }

    fn allocate(&self, bytes: usize) -> CallResult<u64> {
        // SAFETY: the result is stored in a local variable.
        let made = self.made(null_mut(), |out| unsafe { (self.calls.malloc)(out, bytes) });
        made.map(|memory| memory as u64)
    }

    unsafe fn free(&self, address: u64) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { (self.calls.free)(address as *mut c_void) };
    }

    unsafe fn set(&self, stream: Handle, address: u64, value: u8, bytes: usize) -> CallResult {
        let memory = address as *mut c_void;
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.memset_d8_async)(memory, value, bytes, stream.cast()) })
    }

    unsafe fn copy(&self, stream: Handle, transfer: Transfer) -> CallResult {
        let Transfer { to, from, bytes, direction } = transfer;
        let kind = match direction {
            Direction::ToDevice => hipMemcpyKind::hipMemcpyHostToDevice,
            Direction::ToHost => hipMemcpyKind::hipMemcpyDeviceToHost,
            Direction::Devices => hipMemcpyKind::hipMemcpyDeviceToDevice,
        };
        let (to, from) = (to as *mut c_void, from as *const c_void);
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.memcpy_async)(to, from, bytes, kind, stream.cast()) })
    }

    unsafe fn ipc_handle(&self, address: u64) -> CallResult<[u8; 64]> {
        let (get, memory) = (self.calls.ipc_get_mem_handle, address as *mut c_void);
        // SAFETY: the handle is a local variable; the rules of [`Driver`] hold for the address.
        let made = self.made(hipIpcMemHandle_t::default(), |out| unsafe { get(out, memory) });
        made.map(|handle| handle.reserved.map(c_char::cast_unsigned))
    }

    fn open_ipc(&self, handle: [u8; 64]) -> CallResult<u64> {
        let handle = hipIpcMemHandle_t { reserved: handle.map(|byte| byte as c_char) };
        let open = self.calls.ipc_open_mem_handle;
        let flags = hipIpcMemLazyEnablePeerAccess;
        // SAFETY: the address is a local variable; the runtime checks the handle.
        let made = self.made(null_mut(), |out| unsafe { open(out, handle, flags) });
        made.map(|memory| memory as u64)
    }

    unsafe fn close_ipc(&self, address: u64) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { (self.calls.ipc_close_mem_handle)(address as *mut c_void) };
    }

    unsafe fn begin_capture(&self, stream: Handle) -> CallResult {
        let mode = hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.stream_begin_capture)(stream.cast(), mode) })
    }

    unsafe fn end_capture(&self, stream: Handle) -> CallResult<Handle> {
        let end = self.calls.stream_end_capture;
        // SAFETY: the rules of [`Driver`] hold; the result is stored in a local variable.
        let graph = self.made(null_mut(), |out| unsafe { end(stream.cast(), out) })?;
        let instantiate = self.calls.graph_instantiate_with_flags;
        // SAFETY: the graph was just captured.
        let exec = self.made(null_mut(), |out| unsafe { instantiate(out, graph, 0) });
        // SAFETY: this is the only handle of the captured graph; the executable graph does not need it.
        let _ = unsafe { (self.calls.graph_destroy)(graph) };
        exec.map(<*mut _>::cast)
    }

    unsafe fn launch(&self, graph: Handle, stream: Handle) -> CallResult {
        // SAFETY: the rules of [`Driver`] hold.
        self.done(unsafe { (self.calls.graph_launch)(graph.cast(), stream.cast()) })
    }

    unsafe fn destroy_graph(&self, graph: Handle) {
        // SAFETY: the rules of [`Driver`] hold. An error has no remedy.
        let _ = unsafe { (self.calls.graph_exec_destroy)(graph.cast()) };
    }
}
