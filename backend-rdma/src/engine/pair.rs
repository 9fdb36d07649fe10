//! Queues the ops of an engine for one peer and posts them over one or more rails.
//!
//! The primary rail takes signals and small copies, so their order is that of the queue pair. Stripes of
//! large puts and gets rotate over all rails by the peer's address: bytes at one remote address use the
//! same queue pair and keep its order. If a small copy overlaps a large one, or a put and a get overlap in
//! memory of this rank, the later one is held until the earlier is complete. A signal tells the peer from
//! which other rails it must await a marker.

mod announce;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_sys::{
    ibv_send_flags, ibv_send_rdma, ibv_send_target, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};
use peerlane_hal::{Deadline, Ticket};
use peerlane_toolkit::device::Fault;

use super::chain::Chain;
use super::numbers::Numbers;
use super::opening::{Job, Opened, Opening};
use super::stillness::Stillness;
use super::strand::{Flight, Posting, Strand};
use crate::error::Error;
use crate::fabric::{Control, SignalBy};
use crate::key::CardKeys;

/// An op for one peer, checked against its regions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Write(Span),
    Read(Span),
    Signal(Announcement),
}

/// A range of local memory and a range of the peer's memory, of the same length.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) here: u64,
    pub(super) here_keys: CardKeys,
    pub(super) there: u64,
    pub(super) there_keys: CardKeys,
    pub(super) bytes: u64,
    /// Whether the bytes are device memory, which the processor cannot read.
    pub(super) of_device: bool,
}

/// A value for a flag, named by registration and word, and by the address for the peer's first NIC.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announcement {
    pub(super) generation: u64,
    pub(super) word: u64,
    pub(super) value: u64,
    pub(super) address: u64,
    pub(super) key: u32,
}

/// An op that waits to be posted.
#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    work: Work,
    /// Whether the copy is cut into stripes over all rails.
    striped: bool,
    /// Whether to request a completion: the op is the last of its slice for this peer, or a flag of the own
    /// rank waits for it.
    asked: bool,
}

/// The connection of an engine to one peer.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) control: Arc<Control>,
    opening: Option<Opening>,
    opened: Option<Opened>,
    stripe_bytes: u64,
    pending: VecDeque<Queued>,
    /// The order and ticket of the last op of each slice.
    ends: VecDeque<(u64, Ticket)>,
    numbers: Numbers,
    /// An op ended on another rail, so the completion of the earlier requests of the primary is still to be
    /// requested: the target of the empty write, and the op's order.
    flush: Option<(ibv_send_target, u64)>,
    still: Stillness,
}

impl Pair {
    /// Creates an endpoint and starts to open its queue pairs.
    pub(super) fn open(job: Job) -> Result<Self, Error> {
        let (control, stripe_bytes) = (Arc::clone(&job.control), job.inner.options.stripe_bytes);
        Ok(Self {
            control,
            opening: Some(Opening::start(job)?),
            opened: None,
            stripe_bytes,
            pending: VecDeque::new(),
            ends: VecDeque::new(),
            numbers: Numbers::default(),
            flush: None,
            still: Stillness::default(),
        })
    }

    /// Queues an op.
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, work: Work) {
        let striped = match &work {
            // A single stripe would need a marker and gain nothing.
            Work::Write(span) | Work::Read(span) => span.bytes >= 2 * self.stripe_bytes,
            Work::Signal(_) => false,
        };
        self.pending.push_back(Queued { ticket, order, work, striped, asked: false });
    }

    /// Requests a completion for the op queued last. For posted ops it was requested at the end of their slice.
    pub(super) fn ask(&mut self) {
        if let Some(queued) = self.pending.back_mut() {
            queued.asked = true;
        }
    }

    /// Ends a slice; returns whether it has ops for this peer.
    pub(super) fn end_slice(&mut self, ticket: Ticket) -> bool {
        let last = self.pending.back_mut().filter(|queued| queued.ticket == ticket);
        last.is_some_and(|queued| {
            queued.asked = true;
            self.ends.push_back((queued.order, ticket));
            true
        })
    }

    /// Returns the number of ops that are not posted.
    pub(super) fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Returns whether a call to [`pump`](Self::pump) may progress.
    pub(super) fn has_work(&self) -> bool {
        !self.pending.is_empty() || self.flush.is_some() || self.opening.is_some()
    }

    /// Sets the deadline for the peer to close its queue pairs when this is dropped.
    pub(super) fn close_by(&mut self, deadline: Deadline) {
        self.opening = None;
        if let Some(opened) = &mut self.opened {
            opened.close_by = Some(deadline);
        }
    }

    fn strands(&self) -> &[Strand] {
        self.opened.as_ref().map_or(&[], |opened| &opened.strands)
    }

    /// Returns whether every op up to `order` is complete.
    pub(super) fn is_over(&self, order: u64) -> bool {
        let posted = self.strands().iter().filter_map(Strand::first_order);
        let waiting = self.pending.front().map(|queued| queued.order);
        posted.chain(waiting).all(|first| first > order)
    }

    /// Returns whether no request is posted.
    pub(super) fn is_drained(&self) -> bool {
        self.strands().iter().all(Strand::is_drained)
    }

    /// Drops the ops that are not posted and fails the posted requests.
    pub(super) fn fail(&mut self) {
        self.pending.clear();
        (self.opening, self.flush) = (None, None);
        self.strands().iter().for_each(|strand| strand.qp.fail());
    }

    /// Completes a request and those before it on its rail; calls `finish` for each ticket that this ends.
    pub(super) fn complete(
        &mut self,
        (strand, number): (usize, u64),
        mut finish: impl FnMut(Ticket),
    ) {
        let strands = self.opened.as_mut().map(|opened| &mut opened.strands);
        if let Some(strand) = strands.and_then(|strands| strands.get_mut(strand)) {
            strand.complete(number);
        }
        while let Some(&(order, ticket)) = self.ends.front()
            && self.is_over(order)
        {
            self.ends.pop_front();
            finish(ticket);
        }
    }

    /// Returns the time left until the peer counts as lost, or `None` if no request is posted.
    ///
    /// # Errors
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost): nothing has completed for `limit`.
    pub(super) fn patience(
        &mut self,
        now: Instant,
        limit: Duration,
    ) -> Result<Option<Duration>, Error> {
        if self.is_drained() {
            self.still.end();
            return Ok(None);
        }
        let done = self.strands().iter().map(Strand::done).sum();
        let left = self.still.left(done, now, limit);
        left.map(Some).ok_or_else(|| {
            let (peer, place) = (self.control.peer, &self.control.place);
            let how = format!(
                "{place} answers, but has taken nothing for {limit:?}; its process may be stopped"
            );
            Fault::PeerLost { peer, how }.into()
        })
    }

    /// Posts ops while the limits allow it.
    pub(super) fn pump(&mut self, chains: &mut [Chain]) -> Result<(), Error> {
        if let Some(opening) = &self.opening {
            let Some(opened) = opening.poll()? else { return Ok(()) };
            (self.opened, self.opening) = (Some(opened), None);
        }
        while self.flush(chains)? && self.post_head(chains)? {}
        for (strand, chain) in self.strands().iter().zip(chains) {
            chain.post(&strand.qp)?;
        }
        Ok(())
    }

    /// Posts one request of the first op; returns whether one was posted.
    fn post_head(&mut self, chains: &mut [Chain]) -> Result<bool, Error> {
        let Some(head) = self.pending.front().copied() else { return Ok(false) };
        match head.work {
            Work::Write(span) => self.copy(head, span, false, chains),
            Work::Read(span) => self.copy(head, span, true, chains),
            Work::Signal(announcement) => self.announce(head, announcement, chains),
        }
    }

    /// Posts the pending empty write, if any; returns false if the primary is full.
    fn flush(&mut self, chains: &mut [Chain]) -> Result<bool, Error> {
        let Some((target, order)) = self.flush else { return Ok(true) };
        let first = &mut self.opened.as_mut().expect("something was posted").strands[0];
        if !first.has_room() {
            return Ok(false);
        }
        let mut request = ibv_send_wr { opcode: ibv_wr_opcode::RDMA_WRITE, ..Default::default() };
        request.wr = target;
        first.count(&mut request, Posting { order, bytes: 0, asked: true });
        chains[0].push(&first.qp, request, None)?;
        self.flush = None;
        Ok(true)
    }

    /// Posts one piece of a put or get; returns whether one was posted.
    fn copy(
        &mut self,
        head: Queued,
        span: Span,
        is_read: bool,
        chains: &mut [Chain],
    ) -> Result<bool, Error> {
        let Some(Opened { strands, signal, .. }) = &mut self.opened else { return Ok(false) };
        let striped = head.striped && strands.len() > 1;
        let (stripe, into) = (span.there / self.stripe_bytes, span.there % self.stripe_bytes);
        let index = if striped { (stripe % strands.len() as u64) as usize } else { 0 };
        let most = if striped { self.stripe_bytes - into } else { u64::MAX };
        let bytes = span.bytes.min(strands[index].room.piece_bytes).min(most);
        if !strands[index].has_room() {
            return Ok(false);
        }
        if strands.len() > 1 {
            let flight = Flight {
                here: span.here..span.here + bytes,
                there: span.there..span.there + bytes,
                is_read,
            };
            let mut others = strands.iter().enumerate().filter(|(other, _)| *other != index);
            if others.any(|(_, strand)| strand.holds(&flight)) {
                return Ok(false);
            }
            strands[index].fly(flight);
        }
        let whole = bytes == span.bytes;
        let opcode = if is_read { ibv_wr_opcode::RDMA_READ } else { ibv_wr_opcode::RDMA_WRITE };
        let mut request = ibv_send_wr { opcode, ..Default::default() };
        // The write may carry the signal after it unless that signal has to wait for another rail.
        let may_carry = whole
            && !is_read
            && index == 0
            && *signal == SignalBy::Message
            && !strands[1..].iter().any(|other| other.is_ahead || other.is_reading());
        let next = may_carry.then(|| self.fuse(head, &mut request)).flatten();
        let Some(Opened { strands, .. }) = &mut self.opened else { return Ok(false) };
        let strand = &mut strands[index];
        request.wr = target(span.there, span.there_keys[strand.peer_card]);
        // The processor reads inline bytes now: it cannot read device memory, and a get in flight may still
        // change the bytes.
        let may_inline = !is_read && !span.of_device && !strand.is_reading();
        if may_inline && bytes <= u64::from(strand.qp.inline_bytes) {
            request.send_flags |= ibv_send_flags::INLINE;
        }
        // A piece is at most the largest message of the port, whose length has 32 bits.
        let (length, lkey) = (bytes as u32, span.here_keys[strand.card]);
        let place = ibv_sge { addr: span.here, length, lkey };
        strand.is_ahead |= !is_read && index > 0;
        let last = next.unwrap_or(head);
        // On the other rails requests are few and large, so each is signaled.
        let asked = whole && last.asked || index > 0;
        strand.count(&mut request, Posting { order: head.order, bytes, asked });
        chains[index].push(&strand.qp, request, Some(place))?;
        if whole && last.asked && strands[0].has_unmarked() {
            let to = target(span.there, span.there_keys[strands[0].peer_card]);
            self.flush = Some((to, last.order));
        }
        self.advance(whole, bytes);
        Ok(true)
    }

    /// Removes the posted part from the first op.
    fn advance(&mut self, whole: bool, bytes: u64) {
        if whole {
            self.pending.pop_front();
        } else if let Some(Queued { work: Work::Write(span) | Work::Read(span), .. }) =
            self.pending.front_mut()
        {
            (span.here, span.there) = (span.here + bytes, span.there + bytes);
            span.bytes -= bytes;
        }
    }
}

/// Returns the remote part of an RDMA request.
fn target(remote_addr: u64, rkey: u32) -> ibv_send_target {
    ibv_send_target { rdma: ibv_send_rdma { remote_addr, rkey } }
}
