//! Events.

use std::ffi::c_uint;

use super::call::{enter, refuse_during_capture};
use super::code::{CUresult, INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome};
use super::context;
use super::handles::{EVENTS, stream};
use super::types::{CUevent, CUstream, EVENT_DISABLE_TIMING, Out, store};
use crate::device::event::Event;

#[unsafe(no_mangle)]
extern "C" fn cuEventCreate(out: Out<'_, CUevent>, flags: c_uint) -> CUresult {
    enter("cuEventCreate", || {
        let session = context::current()?;
        // Blocking, without timing, for other processes.
        if flags & !7 != 0 || out.is_none() {
            return Err(INVALID_VALUE);
        }
        let timed = flags & EVENT_DISABLE_TIMING == 0;
        store(out, EVENTS.insert(Event::new(session, timed)))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: CUevent) -> CUresult {
    enter("cuEventDestroy_v2", || {
        context::current()?;
        EVENTS.remove(event).map(|_| ())
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: CUevent, handle: CUstream) -> CUresult {
    enter("cuEventRecord", || {
        let (event, queue) = (EVENTS.find(event)?, stream(handle)?);
        // Both must be of one context.
        if event.session().id() != queue.session().id() {
            return Err(INVALID_HANDLE);
        }
        Ok(event.record(&queue)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventQuery(event: CUevent) -> CUresult {
    enter("cuEventQuery", || {
        context::current()?;
        refuse_during_capture()?;
        let event = EVENTS.find(event)?;
        if !event.is_done()? {
            return Err(NOT_READY);
        }
        health(&event)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: CUevent) -> CUresult {
    enter("cuEventSynchronize", || {
        context::current()?;
        refuse_during_capture()?;
        let event = EVENTS.find(event)?;
        event.wait()?;
        health(&event)
    })
}

fn health(event: &Event) -> Outcome {
    event.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

/// In milliseconds.
fn elapsed(out: Out<'_, f32>, start: CUevent, end: CUevent) -> Outcome {
    context::current()?;
    let (start, end) = (EVENTS.find(start)?, EVENTS.find(end)?);
    if !start.is_timed() || !end.is_timed() {
        return Err(INVALID_HANDLE);
    }
    let from = start.at().ok_or(INVALID_HANDLE)?.ok_or(NOT_READY)?;
    let to = end.at().ok_or(INVALID_HANDLE)?.ok_or(NOT_READY)?;
    let forth = to.saturating_duration_since(from).as_secs_f32();
    let back = from.saturating_duration_since(to).as_secs_f32();
    store(out, (forth - back) * 1e3)
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime(out: Out<'_, f32>, start: CUevent, end: CUevent) -> CUresult {
    enter("cuEventElapsedTime", || elapsed(out, start, end))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventElapsedTime_v2(out: Out<'_, f32>, start: CUevent, end: CUevent) -> CUresult {
    enter("cuEventElapsedTime_v2", || elapsed(out, start, end))
}
