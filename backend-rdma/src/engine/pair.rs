//! The queue of an engine to one peer: what waits to be posted, and what is posted and not complete.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use ibverbs_sys::{
    IBV_SEND_FENCE, IBV_SEND_INLINE, IBV_SEND_SIGNALED, ibv_send_rdma, ibv_send_target,
    ibv_send_wr, ibv_sge, ibv_wr_opcode,
};
use peerlane_hal::mechanics::mapping::Mapping;
use peerlane_hal::{Deadline, Ticket};

use super::chain::Chain;
use crate::error::Error;
use crate::fabric::{
    Control, End, Inner, MESSAGE_BYTES, Message, NUMBERS_MAX, STEP_MAX, SignalBy, receive_from,
    send_to,
};
use crate::sys::{Cq, Mr, Qp, QpSizes};

/// Work for one peer, checked against its regions.
#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Write(Span),
    Read(Span),
    Signal { generation: u64, word: u64, value: u64, address: u64, key: u32 },
}

/// Bytes here and there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) here: u64,
    pub(super) here_key: u32,
    pub(super) there: u64,
    pub(super) there_key: u32,
    pub(super) bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Queued {
    ticket: Ticket,
    order: u64,
    work: Work,
    /// The last of its slice to this peer, or right before something that waits for it: its completion
    /// is asked for.
    asked: bool,
    /// The last of its slice to this peer.
    last: bool,
}

/// A posted request whose completion was asked for, with those before it whose was not.
#[derive(Clone, Copy, Debug)]
struct Mark {
    /// The number of the request.
    number: u64,
    first_order: u64,
    bytes: u64,
    finishes: Option<Ticket>,
}

/// Requests since the last mark.
#[derive(Clone, Copy, Debug, Default)]
struct Unmarked {
    requests: u32,
    bytes: u64,
    first_order: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Pair {
    pub(super) qp: Qp,
    pub(super) control: Arc<Control>,
    other: u32,
    signal: SignalBy,
    index: u32,
    depth: u32,
    bytes_max: u64,
    piece_bytes_max: u64,
    pending: VecDeque<Queued>,
    marks: VecDeque<Mark>,
    unmarked: Unmarked,
    /// Numbers of requests, from 1.
    posted: u64,
    done: u64,
    posted_bytes: u64,
    /// A read is under way: what is posted next must not overtake it.
    fence: bool,
    /// Flags that the peer knows by a short number, and what they hold.
    numbers: HashMap<(u64, u64), (u32, u64)>,
    messages: Messages,
}

/// A place for the message of every request that may be posted.
#[derive(Debug)]
struct Messages {
    mr: Mr,
    memory: Mapping,
}

/// What a pair may hold.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) requests: u32,
    pub(super) piece_bytes: u64,
}

impl Pair {
    /// Opens both ends.
    pub(super) fn open(
        inner: &Inner,
        control: &Arc<Control>,
        cq: &Arc<Cq>,
        index: u32,
        room: Room,
    ) -> Result<Self, Error> {
        let deadline = Deadline::after(inner.options.open_timeout);
        let inline_bytes = inner.options.inline_bytes;
        let sizes = QpSizes { sends: room.requests, inline_bytes };
        let qp = Qp::create(&inner.domain, cq, None, sizes)?;
        let own = End::of(&qp, &inner.place)?;
        let (other, signal) = control.open_pair(own, inner.options.signal, deadline)?;
        receive_from(&qp, &inner.place, &inner.options, &own, &other)?;
        send_to(&qp, &inner.options, &own, &other)?;
        let bytes = room.requests as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::of_mapping)?;
        // SAFETY: the registration is dropped before the mapping, being the field before it.
        let mr = unsafe { inner.domain.register(memory.base(), bytes) }?;
        Ok(Self {
            qp,
            control: Arc::clone(control),
            other: other.pair,
            signal,
            index,
            depth: room.requests,
            bytes_max: inner.options.posted_bytes_max,
            piece_bytes_max: room.piece_bytes,
            pending: VecDeque::new(),
            marks: VecDeque::new(),
            unmarked: Unmarked::default(),
            posted: 0,
            done: 0,
            posted_bytes: 0,
            fence: false,
            numbers: HashMap::new(),
            messages: Messages { mr, memory },
        })
    }

    pub(super) fn push(&mut self, ticket: Ticket, order: u64, work: Work) {
        self.pending.push_back(Queued { ticket, order, work, asked: false, last: false });
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
            queued.last = true;
            true
        })
    }

    pub(super) fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Whether every op up to `order` is complete.
    pub(super) fn is_over(&self, order: u64) -> bool {
        let first = self
            .marks
            .front()
            .map(|mark| mark.first_order)
            .or(self.unmarked.first_order)
            .or_else(|| self.pending.front().map(|queued| queued.order));
        first.is_none_or(|first| first > order)
    }

    /// Whether nothing is posted any more.
    pub(super) fn is_drained(&self) -> bool {
        self.done == self.posted
    }

    /// Drops what is not posted, and lets fail what is.
    pub(super) fn fail(&mut self) {
        self.pending.clear();
        self.qp.fail();
    }

    /// The request of this number is complete, and so are those before it; what that finishes.
    pub(super) fn complete(&mut self, number: u64, mut finish: impl FnMut(Ticket)) {
        self.done = self.done.max(number);
        while let Some(mark) = self.marks.front().filter(|mark| mark.number <= number) {
            self.posted_bytes -= mark.bytes;
            mark.finishes.map(&mut finish);
            self.marks.pop_front();
        }
    }

    /// What a request was, for texts.
    pub(super) fn what(is_read: bool) -> &'static str {
        if is_read { "a get from" } else { "a put or signal to" }
    }

    /// Posts what there is room for.
    pub(super) fn pump(&mut self, chain: &mut Chain) -> Result<(), Error> {
        while let Some(head) = self.pending.front().copied() {
            let under_way = self.posted - self.done;
            let full = under_way >= u64::from(self.depth)
                || (self.posted_bytes >= self.bytes_max && under_way > 0);
            if full {
                break;
            }
            if chain.is_full() {
                chain.post(&self.qp)?;
            }
            self.request(head, chain);
        }
        chain.post(&self.qp)
    }

    /// Makes a request of the head, and takes off what it does of it.
    fn request(&mut self, head: Queued, chain: &mut Chain) {
        let mut request = ibv_send_wr::default();
        let place;
        let (mut asked, mut last) = (head.asked, head.last);
        let (mut whole, mut bytes) = (true, 0);
        match head.work {
            Work::Write(span) | Work::Read(span) => {
                let is_read = matches!(head.work, Work::Read(_));
                bytes = span.bytes.min(self.piece_bytes_max);
                whole = bytes == span.bytes;
                request.opcode =
                    if is_read { ibv_wr_opcode::RDMA_READ } else { ibv_wr_opcode::RDMA_WRITE };
                request.wr = target(span.there, span.there_key);
                // A piece is smaller than the largest message, which has 32 bits.
                place =
                    Some(ibv_sge { addr: span.here, length: bytes as u32, lkey: span.here_key });
                if !is_read && bytes <= u64::from(self.qp.inline_bytes) {
                    request.send_flags |= IBV_SEND_INLINE;
                }
                if whole
                    && !is_read
                    && let Some(fused) = self.fuse(head, &mut request)
                {
                    asked |= fused.asked;
                    last |= fused.last;
                }
            }
            Work::Signal { generation, word, value, address, key } => {
                place = self.signal((generation, word), value, (address, key), &mut request);
            }
        }
        if whole {
            self.pending.pop_front();
        } else if let Some(Queued { work: Work::Write(span) | Work::Read(span), .. }) =
            self.pending.front_mut()
        {
            (span.here, span.there) = (span.here + bytes, span.there + bytes);
            span.bytes -= bytes;
            (asked, last) = (false, false);
        }
        if request.opcode != ibv_wr_opcode::RDMA_READ && std::mem::take(&mut self.fence) {
            request.send_flags |= IBV_SEND_FENCE;
        }
        self.fence |= request.opcode == ibv_wr_opcode::RDMA_READ;
        let finishes = last.then_some(head.ticket);
        self.count(head.order, bytes, asked, finishes, &mut request);
        chain.push(request, place);
    }

    /// Counts the request, and asks for its completion now and then.
    fn count(
        &mut self,
        order: u64,
        bytes: u64,
        asked: bool,
        finishes: Option<Ticket>,
        request: &mut ibv_send_wr,
    ) {
        self.posted += 1;
        self.posted_bytes += bytes;
        self.unmarked.requests += 1;
        self.unmarked.bytes += bytes;
        let first_order = *self.unmarked.first_order.get_or_insert(order);
        request.wr_id = u64::from(self.index) << 48 | self.posted;
        let many = self.unmarked.requests >= self.depth / 4;
        if asked || many || self.unmarked.bytes >= self.bytes_max / 4 {
            request.send_flags |= IBV_SEND_SIGNALED;
            let (number, bytes) = (self.posted, self.unmarked.bytes);
            self.marks.push_back(Mark { number, first_order, bytes, finishes });
            self.unmarked = Unmarked::default();
        }
    }

    /// The immediate of a flag whose short number the peer knows, if the step is small.
    fn immediate(&mut self, flag: (u64, u64), value: u64) -> Option<u32> {
        let (number, known) = self.numbers.get_mut(&flag)?;
        let step = value.checked_sub(*known).filter(|step| (1..=STEP_MAX).contains(step))?;
        *known = value;
        Some(Message::immediate(*number, step))
    }

    /// Lets a write carry the signal behind it in the same slice.
    fn fuse(&mut self, head: Queued, request: &mut ibv_send_wr) -> Option<Queued> {
        let next = self.pending.get(1).copied().filter(|next| next.ticket == head.ticket)?;
        let Work::Signal { generation, word, value, .. } = next.work else { return None };
        if self.signal == SignalBy::Write || head.asked {
            return None;
        }
        request.imm_data = self.immediate((generation, word), value)?;
        request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
        self.pending.remove(1);
        Some(next)
    }

    /// A signal alone.
    fn signal(
        &mut self,
        flag: (u64, u64),
        value: u64,
        (address, key): (u64, u32),
        request: &mut ibv_send_wr,
    ) -> Option<ibv_sge> {
        if self.signal == SignalBy::Write {
            request.opcode = ibv_wr_opcode::RDMA_WRITE;
            request.wr = target(address, key);
            return Some(self.message(&value.to_ne_bytes(), request));
        }
        if let Some(immediate) = self.immediate(flag, value) {
            request.opcode = ibv_wr_opcode::RDMA_WRITE_WITH_IMM;
            request.imm_data = immediate;
            request.wr = target(address, key);
            return None;
        }
        let fresh = self.numbers.len() as u32;
        let number = match self.numbers.get_mut(&flag) {
            Some((number, known)) => {
                *known = value;
                *number
            }
            None if fresh < NUMBERS_MAX => {
                self.numbers.insert(flag, (fresh, value));
                fresh
            }
            None => u32::MAX,
        };
        let (generation, word) = flag;
        let message = Message { generation, word, value, number }.encode();
        request.opcode = ibv_wr_opcode::SEND;
        Some(self.message(&message, request))
    }

    /// Where the bytes of a message lie until they are sent.
    fn message(&mut self, bytes: &[u8], request: &mut ibv_send_wr) -> ibv_sge {
        // Of this number's place the last request is complete, since no more than `depth` are posted.
        let at = (self.posted % u64::from(self.depth)) as usize * MESSAGE_BYTES;
        let place = self.messages.memory.base().as_ptr().wrapping_add(at);
        // SAFETY: inside the mapping, which has a place a request; nobody else uses this one.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), place, bytes.len()) };
        if bytes.len() <= self.qp.inline_bytes as usize {
            request.send_flags |= IBV_SEND_INLINE;
        }
        let lkey = self.messages.mr.local_key();
        ibv_sge { addr: place as u64, length: bytes.len() as u32, lkey }
    }

    /// Ends it here and there.
    pub(super) fn close(self, deadline: Deadline) {
        let Self { qp, control, other, .. } = self;
        qp.fail();
        drop(qp);
        control.close_pair(other, deadline);
    }
}

fn target(remote_addr: u64, rkey: u32) -> ibv_send_target {
    ibv_send_target { rdma: ibv_send_rdma { remote_addr, rkey } }
}
