//! Streams.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::Face;
use super::call::{exchange_mode, refuse_during_capture};
use super::code::{INVALID_VALUE, NOT_READY, Outcome, STREAM_CAPTURE_IMPLICIT};
use super::handles::{EVENTS, STREAM_PER_THREAD, STREAMS, stream};
use super::out::{Out, store, store_if};
use crate::device::capture::Mode;
use crate::device::command::{Command, HostCall};
use crate::device::queue::{Queue, QueueKind};

const NON_BLOCKING: c_uint = 1;

/// How a capture of a stream stands.
const CAPTURE_NONE: c_int = 0;
const CAPTURE_ACTIVE: c_int = 1;
const CAPTURE_INVALIDATED: c_int = 2;

pub(crate) fn create<F: Face>(out: Out<'_, usize>, flags: c_uint) -> Outcome {
    let session = F::current()?;
    let kind = match flags {
        0 => QueueKind::Blocking,
        NON_BLOCKING => QueueKind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let place = out.ok_or(INVALID_VALUE)?;
    place.write(STREAMS.insert(session.new_queue(kind)));
    Ok(())
}

/// What the stream was given is still done.
pub(crate) fn destroy<F: Face>(handle: usize) -> Outcome {
    F::ready()?;
    let queue = STREAMS.remove(handle)?;
    queue.invalidate_capture();
    queue.close();
    Ok(())
}

/// The same, once it is done.
pub(crate) fn drain_and_destroy<F: Face>(handle: usize) -> Outcome {
    F::ready()?;
    let queue = stream::<F>(handle)?;
    if !queue.is_capturing() {
        queue.drain()?;
    }
    destroy::<F>(handle)
}

/// How the session of a queue that has drained is.
fn health(queue: &Queue) -> Outcome {
    queue.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

pub(crate) fn query<F: Face>(handle: usize) -> Outcome {
    let queue = stream::<F>(handle)?;
    queue.refuse_while_capturing()?;
    refuse_during_capture()?;
    if queue.is_idle() { health(&queue) } else { Err(NOT_READY) }
}

pub(crate) fn synchronize<F: Face>(handle: usize) -> Outcome {
    let queue = stream::<F>(handle)?;
    queue.refuse_while_capturing()?;
    refuse_during_capture()?;
    queue.drain()?;
    health(&queue)
}

/// Waits for every stream of the session that is current.
pub(crate) fn synchronize_all<F: Face>() -> Outcome {
    let session = F::current()?;
    refuse_during_capture()?;
    for queue in session.queues() {
        queue.refuse_while_capturing()?;
        queue.drain()?;
    }
    session.fault().map_or(Ok(()), |fault| Err(fault.into()))
}

pub(crate) fn wait_event<F: Face>(handle: usize, event: usize, flags: c_uint) -> Outcome {
    let queue = stream::<F>(handle)?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    Ok(EVENTS.find(event)?.hold(&queue)?)
}

pub(crate) fn flags<F: Face>(handle: usize, out: Out<'_, c_uint>) -> Outcome {
    store(out, c_uint::from(stream::<F>(handle)?.kind() == QueueKind::NonBlocking))
}

/// The state of a capture and its number, 0 for none.
fn capture_of<F: Face>(handle: usize) -> Outcome<(c_int, u64)> {
    if handle <= STREAM_PER_THREAD {
        let blocking = |queue: &Arc<Queue>| queue.kind() == QueueKind::Blocking;
        let mut queues = F::current()?.queues().into_iter().filter(blocking);
        if queues.any(|queue| queue.is_capturing()) {
            return Err(STREAM_CAPTURE_IMPLICIT);
        }
        return Ok((CAPTURE_NONE, 0));
    }
    Ok(stream::<F>(handle)?.with_member(|member| match member {
        None => (CAPTURE_NONE, 0),
        Some(member) if member.capture().is_invalid() => {
            (CAPTURE_INVALIDATED, member.capture().id())
        }
        Some(member) => (CAPTURE_ACTIVE, member.capture().id()),
    }))
}

pub(crate) fn is_capturing<F: Face>(handle: usize, out: Out<'_, c_int>) -> Outcome {
    store(out, capture_of::<F>(handle)?.0)
}

pub(crate) fn capture_info<F: Face>(
    handle: usize,
    status: Out<'_, c_int>,
    id: Out<'_, u64>,
) -> Outcome {
    let (state, number) = capture_of::<F>(handle)?;
    store(status, state)?;
    store_if(id, number)
}

pub(crate) fn mode(number: c_int) -> Outcome<Mode> {
    match number {
        0 => Ok(Mode::Global),
        1 => Ok(Mode::ThreadLocal),
        2 => Ok(Mode::Relaxed),
        _ => Err(INVALID_VALUE),
    }
}

/// Sets what this thread may do during captures, and gives what was set before in its place.
pub(crate) fn exchange(number: Option<&mut c_int>) -> Outcome {
    let number = number.ok_or(INVALID_VALUE)?;
    *number = exchange_mode(mode(*number)?) as c_int;
    Ok(())
}

/// A function of the caller that a stream calls.
pub(crate) type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

pub(crate) fn call_host<F: Face>(
    handle: usize,
    function: HostFunction,
    data: *mut c_void,
) -> Outcome {
    let queue = stream::<F>(handle)?;
    let function = function.ok_or(INVALID_VALUE)?;
    Ok(queue.submit(Command::Call(HostCall { function, data }))?)
}
