//! Counts the tickets of an engine.

use std::collections::VecDeque;

use peerlane_hal::Ticket;

/// Issues tickets and tracks which are complete, also where the parts of a ticket finish out of order, such
/// as a copy that is split over engines, or queue pairs to several peers.
///
/// It holds one counter for each open ticket, in a buffer that is allocated once.
#[derive(Debug)]
pub struct Ledger {
    /// Number of open parts of each ticket after `done`, oldest first.
    open: VecDeque<u32>,
    done: u64,
}

impl Ledger {
    /// Creates a ledger that does not allocate while at most `tickets` are open.
    pub fn with_capacity(tickets: usize) -> Self {
        Self { open: VecDeque::with_capacity(tickets), done: 0 }
    }

    /// Issues the next ticket, with `parts` to finish. A ticket without parts is complete as soon as all
    /// earlier ones are.
    pub fn issue(&mut self, parts: u32) -> Ticket {
        self.open.push_back(parts);
        let ticket = self.last();
        self.settle();
        ticket
    }

    /// Finishes one part of `ticket`.
    ///
    /// # Panics
    /// Panics if the ticket has no open part, which is an error of the backend.
    pub fn finish_part(&mut self, ticket: Ticket) {
        let parts = ticket
            .0
            .checked_sub(self.done + 1)
            .and_then(|index| self.open.get_mut(usize::try_from(index).ok()?))
            .filter(|parts| **parts > 0)
            .unwrap_or_else(|| panic!("{ticket:?} has no open part"));
        *parts -= 1;
        self.settle();
    }

    /// Completes all tickets, after a release or a drop.
    pub fn finish_all(&mut self) {
        self.done = self.last().0;
        self.open.clear();
    }

    /// Returns the number of incomplete tickets.
    pub fn open(&self) -> usize {
        self.open.len()
    }

    /// Returns the last issued ticket.
    pub fn last(&self) -> Ticket {
        Ticket(self.done + self.open.len() as u64)
    }

    /// Returns the last ticket up to which everything is complete.
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
        let mut ledger = Ledger::with_capacity(4);
        let (a, b) = (ledger.issue(2), ledger.issue(1));
        ledger.finish_part(b);
        assert_eq!(ledger.completed(), Ticket::NONE);
        ledger.finish_part(a);
        assert_eq!(ledger.completed(), Ticket::NONE);
        ledger.finish_part(a);
        assert_eq!(ledger.completed(), b);
    }

    #[test]
    fn an_empty_ticket_completes_with_its_predecessors() {
        let mut ledger = Ledger::with_capacity(4);
        let first = ledger.issue(1);
        let empty = ledger.issue(0);
        assert_eq!(ledger.completed(), Ticket::NONE);
        ledger.finish_part(first);
        assert_eq!(ledger.completed(), empty);
    }

    #[test]
    #[should_panic(expected = "Ticket(1) has no open part")]
    fn finishing_twice_is_a_bug() {
        let mut ledger = Ledger::with_capacity(1);
        let ticket = ledger.issue(1);
        ledger.finish_part(ticket);
        ledger.finish_part(ticket);
    }
}
