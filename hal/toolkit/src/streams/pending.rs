//! Tracks the submissions in flight, with their tickets, their commands and the flags they wait
//! for.

use std::collections::VecDeque;

use super::resources::Event;
use crate::Fault;
use crate::device::{DevicePtr, StreamCalls, StreamHandle};

/// The driver has room for about a thousand commands on one stream and then blocks the caller.
/// Behind a wait that only this caller can release, that would be a deadlock.
pub(super) const COMMANDS_MAX: usize = 768;
const AWAITED: usize = 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Awaited {
    pub(super) flag: DevicePtr,
    /// The flag's address in this process, or `None` if the host cannot access the flag.
    pub(super) host: Option<u64>,
    pub(super) value: u64,
}

/// Tracks the submissions in flight, with their commands and the flags that they wait for.
///
/// Tickets complete in order, since a slice ends with a join of all its streams. One number
/// therefore describes the progress.
#[derive(Debug)]
pub(super) struct Pending {
    done: u64,
    /// The number of commands of each incomplete ticket, oldest first.
    commands: VecDeque<usize>,
    queued: usize,
    awaited: VecDeque<(u64, Awaited)>,
}

impl Pending {
    pub(super) fn new() -> Self {
        Self {
            done: 0,
            commands: VecDeque::with_capacity(COMMANDS_MAX),
            queued: 0,
            awaited: VecDeque::with_capacity(AWAITED),
        }
    }

    pub(super) fn done(&self) -> u64 {
        self.done
    }

    pub(super) fn last(&self) -> u64 {
        self.done + self.commands.len() as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Rejects a submission if its `requested` commands do not fit into the queue now. An empty
    /// queue accepts every submission.
    ///
    /// # Errors Returns [`Fault::QueueFull`].
    pub(super) fn admit(&self, requested: usize) -> Result<(), Fault> {
        let queued = self.queued;
        if self.is_empty() || queued + requested <= COMMANDS_MAX {
            return Ok(());
        }
        Err(Fault::QueueFull { queued, room: COMMANDS_MAX, requested })
    }

    pub(super) fn await_flag(&mut self, awaited: Awaited) {
        self.awaited.push_back((self.last() + 1, awaited));
    }

    pub(super) fn issue(&mut self, commands: usize) -> u64 {
        self.commands.push_back(commands);
        self.queued += commands;
        self.last()
    }

    pub(super) fn settle(&mut self, done: u64) -> bool {
        let before = self.done;
        while self.done < done
            && let Some(commands) = self.commands.pop_front()
        {
            self.done += 1;
            self.queued -= commands;
        }
        while self.awaited.front().is_some_and(|(ticket, _)| *ticket <= self.done) {
            self.awaited.pop_front();
        }
        self.done > before
    }

    pub(super) fn awaited(&self) -> impl Iterator<Item = Awaited> + Clone {
        self.awaited.iter().map(|(_, awaited)| *awaited)
    }
}

const OPEN: usize = 64;

/// Tracks which tickets are complete by driver events, one at the end of each submission.
///
/// A word in host memory that the stream writes at the end of a slice would be simpler to read. But
/// this write waits until everything before it is visible to the host, which costs each start about
/// 1.4 µs; an event costs nothing (docs/perf/cuda-streams.md).
#[derive(Debug)]
pub(super) struct TicketEvents<D: StreamCalls> {
    open: VecDeque<(u64, Event<D>)>,
    done: u64,
    spare: Vec<Event<D>>,
}

impl<D: StreamCalls> TicketEvents<D> {
    pub(super) fn new() -> Self {
        Self { open: VecDeque::with_capacity(OPEN), done: 0, spare: Vec::with_capacity(OPEN) }
    }

    pub(super) fn record(
        &mut self,
        context: &D,
        ticket: u64,
        stream: StreamHandle,
    ) -> Result<(), D::Error> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => {
                // A capture of the global mode on another thread would refuse the call otherwise.
                let _relaxed = context.enter_relaxed()?;
                Event::create(context)?
            }
        };
        event.record(context, stream)?;
        self.open.push_back((ticket, event));
        Ok(())
    }

    pub(super) fn order(&self, context: &D, stream: StreamHandle) -> Result<(), D::Error> {
        self.open.back().map_or(Ok(()), |(_, event)| event.block(context, stream))
    }

    /// Orders a stream after the submission of `ticket`, which is complete if no event of it is
    /// open.
    pub(super) fn order_after(
        &self,
        context: &D,
        ticket: u64,
        stream: StreamHandle,
    ) -> Result<(), D::Error> {
        let index = self.open.partition_point(|(of, _)| *of < ticket);
        self.open.get(index).map_or(Ok(()), |(_, event)| event.block(context, stream))
    }

    /// Queries the driver's events and returns the last complete ticket; the context must be
    /// current and relaxed.
    ///
    /// Each slice begins behind the previous one, so an event that has passed covers all slices
    /// before it. A query costs as much as a copy, so a binary search keeps the number of queries
    /// small.
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

    pub(super) fn has_news(&self, context: &D) -> bool {
        let Some((_, event)) = self.open.front() else { return false };
        let Ok(_relaxed) = context.enter_relaxed() else { return true };
        event.has_passed(context).unwrap_or(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_fills_and_empties() {
        let mut pending = Pending::new();
        pending.admit(usize::MAX).expect("an empty queue takes everything");
        assert_eq!(pending.issue(700), 1);
        pending.admit(68).expect("just fits");
        let error = pending.admit(69).expect_err("one too many");
        assert_eq!(error, Fault::QueueFull { queued: 700, room: 768, requested: 69 });
        assert!(pending.settle(1));
        assert!(!pending.settle(1));
        assert_eq!((pending.done(), pending.last(), pending.is_empty()), (1, 1, true));
        pending.admit(COMMANDS_MAX).expect("it is empty again");
    }

    #[test]
    fn what_is_awaited_goes_with_its_ticket() {
        let mut pending = Pending::new();
        for value in 1..=3 {
            pending.await_flag(Awaited { flag: 8, host: None, value });
            pending.issue(1);
        }
        pending.settle(2);
        assert_eq!(
            pending.awaited().collect::<Vec<_>>(),
            [Awaited { flag: 8, host: None, value: 3 }]
        );
        // A ticket that was never issued changes nothing.
        pending.settle(9);
        assert_eq!((pending.done(), pending.awaited().count()), (3, 0));
    }
}
