//! Events.

use super::Face;
use super::call::refuse_during_capture;
use super::code::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, Outcome};
use super::handles::{EVENTS, stream};
use super::out::{Out, store};
use crate::device::event::Event;

const DISABLE_TIMING: u32 = 2;

/// `known` are the flags that the face has.
pub(crate) fn create<F: Face>(out: Out<'_, usize>, flags: u32, known: u32) -> Outcome {
    let session = F::current()?;
    if flags & !known != 0 || out.is_none() {
        return Err(INVALID_VALUE);
    }
    let timed = flags & DISABLE_TIMING == 0;
    store(out, EVENTS.insert(Event::new(session, timed)))
}

pub(crate) fn destroy<F: Face>(event: usize) -> Outcome {
    F::ready()?;
    EVENTS.remove(event).map(|_| ())
}

pub(crate) fn record<F: Face>(event: usize, handle: usize) -> Outcome {
    let (event, queue) = (EVENTS.find(event)?, stream::<F>(handle)?);
    // Both must be of one context.
    if event.session().id() != queue.session().id() {
        return Err(INVALID_HANDLE);
    }
    Ok(event.record(&queue)?)
}

pub(crate) fn query<F: Face>(event: usize) -> Outcome {
    F::ready()?;
    refuse_during_capture()?;
    let event = EVENTS.find(event)?;
    if !event.is_done()? {
        return Err(NOT_READY);
    }
    health(&event)
}

pub(crate) fn synchronize<F: Face>(event: usize) -> Outcome {
    F::ready()?;
    refuse_during_capture()?;
    let event = EVENTS.find(event)?;
    event.wait()?;
    health(&event)
}

fn health(event: &Event) -> Outcome {
    event.session().fault().map_or(Ok(()), |fault| Err(fault.into()))
}

/// In milliseconds.
pub(crate) fn elapsed<F: Face>(out: Out<'_, f32>, start: usize, end: usize) -> Outcome {
    F::ready()?;
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
