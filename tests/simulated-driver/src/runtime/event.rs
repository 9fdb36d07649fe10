//! Implements the calls on events.

use super::Api;
use super::call::refuse_during_capture;
use super::code::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome};
use super::handles::{EVENTS, stream};
use super::out::{Out, store};
use crate::device::event::Event;

const DISABLE_TIMING: u32 = 2;

/// Creates an event; `known` are the flags that the API accepts.
pub(crate) fn create<A: Api>(out: Out<'_, usize>, flags: u32, known: u32) -> Outcome {
    let session = A::current()?;
    if flags & !known != 0 || out.is_none() {
        return Err(INVALID_VALUE);
    }
    let timed = flags & DISABLE_TIMING == 0;
    store(out, EVENTS.insert(Event::new(session, timed)))
}

pub(crate) fn destroy<A: Api>(event: usize) -> Outcome {
    A::ready()?;
    EVENTS.remove(event).map(|_| ())
}

pub(crate) fn record<A: Api>(event: usize, handle: usize) -> Outcome {
    let (event, queue) = (EVENTS.find(event)?, stream::<A>(handle)?);
    // Event and stream must be of the same context.
    if event.session().id() != queue.session().id() {
        return Err(INVALID_HANDLE);
    }
    Ok(event.record(&queue)?)
}

pub(crate) fn query<A: Api>(event: usize) -> Outcome {
    A::ready()?;
    refuse_during_capture()?;
    let event = EVENTS.find(event)?;
    if !event.is_done()? {
        return Err(NOT_READY);
    }
    health(&event)
}

pub(crate) fn synchronize<A: Api>(event: usize) -> Outcome {
    A::ready()?;
    refuse_during_capture()?;
    let event = EVENTS.find(event)?;
    event.wait()?;
    health(&event)
}

fn health(event: &Event) -> Outcome {
    event.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

/// Stores the time between two events in milliseconds.
pub(crate) fn elapsed<A: Api>(out: Out<'_, f32>, start: usize, end: usize) -> Outcome {
    A::ready()?;
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
