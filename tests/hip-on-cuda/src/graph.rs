//! Exports the calls on graphs.

use std::ffi::{c_char, c_ulonglong};

use hip_sys::{hipGraph_t, hipGraphExec_t, hipGraphNode_t, hipStream_t};

use crate::calls::hip;

hip! {
    fn hipGraphInstantiate(
        out: *mut hipGraphExec_t,
        graph: hipGraph_t,
        _node: *mut hipGraphNode_t,
        _log: *mut c_char,
        _log_bytes: usize,
    ) = |cuda| (cuda.cuGraphInstantiate)(out.cast(), graph.cast(), 0);
    fn hipGraphInstantiateWithFlags(
        out: *mut hipGraphExec_t,
        graph: hipGraph_t,
        flags: c_ulonglong,
    ) = |cuda| (cuda.cuGraphInstantiate)(out.cast(), graph.cast(), flags);
    fn hipGraphLaunch(exec: hipGraphExec_t, stream: hipStream_t) =
        |cuda| (cuda.cuGraphLaunch)(exec.cast(), stream.cast());
    fn hipGraphExecDestroy(exec: hipGraphExec_t) =
        |cuda| (cuda.cuGraphExecDestroy)(exec.cast());
    fn hipGraphDestroy(graph: hipGraph_t) = |cuda| (cuda.cuGraphDestroy)(graph.cast());
}
