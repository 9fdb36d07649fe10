//! Captures and graphs.

use std::ffi::c_int;
use std::sync::Arc;

use super::Face;
use super::code::{INVALID_VALUE, Outcome, STREAM_CAPTURE_UNSUPPORTED};
use super::handles::{GRAPHS, PROGRAMS, STREAM_PER_THREAD, stream};
use super::out::{Out, store};
use super::stream::mode;
use crate::device::capture::Capture;
use crate::device::command::Command;
use crate::device::counters::{Counter, NO_DEVICE};
use crate::device::graph::Program;

pub(crate) fn begin<F: Face>(handle: usize, number: c_int) -> Outcome {
    if handle <= STREAM_PER_THREAD {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(Capture::begin(&stream::<F>(handle)?, mode(number)?)?)
}

/// A capture that failed has ended all the same, and gives no graph.
pub(crate) fn end<F: Face>(handle: usize, out: Out<'_, usize>) -> Outcome {
    let place = out.ok_or(INVALID_VALUE)?;
    let queue = stream::<F>(handle)?;
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

pub(crate) fn instantiate<F: Face>(out: Out<'_, usize>, graph: usize) -> Outcome {
    F::ready()?;
    let program = Program::new(GRAPHS.find(graph)?.to_vec());
    Counter::LiveGraphs.add(NO_DEVICE, 1);
    store(out, PROGRAMS.insert(program))
}

pub(crate) fn launch<F: Face>(program: usize, handle: usize) -> Outcome {
    let (program, queue) = (PROGRAMS.find(program)?, stream::<F>(handle)?);
    if queue.is_capturing() {
        return Ok(queue.submit(Command::Launch(program.nested()))?);
    }
    Ok(program.launch(|launch| queue.submit(Command::Launch(launch)))?)
}

/// Programs need no room on a device here.
pub(crate) fn upload<F: Face>(program: usize, handle: usize) -> Outcome {
    stream::<F>(handle)?;
    PROGRAMS.find(program).map(|_| ())
}

/// Only counts the nodes; they have no handles here.
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
