//! Adapts CUDA to the tests that all stream engines share.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaGraph, CudaStream, result, sys};
pub(crate) use peerlane_cuda::{Engine, Error, Fabric, Local, Options, Remote, SignalBy, Stream};
use peerlane_hal::{ErrorKind, Region as _};
use peerlane_simulated_driver::{Driver, install_from, without_symbols};

pub(crate) use crate::support::{connected, driver, pattern, ranks, soon};

/// Installs a driver without batched memory operations, as the oldest supported ones are.
pub(crate) fn oldest_driver() -> Driver {
    let symbols =
        ["cuStreamBatchMemOp_v2", "cuStreamCreateWithPriority", "cuStreamGetCaptureInfo_v2"];
    install_from(&without_symbols(&symbols))
}

/// Name of simulated devices.
pub(crate) const DEVICE_NAME: &str = "Simulated GPU";
/// The call that submits several memory operations.
pub(crate) const BATCH: &str = "cuStreamBatchMemOp_v2";
/// Calls of a start, a result that each fails with, and the expected error kind.
pub(crate) const REFUSALS: [(&str, i32, ErrorKind); 4] = [
    (BATCH, 9999, ErrorKind::Other),
    ("cuMemcpyAsync", 2, ErrorKind::OutOfMemory),
    ("cuStreamWaitEvent", 400, ErrorKind::Other),
    ("cuEventRecord", 700, ErrorKind::DeviceLost),
];
/// Functions that make a device fail.
pub(crate) const LOSSES: [fn(&Driver, u32); 2] =
    [|driver, device| driver.break_device(device, 700), Driver::destroy_context];

/// Capture mode: the threads whose calls a capture restricts.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mode {
    Global,
    ThreadLocal,
    Relaxed,
}

/// A compute stream of a rank. The tests compute by copying.
#[derive(Clone)]
pub(crate) struct Compute {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

impl Compute {
    pub(crate) fn new(device: usize) -> Self {
        let context = CudaContext::new(device).expect("a device");
        let stream = context.new_stream().expect("a stream");
        Self { context, stream }
    }

    pub(crate) fn handle(&self) -> Stream {
        // SAFETY: tests keep their streams until the engines are gone.
        unsafe { Stream::from_raw(self.stream.cu_stream().cast()) }
    }

    /// Copies a whole region in stream order. Copies from and to the host would block the host.
    pub(crate) fn copy(&self, to: &Local, from: &Local) {
        assert_eq!(to.bytes(), from.bytes());
        self.context.bind_to_thread().unwrap();
        let (bytes, stream) = (to.bytes() as usize, self.stream.cu_stream());
        let (to, from) = (to.device_ptr(), from.device_ptr());
        // SAFETY: both regions have this length, and tests keep them until the stream is finished.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream) }.unwrap();
    }

    /// Orders later work of this stream after the work that `other` holds.
    pub(crate) fn wait_for(&self, other: &Self) {
        self.stream.join(&other.stream).unwrap();
    }

    pub(crate) fn finish(&self) {
        self.stream.synchronize().unwrap();
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.context.bind_to_thread().unwrap();
        // SAFETY: the stream lives.
        let code = unsafe { sys::cuStreamQuery(self.stream.cu_stream()) };
        assert!(
            [sys::CUresult::CUDA_SUCCESS, sys::CUresult::CUDA_ERROR_NOT_READY].contains(&code),
            "{code:?}"
        );
        code == sys::CUresult::CUDA_SUCCESS
    }

    pub(crate) fn begin_capture(&self, mode: Mode) {
        use sys::CUstreamCaptureMode as Raw;
        let mode = match mode {
            Mode::Global => Raw::CU_STREAM_CAPTURE_MODE_GLOBAL,
            Mode::ThreadLocal => Raw::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            Mode::Relaxed => Raw::CU_STREAM_CAPTURE_MODE_RELAXED,
        };
        self.stream.begin_capture(mode).unwrap();
    }

    pub(crate) fn end_capture(&self) -> Graph {
        Graph(self.end().expect("the capture recorded work"))
    }

    /// Ends a capture that recorded nothing and stayed valid.
    pub(crate) fn end_empty_capture(&self) {
        drop(self.end());
    }

    fn end(&self) -> Option<CudaGraph> {
        let flags = sys::CUgraphInstantiate_flags(0);
        self.stream.end_capture(flags).expect("the capture is valid")
    }
}

/// An instantiated graph that is replayed on the stream that captured it.
pub(crate) struct Graph(CudaGraph);

impl Graph {
    pub(crate) fn launch(&self) {
        self.0.launch().unwrap();
    }
}
