//! How far the streams have come: an event behind each slice.
//!
//! A word in host memory, written by the stream at the end of a slice, would be simpler to look at;
//! but the write waits for everything before it to be visible to the host, and that costs each start
//! about 1.4 µs, an event nothing (docs/perf/cuda-streams.md).

use std::collections::VecDeque;

use super::queue::Event;
use crate::device::{StreamCalls, StreamHandle};

/// Slices that are remembered without allocating.
const OPEN: usize = 64;

/// The events of the slices that are not known to be complete.
#[derive(Debug)]
pub(super) struct Tickets<D: StreamCalls> {
    open: VecDeque<(u64, Event<D>)>,
    /// The last ticket whose event has passed.
    done: u64,
    spare: Vec<Event<D>>,
}

impl<D: StreamCalls> Tickets<D> {
    pub(super) fn new() -> Self {
        Self { open: VecDeque::with_capacity(OPEN), done: 0, spare: Vec::with_capacity(OPEN) }
    }

    /// `ticket` is complete when the stream has come to here. The context is current.
    pub(super) fn record(
        &mut self,
        context: &D,
        ticket: u64,
        stream: StreamHandle,
    ) -> Result<(), D::Error> {
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
    pub(super) fn order(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        self.open.back().map_or(Ok(()), |(_, event)| event.hold(context, stream))
    }

    /// The last ticket that is complete. The context is current, and relaxed.
    ///
    /// A slice begins behind the one before it, so an event that has passed stands for all before it.
    /// A look costs as much as a copy: halving looks less often than there are slices.
    pub(super) fn completed(&mut self, context: &D) -> Result<u64, D::Error> {
        let (mut passed, mut open) = (0, self.open.len());
        while passed < open {
            let middle = passed + (open - passed) / 2;
            match self.open[middle].1.has_passed(context)? {
                true => passed = middle + 1,
                false => open = middle,
            }
        }
        for (ticket, event) in self.open.drain(..passed) {
            self.done = ticket;
            self.spare.push(event);
        }
        Ok(self.done)
    }

    /// Whether a look would bring news: a ticket or an error.
    pub(super) fn has_news(&self, context: &D) -> bool {
        let Some((_, event)) = self.open.front() else { return false };
        let Ok(_relaxed) = context.enter_relaxed() else { return true };
        event.has_passed(context).unwrap_or(true)
    }
}
