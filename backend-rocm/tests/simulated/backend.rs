//! Calls of HIP that the shared tests of engines over streams need.

use std::ffi::c_void;
use std::sync::Arc;

use hip_sys::{
    hipError_t, hipGraph_t, hipGraphExec_t, hipMemcpyKind, hipStream_t, hipStreamCaptureMode,
};
use peerlane_hal::{ErrorKind, Region as _};
pub(crate) use peerlane_rocm::{Engine, Error, Fabric, Local, Options, Remote, SignalBy, Stream};
use peerlane_simulated_driver::{Driver, Rocm};

pub(crate) use crate::support::{connected, driver, pattern, soon};

/// Installs the oldest supported release: without batched memory operations, and without copies that use no compute
/// units.
pub(crate) fn oldest_driver() -> Driver {
    Rocm::release("5.7").install()
}

/// Opens connected ranks of this process, each on the device with its number.
pub(crate) fn ranks(count: usize) -> Result<Vec<Fabric>, Error> {
    crate::support::ranks(count, false)
}

/// Name of the simulated devices.
pub(crate) const DEVICE_NAME: &str = "Simulated Instinct";
/// Call that takes several memory operations.
pub(crate) const BATCH: &str = "hipStreamBatchMemOp";
/// Calls of a start with a result that makes each fail, and the expected error kind.
pub(crate) const REFUSALS: [(&str, i32, ErrorKind); 4] = [
    (BATCH, 9999, ErrorKind::Other),
    ("hipMemcpyAsync", 2, ErrorKind::OutOfMemory),
    ("hipStreamWaitEvent", 400, ErrorKind::Other),
    ("hipEventRecord", 700, ErrorKind::DeviceLost),
];
/// Functions that break a device.
pub(crate) const LOSSES: [fn(&Driver, u32); 1] =
    [|driver, device| driver.break_device(device, 700)];

/// Capture mode of a stream.
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

/// A stream on which a rank computes. Here the compute work is copies.
#[derive(Clone)]
pub(crate) struct Compute(Arc<Owned>);

struct Owned {
    device: i32,
    stream: hipStream_t,
}

// SAFETY: HIP accepts a stream from every thread.
unsafe impl Send for Owned {}
// SAFETY: as above.
unsafe impl Sync for Owned {}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: `new` created the stream, and no engine uses it any more.
        ok(unsafe { (hip().stream_destroy)(self.stream) });
    }
}

impl Compute {
    pub(crate) fn new(device: usize) -> Self {
        let device = i32::try_from(device).expect("the number of a device");
        let mut stream = std::ptr::null_mut();
        // SAFETY: HIP checks the number.
        ok(unsafe { (hip().set_device)(device) });
        let create = hip().stream_create_with_flags;
        // SAFETY: the result is stored in a local.
        ok(unsafe { create(&raw mut stream, hip_sys::hipStreamNonBlocking) });
        Self(Arc::new(Owned { device, stream }))
    }

    fn bind(&self) -> hipStream_t {
        // SAFETY: `new` used the same number.
        ok(unsafe { (hip().set_device)(self.0.device) });
        self.0.stream
    }

    pub(crate) fn handle(&self) -> Stream {
        // SAFETY: tests keep their streams until the engines are dropped.
        unsafe { Stream::from_raw(self.0.stream.cast()) }
    }

    /// Copies a whole region after earlier work of the stream.
    ///
    /// Copies from and to the host would block the host.
    pub(crate) fn copy(&self, to: &Local, from: &Local) {
        assert_eq!(to.bytes(), from.bytes());
        let (bytes, stream) = (to.bytes() as usize, self.bind());
        let (to, from) = (to.device_ptr() as *mut c_void, from.device_ptr() as *const c_void);
        let kind = hipMemcpyKind::hipMemcpyDeviceToDevice;
        // SAFETY: both regions have this length, and tests keep them until the stream is finished.
        ok(unsafe { (hip().memcpy_async)(to, from, bytes, kind, stream) });
    }

    /// Orders later work of this stream after the work that `other` holds.
    pub(crate) fn wait_for(&self, other: &Self) {
        let (stream, mut event) = (self.bind(), std::ptr::null_mut());
        let create = hip().event_create_with_flags;
        // SAFETY: the result is stored in a local.
        ok(unsafe { create(&raw mut event, hip_sys::hipEventDisableTiming) });
        // SAFETY: both are alive.
        ok(unsafe { (hip().event_record)(event, other.0.stream) });
        // SAFETY: both are alive.
        ok(unsafe { (hip().stream_wait_event)(stream, event, 0) });
        // SAFETY: the event was created above; destroying it does not affect the wait.
        ok(unsafe { (hip().event_destroy)(event) });
    }

    pub(crate) fn finish(&self) {
        // SAFETY: the stream is alive.
        ok(unsafe { (hip().stream_synchronize)(self.bind()) });
    }

    pub(crate) fn is_idle(&self) -> bool {
        // SAFETY: the stream is alive.
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
        // SAFETY: the stream is alive.
        ok(unsafe { (hip().stream_begin_capture)(self.bind(), mode) });
    }

    pub(crate) fn end_capture(&self) -> Graph {
        let (graph, mut exec) = (self.end(), std::ptr::null_mut());
        let instantiate = hip().graph_instantiate_with_flags;
        // SAFETY: the graph is alive; the result is stored in a local.
        ok(unsafe { instantiate(&raw mut exec, graph, 0) });
        Graph { graph, exec, stream: self.clone() }
    }

    /// Ends a capture that recorded nothing.
    pub(crate) fn end_empty_capture(&self) {
        let graph = self.end();
        if !graph.is_null() {
            // SAFETY: the graph was captured above.
            ok(unsafe { (hip().graph_destroy)(graph) });
        }
    }

    fn end(&self) -> hipGraph_t {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is alive; the result is stored in a local.
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
        // SAFETY: both are alive.
        ok(unsafe { (hip().graph_launch)(self.exec, self.stream.bind()) });
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: `end_capture` instantiated it.
        ok(unsafe { (hip().graph_exec_destroy)(self.exec) });
        // SAFETY: `end_capture` captured it.
        ok(unsafe { (hip().graph_destroy)(self.graph) });
    }
}
