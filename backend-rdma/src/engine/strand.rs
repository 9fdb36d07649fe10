//! Tracks the posted requests of one queue pair, and posts requests in chains.

use std::collections::VecDeque;
use std::ops::Range;

use ibverbs_sys::{ibv_send_flags, ibv_send_wr, ibv_wr_opcode};

use crate::sys::Qp;

/// Bit positions of the peer and the rail in a request id.
const PEER_SHIFT: u32 = 48;
const STRAND_SHIFT: u32 = 44;
const NUMBER_MASK: u64 = (1 << STRAND_SHIFT) - 1;

/// Identifies a request in its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId {
    pub(super) peer: usize,
    pub(super) strand: usize,
    pub(super) number: u64,
}

impl RequestId {
    pub(super) fn of(id: u64) -> Self {
        Self {
            peer: (id >> PEER_SHIFT) as usize,
            strand: (id >> STRAND_SHIFT & 0xf) as usize,
            number: id & NUMBER_MASK,
        }
    }

    fn pack(self) -> u64 {
        (self.peer as u64) << PEER_SHIFT | (self.strand as u64) << STRAND_SHIFT | self.number
    }
}

/// A posted request with a completion, and the requests before it without one.
#[derive(Clone, Copy, Debug)]
struct Mark {
    number: u64,
    first_order: u64,
    bytes: u64,
}

/// Requests posted since the last signaled one.
#[derive(Clone, Copy, Debug, Default)]
struct Unmarked {
    requests: u32,
    bytes: u64,
    first_order: Option<u64>,
}

/// The memory of a put or get in flight.
#[derive(Clone, Debug)]
pub(super) struct Flight {
    pub(super) here: Range<u64>,
    pub(super) there: Range<u64>,
    pub(super) is_read: bool,
}

impl Flight {
    /// Returns whether the order in which the two take effect is visible.
    fn conflicts(&self, other: &Self) -> bool {
        let overlap =
            |one: &Range<u64>, two: &Range<u64>| one.start < two.end && two.start < one.end;
        overlap(&self.there, &other.there) && !(self.is_read && other.is_read)
            || overlap(&self.here, &other.here) && (self.is_read || other.is_read)
    }
}

/// Limits of what one rail may have posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) requests: u32,
    pub(super) bytes: u64,
    pub(super) piece_bytes: u64,
}

/// What a rail records of a request when it is posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posting {
    /// The number of its op, in the order of submission to the engine.
    pub(super) order: u64,
    pub(super) bytes: u64,
    /// Whether to request a completion.
    pub(super) asked: bool,
}

/// A queue pair to a peer and its requests in flight.
#[derive(Debug)]
pub(super) struct Strand {
    pub(super) qp: Qp,
    /// Index of the NIC of this rank, and of the peer's NIC.
    pub(super) card: usize,
    pub(super) peer_card: usize,
    pub(super) room: Room,
    peer: usize,
    index: usize,
    marks: VecDeque<Mark>,
    unmarked: Unmarked,
    /// Number of the last posted request; numbers begin at 1.
    posted: u64,
    done: u64,
    posted_bytes: u64,
    /// Whether the next request needs a fence, because a read may be in flight.
    fence: bool,
    /// Number of the last read.
    last_read: u64,
    /// Whether bytes were put since the last marker.
    pub(super) is_ahead: bool,
    /// Copies in flight; empty if the endpoint has only one rail.
    flights: VecDeque<(u64, Flight)>,
}

impl Strand {
    pub(super) fn new(
        qp: Qp,
        (card, peer_card): (usize, usize),
        (peer, index): (usize, usize),
        room: Room,
    ) -> Self {
        Self {
            qp,
            card,
            peer_card,
            room,
            peer,
            index,
            marks: VecDeque::new(),
            unmarked: Unmarked::default(),
            posted: 0,
            done: 0,
            posted_bytes: 0,
            fence: false,
            last_read: 0,
            is_ahead: false,
            flights: VecDeque::new(),
        }
    }

    /// Returns whether one more request may be posted.
    pub(super) fn has_room(&self) -> bool {
        let under_way = self.posted - self.done;
        under_way < u64::from(self.room.requests)
            && (self.posted_bytes < self.room.bytes || under_way == 0)
    }

    /// Returns whether no request is posted.
    pub(super) fn is_drained(&self) -> bool {
        self.done == self.posted
    }

    /// Returns whether a read is posted and not known to be complete.
    pub(super) fn is_reading(&self) -> bool {
        self.last_read > self.done
    }

    /// Returns the number of completed requests.
    pub(super) fn done(&self) -> u64 {
        self.done
    }

    /// Returns the buffer slot of the next request; there is one slot per request that may be posted.
    pub(super) fn slot(&self) -> usize {
        (self.posted % u64::from(self.room.requests)) as usize
    }

    /// Returns whether requests without a requested completion are posted.
    pub(super) fn has_unmarked(&self) -> bool {
        self.unmarked.requests > 0
    }

    /// Returns the order of the first op with an incomplete request.
    pub(super) fn first_order(&self) -> Option<u64> {
        self.marks.front().map(|mark| mark.first_order).or(self.unmarked.first_order)
    }

    /// Returns whether a copy in flight here must complete before `flight` is posted on another rail.
    pub(super) fn holds(&self, flight: &Flight) -> bool {
        self.flights.iter().any(|(_, under_way)| under_way.conflicts(flight))
    }

    /// Records the memory of the next request.
    pub(super) fn fly(&mut self, flight: Flight) {
        self.flights.push_back((self.posted + 1, flight));
    }

    /// Numbers a request that is about to be posted, and requests a completion where one is due.
    pub(super) fn count(&mut self, request: &mut ibv_send_wr, posting: Posting) {
        let is_read = request.opcode == ibv_wr_opcode::RDMA_READ;
        if !is_read && std::mem::take(&mut self.fence) {
            request.send_flags |= ibv_send_flags::FENCE;
        }
        self.fence |= is_read;
        self.posted += 1;
        if is_read {
            self.last_read = self.posted;
        }
        self.posted_bytes += posting.bytes;
        self.unmarked.requests += 1;
        self.unmarked.bytes += posting.bytes;
        let first_order = *self.unmarked.first_order.get_or_insert(posting.order);
        let (peer, strand, number) = (self.peer, self.index, self.posted);
        request.wr_id = RequestId { peer, strand, number }.pack();
        let many = self.unmarked.requests >= self.room.requests / 4;
        if posting.asked || many || self.unmarked.bytes >= self.room.bytes / 4 {
            request.send_flags |= ibv_send_flags::SIGNALED;
            self.marks.push_back(Mark { number, first_order, bytes: self.unmarked.bytes });
            self.unmarked = Unmarked::default();
        }
    }

    /// Completes the request of this number and those before it.
    pub(super) fn complete(&mut self, number: u64) {
        self.done = self.done.max(number);
        while let Some(mark) = self.marks.front().filter(|mark| mark.number <= number) {
            self.posted_bytes -= mark.bytes;
            self.marks.pop_front();
        }
        while self.flights.front().is_some_and(|(flying, _)| *flying <= number) {
            self.flights.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_tells_whose_it_is() {
        let id = RequestId { peer: 65_535, strand: 7, number: NUMBER_MASK };
        assert_eq!(RequestId::of(id.pack()), id);
        let id = RequestId { peer: 0, strand: 0, number: 1 };
        assert_eq!(RequestId::of(id.pack()), id);
    }

    #[test]
    fn only_copies_whose_order_shows_conflict() {
        let flight = |here, there, is_read| Flight { here, there, is_read };
        let put = flight(0..10, 100..110, false);
        let conflicts = |other: Flight| put.conflicts(&other) && other.conflicts(&put);
        assert!(conflicts(flight(50..60, 109..119, false)), "two puts to one place");
        assert!(!put.conflicts(&flight(50..60, 110..120, false)));
        assert!(!put.conflicts(&flight(5..15, 110..120, false)), "two puts from one place");
        assert!(conflicts(flight(50..60, 100..110, true)), "a get of what was put");
        assert!(conflicts(flight(9..10, 200..201, true)), "a get onto what is put");
        let get = flight(0..10, 100..110, true);
        assert!(!get.conflicts(&flight(50..60, 100..110, true)), "two gets of one place");
        assert!(get.conflicts(&flight(0..10, 200..210, true)), "two gets to one place");
    }
}
