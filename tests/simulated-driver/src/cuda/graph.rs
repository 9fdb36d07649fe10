//! Captures and graphs.

use std::ffi::{c_int, c_ulonglong};
use std::sync::Arc;

use super::call::enter;
use super::code::{CUresult, INVALID_VALUE, STREAM_CAPTURE_UNSUPPORTED};
use super::context;
use super::handles::{GRAPHS, PROGRAMS, stream};
use super::stream::mode;
use super::types::{CUgraph, CUgraphExec, CUstream, Out, STREAM_PER_THREAD, store};
use crate::device::capture::Capture;
use crate::device::command::Command;
use crate::device::counters::{Counter, NO_DEVICE};
use crate::device::graph::Program;

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(handle: CUstream, number: c_int) -> CUresult {
    enter("cuStreamBeginCapture_v2", || {
        if handle <= STREAM_PER_THREAD {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        Ok(Capture::begin(&stream(handle)?, mode(number)?)?)
    })
}

/// A capture that failed has ended all the same, and gives no graph.
#[unsafe(no_mangle)]
extern "C" fn cuStreamEndCapture(handle: CUstream, out: Out<'_, CUgraph>) -> CUresult {
    enter("cuStreamEndCapture", || {
        let place = out.ok_or(INVALID_VALUE)?;
        let queue = stream(handle)?;
        match Capture::end(&queue) {
            Ok(nodes) => {
                Counter::LiveGraphs.add(NO_DEVICE, 1);
                place.write(GRAPHS.insert(Arc::new(nodes)));
                Ok(())
            }
            Err(error) => {
                place.write(0);
                Err(error.into())
            }
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphInstantiateWithFlags(
    out: Out<'_, CUgraphExec>,
    graph: CUgraph,
    _flags: c_ulonglong,
) -> CUresult {
    enter("cuGraphInstantiateWithFlags", || {
        context::current()?;
        let program = Program::new(GRAPHS.find(graph)?.to_vec());
        Counter::LiveGraphs.add(NO_DEVICE, 1);
        store(out, PROGRAMS.insert(program))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphLaunch(program: CUgraphExec, handle: CUstream) -> CUresult {
    enter("cuGraphLaunch", || {
        let (program, queue) = (PROGRAMS.find(program)?, stream(handle)?);
        if queue.is_capturing() {
            return Ok(queue.submit(Command::Launch(program.nested()))?);
        }
        Ok(program.launch(|launch| queue.submit(Command::Launch(launch)))?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphUpload(program: CUgraphExec, handle: CUstream) -> CUresult {
    enter("cuGraphUpload", || {
        stream(handle)?;
        PROGRAMS.find(program).map(|_| ())
    })
}

/// Only counts the nodes; they have no handles here.
#[unsafe(no_mangle)]
extern "C" fn cuGraphGetNodes(graph: CUgraph, _nodes: usize, count: Out<'_, usize>) -> CUresult {
    enter("cuGraphGetNodes", || store(count, GRAPHS.find(graph)?.len()))
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphExecDestroy(program: CUgraphExec) -> CUresult {
    enter("cuGraphExecDestroy", || {
        PROGRAMS.remove(program)?;
        Counter::LiveGraphs.add(NO_DEVICE, -1);
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    enter("cuGraphDestroy", || {
        GRAPHS.remove(graph)?;
        Counter::LiveGraphs.add(NO_DEVICE, -1);
        Ok(())
    })
}
