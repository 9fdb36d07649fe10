//! Implements the engine of the staged fabric, and the queue that tracks its ops.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{Caps, CopyEngine, Deadline, Fabric, Op, Role, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineState, RegionBounds, TicketCounter};

use crate::Shared;
use crate::channel::ResolvedOp;
use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::transport::BUSY_PARK_MAX;

/// The time limit for transfers in flight when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An op with the index of the peer that it addresses.
type Addressed<D, N> = (usize, ResolvedOp<D, N>);

/// An in-order queue of ops on a staged fabric; the thread that polls it moves the bytes.
pub struct Engine<D: Fabric, N: Fabric> {
    id: u64,
    /// An idle engine of the network, with which this engine parks. Nothing is submitted to it.
    parker: N::Engine,
    state: EngineState<Error>,
    shared: Arc<Shared<D, N>>,
}

impl<D: Fabric, N: Fabric> Engine<D, N> {
    pub(crate) fn new(id: u64, parker: N::Engine, caps: Caps, shared: Arc<Shared<D, N>>) -> Self {
        Self { id, parker, state: EngineState::new(caps), shared }
    }

    /// Converts a checked op to one that owns its regions; returns `None` if the op has no bytes.
    fn resolve(op: &Op<'_, Local<D, N>, Remote<D, N>>) -> Option<Addressed<D, N>> {
        let (peer, resolved) = match *op {
            Op::Put { bytes: 0, .. } | Op::Get { bytes: 0, .. } => return None,
            Op::Put { dst, src, bytes } => {
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.0), Arc::clone(&src.region.registration));
                (dst.peer, ResolvedOp::Put { dst, to, src, from, bytes })
            }
            Op::Get { dst, src, bytes } => {
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.registration), Arc::clone(&src.region.0));
                (src.peer, ResolvedOp::Get { dst, to, src, from, bytes })
            }
            Op::Signal { flag, value } => {
                let region = &flag.region.0;
                let signal =
                    ResolvedOp::Signal { flag: Arc::clone(region), word: flag.word, value };
                (region.peer, signal)
            }
            Op::Wait { .. } => unreachable!("the check of the slice refuses waits"),
        };
        Some((peer.index(), resolved))
    }
}

impl<D: Fabric, N: Fabric> RegionBounds for Local<D, N> {
    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn role(&self) -> Role {
        self.registration.role
    }
}

impl<D: Fabric, N: Fabric> RegionBounds for Remote<D, N> {
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    fn role(&self) -> Role {
        self.0.role
    }
}

// SAFETY: the layer passes all calls on to implementations that uphold the contract.
unsafe impl<D: Fabric, N: Fabric> CopyEngine for Engine<D, N> {
    type Error = Error;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<D, N>, Remote<D, N>>],
    ) -> Result<Ticket, Error> {
        let mut transport = self.shared.transport();
        transport.check()?;
        self.state.check_slice(ops)?;
        let queue = transport.queue(self.id);
        queue.tickets.check_room(queue.len(), ops.len())?;
        let resolved: Vec<_> = ops.iter().filter_map(Self::resolve).collect();
        let ticket = queue.push(resolved.into_iter());
        transport.progress(self.id)?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        // Polls the parker too, so that whatever arrives afterwards ends the next park.
        self.parker.completed().map_err(Error::backend("poll the network"))?;
        let mut transport = self.shared.transport();
        transport.progress(self.id)?;
        Ok(transport.completed(self.id))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        let busy = {
            let transport = self.shared.transport();
            transport.check()?;
            transport.is_busy()
        };
        let limit = if busy { limit.min(BUSY_PARK_MAX) } else { limit };
        self.parker.park(limit).map_err(Error::backend("park"))
    }

    /// Returns whether the engine of the network is busy. Copies and messages in flight do not count: they
    /// progress without this rank, and `park` limits its sleep for them.
    fn is_busy(&self) -> bool {
        self.parker.is_busy()
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        let mut transport = self.shared.transport();
        transport.check()?;
        if self.state.release() {
            transport.release(self.id);
        }
        transport.progress(self.id)
    }

    /// Returns 0, because copy engines copy between a device and the host.
    fn compute_bytes(
        &mut self,
        _ops: &[Op<'_, Local<D, N>, Remote<D, N>>],
        _captured: bool,
    ) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl<D: Fabric, N: Fabric> Drop for Engine<D, N> {
    fn drop(&mut self) {
        let mut transport = self.shared.transport();
        transport.release(self.id);
        // Transfers in flight still use the caller's memory.
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        while transport.queue(self.id).len() > 0 && !deadline.has_passed() {
            if transport.progress(self.id).is_err() {
                break;
            }
        }
        transport.remove_queue(self.id);
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Engine<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Identifies an op that a transfer belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId {
    pub(crate) queue: u64,
    pub(crate) peer: usize,
    pub(crate) order: u64,
}

/// An op in a queue, with the progress of its transfers.
#[derive(Debug)]
pub(crate) struct QueuedOp<W> {
    ticket: Ticket,
    pub(crate) order: u64,
    pub(crate) op: W,
    /// The number of bytes of the op that are in flight or complete.
    pub(crate) bytes_started: u64,
    /// Whether no transfer of the op is left to start.
    pub(crate) all_started: bool,
    in_flight: u32,
}

impl<W> QueuedOp<W> {
    pub(crate) fn start_transfer(&mut self) {
        self.in_flight += 1;
    }
}

/// Holds the ops of one engine to one peer, in order.
#[derive(Debug)]
pub(crate) struct PeerQueue<W> {
    entries: VecDeque<QueuedOp<W>>,
    /// The index of the first op that is not fully started.
    next: usize,
}

impl<W> Default for PeerQueue<W> {
    fn default() -> Self {
        Self { entries: VecDeque::new(), next: 0 }
    }
}

/// Holds the ops of one engine in a queue for each peer; ops to different peers do not wait for each other.
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

    /// Returns the number of incomplete ops.
    pub(crate) fn len(&self) -> usize {
        self.peers.iter().map(|peer_queue| peer_queue.entries.len()).sum()
    }

    /// Adds the ops of a slice, each with the index of its peer.
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

    /// Returns whether every op before `order` is complete.
    pub(crate) fn is_complete_before(&self, order: u64) -> bool {
        let first = |peer_queue: &PeerQueue<W>| {
            peer_queue.entries.front().map_or(u64::MAX, |entry| entry.order)
        };
        self.peers.iter().all(|peer_queue| first(peer_queue) >= order)
    }

    /// Records that a transfer of an op is complete.
    pub(crate) fn finish(&mut self, op_id: OpId) {
        if let Some(entry) = self.peers[op_id.peer].find(op_id.order) {
            entry.in_flight -= 1;
        }
        self.settle(op_id.peer);
    }

    /// Removes complete ops from the front, so that the remaining ones stay sorted by order.
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

    /// Drops the ops that have not started; the others start no further transfers.
    pub(crate) fn release(&mut self) {
        self.released.get_or_insert_with(Instant::now);
        for peer_queue in &mut self.peers {
            peer_queue.entries.retain(|entry| entry.in_flight > 0);
            peer_queue.entries.iter_mut().for_each(|entry| entry.all_started = true);
            peer_queue.next = peer_queue.entries.len();
        }
        self.settle_release();
    }

    /// Completes all tickets of a released queue once none of its transfers is in flight.
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

    /// Returns the first op that is not fully started.
    pub(crate) fn next(&mut self) -> Option<&mut QueuedOp<W>> {
        self.entries.get_mut(self.next)
    }

    /// Marks the first op that is not fully started as fully started.
    pub(crate) fn advance(&mut self) {
        self.entries[self.next].all_started = true;
        self.next += 1;
    }

    /// Returns whether any started op that `is` selects is incomplete.
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
