//! HIP, as the tests that engines of streams share want it.

use std::ffi::c_void;
use std::sync::{Arc, MutexGuard};

use hip_sys::{
    hipError_t, hipGraph_t, hipGraphExec_t, hipMemcpyKind, hipStream_t, hipStreamCaptureMode,
};
use peerlane_hal::{ErrorKind, Region as _};
pub(crate) use peerlane_rocm::{Engine, Error, Fabric, Local, Options, Remote, SignalBy, Stream};
use peerlane_simulated_driver::Driver;

pub(crate) use crate::support::{connected, pattern, soon};

pub(crate) fn driver() -> (Driver, MutexGuard<'static, ()>) {
    crate::support::driver(crate::RELEASE)
}

/// As many ranks of this process, each on the device with its number, connected with all.
pub(crate) fn ranks(count: usize) -> Result<Vec<Fabric>, Error> {
    crate::support::ranks(count, false)
}

/// What simulated devices are called.
pub(crate) const DEVICE_NAME: &str = "Simulated Instinct";
/// Several memory operations in one call.
pub(crate) const BATCH: &str = "hipStreamBatchMemOp";
/// Calls of a start, an answer to each, and what a program makes of it.
pub(crate) const REFUSALS: [(&str, i32, ErrorKind); 4] = [
    (BATCH, 9999, ErrorKind::Other),
    ("hipMemcpyAsync", 2, ErrorKind::OutOfMemory),
    ("hipStreamWaitEvent", 400, ErrorKind::Other),
    ("hipEventRecord", 700, ErrorKind::DeviceLost),
];
/// Ways in which a device goes.
pub(crate) const LOSSES: [fn(&Driver, u32); 1] =
    [|driver, device| driver.break_device(device, 700)];

/// Whose work a capture minds.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

fn hip() -> &'static hip_sys::Library {
    hip_sys::Library::load().expect("the simulated driver was installed")
}

fn ok(code: hipError_t) {
    assert_eq!(code, hipError_t::hipSuccess);
}

/// A stream on which a rank computes: here, copies.
#[derive(Clone)]
pub(crate) struct Compute(Arc<Owned>);

struct Owned {
    device: i32,
    stream: hipStream_t,
}

// SAFETY: HIP takes a stream from any thread.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: made by `new`, and whoever used it is done.
        ok(unsafe { (hip().stream_destroy)(self.stream) });
    }
}

impl Compute {
    pub(crate) fn new(device: usize) -> Self {
        let device = i32::try_from(device).expect("a number of a device");
        let mut stream = std::ptr::null_mut();
        // SAFETY: HIP checks the number.
        ok(unsafe { (hip().set_device)(device) });
        let create = hip().stream_create_with_flags;
        // SAFETY: the result is stored in a local.
        ok(unsafe { create(&raw mut stream, hip_sys::hipStreamNonBlocking) });
        Self(Arc::new(Owned { device, stream }))
    }

    fn bind(&self) -> hipStream_t {
        // SAFETY: the number was good before.
        ok(unsafe { (hip().set_device)(self.0.device) });
        self.0.stream
    }

    pub(crate) fn handle(&self) -> Stream {
        // SAFETY: tests keep their streams until the engines are gone.
        unsafe { Stream::from_raw(self.0.stream.cast()) }
    }

    /// Copies a whole region, behind what the stream holds. Copies from and to the host would make
    /// the host wait.
    pub(crate) fn copy(&self, to: &Local, from: &Local) {
        assert_eq!(to.bytes(), from.bytes());
        let (bytes, stream) = (to.bytes() as usize, self.bind());
        let (to, from) = (to.device_ptr() as *mut c_void, from.device_ptr() as *const c_void);
        let kind = hipMemcpyKind::hipMemcpyDeviceToDevice;
        // SAFETY: both regions are so long, and tests keep them until the stream is finished.
        ok(unsafe { (hip().memcpy_async)(to, from, bytes, kind, stream) });
    }

    /// What it gets next comes after what `other` holds.
    pub(crate) fn wait_for(&self, other: &Self) {
        let (stream, mut event) = (self.bind(), std::ptr::null_mut());
        let create = hip().event_create_with_flags;
        // SAFETY: the result is stored in a local.
        ok(unsafe { create(&raw mut event, hip_sys::hipEventDisableTiming) });
        // SAFETY: both live.
        ok(unsafe { (hip().event_record)(event, other.0.stream) });
        // SAFETY: both live.
        ok(unsafe { (hip().stream_wait_event)(stream, event, 0) });
        // SAFETY: made above; the wait for it is not affected.
        ok(unsafe { (hip().event_destroy)(event) });
    }

    pub(crate) fn finish(&self) {
        // SAFETY: the stream lives.
        ok(unsafe { (hip().stream_synchronize)(self.bind()) });
    }

    pub(crate) fn is_idle(&self) -> bool {
        // SAFETY: the stream lives.
        let code = unsafe { (hip().stream_query)(self.bind()) };
        assert!([hipError_t::hipSuccess, hipError_t::hipErrorNotReady].contains(&code), "{code:?}");
        code == hipError_t::hipSuccess
    }

    pub(crate) fn begin_capture(&self, mode: Mode) {
        let mode = match mode {
            Mode::Global => hipStreamCaptureMode::hipStreamCaptureModeGlobal,
            Mode::ThreadLocal => hipStreamCaptureMode::hipStreamCaptureModeThreadLocal,
            Mode::Relaxed => hipStreamCaptureMode::hipStreamCaptureModeRelaxed,
        };
        // SAFETY: the stream lives.
        ok(unsafe { (hip().stream_begin_capture)(self.bind(), mode) });
    }

    pub(crate) fn end_capture(&self) -> Graph {
        let (graph, mut exec) = (self.end(), std::ptr::null_mut());
        let instantiate = hip().graph_instantiate_with_flags;
        // SAFETY: the graph lives; the result is stored in a local.
        ok(unsafe { instantiate(&raw mut exec, graph, 0) });
        Graph { graph, exec, stream: self.clone() }
    }

    /// Nothing was recorded, and nothing disturbed that.
    pub(crate) fn end_empty_capture(&self) {
        let graph = self.end();
        if !graph.is_null() {
            // SAFETY: just recorded.
            ok(unsafe { (hip().graph_destroy)(graph) });
        }
    }

    fn end(&self) -> hipGraph_t {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream lives; the result is stored in a local.
        ok(unsafe { (hip().stream_end_capture)(self.bind(), &raw mut graph) });
        graph
    }
}

/// A graph, ready to be replayed on the stream that captured it.
pub(crate) struct Graph {
    graph: hipGraph_t,
    exec: hipGraphExec_t,
    stream: Compute,
}

impl Graph {
    pub(crate) fn launch(&self) {
        // SAFETY: both live.
        ok(unsafe { (hip().graph_launch)(self.exec, self.stream.bind()) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `end_capture`.
        ok(unsafe { (hip().graph_exec_destroy)(self.exec) });
        // SAFETY: recorded by `end_capture`.
        ok(unsafe { (hip().graph_destroy)(self.graph) });
    }
}
