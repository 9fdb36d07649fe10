//! Slices that are not complete: how much of the streams' queues they take, and what they wait for.

use std::collections::VecDeque;

use crate::device::{DevicePtr, Fault};

/// Commands that one stream holds at most. The driver has room for about a thousand and then blocks
/// the caller; behind a wait that only the same caller can release, for ever.
pub(super) const COMMANDS_MAX: usize = 768;
/// Waits that are remembered without allocating.
const AWAITED: usize = 1024;

/// A flag that a queued wait may be blocked on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Awaited {
    pub(super) flag: DevicePtr,
    /// Where the host finds it, if it does.
    pub(super) host: Option<u64>,
    /// What lets the wait pass.
    pub(super) value: u64,
}

/// The tickets and what belongs to them.
///
/// They complete in order, because every stream has been joined when a slice ends; so the last one
/// that is complete says all.
#[derive(Debug)]
pub(super) struct Pending {
    done: u64,
    /// Commands of each ticket behind `done`, oldest first.
    commands: VecDeque<usize>,
    /// Their sum.
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

    /// The last ticket that is complete.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// The last ticket given out.
    pub(super) fn last(&self) -> u64 {
        self.done + self.commands.len() as u64
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Whether a slice of `wanted` commands fits now; it always fits an empty queue.
    pub(super) fn admit(&self, wanted: usize) -> Result<(), Fault> {
        let queued = self.queued;
        if self.is_empty() || queued + wanted <= COMMANDS_MAX {
            return Ok(());
        }
        Err(Fault::QueueFull { queued, room: COMMANDS_MAX, wanted })
    }

    /// The slice that is being submitted will wait for this.
    pub(super) fn await_flag(&mut self, awaited: Awaited) {
        self.awaited.push_back((self.last() + 1, awaited));
    }

    /// The slice has gone onto the streams; its ticket.
    pub(super) fn issue(&mut self, commands: usize) -> u64 {
        self.commands.push_back(commands);
        self.queued += commands;
        self.last()
    }

    /// Tickets up to `done` are complete; whether that is news.
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

    /// What waits of slices that are not complete wait for; also of one that failed half-way.
    pub(super) fn awaited(&self) -> impl Iterator<Item = Awaited> + Clone {
        self.awaited.iter().map(|(_, awaited)| *awaited)
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
        assert_eq!(error, Fault::QueueFull { queued: 700, room: 768, wanted: 69 });
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
        // Nobody can invent a ticket.
        pending.settle(9);
        assert_eq!((pending.done(), pending.awaited().count()), (3, 0));
    }
}
