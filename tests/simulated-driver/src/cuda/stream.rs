//! Streams.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use super::call::{enter, exchange_mode, refuse_during_capture};
use super::code::{CUresult, INVALID_VALUE, NOT_READY, Outcome, STREAM_CAPTURE_IMPLICIT};
use super::context;
use super::handles::{EVENTS, STREAMS, stream};
use super::types::{
    CUcontext, CUevent, CUgraph, CUstream, Out, STREAM_NON_BLOCKING, STREAM_PER_THREAD, store,
};
use crate::device::capture::Mode;
use crate::device::command::{Command, HostCall};
use crate::device::queue::{Queue, QueueKind};

/// What `cuStreamIsCapturing` answers.
const CAPTURE_NONE: c_int = 0;
const CAPTURE_ACTIVE: c_int = 1;
const CAPTURE_INVALIDATED: c_int = 2;

fn create(out: Out<'_, CUstream>, flags: c_uint) -> Outcome {
    let session = context::current()?;
    let kind = match flags {
        0 => QueueKind::Blocking,
        STREAM_NON_BLOCKING => QueueKind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let place = out.ok_or(INVALID_VALUE)?;
    place.write(STREAMS.insert(session.new_queue(kind)));
    Ok(())
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamCreate(out: Out<'_, CUstream>, flags: c_uint) -> CUresult {
    enter("cuStreamCreate", || create(out, flags))
}

/// Priorities change nothing here; copy engines ignore them as well.
#[unsafe(no_mangle)]
extern "C" fn cuStreamCreateWithPriority(
    out: Out<'_, CUstream>,
    flags: c_uint,
    _priority: c_int,
) -> CUresult {
    enter("cuStreamCreateWithPriority", || create(out, flags))
}

/// What the stream was given is still done.
#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(handle: CUstream) -> CUresult {
    enter("cuStreamDestroy_v2", || {
        context::current()?;
        let queue = STREAMS.remove(handle)?;
        queue.invalidate_capture();
        queue.close();
        Ok(())
    })
}

/// How the session of a queue that has drained is.
fn health(queue: &Queue) -> Outcome {
    queue.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamQuery(handle: CUstream) -> CUresult {
    enter("cuStreamQuery", || {
        let queue = stream(handle)?;
        queue.refuse_while_capturing()?;
        refuse_during_capture()?;
        if queue.is_idle() { health(&queue) } else { Err(NOT_READY) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(handle: CUstream) -> CUresult {
    enter("cuStreamSynchronize", || {
        let queue = stream(handle)?;
        queue.refuse_while_capturing()?;
        refuse_during_capture()?;
        queue.drain()?;
        health(&queue)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(handle: CUstream, event: CUevent, flags: c_uint) -> CUresult {
    enter("cuStreamWaitEvent", || {
        let queue = stream(handle)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        Ok(EVENTS.find(event)?.hold(&queue)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCtx(handle: CUstream, out: Out<'_, CUcontext>) -> CUresult {
    enter("cuStreamGetCtx", || store(out, context::handle_of(stream(handle)?.session().device())))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamGetFlags(handle: CUstream, out: Out<'_, c_uint>) -> CUresult {
    enter("cuStreamGetFlags", || {
        store(out, c_uint::from(stream(handle)?.kind() == QueueKind::NonBlocking))
    })
}

/// The state of a capture and its number, 0 for none.
fn capture_of(handle: CUstream) -> Outcome<(c_int, u64)> {
    if handle <= STREAM_PER_THREAD {
        let blocking = |queue: &Arc<Queue>| queue.kind() == QueueKind::Blocking;
        let mut queues = context::current()?.queues().into_iter().filter(blocking);
        if queues.any(|queue| queue.is_capturing()) {
            return Err(STREAM_CAPTURE_IMPLICIT);
        }
        return Ok((CAPTURE_NONE, 0));
    }
    Ok(stream(handle)?.with_member(|member| match member {
        None => (CAPTURE_NONE, 0),
        Some(member) if member.capture().is_invalid() => {
            (CAPTURE_INVALIDATED, member.capture().id())
        }
        Some(member) => (CAPTURE_ACTIVE, member.capture().id()),
    }))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamIsCapturing(handle: CUstream, out: Out<'_, c_int>) -> CUresult {
    enter("cuStreamIsCapturing", || store(out, capture_of(handle)?.0))
}

/// The graph that grows and its nodes have no handles here, and are answered with none.
#[unsafe(no_mangle)]
extern "C" fn cuStreamGetCaptureInfo_v2(
    handle: CUstream,
    status: Out<'_, c_int>,
    id: Out<'_, c_ulonglong>,
    graph: Out<'_, CUgraph>,
    dependencies: Out<'_, usize>,
    dependencies_count: Out<'_, usize>,
) -> CUresult {
    enter("cuStreamGetCaptureInfo_v2", || {
        let (state, number) = capture_of(handle)?;
        store(status, state)?;
        for (out, value) in [(graph, 0), (dependencies, 0), (dependencies_count, 0)] {
            if out.is_some() {
                store(out, value)?;
            }
        }
        if id.is_some() { store(id, number) } else { Ok(()) }
    })
}

pub(super) fn mode(number: c_int) -> Outcome<Mode> {
    match number {
        0 => Ok(Mode::Global),
        1 => Ok(Mode::ThreadLocal),
        2 => Ok(Mode::Relaxed),
        _ => Err(INVALID_VALUE),
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuThreadExchangeStreamCaptureMode(number: Option<&mut c_int>) -> CUresult {
    enter("cuThreadExchangeStreamCaptureMode", || {
        let number = number.ok_or(INVALID_VALUE)?;
        *number = exchange_mode(mode(*number)?) as c_int;
        Ok(())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuLaunchHostFunc(
    handle: CUstream,
    function: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> CUresult {
    enter("cuLaunchHostFunc", || {
        let queue = stream(handle)?;
        let function = function.ok_or(INVALID_VALUE)?;
        Ok(queue.submit(Command::Call(HostCall { function, data }))?)
    })
}
