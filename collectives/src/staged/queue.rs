//! What engines have taken: for every peer a line of ops in order, and how far each op has come.
//!
//! Ops to different peers do not wait for each other. A part of an op names it from wherever the part
//! is under way.

use std::collections::VecDeque;
use std::time::Instant;

use peerlane_hal::Ticket;
use peerlane_toolkit::Ledger;

/// An op, as what is under way for it names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) queue: u64,
    pub(super) peer: usize,
    pub(super) order: u64,
}

/// An op on its way.
#[derive(Debug)]
pub(super) struct Entry<W> {
    ticket: Ticket,
    pub(super) order: u64,
    pub(super) work: W,
    /// Bytes that are under way or done.
    pub(super) begun: u64,
    /// Nothing more has to be begun.
    pub(super) whole: bool,
    flying: u32,
}

impl<W> Entry<W> {
    /// Something was begun for it.
    pub(super) fn fly(&mut self) {
        self.flying += 1;
    }
}

/// Ops to one peer, in order.
#[derive(Debug)]
pub(super) struct Line<W> {
    entries: VecDeque<Entry<W>>,
    /// The first that is not whole.
    next: usize,
}

impl<W> Default for Line<W> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), next: 0 }
    }
}

/// The ops of one engine.
#[derive(Debug)]
pub(super) struct Queue<W> {
    pub(super) lines: Vec<Line<W>>,
    pub(super) ledger: Ledger,
    pub(super) released: Option<Instant>,
    order: u64,
}

impl<W> Queue<W> {
    pub(super) fn new(ranks: usize, room: usize) -> Self {
        let lines = (0..ranks).map(|_| Line::default()).collect();
        Self { lines, ledger: Ledger::with_capacity(room), released: None, order: 0 }
    }

    /// How many ops are not complete.
    pub(super) fn len(&self) -> usize {
        self.lines.iter().map(|line| line.entries.len()).sum()
    }

    /// Takes a slice.
    pub(super) fn push(&mut self, works: impl ExactSizeIterator<Item = (usize, W)>) -> Ticket {
        // A queue holds fewer than 2^32 ops.
        let ticket = self.ledger.issue(works.len() as u32);
        for (peer, work) in works {
            self.order += 1;
            let order = self.order;
            let entry = Entry { ticket, order, work, begun: 0, whole: false, flying: 0 };
            self.lines[peer].entries.push_back(entry);
        }
        ticket
    }

    /// Whether everything that was taken before `order` is complete.
    pub(super) fn is_over(&self, order: u64) -> bool {
        let first = |line: &Line<W>| line.entries.front().map_or(u64::MAX, |entry| entry.order);
        self.lines.iter().all(|line| first(line) >= order)
    }

    /// Something that was begun for an op is done.
    pub(super) fn land(&mut self, part: Part) {
        if let Some(entry) = self.lines[part.peer].find(part.order) {
            entry.flying -= 1;
        }
        self.settle(part.peer);
    }

    /// Takes out what is complete; only what has no op before it, so that orders stay sorted.
    pub(super) fn settle(&mut self, peer: usize) {
        let line = &mut self.lines[peer];
        while let Some(entry) = line.entries.front() {
            if !entry.whole || entry.flying > 0 {
                break;
            }
            if self.released.is_none() {
                self.ledger.finish_part(entry.ticket);
            }
            line.entries.pop_front();
            line.next = line.next.saturating_sub(1);
        }
    }

    /// Drops what is not begun, and begins nothing more.
    pub(super) fn release(&mut self) {
        self.released.get_or_insert_with(Instant::now);
        for line in &mut self.lines {
            line.entries.retain(|entry| entry.flying > 0);
            line.entries.iter_mut().for_each(|entry| entry.whole = true);
            line.next = line.entries.len();
        }
        self.settle_release();
    }

    /// Once nothing of a released queue is under way, everything counts as complete.
    pub(super) fn settle_release(&mut self) {
        if self.released.is_some() && self.len() == 0 {
            self.ledger.finish_all();
        }
    }
}

impl<W> Line<W> {
    fn find(&mut self, order: u64) -> Option<&mut Entry<W>> {
        let at = self.entries.binary_search_by_key(&order, |entry| entry.order).ok()?;
        self.entries.get_mut(at)
    }

    /// The first op that is not whole.
    pub(super) fn next(&mut self) -> Option<&mut Entry<W>> {
        self.entries.get_mut(self.next)
    }

    /// That op is whole now.
    pub(super) fn advance(&mut self) {
        self.entries[self.next].whole = true;
        self.next += 1;
    }

    /// Whether an op before the next one is of some sort and not complete.
    pub(super) fn has_open(&self, is: impl Fn(&W) -> bool) -> bool {
        let open = |entry: &Entry<W>| entry.flying > 0 && is(&entry.work);
        self.entries.iter().take(self.next).any(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(queue: &mut Queue<char>, peer: usize) -> Part {
        let entry = queue.lines[peer].next().unwrap();
        entry.fly();
        let part = Part { queue: 0, peer, order: entry.order };
        queue.lines[peer].advance();
        part
    }

    #[test]
    fn a_ticket_is_complete_when_all_its_ops_are() {
        let mut queue = Queue::new(2, 8);
        let ticket = queue.push([(0, 'a'), (1, 'b'), (0, 'c')].into_iter());
        let [a, b, c] = [0, 1, 0].map(|peer| begin(&mut queue, peer));
        queue.land(c);
        queue.land(b);
        assert_eq!(queue.ledger.completed(), Ticket::NONE);
        assert!(!queue.is_over(a.order + 1) && queue.is_over(a.order));
        queue.land(a);
        assert_eq!((queue.ledger.completed(), queue.len()), (ticket, 0));
    }

    #[test]
    fn lines_do_not_wait_for_each_other() {
        let mut queue = Queue::new(2, 8);
        let first = queue.push([(0, 'a')].into_iter());
        queue.push([(1, 'b')].into_iter());
        let b = begin(&mut queue, 1);
        assert!(queue.lines[1].has_open(|work| *work == 'b'));
        queue.land(b);
        assert!(!queue.lines[1].has_open(|_| true) && !queue.is_over(b.order));
        let a = begin(&mut queue, 0);
        queue.land(a);
        assert!(queue.ledger.completed() > first);
    }

    #[test]
    fn what_is_under_way_ends_before_a_released_queue_is_drained() {
        let mut queue = Queue::new(1, 8);
        let last = queue.push([(0, 'a'), (0, 'b'), (0, 'c')].into_iter());
        let a = begin(&mut queue, 0);
        queue.release();
        assert_eq!((queue.len(), queue.ledger.completed()), (1, Ticket::NONE));
        assert!(queue.lines[0].next().is_none());
        queue.land(a);
        queue.settle_release();
        assert_eq!((queue.len(), queue.ledger.completed()), (0, last));
    }
}
