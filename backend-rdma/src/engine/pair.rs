//! The queue of an engine to one peer: what waits to be posted, and over which queue pairs it goes.
//!
//! The first queue pair takes signals and what is small, so their order is its own. Stripes of large
//! puts and gets go over all of them, by the peer's address: what touches the same bytes of the peer
//! takes the same queue pair, and its order with it. Where a small op meets a large one, or a put and a
//! get meet in memory of this rank, the later one is held until the earlier is complete. A signal says
//! to the peer on which other queue pairs it has to wait for a companion.

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

/// Work for one peer, checked against its regions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Write(Span),
    Read(Span),
    Signal(Announcement),
}

/// Bytes here and there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) here: u64,
    pub(super) here_keys: CardKeys,
    pub(super) there: u64,
    pub(super) there_keys: CardKeys,
    pub(super) bytes: u64,
    /// Whether the processor does not reach the bytes here.
    pub(super) of_device: bool,
}

/// A value for a flag, which the peer knows by registration and word, and its first card by address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Announcement {
    pub(super) generation: u64,
    pub(super) word: u64,
    pub(super) value: u64,
    pub(super) address: u64,
    pub(super) key: u32,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    work: Work,
    /// Cut over all queue pairs.
    striped: bool,
    /// The last of its slice to this peer, or right before something that waits for it: its completion
    /// is asked for.
    asked: bool,
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) control: Arc<Control>,
    opening: Option<Opening>,
    opened: Option<Opened>,
    stripe_bytes: u64,
    pending: VecDeque<Queued>,
    /// The last op of each slice, as its place among all of the engine.
    ends: VecDeque<(u64, Ticket)>,
    numbers: Numbers,
    /// An op ended on another queue pair, and what is before it on the first has to be asked for: where
    /// an empty write goes, and the op's place.
    flush: Option<(ibv_send_target, u64)>,
    still: Stillness,
}

impl Pair {
    /// Begins to open the queue pairs.
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

    pub(super) fn push(&mut self, ticket: Ticket, order: u64, work: Work) {
        let striped = match &work {
            // One stripe alone would only ask for a companion.
            Work::Write(span) | Work::Read(span) => span.bytes >= 2 * self.stripe_bytes,
            Work::Signal(_) => false,
        };
        self.pending.push_back(Queued { ticket, order, work, striped, asked: false });
    }

    /// Asks for the completion of what was pushed last; what is posted already was asked for with its
    /// slice.
    pub(super) fn ask(&mut self) {
        if let Some(queued) = self.pending.back_mut() {
            queued.asked = true;
        }
    }

    /// Everything of a slice was pushed; whether there was anything.
    pub(super) fn end_slice(&mut self, ticket: Ticket) -> bool {
        let last = self.pending.back_mut().filter(|queued| queued.ticket == ticket);
        last.is_some_and(|queued| {
            queued.asked = true;
            self.ends.push_back((queued.order, ticket));
            true
        })
    }

    pub(super) fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Whether a call may come further, for what has been submitted.
    pub(super) fn has_work(&self) -> bool {
        !self.pending.is_empty() || self.flush.is_some() || self.opening.is_some()
    }

    /// How long the peer may take to close its ends when this is dropped.
    pub(super) fn close_by(&mut self, deadline: Deadline) {
        self.opening = None;
        if let Some(opened) = &mut self.opened {
            opened.close_by = Some(deadline);
        }
    }

    fn strands(&self) -> &[Strand] {
        self.opened.as_ref().map_or(&[], |opened| &opened.strands)
    }

    /// Whether every op up to `order` is complete.
    pub(super) fn is_over(&self, order: u64) -> bool {
        let posted = self.strands().iter().filter_map(Strand::first_order);
        let waiting = self.pending.front().map(|queued| queued.order);
        posted.chain(waiting).all(|first| first > order)
    }

    /// Whether nothing is posted any more.
    pub(super) fn is_drained(&self) -> bool {
        self.strands().iter().all(Strand::is_drained)
    }

    /// Drops what is not posted, and lets fail what is.
    pub(super) fn fail(&mut self) {
        self.pending.clear();
        (self.opening, self.flush) = (None, None);
        self.strands().iter().for_each(|strand| strand.qp.fail());
    }

    /// A request is complete, and so are those before it on its queue pair; what that finishes.
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

    /// How long what is posted may still stay incomplete, if there is any; an error where that is over.
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

    /// Posts what there is room for.
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

    /// Posts a request of the head; whether there was one, and room.
    fn post_head(&mut self, chains: &mut [Chain]) -> Result<bool, Error> {
        let Some(head) = self.pending.front().copied() else { return Ok(false) };
        match head.work {
            Work::Write(span) => self.copy(head, span, false, chains),
            Work::Read(span) => self.copy(head, span, true, chains),
            Work::Signal(announcement) => self.announce(head, announcement, chains),
        }
    }

    /// Posts the empty write that is owed; whether none is owed any more.
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

    /// Posts a piece of a put or get.
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
        // What no signal has to wait for elsewhere may carry it.
        let may_carry = whole
            && !is_read
            && index == 0
            && *signal == SignalBy::Message
            && !strands[1..].iter().any(|other| other.is_ahead || other.is_reading());
        let next = may_carry.then(|| self.fuse(head, &mut request)).flatten();
        let Some(Opened { strands, .. }) = &mut self.opened else { return Ok(false) };
        let strand = &mut strands[index];
        request.wr = target(span.there, span.there_keys[strand.peer_card]);
        // The processor takes inline bytes now: it reaches no device, and a get that is under way may still
        // change them.
        let may_inline = !is_read && !span.of_device && !strand.is_reading();
        if may_inline && bytes <= u64::from(strand.qp.inline_bytes) {
            request.send_flags |= ibv_send_flags::INLINE;
        }
        // A piece is smaller than the largest message, which has 32 bits.
        let (length, lkey) = (bytes as u32, span.here_keys[strand.card]);
        let place = ibv_sge { addr: span.here, length, lkey };
        strand.is_ahead |= !is_read && index > 0;
        let last = next.unwrap_or(head);
        // Elsewhere than on the first, requests are few and large.
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

    /// Takes off the head what was posted of it.
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

fn target(remote_addr: u64, rkey: u32) -> ibv_send_target {
    ibv_send_target { rdma: ibv_send_rdma { remote_addr, rkey } }
}
