//! Implements the calls on captures and graphs.

use std::ffi::c_int;
use std::sync::Arc;

use super::Api;
use super::code::{INVALID_VALUE, Outcome, STREAM_CAPTURE_UNSUPPORTED};
use super::handles::{GRAPHS, PROGRAMS, STREAM_PER_THREAD, stream};
use super::out::{Out, store};
use super::stream::mode;
use crate::device::capture::Capture;
use crate::device::command::Command;
use crate::device::counters::{Counter, NO_DEVICE};
use crate::device::graph::Program;

pub(crate) fn begin<A: Api>(handle: usize, number: c_int) -> Outcome {
    if handle <= STREAM_PER_THREAD {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(Capture::begin(&stream::<A>(handle)?, mode(number)?)?)
}

/// Ends a capture. A capture that failed ends too, without a graph.
pub(crate) fn end<A: Api>(handle: usize, out: Out<'_, usize>) -> Outcome {
    let place = out.ok_or(INVALID_VALUE)?;
    let queue = stream::<A>(handle)?;
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
}

pub(crate) fn instantiate<A: Api>(out: Out<'_, usize>, graph: usize) -> Outcome {
    A::ready()?;
    let program = Program::new(GRAPHS.find(graph)?.to_vec(), A::BRANCHES_TAKE_CHANNELS);
    Counter::LiveGraphs.add(NO_DEVICE, 1);
    store(out, PROGRAMS.insert(program))
}

pub(crate) fn launch<A: Api>(program: usize, handle: usize) -> Outcome {
    let (program, queue) = (PROGRAMS.find(program)?, stream::<A>(handle)?);
    if queue.is_capturing() {
        return Ok(queue.submit(Command::Launch(program.nested()))?);
    }
    Ok(program.launch(|launch| queue.submit(Command::Launch(launch)))?)
}

/// Checks its arguments; programs need no upload here.
pub(crate) fn upload<A: Api>(program: usize, handle: usize) -> Outcome {
    stream::<A>(handle)?;
    PROGRAMS.find(program).map(|_| ())
}

/// Stores the number of nodes; nodes have no handles here.
pub(crate) fn count_nodes(graph: usize, count: Out<'_, usize>) -> Outcome {
    store(count, GRAPHS.find(graph)?.len())
}

pub(crate) fn destroy_program(program: usize) -> Outcome {
    PROGRAMS.remove(program)?;
    Counter::LiveGraphs.add(NO_DEVICE, -1);
    Ok(())
}

pub(crate) fn destroy(graph: usize) -> Outcome {
    GRAPHS.remove(graph)?;
    Counter::LiveGraphs.add(NO_DEVICE, -1);
    Ok(())
}
