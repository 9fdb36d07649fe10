//! Tracks the work requests in flight on one queue pair, and posts requests in chains.

use std::collections::VecDeque;
use std::ops::Range;

use ibverbs_sys::{ibv_send_flags, ibv_send_wr, ibv_sge, ibv_wr_opcode};

use crate::error::Error;
use crate::sys::Qp;

/// The bit position of the peer in a work request id, above 4 bits for the queue pair and 44 for the sequence
/// number.
const PEER_SHIFT: u32 = 48;
const RAIL_SHIFT: u32 = 44;
const SEQUENCE_MASK: u64 = (1 << RAIL_SHIFT) - 1;

const CHAIN_REQUESTS_MAX: usize = 64;

/// Identifies a work request in its completion, where it is encoded as the `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId {
    pub(super) peer: usize,
    pub(super) rail: usize,
    /// The sequence number of the work request on its queue pair, from 1.
    pub(super) sequence: u64,
}

impl RequestId {
    pub(super) fn decode(wr_id: u64) -> Self {
        Self {
            peer: (wr_id >> PEER_SHIFT) as usize,
            rail: (wr_id >> RAIL_SHIFT & 0xf) as usize,
            sequence: wr_id & SEQUENCE_MASK,
        }
    }

    fn encode(self) -> u64 {
        (self.peer as u64) << PEER_SHIFT | (self.rail as u64) << RAIL_SHIFT | self.sequence
    }
}

/// A posted work request that generates a completion, with the unsignaled requests before it.
#[derive(Clone, Copy, Debug)]
struct Signaled {
    sequence: u64,
    first_order: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Unsignaled {
    requests: u32,
    bytes: u64,
    first_order: Option<u64>,
}

#[derive(Clone, Debug)]
pub(super) struct CopyInFlight {
    pub(super) local: Range<u64>,
    pub(super) remote: Range<u64>,
    pub(super) is_read: bool,
}

impl CopyInFlight {
    /// Returns whether the order of two copies matters, because their memory overlaps.
    fn conflicts(&self, other: &Self) -> bool {
        let overlap =
            |one: &Range<u64>, two: &Range<u64>| one.start < two.end && two.start < one.end;
        overlap(&self.remote, &other.remote) && !(self.is_read && other.is_read)
            || overlap(&self.local, &other.local) && (self.is_read || other.is_read)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RailLimits {
    pub(super) requests: u32,
    pub(super) bytes: u64,
    pub(super) piece_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RequestInfo {
    pub(super) order: u64,
    pub(super) bytes: u64,
    pub(super) signaled: bool,
}

#[derive(Debug)]
pub(super) struct Rail {
    pub(super) qp: Qp,
    pub(super) nic: usize,
    pub(super) peer_nic: usize,
    pub(super) limits: RailLimits,
    peer: usize,
    index: usize,
    signaled: VecDeque<Signaled>,
    unsignaled: Unsignaled,
    posted: u64,
    completed: u64,
    posted_bytes: u64,
    /// Whether the next request needs a fence, because a read may be in flight.
    fence: bool,
    last_read: u64,
    pub(super) needs_marker: bool,
    /// The puts and gets in flight by sequence number, which are not recorded if the peer has only one queue
    /// pair.
    copies: VecDeque<(u64, CopyInFlight)>,
}

impl Rail {
    pub(super) fn new(
        qp: Qp,
        (nic, peer_nic): (usize, usize),
        (peer, index): (usize, usize),
        limits: RailLimits,
    ) -> Self {
        Self {
            qp,
            nic,
            peer_nic,
            limits,
            peer,
            index,
            signaled: VecDeque::new(),
            unsignaled: Unsignaled::default(),
            posted: 0,
            completed: 0,
            posted_bytes: 0,
            fence: false,
            last_read: 0,
            needs_marker: false,
            copies: VecDeque::new(),
        }
    }

    pub(super) fn has_room(&self) -> bool {
        let in_flight = self.posted - self.completed;
        in_flight < u64::from(self.limits.requests)
            && (self.posted_bytes < self.limits.bytes || in_flight == 0)
    }

    pub(super) fn is_drained(&self) -> bool {
        self.completed == self.posted
    }

    pub(super) fn is_reading(&self) -> bool {
        self.last_read > self.completed
    }

    pub(super) fn completed(&self) -> u64 {
        self.completed
    }

    pub(super) fn slot(&self) -> usize {
        (self.posted % u64::from(self.limits.requests)) as usize
    }

    pub(super) fn has_unsignaled(&self) -> bool {
        self.unsignaled.requests > 0
    }

    pub(super) fn first_order(&self) -> Option<u64> {
        self.signaled.front().map(|request| request.first_order).or(self.unsignaled.first_order)
    }

    /// Returns whether a copy in flight on this queue pair must complete before `copy` is posted on another
    /// one.
    pub(super) fn conflicts(&self, copy: &CopyInFlight) -> bool {
        self.copies.iter().any(|(_, in_flight)| in_flight.conflicts(copy))
    }

    pub(super) fn add_copy(&mut self, copy: CopyInFlight) {
        self.copies.push_back((self.posted + 1, copy));
    }

    /// Sets the fence and signaled flags of a work request that is about to be posted.
    ///
    /// A request is also signaled when a quarter of the limits was posted without a signaled request.
    pub(super) fn prepare(&mut self, request: &mut ibv_send_wr, info: RequestInfo) {
        let is_read = request.opcode == ibv_wr_opcode::RDMA_READ;
        if !is_read && std::mem::take(&mut self.fence) {
            request.send_flags |= ibv_send_flags::FENCE;
        }
        self.fence |= is_read;
        self.posted += 1;
        if is_read {
            self.last_read = self.posted;
        }
        self.posted_bytes += info.bytes;
        self.unsignaled.requests += 1;
        self.unsignaled.bytes += info.bytes;
        let first_order = *self.unsignaled.first_order.get_or_insert(info.order);
        let (peer, rail, sequence) = (self.peer, self.index, self.posted);
        request.wr_id = RequestId { peer, rail, sequence }.encode();
        let is_due = self.unsignaled.requests >= self.limits.requests / 4
            || self.unsignaled.bytes >= self.limits.bytes / 4;
        if info.signaled || is_due {
            request.send_flags |= ibv_send_flags::SIGNALED;
            let bytes = self.unsignaled.bytes;
            self.signaled.push_back(Signaled { sequence, first_order, bytes });
            self.unsignaled = Unsignaled::default();
        }
    }

    /// Completes the work request with this sequence number and all earlier ones.
    pub(super) fn complete(&mut self, sequence: u64) {
        self.completed = self.completed.max(sequence);
        while let Some(request) = self.signaled.front().filter(|first| first.sequence <= sequence) {
            self.posted_bytes -= request.bytes;
            self.signaled.pop_front();
        }
        while self.copies.front().is_some_and(|(first, _)| *first <= sequence) {
            self.copies.pop_front();
        }
    }
}

/// Collects requests for one queue pair and posts them with one doorbell.
#[derive(Debug)]
pub(super) struct RequestChain {
    // Both are allocated once.
    requests: Vec<ibv_send_wr>,
    sges: Vec<ibv_sge>,
}

// SAFETY: the pointers in the requests are set and used in `post` only.
unsafe impl Send for RequestChain {}

impl RequestChain {
    pub(super) fn new() -> Self {
        let requests = Vec::with_capacity(CHAIN_REQUESTS_MAX);
        Self { requests, sges: Vec::with_capacity(CHAIN_REQUESTS_MAX) }
    }

    /// Adds a work request to the chain, and posts the chain first if it is full. A request without a
    /// scatter-gather entry has no bytes.
    pub(super) fn push(
        &mut self,
        qp: &Qp,
        mut request: ibv_send_wr,
        sge: Option<ibv_sge>,
    ) -> Result<(), Error> {
        if self.requests.len() == CHAIN_REQUESTS_MAX {
            self.post(qp)?;
        }
        request.num_sge = sge.is_some().into();
        self.requests.push(request);
        self.sges.push(sge.unwrap_or_default());
        Ok(())
    }

    pub(super) fn post(&mut self, qp: &Qp) -> Result<(), Error> {
        let mut next = std::ptr::null_mut();
        for (request, sge) in self.requests.iter_mut().zip(&mut self.sges).rev() {
            request.next = next;
            request.sg_list = sge;
            next = request;
        }
        let posted = match self.requests.first_mut() {
            // SAFETY: the chain was just built and is valid for the call. `submit`'s contract keeps the
            // memory of copies alive, and messages are in buffers of the endpoint.
            Some(first) => unsafe { qp.post(first) },
            None => Ok(()),
        };
        self.requests.clear();
        self.sges.clear();
        posted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_id_survives_encoding() {
        let id = RequestId { peer: 65_535, rail: 7, sequence: SEQUENCE_MASK };
        assert_eq!(RequestId::decode(id.encode()), id);
        let id = RequestId { peer: 0, rail: 0, sequence: 1 };
        assert_eq!(RequestId::decode(id.encode()), id);
    }

    #[test]
    fn only_copies_whose_order_is_visible_conflict() {
        let copy = |local, remote, is_read| CopyInFlight { local, remote, is_read };
        let put = copy(0..10, 100..110, false);
        let conflicts = |other: CopyInFlight| put.conflicts(&other) && other.conflicts(&put);
        assert!(conflicts(copy(50..60, 109..119, false)), "two puts to the same bytes");
        assert!(!put.conflicts(&copy(50..60, 110..120, false)));
        assert!(!put.conflicts(&copy(5..15, 110..120, false)), "two puts from the same bytes");
        assert!(conflicts(copy(50..60, 100..110, true)), "a get of bytes that are put");
        assert!(conflicts(copy(9..10, 200..201, true)), "a get into the source of a put");
        let get = copy(0..10, 100..110, true);
        assert!(!get.conflicts(&copy(50..60, 100..110, true)), "two gets of the same bytes");
        assert!(get.conflicts(&copy(0..10, 200..210, true)), "two gets into the same bytes");
    }
}
