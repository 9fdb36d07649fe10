//! Holds the ops of an engine with one peer, and sends the messages for them.

use std::collections::VecDeque;
use std::sync::Arc;

use peerlane_hal::{Rank, Ticket};
use peerlane_toolkit::Fault;

use super::ops::PeerOp;
use crate::error::Error;
use crate::network::{
    Address, Completions, Content, Driver, FlagStore, Header, Outcome, PendingGet, RegionByte,
};
use crate::sys::Completion;

/// The limits of a queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) messages_max: usize,
    pub(super) message_bytes_max: u64,
}

/// The ops of an engine with one peer, in the order of submission.
#[derive(Debug)]
pub(super) struct PeerQueue {
    to: Arc<Address>,
    /// The ops that are not complete, and complete ones between them.
    ops: VecDeque<QueuedOp>,
    /// The number of the first of them.
    first: u64,
    /// The number of the first op of which something was not sent.
    unsent: u64,
    /// The number of messages whose sends go on, and of gets without their bytes.
    sending: usize,
    getting: usize,
    next_sequence: u64,
}

#[derive(Debug)]
struct QueuedOp {
    ticket: Ticket,
    order: u64,
    op: PeerOp,
    /// The ticket of a signal before a put, whose first message carries it.
    signal: Option<Ticket>,
    before: Option<FlagStore>,
    /// The flag that the last message of a put carries.
    after: Option<FlagStore>,
    /// The number of bytes that messages were sent for.
    sent: u64,
    /// The number of requests that go on.
    requests: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Queued,
    Sent,
    Complete,
}

/// What a request is for, which is a bit of a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Send,
    Get,
}

/// The bits of a tag for the rank of the peer.
const PEER_BITS: u32 = 20;
const KIND_BITS: u32 = 1;

/// Returns the number of a request: the peer, the op and the kind.
fn tag(peer: Rank, op: u64, kind: RequestKind) -> u64 {
    (op << PEER_BITS | u64::from(peer.0)) << KIND_BITS | kind as u64
}

/// Returns the peer of a request.
pub(super) fn peer_of(tag: u64) -> usize {
    ((tag >> KIND_BITS) & ((1 << PEER_BITS) - 1)) as usize
}

impl PeerQueue {
    pub(super) fn new(to: Arc<Address>) -> Self {
        Self {
            to,
            ops: VecDeque::new(),
            first: 0,
            unsent: 0,
            sending: 0,
            getting: 0,
            next_sequence: 0,
        }
    }

    /// Adds an op. Returns the number of ops that are complete with it, which is 0 if it is carried
    /// by a message of the op before.
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, op: PeerOp) -> u32 {
        let last = self.ops.back_mut().filter(|last| last.state == State::Queued && last.sent == 0);
        match (op, last.map(|last| (last.op, last))) {
            // The last message of a put carries the signal behind it.
            (PeerOp::Signal(flag), Some((PeerOp::Put { .. }, last)))
                if last.after.is_none() && last.ticket == ticket =>
            {
                last.after = Some(flag);
                return 0;
            }
            // The first message of a put carries the signal before it.
            (PeerOp::Put { .. }, Some((PeerOp::Signal(flag), last))) => {
                (last.op, last.before) = (op, Some(flag));
                last.signal = Some(std::mem::replace(&mut last.ticket, ticket));
                return 1;
            }
            _ => {}
        }

        self.ops.push_back(QueuedOp {
            ticket,
            order,
            op,
            signal: None,
            before: None,
            after: None,
            sent: 0,
            requests: 0,
            state: State::Queued,
        });
        1
    }

    /// Returns the number of ops that are not complete.
    pub(super) fn len(&self) -> usize {
        self.ops.len()
    }

    /// Returns whether all ops are complete that the engine has submitted before the op `order`,
    /// and that op.
    pub(super) fn is_complete(&self, order: u64) -> bool {
        let open = self.ops.iter().find(|op| op.state != State::Complete);
        open.is_none_or(|op| op.order > order)
    }

    /// Returns whether UCX may read memory for a send.
    pub(super) fn is_sending(&self) -> bool {
        self.sending > 0
    }

    pub(super) fn peer(&self) -> Rank {
        self.to.rank
    }

    /// Drops all ops. Requests go on.
    pub(super) fn clear(&mut self) {
        self.first += self.ops.len() as u64;
        self.ops.clear();
        self.unsent = self.first;
    }

    /// Returns whether a message can be sent now.
    pub(super) fn can_send(&self, limits: Limits) -> bool {
        let next = self.ops.get((self.unsent - self.first) as usize);
        next.is_some_and(|op| self.allows(op, limits))
    }

    /// Returns whether a message of an op can be sent now.
    fn allows(&self, op: &QueuedOp, limits: Limits) -> bool {
        // A put may read what a get brings, or replace what it copies, and a signal says that the
        // gets before it are complete.
        let waits_for_gets = self.getting > 0 && !matches!(op.op, PeerOp::Get { .. });
        !waits_for_gets && self.sending + self.getting < limits.messages_max
    }

    /// Returns whether the queue has signals only, and nothing was sent of them.
    pub(super) fn has_only_signals(&self) -> bool {
        let unsent = self.ops.range((self.unsent - self.first) as usize..);
        unsent.map(|op| op.op).all(|op| matches!(op, PeerOp::Signal(_)))
    }

    /// Sends what the limits allow, and adds the requests that have ended at once to `ended`.
    pub(super) fn send(
        &mut self,
        driver: &mut Driver,
        (engine, limits): (u32, Limits),
        completions: &Arc<Completions>,
        ended: &mut Vec<(u64, Outcome)>,
    ) -> Result<(), Error> {
        let completion: Arc<dyn Completion> = Arc::clone(completions) as _;
        let sender = driver.rank();
        let peer = self.to.rank;

        while self.can_send(limits) {
            let number = self.unsent;
            let Some(op) = self.ops.get_mut((number - self.first) as usize) else { break };

            let left = op.op.bytes() - op.sent;
            let bytes = left.min(limits.message_bytes_max);
            let is_last = bytes == left;
            let (content, payload) = match op.op {
                PeerOp::Put { to, from, .. } => {
                    let to = RegionByte { offset: to.offset + op.sent, ..to };
                    let before = op.before.filter(|_| op.sent == 0);
                    let content = Content::Put { to, before, after: op.after.filter(|_| is_last) };
                    (content, (from.wrapping_add(op.sent as usize), bytes as usize))
                }
                PeerOp::Signal(flag) => {
                    let to = RegionByte { region: flag.region, offset: 0 };
                    (Content::Put { to, before: None, after: Some(flag) }, (std::ptr::null(), 0))
                }
                PeerOp::Get { from, to, .. } => {
                    let request = driver.add_get(PendingGet {
                        to: (to.wrapping_add(op.sent as usize), bytes as usize),
                        completions: Arc::clone(completions),
                        tag: tag(peer, number, RequestKind::Get),
                    })?;
                    op.requests += 1;
                    self.getting += 1;
                    let from = RegionByte { offset: from.offset + op.sent, ..from };
                    (Content::Get { from, bytes, request }, (std::ptr::null(), 0))
                }
            };
            op.sent += bytes;
            op.requests += 1;
            if is_last {
                op.state = State::Sent;
                self.unsent += 1;
            }

            let sequence = self.next_sequence;
            self.next_sequence += 1;
            self.sending += 1;
            let header = Header { token: self.to.token, sender, engine, sequence, content };
            let tag = tag(peer, number, RequestKind::Send);
            // SAFETY: the op was checked against its regions, which the caller of `submit` keeps
            // until the op is complete, and the engine until the send ends.
            let sent = unsafe { driver.send(&self.to, &header, payload, &completion, tag) };
            let sent = sent.inspect_err(|_| self.sending -= 1)?;
            ended.extend(sent.map(|outcome| (tag, outcome)));
        }
        Ok(())
    }

    /// Says to the peer that the engine sends no more.
    pub(super) fn send_end(&mut self, driver: &mut Driver, engine: u32) {
        let header = Header {
            token: self.to.token,
            sender: driver.rank(),
            engine,
            sequence: self.next_sequence,
            content: Content::End,
        };
        let completion: Arc<dyn Completion> = Arc::new(Completions::default());
        // A peer that cannot be reached needs not know it.
        // SAFETY: there are no bytes.
        let _ = unsafe { driver.send(&self.to, &header, (std::ptr::null(), 0), &completion, 0) };
    }

    /// Takes note of a request that has ended, and calls `finish` with the tickets of ops that are
    /// complete.
    pub(super) fn end(
        &mut self,
        tag: u64,
        outcome: Outcome,
        mut finish: impl FnMut(Ticket),
    ) -> Result<(), Error> {
        let (kind, number) = (tag & ((1 << KIND_BITS) - 1), tag >> (KIND_BITS + PEER_BITS));
        let of_kind =
            if kind == RequestKind::Get as u64 { &mut self.getting } else { &mut self.sending };
        *of_kind -= 1;
        let index = number.checked_sub(self.first);
        if let Some(op) = index.and_then(|index| self.ops.get_mut(index as usize)) {
            op.requests -= 1;
            if op.requests == 0 && op.state == State::Sent && matches!(outcome, Outcome::Done) {
                op.state = State::Complete;
                finish(op.ticket);
                op.signal.into_iter().for_each(&mut finish);
            }
        }
        self.check(outcome, number)?;

        while self.ops.front().is_some_and(|op| op.state == State::Complete) {
            self.ops.pop_front();
            self.first += 1;
        }
        Ok(())
    }

    fn check(&self, outcome: Outcome, number: u64) -> Result<(), Error> {
        let peer = self.to.rank;

        match outcome {
            Outcome::Done => Ok(()),
            Outcome::Failed(status) => Err(Error::Send {
                what: "a put, get or signal to",
                peer,
                location: self.to.location(),
                status,
            }),
            Outcome::Freed => {
                // A release has dropped the op, if it is not there.
                let index = number.checked_sub(self.first);
                let op = index.and_then(|index| self.ops.get(index as usize)).map(|op| op.op);
                let generation = match op {
                    Some(PeerOp::Get { from, .. }) => from.region,
                    _ => 0,
                };
                Err(Fault::Freed { peer, generation }.into())
            }
        }
    }
}

impl PeerOp {
    fn bytes(self) -> u64 {
        match self {
            Self::Put { bytes, .. } | Self::Get { bytes, .. } => bytes,
            Self::Signal(_) => 0,
        }
    }
}
