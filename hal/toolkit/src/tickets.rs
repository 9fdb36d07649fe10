//! Issues the tickets of submitted ops and tracks their completion.

use std::collections::VecDeque;

use peerlane_hal::Ticket;

use crate::Fault;

/// Issues tickets and tracks which of them are complete. The ops of a ticket may finish out of order, for
/// example on several engines or queue pairs.
///
/// An op that is split counts once for each piece.
///
/// It holds one counter for each open ticket, in a buffer that is allocated once.
#[derive(Debug)]
pub struct TicketCounter {
    /// The number of open ops of each incomplete ticket, oldest first.
    open: VecDeque<u32>,
    done: u64,
    room: usize,
}

impl TicketCounter {
    /// Creates a counter for a queue that holds at most `room` ops. It does not allocate while at most as
    /// many tickets are open.
    pub fn with_capacity(room: usize) -> Self {
        Self { open: VecDeque::with_capacity(room), done: 0, room }
    }

    /// Checks that a queue with `queued` ops has room for `requested` more ops.
    ///
    /// A slice without ops takes a ticket, and as many tickets as ops can be open.
    ///
    /// # Errors
    /// Returns [`Fault::QueueFull`].
    pub fn check_room(&self, queued: usize, requested: usize) -> Result<(), Fault> {
        let room = self.room;
        if queued + requested > room || self.open() >= room {
            return Err(Fault::QueueFull { queued, room, requested });
        }
        Ok(())
    }

    /// Issues the next ticket, which is complete when `ops` ops have finished. A ticket without ops is
    /// complete as soon as all earlier ones are.
    pub fn issue(&mut self, ops: u32) -> Ticket {
        self.open.push_back(ops);
        let ticket = self.last();
        self.settle();
        ticket
    }

    /// Records that one op of a ticket has finished.
    ///
    /// # Panics
    /// Panics if the ticket has no open op, which is an error of the backend.
    pub fn finish_op(&mut self, ticket: Ticket) {
        let ops = ticket
            .0
            .checked_sub(self.done + 1)
            .and_then(|index| self.open.get_mut(usize::try_from(index).ok()?))
            .filter(|ops| **ops > 0)
            .unwrap_or_else(|| panic!("{ticket:?} has no open op"));
        *ops -= 1;
        self.settle();
    }

    /// Marks all issued tickets as complete, after a release or a drop.
    pub fn finish_all(&mut self) {
        self.done = self.last().0;
        self.open.clear();
    }

    /// Returns the number of tickets that are not complete yet.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Returns the ticket that was issued last.
    pub fn last(&self) -> Ticket {
        Ticket(self.done + self.open.len() as u64)
    }

    /// Returns the last ticket that is complete together with all earlier tickets.
    pub fn completed(&self) -> Ticket {
        Ticket(self.done)
    }

    fn settle(&mut self) {
        while self.open.front() == Some(&0) {
            self.open.pop_front();
            self.done += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completion_is_the_prefix_of_finished_tickets() {
        let mut tickets = TicketCounter::with_capacity(4);
        let (a, b) = (tickets.issue(2), tickets.issue(1));
        tickets.finish_op(b);
        assert_eq!(tickets.completed(), Ticket::NONE);
        tickets.finish_op(a);
        assert_eq!(tickets.completed(), Ticket::NONE);
        tickets.finish_op(a);
        assert_eq!(tickets.completed(), b);
    }

    #[test]
    fn an_empty_ticket_completes_with_its_predecessors() {
        let mut tickets = TicketCounter::with_capacity(4);
        let first = tickets.issue(1);
        let empty = tickets.issue(0);
        assert_eq!(tickets.completed(), Ticket::NONE);
        tickets.finish_op(first);
        assert_eq!(tickets.completed(), empty);
    }

    #[test]
    #[should_panic(expected = "Ticket(1) has no open op")]
    fn finishing_twice_is_a_bug() {
        let mut tickets = TicketCounter::with_capacity(1);
        let ticket = tickets.issue(1);
        tickets.finish_op(ticket);
        tickets.finish_op(ticket);
    }
}
