//! Captures and replays of CUDA.

use peerlane_toolkit::device::{ExecHandle, GraphCalls, GraphHandle, StreamHandle};

use crate::device::Context;
use crate::error::Error;
use crate::sys;

impl GraphCalls for Context {
    unsafe fn begin_capture(&self, stream: StreamHandle) -> Result<(), Error> {
        let mode = sys::STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.stream_begin_capture)(stream.0, mode) };
        self.check("cuStreamBeginCapture", code)
    }

    unsafe fn end_capture(&self, stream: StreamHandle) -> Result<GraphHandle, Error> {
        let mut graph = std::ptr::null_mut();
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.driver.stream_end_capture)(stream.0, &raw mut graph) };
        self.check("cuStreamEndCapture", code)?;
        Ok(GraphHandle(graph))
    }

    unsafe fn instantiate(&self, graph: GraphHandle) -> Result<ExecHandle, Error> {
        let mut executable = std::ptr::null_mut();
        // SAFETY: the caller's; the result is stored in a local.
        let code = unsafe { (self.driver.graph_instantiate)(&raw mut executable, graph.0, 0) };
        self.check("cuGraphInstantiateWithFlags", code)?;
        Ok(ExecHandle(executable))
    }

    unsafe fn launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<(), Error> {
        // SAFETY: the caller's.
        let code = unsafe { (self.driver.graph_launch)(exec.0, stream.0) };
        self.check("cuGraphLaunch", code)
    }

    unsafe fn destroy_exec(&self, exec: ExecHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.graph_exec_destroy)(exec.0) };
    }

    unsafe fn destroy_graph(&self, graph: GraphHandle) {
        // SAFETY: the caller's.
        let _ = unsafe { (self.driver.graph_destroy)(graph.0) };
    }
}
