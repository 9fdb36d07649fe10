//! How far the streams have come: an event behind each slice.
//!
//! A word in host memory, written by the stream at the end of a slice, would be simpler to look at;
//! but the write waits for everything before it to be visible to the host, and that costs each start
//! about 1.4 µs, an event nothing (docs/perf/cuda-streams.md).

use std::collections::VecDeque;

use super::queue::Event;
use crate::device::Context;
use crate::error::Error;
use crate::sys::CUstream;

/// Slices that are remembered without allocating.
const OPEN: usize = 64;

/// The events of the slices that are not known to be complete.
#[derive(Debug, Default)]
pub(super) struct Tickets {
    open: VecDeque<(u64, Event)>,
    /// The last ticket whose event has passed.
    done: u64,
    spare: Vec<Event>,
}

impl Tickets {
    pub(super) fn new() -> Self {
        Self { open: VecDeque::with_capacity(OPEN), done: 0, spare: Vec::with_capacity(OPEN) }
    }

    /// `ticket` is complete when the stream has come to here. The context is current.
    pub(super) fn record(
        &mut self,
        context: &Context,
        ticket: u64,
        stream: CUstream,
    ) -> Result<(), Error> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => {
                // Otherwise a capture of the global mode on another thread refuses it.
                let _relaxed = context.enter_relaxed()?;
                Event::create(context)?
            }
        };
        event.record(context, stream)?;
        self.open.push_back((ticket, event));
        Ok(())
    }

    /// What `stream` gets next comes after the last ticket.
    pub(super) fn order(&self, context: &Context, stream: CUstream) -> Result<(), Error> {
        self.open.back().map_or(Ok(()), |(_, event)| event.hold(context, stream))
    }

    /// The last ticket that is complete. The context is current, and relaxed.
    pub(super) fn completed(&mut self, context: &Context) -> Result<u64, Error> {
        while let Some((ticket, event)) = self.open.front() {
            if !event.has_passed(context)? {
                break;
            }
            self.done = *ticket;
            self.spare.extend(self.open.pop_front().map(|(_, event)| event));
        }
        Ok(self.done)
    }

    /// Whether a look would bring news: a ticket or an error.
    pub(super) fn has_news(&self, context: &Context) -> bool {
        let Some((_, event)) = self.open.front() else { return false };
        let Ok(_relaxed) = context.enter_relaxed() else { return true };
        event.has_passed(context).unwrap_or(true)
    }
}
