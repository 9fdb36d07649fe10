//! Wraps a stream of the caller, and the work that a caller submits to it.

use std::ffi::c_void;

use hip_sys::{
    Library, hipError_t, hipGraphExec_t, hipMemcpyKind, hipStream_t, hipStreamCaptureMode,
    hipStreamNonBlocking,
};
use peerlane_rocm::Stream;
use peerlane_tests::{Failure, Outcome};

use super::gpu::{Gpu, granted};
use super::memory::Pinned;
use crate::support::test_rank::CaptureMode;

/// A stream that does not wait for the default stream; it ends with the process.
#[derive(Clone)]
pub(crate) struct CallerStream {
    hip: &'static Library,
    raw: hipStream_t,
}

impl CallerStream {
    pub(super) fn new(gpu: &Gpu) -> Outcome<Self> {
        let mut raw = std::ptr::null_mut();
        let create = gpu.hip.stream_create_with_flags;
        // SAFETY: the result is stored in a local.
        granted("make a stream", unsafe { create(&raw mut raw, hipStreamNonBlocking) })?;
        Ok(Self { hip: gpu.hip, raw })
    }

    /// As Peerlane takes it.
    pub(crate) fn for_starts(&self) -> Stream {
        // SAFETY: streams of these tests live as long as the process.
        unsafe { Stream::from_raw(self.raw.cast()) }
    }

    fn put(&self, what: &str, to: u64, from: u64, bytes: usize, kind: hipMemcpyKind) -> Outcome {
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (to as *mut c_void, from as *const c_void);
        // SAFETY: the tests give addresses that live until the stream is finished, and look at what
        // is copied after that.
        let code = unsafe { (self.hip.memcpy_async)(to, from, bytes, kind, self.raw) };
        granted(what, code)
    }

    /// Copies to the device what the pinned memory holds by then.
    pub(crate) fn copy_in(
        &self,
        address: u64,
        from: &Pinned,
        offset: usize,
        bytes: usize,
    ) -> Outcome {
        let from = from.at(offset, bytes).as_ptr() as u64;
        self.put("copy to the device", address, from, bytes, hipMemcpyKind::hipMemcpyHostToDevice)
    }

    /// Copies from the device.
    pub(crate) fn copy_out(
        &self,
        to: &Pinned,
        offset: usize,
        address: u64,
        bytes: usize,
    ) -> Outcome {
        let to = to.at(offset, bytes).as_ptr() as u64;
        self.put("copy from the device", to, address, bytes, hipMemcpyKind::hipMemcpyDeviceToHost)
    }

    /// Copies inside the device.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Outcome {
        self.put("copy inside the device", to, from, bytes, hipMemcpyKind::hipMemcpyDeviceToDevice)
    }

    pub(crate) fn fill(&self, address: u64, byte: u8, bytes: usize) -> Outcome {
        if bytes == 0 {
            return Ok(());
        }
        let fill = self.hip.memset_async;
        // SAFETY: as in `put`.
        granted("fill", unsafe { fill(address as *mut c_void, byte.into(), bytes, self.raw) })
    }

    /// What it gets next waits until the host writes a 1 to the first byte of the gate, which held 0.
    pub(crate) fn hold(&self, gate: &Pinned) -> Outcome {
        let (wait, at) = (self.hip.stream_wait_value_32, gate.address() as *mut c_void);
        // SAFETY: the gate lives until the stream is finished.
        let code = unsafe { wait(self.raw, at, 1, hip_sys::hipStreamWaitValueGte, u32::MAX) };
        granted("hold a stream", code)
    }

    /// What it gets next comes after what `other` holds now.
    pub(crate) fn follow(&self, other: &Self) -> Outcome {
        let mut event = std::ptr::null_mut();
        let create = self.hip.event_create_with_flags;
        // SAFETY: the result is stored in a local.
        granted("make an event", unsafe {
            create(&raw mut event, hip_sys::hipEventDisableTiming)
        })?;
        // SAFETY: the event was made above, the stream lives.
        granted("record", unsafe { (self.hip.event_record)(event, other.raw) })?;
        // SAFETY: as above.
        granted("wait for a stream", unsafe { (self.hip.stream_wait_event)(self.raw, event, 0) })?;
        // SAFETY: as above; what waits for it keeps what it needs.
        granted("give an event back", unsafe { (self.hip.event_destroy)(event) })
    }

    /// Whether everything on it is done.
    pub(crate) fn is_done(&self) -> Outcome<bool> {
        // SAFETY: the stream lives.
        match unsafe { (self.hip.stream_query)(self.raw) } {
            hipError_t::hipSuccess => Ok(true),
            hipError_t::hipErrorNotReady => Ok(false),
            other => Err(Failure::new(format!("a stream has failed: {other:?}"))),
        }
    }

    /// Records what `work` puts onto it.
    pub(crate) fn record(
        &self,
        mode: CaptureMode,
        work: impl FnOnce() -> Outcome,
    ) -> Outcome<Graph> {
        let mode = match mode {
            CaptureMode::Global => hipStreamCaptureMode::hipStreamCaptureModeGlobal,
            CaptureMode::ThreadLocal => hipStreamCaptureMode::hipStreamCaptureModeThreadLocal,
        };
        // SAFETY: the stream lives.
        granted("begin a capture", unsafe { (self.hip.stream_begin_capture)(self.raw, mode) })?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: as above; the result is stored in a local.
        let ended = unsafe { (self.hip.stream_end_capture)(self.raw, &raw mut graph) };
        worked?;
        granted("end a capture", ended)?;
        let mut program = std::ptr::null_mut();
        let instantiate = self.hip.graph_instantiate_with_flags;
        // SAFETY: the graph was just recorded; the result is stored in a local.
        granted("instantiate a graph", unsafe { instantiate(&raw mut program, graph, 0) })?;
        // SAFETY: as above, and the program does not need it.
        granted("give a graph back", unsafe { (self.hip.graph_destroy)(graph) })?;
        Ok(Graph { stream: self.clone(), program })
    }
}

/// What was recorded, to be replayed on the stream that recorded it.
pub(crate) struct Graph {
    stream: CallerStream,
    program: hipGraphExec_t,
}

impl Graph {
    pub(crate) fn replay(&self) -> Outcome {
        let launch = self.stream.hip.graph_launch;
        // SAFETY: both live.
        granted("replay a graph", unsafe { launch(self.program, self.stream.raw) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated by `record`; replays that run keep what they need.
        let _ = unsafe { (self.stream.hip.graph_exec_destroy)(self.program) };
    }
}
