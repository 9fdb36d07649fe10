//! Holds the ops of an engine in one queue for each peer, and tracks their transfers.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use peerlane_hal::{Fabric, Ticket};
use peerlane_toolkit::TicketCounter;

use crate::memory::{Import, Registration};

/// An op that keeps its memory regions alive until it is complete.
pub(crate) enum ResolvedOp<D: Fabric, N: Fabric> {
    Put {
        dst: Arc<Import<D, N>>,
        to: u64,
        src: Arc<Registration<D, N>>,
        from: u64,
        bytes: u64,
    },
    Get {
        dst: Arc<Registration<D, N>>,
        to: u64,
        src: Arc<Import<D, N>>,
        from: u64,
        bytes: u64,
    },
    Signal {
        flag: Arc<Import<D, N>>,
        word: u64,
        value: u64,
    },
    /// The reply to a peer's get, which sends bytes of a region of this rank.
    Reply {
        get: u64,
        src: Arc<Registration<D, N>>,
        from: u64,
        bytes: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId {
    pub(crate) queue: u64,
    pub(crate) peer: usize,
    pub(crate) order: u64,
}

#[derive(Debug)]
pub(crate) struct QueuedOp<W> {
    ticket: Ticket,
    pub(crate) order: u64,
    pub(crate) op: W,
    pub(crate) bytes_started: u64,
    pub(crate) all_started: bool,
    in_flight: u32,
}

impl<W> QueuedOp<W> {
    pub(crate) fn start_transfer(&mut self) {
        self.in_flight += 1;
    }
}

#[derive(Debug)]
pub(crate) struct PeerQueue<W> {
    entries: VecDeque<QueuedOp<W>>,
    next: usize,
}

impl<W> Default for PeerQueue<W> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), next: 0 }
    }
}

/// The ops of one engine, in one queue for each peer because ops to different peers do not wait for each
/// other.
#[derive(Debug)]
pub(crate) struct OpQueue<W> {
    pub(crate) peers: Vec<PeerQueue<W>>,
    pub(crate) tickets: TicketCounter,
    pub(crate) released: Option<Instant>,
    order: u64,
}

impl<W> OpQueue<W> {
    pub(crate) fn new(ranks: usize, capacity: usize) -> Self {
        let peers = (0..ranks).map(|_| PeerQueue::default()).collect();
        Self { peers, tickets: TicketCounter::with_capacity(capacity), released: None, order: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.peers.iter().map(|peer_queue| peer_queue.entries.len()).sum()
    }

    pub(crate) fn push(&mut self, ops: impl ExactSizeIterator<Item = (usize, W)>) -> Ticket {
        // A queue holds fewer than 2^32 ops.
        let ticket = self.tickets.issue(ops.len() as u32);
        for (peer, op) in ops {
            self.order += 1;
            let order = self.order;
            let entry =
                QueuedOp { ticket, order, op, bytes_started: 0, all_started: false, in_flight: 0 };
            self.peers[peer].entries.push_back(entry);
        }
        ticket
    }

    pub(crate) fn is_complete_before(&self, order: u64) -> bool {
        let first = |peer_queue: &PeerQueue<W>| {
            peer_queue.entries.front().map_or(u64::MAX, |entry| entry.order)
        };
        self.peers.iter().all(|peer_queue| first(peer_queue) >= order)
    }

    pub(crate) fn finish(&mut self, op_id: OpId) {
        if let Some(entry) = self.peers[op_id.peer].find(op_id.order) {
            entry.in_flight -= 1;
        }
        self.settle(op_id.peer);
    }

    pub(crate) fn settle(&mut self, peer: usize) {
        let peer_queue = &mut self.peers[peer];
        while let Some(entry) = peer_queue.entries.front() {
            if !entry.all_started || entry.in_flight > 0 {
                break;
            }
            if self.released.is_none() {
                self.tickets.finish_op(entry.ticket);
            }
            peer_queue.entries.pop_front();
            peer_queue.next = peer_queue.next.saturating_sub(1);
        }
    }

    pub(crate) fn release(&mut self) {
        self.released.get_or_insert_with(Instant::now);
        for peer_queue in &mut self.peers {
            peer_queue.entries.retain(|entry| entry.in_flight > 0);
            peer_queue.entries.iter_mut().for_each(|entry| entry.all_started = true);
            peer_queue.next = peer_queue.entries.len();
        }
        self.settle_release();
    }

    pub(crate) fn settle_release(&mut self) {
        if self.released.is_some() && self.len() == 0 {
            self.tickets.finish_all();
        }
    }
}

impl<W> PeerQueue<W> {
    fn find(&mut self, order: u64) -> Option<&mut QueuedOp<W>> {
        let at = self.entries.binary_search_by_key(&order, |entry| entry.order).ok()?;
        self.entries.get_mut(at)
    }

    pub(crate) fn next(&mut self) -> Option<&mut QueuedOp<W>> {
        self.entries.get_mut(self.next)
    }

    pub(crate) fn advance(&mut self) {
        self.entries[self.next].all_started = true;
        self.next += 1;
    }

    pub(crate) fn has_incomplete(&self, is: impl Fn(&W) -> bool) -> bool {
        let open = |entry: &QueuedOp<W>| entry.in_flight > 0 && is(&entry.op);
        self.entries.iter().take(self.next).any(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(queue: &mut OpQueue<char>, peer: usize) -> OpId {
        let entry = queue.peers[peer].next().unwrap();
        entry.start_transfer();
        let op_id = OpId { queue: 0, peer, order: entry.order };
        queue.peers[peer].advance();
        op_id
    }

    #[test]
    fn a_ticket_is_complete_when_all_its_ops_are() {
        let mut queue = OpQueue::new(2, 8);
        let ticket = queue.push([(0, 'a'), (1, 'b'), (0, 'c')].into_iter());
        let [a, b, c] = [0, 1, 0].map(|peer| begin(&mut queue, peer));
        queue.finish(c);
        queue.finish(b);
        assert_eq!(queue.tickets.completed(), Ticket::NONE);
        assert!(!queue.is_complete_before(a.order + 1) && queue.is_complete_before(a.order));
        queue.finish(a);
        assert_eq!((queue.tickets.completed(), queue.len()), (ticket, 0));
    }

    #[test]
    fn lines_do_not_wait_for_each_other() {
        let mut queue = OpQueue::new(2, 8);
        let first = queue.push([(0, 'a')].into_iter());
        queue.push([(1, 'b')].into_iter());
        let b = begin(&mut queue, 1);
        assert!(queue.peers[1].has_incomplete(|op| *op == 'b'));
        queue.finish(b);
        assert!(!queue.peers[1].has_incomplete(|_| true) && !queue.is_complete_before(b.order));
        let a = begin(&mut queue, 0);
        queue.finish(a);
        assert!(queue.tickets.completed() > first);
    }

    #[test]
    fn what_is_under_way_ends_before_a_released_queue_is_drained() {
        let mut queue = OpQueue::new(1, 8);
        let last = queue.push([(0, 'a'), (0, 'b'), (0, 'c')].into_iter());
        let a = begin(&mut queue, 0);
        queue.release();
        assert_eq!((queue.len(), queue.tickets.completed()), (1, Ticket::NONE));
        assert!(queue.peers[0].next().is_none());
        queue.finish(a);
        queue.settle_release();
        assert_eq!((queue.len(), queue.tickets.completed()), (0, last));
    }
}
