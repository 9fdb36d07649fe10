//! Captures and graphs.

use std::ffi::{c_char, c_int, c_ulonglong};

use super::Hip;
use super::call::enter;
use super::types::{hipError_t, hipGraph_t, hipGraphExec_t, hipStream_t};
use crate::runtime::graph;
use crate::runtime::out::Out;

#[unsafe(no_mangle)]
extern "C" fn hipStreamBeginCapture(handle: hipStream_t, mode: c_int) -> hipError_t {
    enter("hipStreamBeginCapture", || graph::begin::<Hip>(handle, mode))
}

#[unsafe(no_mangle)]
extern "C" fn hipStreamEndCapture(handle: hipStream_t, out: Out<'_, hipGraph_t>) -> hipError_t {
    enter("hipStreamEndCapture", || graph::end::<Hip>(handle, out))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphInstantiate(
    out: Out<'_, hipGraphExec_t>,
    graph: hipGraph_t,
    _failed: usize,
    _log: *mut c_char,
    _log_bytes: usize,
) -> hipError_t {
    enter("hipGraphInstantiate", || graph::instantiate::<Hip>(out, graph))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphInstantiateWithFlags(
    out: Out<'_, hipGraphExec_t>,
    graph: hipGraph_t,
    _flags: c_ulonglong,
) -> hipError_t {
    enter("hipGraphInstantiateWithFlags", || graph::instantiate::<Hip>(out, graph))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphLaunch(program: hipGraphExec_t, handle: hipStream_t) -> hipError_t {
    enter("hipGraphLaunch", || graph::launch::<Hip>(program, handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphUpload(program: hipGraphExec_t, handle: hipStream_t) -> hipError_t {
    enter("hipGraphUpload", || graph::upload::<Hip>(program, handle))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphGetNodes(
    graph: hipGraph_t,
    _nodes: usize,
    count: Out<'_, usize>,
) -> hipError_t {
    enter("hipGraphGetNodes", || graph::count_nodes(graph, count))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphExecDestroy(program: hipGraphExec_t) -> hipError_t {
    enter("hipGraphExecDestroy", || graph::destroy_program(program))
}

#[unsafe(no_mangle)]
extern "C" fn hipGraphDestroy(graph: hipGraph_t) -> hipError_t {
    enter("hipGraphDestroy", || graph::destroy(graph))
}
