//! Captures and replays of HIP.

use peerlane_toolkit::device::{ExecHandle, GraphCalls, GraphHandle, StreamHandle};

use super::queue::raw;
use crate::device::Context;
use crate::error::Error;
use crate::sys::hip::hipStreamCaptureMode;

impl GraphCalls for Context {
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Error> {
        let mode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.stream_begin_capture)(raw(stream), mode) };
        self.check("hipStreamBeginCapture", code)
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Error> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.hip.calls.stream_end_capture)(raw(stream), &raw mut graph) };
        self.check("hipStreamEndCapture", code)?;
        Ok(GraphHandle(graph.cast()))
    }

    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Error> {
        let mut executable = std::ptr::null_mut();
        let make = self.hip.calls.graph_instantiate_with_flags;
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { make(&raw mut executable, graph.0.cast(), 0) };
        self.check("hipGraphInstantiateWithFlags", code)?;
        Ok(ExecHandle(executable.cast()))
    }

    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.hip.calls.graph_launch)(exec.0.cast(), raw(stream)) };
        self.check("hipGraphLaunch", code)
    }

    unsafe fn destroy_exec(&self, exec: ExecHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.graph_exec_destroy)(exec.0.cast()) };
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.hip.calls.graph_destroy)(graph.0.cast()) };
    }
}
