//! Implements the calls on streams.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

use super::Api;
use super::call::{exchange_mode, refuse_during_capture};
use super::code::{INVALID_VALUE, NOT_READY, Outcome, STREAM_CAPTURE_IMPLICIT};
use super::handles::{EVENTS, STREAM_PER_THREAD, STREAMS, stream};
use super::out::{Out, store, store_if};
use crate::device::capture::Mode;
use crate::device::command::{Command, HostCall};
use crate::device::queue::{Queue, QueueKind};

const NON_BLOCKING: c_uint = 1;

/// States of a stream's capture.
const CAPTURE_NONE: c_int = 0;
const CAPTURE_ACTIVE: c_int = 1;
const CAPTURE_INVALIDATED: c_int = 2;

pub(crate) fn create<A: Api>(out: Out<'_, usize>, flags: c_uint) -> Outcome {
    let session = A::current()?;
    let kind = match flags {
        0 => QueueKind::Blocking,
        NON_BLOCKING => QueueKind::NonBlocking,
        _ => return Err(INVALID_VALUE),
    };
    let place = out.ok_or(INVALID_VALUE)?;
    place.write(STREAMS.insert(session.new_queue(kind)));
    Ok(())
}

/// Destroys a stream; its commands are still executed.
pub(crate) fn destroy<A: Api>(handle: usize) -> Outcome {
    A::ready()?;
    let queue = STREAMS.remove(handle)?;
    queue.invalidate_capture();
    queue.close();
    Ok(())
}

/// Destroys a stream after its commands were executed.
pub(crate) fn drain_and_destroy<A: Api>(handle: usize) -> Outcome {
    A::ready()?;
    let queue = stream::<A>(handle)?;
    if !queue.is_capturing() {
        queue.drain()?;
    }
    destroy::<A>(handle)
}

/// Fails if the session of a drained queue has a fault.
fn health(queue: &Queue) -> Outcome {
    queue.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

pub(crate) fn query<A: Api>(handle: usize) -> Outcome {
    let queue = stream::<A>(handle)?;
    queue.refuse_while_capturing()?;
    refuse_during_capture()?;
    if queue.is_idle() { health(&queue) } else { Err(NOT_READY) }
}

pub(crate) fn synchronize<A: Api>(handle: usize) -> Outcome {
    let queue = stream::<A>(handle)?;
    queue.refuse_while_capturing()?;
    refuse_during_capture()?;
    queue.drain()?;
    health(&queue)
}

/// Waits for every stream of the current session.
pub(crate) fn synchronize_all<A: Api>() -> Outcome {
    let session = A::current()?;
    refuse_during_capture()?;
    for queue in session.queues() {
        queue.refuse_while_capturing()?;
        queue.drain()?;
    }
    session.fault().map_or(Ok(()), |fault| Err(fault.into()))
}

pub(crate) fn wait_event<A: Api>(handle: usize, event: usize, flags: c_uint) -> Outcome {
    let queue = stream::<A>(handle)?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    Ok(EVENTS.find(event)?.hold(&queue)?)
}

pub(crate) fn flags<A: Api>(handle: usize, out: Out<'_, c_uint>) -> Outcome {
    store(out, c_uint::from(stream::<A>(handle)?.kind() == QueueKind::NonBlocking))
}

/// Returns the state of a stream's capture and its number, 0 for none.
fn capture_of<A: Api>(handle: usize) -> Outcome<(c_int, u64)> {
    if handle <= STREAM_PER_THREAD {
        let blocking = |queue: &Arc<Queue>| queue.kind() == QueueKind::Blocking;
        let mut queues = A::current()?.queues().into_iter().filter(blocking);
        if queues.any(|queue| queue.is_capturing()) {
            return Err(STREAM_CAPTURE_IMPLICIT);
        }
        return Ok((CAPTURE_NONE, 0));
    }
    Ok(stream::<A>(handle)?.with_member(|member| match member {
        None => (CAPTURE_NONE, 0),
        Some(member) if member.capture().is_invalid() => {
            (CAPTURE_INVALIDATED, member.capture().id())
        }
        Some(member) => (CAPTURE_ACTIVE, member.capture().id()),
    }))
}

pub(crate) fn is_capturing<A: Api>(handle: usize, out: Out<'_, c_int>) -> Outcome {
    store(out, capture_of::<A>(handle)?.0)
}

pub(crate) fn capture_info<A: Api>(
    handle: usize,
    status: Out<'_, c_int>,
    id: Out<'_, u64>,
) -> Outcome {
    let (state, number) = capture_of::<A>(handle)?;
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

/// Sets what this thread may do during captures, and stores the previous mode in its place.
pub(crate) fn exchange(number: Option<&mut c_int>) -> Outcome {
    let number = number.ok_or(INVALID_VALUE)?;
    *number = exchange_mode(mode(*number)?) as c_int;
    Ok(())
}

/// A function of the caller that a stream calls.
pub(crate) type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

pub(crate) fn call_host<A: Api>(
    handle: usize,
    function: HostFunction,
    data: *mut c_void,
) -> Outcome {
    let queue = stream::<A>(handle)?;
    let function = function.ok_or(INVALID_VALUE)?;
    Ok(queue.submit(Command::Call(HostCall { function, data }))?)
}
