//! Captures and graphs.

use std::ffi::{c_int, c_ulonglong};

use super::Cuda;
use super::types::{CUgraph, CUgraphExec, CUresult, CUstream};
use crate::runtime::call::enter;
use crate::runtime::graph;
use crate::runtime::out::Out;

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(handle: CUstream, mode: c_int) -> CUresult {
    enter("cuStreamBeginCapture_v2", || graph::begin::<Cuda>(handle, mode))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(handle: CUstream, out: Out<'_, CUgraph>) -> CUresult {
    enter("cuStreamEndCapture", || graph::end::<Cuda>(handle, out))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphInstantiateWithFlags(
    out: Out<'_, CUgraphExec>,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    enter("cuGraphInstantiateWithFlags", || graph::instantiate::<Cuda>(out, graph))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(program: CUgraphExec, handle: CUstream) -> CUresult {
    enter("cuGraphLaunch", || graph::launch::<Cuda>(program, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(program: CUgraphExec, handle: CUstream) -> CUresult {
    enter("cuGraphUpload", || graph::upload::<Cuda>(program, handle))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphGetNodes(graph: CUgraph, _nodes: usize, count: Out<'_, usize>) -> CUresult {
    enter("cuGraphGetNodes", || graph::count_nodes(graph, count))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(program: CUgraphExec) -> CUresult {
    enter("cuGraphExecDestroy", || graph::destroy_program(program))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    enter("cuGraphDestroy", || graph::destroy(graph))
}
