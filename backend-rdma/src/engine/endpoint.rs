//! Queues the puts, gets and signals of an RDMA engine to one peer, and posts them over one or more queue
//! pairs.
//!
//! The primary rail takes signals and small copies, so their order is that of the queue pair. Stripes of
//! large puts and gets rotate over all rails by the peer's address: bytes at one remote address use the
//! same queue pair and keep its order. If a small copy overlaps a large one, or a put and a get overlap in
//! memory of this rank, the later one is held until the earlier is complete. A signal tells the peer from
//! which other rails it must await a marker.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ibverbs_sys::{
    ibv_send_flags, ibv_send_rdma, ibv_send_target, ibv_send_wr, ibv_sge, ibv_wr_opcode,
};
use peerlane_hal::{Deadline, Ticket};
use peerlane_toolkit::Fault;

use super::connect::{ConnectJob, Connected, Connecting};
use super::ops::{CopySpan, FlagSignal, PeerOp};
use super::rail::{CopyInFlight, Rail, RequestChain, RequestInfo};
use crate::connection::{Control, FlagIds, Immediate};
use crate::error::Error;
use crate::options::SignalBy;

#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) control: Arc<Control>,
    connecting: Option<Connecting>,
    connected: Option<Connected>,
    stripe_bytes: u64,
    queue: VecDeque<Queued>,
    slice_ends: VecDeque<(u64, Ticket)>,
    flag_ids: FlagIds,
    /// A zero-byte write to post on the primary queue pair, whose completion also covers earlier unsignaled
    /// requests. It is needed if an op ends on another queue pair, or if a copy for another one waits for such a request;
    /// the number is that of the op.
    flush: Option<(ibv_send_target, u64)>,
    stall: StallTimer,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    op: PeerOp,
    /// Whether a put or get is cut into stripes over all queue pairs.
    striped: bool,
    /// Whether the last work request of a put, get or signal must generate a completion. That is so if the op
    /// is the last of its slice for this peer, or if a flag of this rank waits for it.
    signaled: bool,
}

impl Endpoint {
    pub(super) fn open(job: ConnectJob) -> Result<Self, Error> {
        let stripe_bytes = job.resources.options.stripe_bytes;
        Ok(Self {
            control: Arc::clone(&job.control),
            connecting: Some(Connecting::start(job)?),
            connected: None,
            stripe_bytes,
            queue: VecDeque::new(),
            slice_ends: VecDeque::new(),
            flag_ids: FlagIds::default(),
            flush: None,
            stall: StallTimer::default(),
        })
    }

    pub(super) fn push(&mut self, ticket: Ticket, order: u64, op: PeerOp) {
        let striped = match &op {
            // A single stripe would need a marker and gain nothing.
            PeerOp::Write(span) | PeerOp::Read(span) => span.bytes >= 2 * self.stripe_bytes,
            PeerOp::Signal(_) => false,
        };
        self.queue.push_back(Queued { ticket, order, op, striped, signaled: false });
    }

    pub(super) fn signal_last(&mut self) {
        if let Some(queued) = self.queue.back_mut() {
            queued.signaled = true;
        }
    }

    pub(super) fn end_slice(&mut self, ticket: Ticket) -> bool {
        let last = self.queue.back_mut().filter(|queued| queued.ticket == ticket);
        last.is_some_and(|queued| {
            queued.signaled = true;
            self.slice_ends.push_back((queued.order, ticket));
            true
        })
    }

    pub(super) fn queued(&self) -> usize {
        self.queue.len()
    }

    pub(super) fn has_work(&self) -> bool {
        !self.queue.is_empty() || self.flush.is_some() || self.connecting.is_some()
    }

    pub(super) fn close_by(&mut self, deadline: Deadline) {
        self.connecting = None;
        if let Some(connected) = &mut self.connected {
            connected.close_by = Some(deadline);
        }
    }

    fn rails(&self) -> &[Rail] {
        self.connected.as_ref().map_or(&[], |connected| &connected.rails)
    }

    pub(super) fn is_complete(&self, order: u64) -> bool {
        let posted = self.rails().iter().filter_map(Rail::first_order);
        let queued = self.queue.front().map(|queued| queued.order);
        posted.chain(queued).all(|first| first > order)
    }

    pub(super) fn is_drained(&self) -> bool {
        self.rails().iter().all(Rail::is_drained)
    }

    /// Drops the ops that are not posted, and moves the queue pairs to the error state.
    pub(super) fn fail(&mut self) {
        self.queue.clear();
        (self.connecting, self.flush) = (None, None);
        self.rails().iter().for_each(|rail| rail.qp.fail());
    }

    pub(super) fn complete(
        &mut self,
        (rail, sequence): (usize, u64),
        mut finish: impl FnMut(Ticket),
    ) {
        let rails = self.connected.as_mut().map(|connected| &mut connected.rails);
        if let Some(rail) = rails.and_then(|rails| rails.get_mut(rail)) {
            rail.complete(sequence);
        }
        while let Some(&(order, ticket)) = self.slice_ends.front()
            && self.is_complete(order)
        {
            self.slice_ends.pop_front();
            finish(ticket);
        }
    }

    /// Returns the time left until the peer counts as lost, or `None` if no request is in flight.
    ///
    /// # Errors
    /// [`PeerLost`](peerlane_hal::ErrorKind::PeerLost): no request has completed for `limit`.
    pub(super) fn stall_time_left(
        &mut self,
        now: Instant,
        limit: Duration,
    ) -> Result<Option<Duration>, Error> {
        if self.is_drained() {
            self.stall.stop();
            return Ok(None);
        }
        let completed = self.rails().iter().map(Rail::completed).sum();
        let left = self.stall.time_left(completed, now, limit);
        left.map(Some).ok_or_else(|| {
            let (peer, location) = (self.control.peer, &self.control.location);
            let how = format!(
                "{location} answers, but has taken nothing for {limit:?}; its process may be stopped"
            );
            Fault::PeerLost { peer, how }.into()
        })
    }

    pub(super) fn post_queued(&mut self, chains: &mut [RequestChain]) -> Result<(), Error> {
        if let Some(connecting) = &self.connecting {
            let Some(connected) = connecting.poll()? else { return Ok(()) };
            (self.connected, self.connecting) = (Some(connected), None);
        }
        while self.post_flush(chains)? && self.post_head(chains)? {}
        for (rail, chain) in self.rails().iter().zip(chains) {
            chain.post(&rail.qp)?;
        }
        Ok(())
    }

    fn post_head(&mut self, chains: &mut [RequestChain]) -> Result<bool, Error> {
        let Some(head) = self.queue.front().copied() else { return Ok(false) };
        match head.op {
            PeerOp::Write(span) => self.post_copy(head, span, false, chains),
            PeerOp::Read(span) => self.post_copy(head, span, true, chains),
            PeerOp::Signal(signal) => self.post_signal(head, signal, chains),
        }
    }

    /// Plans a flush if the primary queue pair has unsignaled requests, and returns whether it has.
    fn flush_primary(&mut self, span: &CopySpan, order: u64) -> bool {
        let primary = self.rails().first().filter(|rail| rail.has_unsignaled());
        let target = primary.map(|rail| rdma_target(span.remote, span.remote_keys[rail.peer_nic]));
        if let Some(target) = target {
            self.flush = Some((target, order));
        }
        target.is_some()
    }

    fn post_flush(&mut self, chains: &mut [RequestChain]) -> Result<bool, Error> {
        let Some((target, order)) = self.flush else { return Ok(true) };
        let primary = &mut self.connected.as_mut().expect("a request was posted").rails[0];
        if !primary.has_room() {
            return Ok(false);
        }
        let mut request = ibv_send_wr { opcode: ibv_wr_opcode::RDMA_WRITE, ..Default::default() };
        request.wr = target;
        primary.prepare(&mut request, RequestInfo { order, bytes: 0, signaled: true });
        chains[0].push(&primary.qp, request, None)?;
        self.flush = None;
        Ok(true)
    }

    fn post_copy(
        &mut self,
        head: Queued,
        span: CopySpan,
        is_read: bool,
        chains: &mut [RequestChain],
    ) -> Result<bool, Error> {
        let Some(Connected { rails, signal, .. }) = &mut self.connected else { return Ok(false) };
        let striped = head.striped && rails.len() > 1;
        let (stripe, offset) = (span.remote / self.stripe_bytes, span.remote % self.stripe_bytes);
        let index = if striped { (stripe % rails.len() as u64) as usize } else { 0 };
        let bytes_max = if striped { self.stripe_bytes - offset } else { u64::MAX };
        let bytes = span.bytes.min(rails[index].limits.piece_bytes).min(bytes_max);
        if !rails[index].has_room() {
            return Ok(false);
        }
        if rails.len() > 1 {
            let copy = CopyInFlight {
                local: span.local..span.local + bytes,
                remote: span.remote..span.remote + bytes,
                is_read,
            };
            let mut others = rails.iter().enumerate().filter(|(other, _)| *other != index);
            if let Some((other, _)) = others.find(|(_, rail)| rail.conflicts(&copy)) {
                // Only the primary has copies without a completion.
                return Ok(other == 0 && self.flush_primary(&span, head.order));
            }
            rails[index].add_copy(copy);
        }
        let is_last = bytes == span.bytes;
        let opcode = if is_read { ibv_wr_opcode::RDMA_READ } else { ibv_wr_opcode::RDMA_WRITE };
        let mut request = ibv_send_wr { opcode, ..Default::default() };
        // The write may carry the signal after it unless that signal has to wait for another rail.
        let may_carry = is_last
            && !is_read
            && index == 0
            && *signal == SignalBy::Message
            && !rails[1..].iter().any(|other| other.needs_marker || other.is_reading());
        let carried = may_carry.then(|| self.attach_signal(head, &mut request)).flatten();
        let Some(Connected { rails, .. }) = &mut self.connected else { return Ok(false) };
        let rail = &mut rails[index];
        request.wr = rdma_target(span.remote, span.remote_keys[rail.peer_nic]);
        // The processor reads inline bytes now: it cannot read device memory, and a get in flight may still
        // change the bytes.
        let may_inline = !is_read && !span.is_device_memory && !rail.is_reading();
        if may_inline && bytes <= u64::from(rail.qp.inline_bytes) {
            request.send_flags |= ibv_send_flags::INLINE;
        }
        // A piece is at most the largest message of the port, whose length has 32 bits.
        let (length, lkey) = (bytes as u32, span.local_keys[rail.nic]);
        let sge = ibv_sge { addr: span.local, length, lkey };
        rail.needs_marker |= !is_read && index > 0;
        let last_op = carried.unwrap_or(head);
        // On the other rails requests are few and large, so each is signaled.
        let signaled = is_last && last_op.signaled || index > 0;
        rail.prepare(&mut request, RequestInfo { order: head.order, bytes, signaled });
        chains[index].push(&rail.qp, request, Some(sge))?;
        if is_last && last_op.signaled {
            self.flush_primary(&span, last_op.order);
        }
        self.advance(is_last, bytes);
        Ok(true)
    }

    fn advance(&mut self, is_last: bool, bytes: u64) {
        if is_last {
            self.queue.pop_front();
        } else if let Some(Queued { op: PeerOp::Write(span) | PeerOp::Read(span), .. }) =
            self.queue.front_mut()
        {
            (span.local, span.remote) = (span.local + bytes, span.remote + bytes);
            span.bytes -= bytes;
        }
    }

    /// Sends the next signal as the immediate value of a write, so that the signal needs no work request of
    /// its own.
    fn attach_signal(&mut self, head: Queued, request: &mut ibv_send_wr) -> Option<Queued> {
        let next = self.queue.get(1).copied();
        let next = next.filter(|next| next.ticket == head.ticket && !head.signaled)?;
        let PeerOp::Signal(FlagSignal { flag, value, .. }) = next.op else { return None };
        request.imm_data = self.flag_ids.immediate(flag, value, 0)?;
        request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
        self.queue.remove(1);
        Some(next)
    }

    /// Posts an empty write on each other queue pair before the signal, so that the peer can tell when all
    /// data has arrived.
    fn post_signal(
        &mut self,
        head: Queued,
        signal: FlagSignal,
        chains: &mut [RequestChain],
    ) -> Result<bool, Error> {
        let Some(Connected { rails, signal: method, .. }) = &mut self.connected else {
            return Ok(false);
        };
        let (method, (primary, others)) = match rails.split_first_mut() {
            Some(split) => (*method, split),
            None => return Ok(false),
        };
        // A fence does not order two queue pairs, and a flag that the NIC writes is not held for markers.
        let must_wait =
            |rail: &Rail| rail.is_reading() || method == SignalBy::Write && !rail.is_drained();
        let has_room = |rail: &Rail| !rail.needs_marker || rail.has_room();
        if others.iter().any(must_wait) || !primary.has_room() || !others.iter().all(has_room) {
            return Ok(false);
        }
        let mut markers = 0;
        let target = rdma_target(signal.address, signal.key);
        for (at, (rail, chain)) in others.iter_mut().zip(&mut chains[1..]).enumerate() {
            if !std::mem::take(&mut rail.needs_marker) || method == SignalBy::Write {
                continue;
            }
            markers |= 1 << at;
            let mut request = ibv_send_wr {
                opcode: ibv_wr_opcode::RDMA_WRITE_WITH_IMM,
                imm_data: Immediate::Marker.encode(),
                ..Default::default()
            };
            request.wr = target;
            let info = RequestInfo { order: head.order, bytes: 0, signaled: true };
            rail.prepare(&mut request, info);
            chain.push(&rail.qp, request, None)?;
        }
        let (mut request, sge) = self.signal_request(&signal, method, markers);
        let Some(Connected { rails, .. }) = &mut self.connected else { return Ok(false) };
        let info = RequestInfo { order: head.order, bytes: 0, signaled: head.signaled };
        rails[0].prepare(&mut request, info);
        chains[0].push(&rails[0].qp, request, sge)?;
        self.queue.pop_front();
        Ok(true)
    }

    fn signal_request(
        &mut self,
        signal: &FlagSignal,
        method: SignalBy,
        markers: u32,
    ) -> (ibv_send_wr, Option<ibv_sge>) {
        let &FlagSignal { flag, value, address, key } = signal;
        let mut request = ibv_send_wr { wr: rdma_target(address, key), ..Default::default() };
        if method == SignalBy::Write {
            request.opcode = ibv_wr_opcode::RDMA_WRITE;
            let sge = self.message(&value.to_ne_bytes(), &mut request);
            return (request, sge);
        }
        if let Some(immediate) = self.flag_ids.immediate(flag, value, markers) {
            request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
            request.imm_data = immediate;
            return (request, None);
        }
        let message = self.flag_ids.message(flag, value, markers);
        request.opcode = ibv_wr_opcode::SEND;
        let sge = self.message(&message, &mut request);
        (request, sge)
    }

    /// Copies a message into a registered buffer that stays valid until the work request completes.
    fn message(&mut self, bytes: &[u8], request: &mut ibv_send_wr) -> Option<ibv_sge> {
        let Connected { rails, messages, .. } = self.connected.as_ref()?;
        let (addr, lkey) = messages.write(rails[0].slot(), bytes);
        if bytes.len() <= rails[0].qp.inline_bytes as usize {
            request.send_flags |= ibv_send_flags::INLINE;
        }
        Some(ibv_sge { addr, length: bytes.len() as u32, lkey })
    }
}

fn rdma_target(remote_addr: u64, rkey: u32) -> ibv_send_target {
    ibv_send_target { rdma: ibv_send_rdma { remote_addr, rkey } }
}

/// Measures how long a peer has made no progress, by the number of completions at the last change and the
/// time of that change.
#[derive(Debug, Default)]
struct StallTimer(Option<(u64, Instant)>);

impl StallTimer {
    fn stop(&mut self) {
        self.0 = None;
    }

    /// Returns the time left until `limit` passes without progress, or `None` if it has passed. `completed`
    /// counts all completions.
    fn time_left(&mut self, completed: u64, now: Instant, limit: Duration) -> Option<Duration> {
        let unchanged = self.0.filter(|(before, _)| *before == completed);
        let (_, since) = *self.0.insert(unchanged.unwrap_or((completed, now)));
        limit.checked_sub(now.duration_since(since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stall_lasts_from_the_first_check_to_the_next_completion() {
        let (limit, start) = (Duration::from_secs(60), Instant::now());
        let after = |seconds| start + Duration::from_secs(seconds);
        let left = |seconds| Some(Duration::from_secs(seconds));
        let mut stall = StallTimer::default();
        assert_eq!(stall.time_left(5, after(0), limit), left(60));
        assert_eq!(stall.time_left(5, after(59), limit), left(1));
        assert_eq!(stall.time_left(6, after(61), limit), left(60), "a request completed");
        assert_eq!(stall.time_left(6, after(122), limit), None);
        stall.stop();
        assert_eq!(stall.time_left(6, after(200), limit), left(60));
    }
}
