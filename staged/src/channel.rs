//! Exchanges bytes and messages with one peer of a staged fabric, through [`Sender`] and [`Receiver`].
//!
//! A [`Sender`] writes into the peer's slots and ring, and starts the next op of a queue. A [`Receiver`]
//! processes the peer's messages in the order in which they were written. A message takes effect when
//! everything before it is complete.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{Fabric, Rank, Region as _, Ticket};

use crate::error::Error;
use crate::memory::{Backing, RegionTable, Registration};
use crate::ops::{OpId, QueuedOp, ResolvedOp};
use crate::queues::{DeviceCopier, NetworkOp, NetworkQueue};
use crate::wire::{InboxLayout, MESSAGE_BYTES, Message, RING_MESSAGES, SLOTS};
use crate::{NetLocal, NetRemote};

pub(crate) struct LocalBuffers<N: Fabric> {
    pub(crate) rank: Rank,
    pub(crate) layout: InboxLayout,
    pub(crate) inbox: Arc<NetLocal<N>>,
    /// The memory that messages are sent from, with the same layout as the inboxes of peers.
    pub(crate) outbox: Arc<NetLocal<N>>,
    pub(crate) flags: Arc<NetLocal<N>>,
}

impl<N: Fabric> LocalBuffers<N> {
    pub(crate) fn flag(&self, word: u64) -> &AtomicU64 {
        let flags = self.flags.flags().expect("checked when the fabric was opened");
        &flags[word as usize]
    }
}

pub(crate) struct Context<'a, D: Fabric, N: Fabric> {
    pub(crate) copier: &'a mut DeviceCopier<D>,
    pub(crate) network: &'a mut NetworkQueue<N>,
    pub(crate) gets: &'a mut OpenGets<D, N>,
    pub(crate) regions: &'a RegionTable<D, N>,
}

/// Bytes that the network transfers before the message that announces them.
struct Payload<N: Fabric> {
    dst: Arc<NetRemote<N>>,
    to: u64,
    src: Arc<NetLocal<N>>,
    from: u64,
    bytes: u64,
}

struct QueuedMessage<N: Fabric> {
    /// The ticket of the copy from device memory that must complete before the message is sent.
    ready: Ticket,
    payload: Option<Payload<N>>,
    message: Message,
    op_id: Option<OpId>,
}

pub(crate) struct Sender<N: Fabric> {
    peer: usize,
    inbox: Arc<NetRemote<N>>,
    flags: Arc<NetRemote<N>>,
    next_message: u64,
    credited: u64,
    /// For each staging slot in use, the number of the message that frees the slot.
    slots_in_use: VecDeque<u64>,
    next_slot: u64,
    queued: VecDeque<QueuedMessage<N>>,
    awaiting_credit: VecDeque<(u64, OpId)>,
}

pub(crate) enum Started {
    Blocked,
    Bytes(u64),
    All,
    Complete,
}

impl<N: Fabric> Sender<N> {
    pub(crate) fn new(peer: usize, inbox: Arc<NetRemote<N>>, flags: Arc<NetRemote<N>>) -> Self {
        Self {
            peer,
            inbox,
            flags,
            next_message: 0,
            credited: 0,
            slots_in_use: VecDeque::new(),
            next_slot: 0,
            queued: VecDeque::new(),
            awaiting_credit: VecDeque::new(),
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queued.is_empty()
    }

    /// Returns whether the peer has processed every message, so that its flags may be written directly.
    fn is_drained(&self) -> bool {
        self.queued.is_empty() && self.credited == self.next_message
    }

    /// Returns whether a queued message writes directly to a region of the peer, which a newly posted op
    /// would overtake.
    fn has_direct_write(&self) -> bool {
        let mut payloads = self.queued.iter().filter_map(|it| it.payload.as_ref());
        payloads.any(|payload| !Arc::ptr_eq(&payload.dst, &self.inbox))
    }

    fn has_direct_read(&self, buffers: &LocalBuffers<N>) -> bool {
        let mut payloads = self.queued.iter().filter_map(|it| it.payload.as_ref());
        payloads.any(|payload| !Arc::ptr_eq(&payload.src, &buffers.outbox))
    }

    fn has_ring_space(&self) -> bool {
        self.next_message - self.credited < RING_MESSAGES
    }

    fn free_slot(&self) -> Option<u64> {
        (self.slots_in_use.len() as u64 != SLOTS).then_some(self.next_slot % SLOTS)
    }

    fn send(&mut self, ready: Ticket, payload: Option<Payload<N>>, message: Message, op_id: OpId) {
        if payload.is_some() {
            self.slots_in_use.push_back(self.next_message);
            self.next_slot += 1;
        }
        // A get is complete when its replies are here.
        let op_id = (!matches!(message, Message::GetRequest { .. })).then_some(op_id);
        self.queued.push_back(QueuedMessage { ready, payload, message, op_id });
        self.next_message += 1;
    }

    /// Records how many messages the peer has processed, and reports the ops that are now complete.
    ///
    /// # Errors
    /// If the number has decreased or counts messages that were not sent.
    pub(crate) fn credit(&mut self, credited: u64, mut done: impl FnMut(OpId)) -> Result<bool, ()> {
        if credited == self.credited {
            return Ok(false);
        }
        if credited < self.credited || credited > self.next_message {
            return Err(());
        }
        self.credited = credited;
        while self.slots_in_use.front().is_some_and(|message| *message < credited) {
            self.slots_in_use.pop_front();
        }
        while self.awaiting_credit.front().is_some_and(|(message, _)| *message < credited) {
            let Some((_, op_id)) = self.awaiting_credit.pop_front() else { break };
            done(op_id);
        }
        Ok(true)
    }

    pub(crate) fn post(
        &mut self,
        network: &mut NetworkQueue<N>,
        buffers: &LocalBuffers<N>,
        done: Ticket,
    ) -> bool {
        let count = self.queued.iter().take_while(|it| it.ready <= done).count();
        if count == 0 {
            return false;
        }
        let first = self.next_message - self.queued.len() as u64;
        let mut op_ids = Vec::new();
        for (number, queued) in (first..).zip(self.queued.drain(..count)) {
            buffers
                .write(buffers.layout.message_offset(self.peer, number), &queued.message.encode());
            if let Some(Payload { dst, to, src, from, bytes }) = queued.payload {
                network.push(NetworkOp::Put { dst, to, src, from, bytes }, Vec::new());
            }
            match queued.op_id {
                Some(op_id) if self.peer == buffers.rank.index() => {
                    self.awaiting_credit.push_back((number, op_id));
                }
                op_id => op_ids.extend(op_id),
            }
        }
        let end = first + count as u64;
        let mut from = first;
        while from < end {
            // Messages are contiguous up to the end of the ring.
            let run = (RING_MESSAGES - from % RING_MESSAGES).min(end - from);
            let put = NetworkOp::Put {
                dst: Arc::clone(&self.inbox),
                to: buffers.layout.message_offset(buffers.rank.index(), from),
                src: Arc::clone(&buffers.outbox),
                from: buffers.layout.message_offset(self.peer, from),
                bytes: run * MESSAGE_BYTES as u64,
            };
            network.push(put, Vec::new());
            from += run;
        }
        self.signal(network, InboxLayout::written_flag(buffers.rank.index()), end, op_ids);
        true
    }

    pub(crate) fn signal(
        &self,
        network: &mut NetworkQueue<N>,
        word: u64,
        value: u64,
        op_ids: Vec<OpId>,
    ) {
        network.push(NetworkOp::Signal { flag: Arc::clone(&self.flags), word, value }, op_ids);
    }

    pub(crate) fn start<D: Fabric>(
        &mut self,
        entry: &QueuedOp<ResolvedOp<D, N>>,
        op_id: OpId,
        get_incomplete: bool,
        buffers: &LocalBuffers<N>,
        context: &mut Context<'_, D, N>,
    ) -> Result<Started, Error> {
        // The earlier get may still read what the put overwrites, or what the flag announces.
        if get_incomplete && matches!(entry.op, ResolvedOp::Put { .. } | ResolvedOp::Signal { .. })
        {
            return Ok(Started::Blocked);
        }
        match &entry.op {
            ResolvedOp::Put { dst, to, src, from, bytes } => {
                if let (Some(remote), Backing::Direct(local)) = (&dst.direct, &src.backing) {
                    if self.has_direct_write() {
                        return Ok(Started::Blocked);
                    }
                    let (dst, src) = (Arc::clone(remote), Arc::clone(local));
                    let put = NetworkOp::Put { dst, to: *to, src, from: *from, bytes: *bytes };
                    context.network.push(put, vec![op_id]);
                    return Ok(Started::All);
                }
                let at = entry.bytes_started;
                let piece = (bytes - at).min(buffers.layout.slot_bytes);
                let (remote, generation, offset) = (&dst.direct, dst.generation, to + at);
                let target = |slot| match remote {
                    Some(remote) => (Some((Arc::clone(remote), offset)), Message::FreeSlot),
                    None => (None, Message::Copy { generation, offset, bytes: piece, slot }),
                };
                self.send_piece((src, from + at), piece, target, op_id, buffers, context)
            }
            ResolvedOp::Reply { get, src, from, bytes } => {
                let (get, offset) = (*get, entry.bytes_started);
                let piece = (bytes - offset).min(buffers.layout.slot_bytes);
                let target = |slot| (None, Message::GetReply { get, offset, bytes: piece, slot });
                self.send_piece((src, from + offset), piece, target, op_id, buffers, context)
            }
            ResolvedOp::Get { dst, to, src, from, bytes } => {
                if let (true, Backing::Direct(local), Some(remote)) =
                    (context.network.caps().gets, &dst.backing, &src.direct)
                {
                    if self.has_direct_write()
                        || self.has_direct_read(buffers)
                        || context.gets.is_incomplete(op_id)
                    {
                        return Ok(Started::Blocked);
                    }
                    let (dst, src) = (Arc::clone(local), Arc::clone(remote));
                    let get = NetworkOp::Get { dst, to: *to, src, from: *from, bytes: *bytes };
                    context.network.push(get, vec![op_id]);
                    return Ok(Started::All);
                }
                if !self.has_ring_space() {
                    return Ok(Started::Blocked);
                }
                let get = context.gets.open(op_id, dst, *to, *bytes);
                let (generation, offset, bytes) = (src.generation, *from, *bytes);
                let request = Message::GetRequest { generation, offset, bytes, get };
                self.send(Ticket::NONE, None, request, op_id);
                Ok(Started::All)
            }
            ResolvedOp::Signal { flag, word, value } => {
                if let (true, Some(flag)) = (self.is_drained(), &flag.direct) {
                    let signal =
                        NetworkOp::Signal { flag: Arc::clone(flag), word: *word, value: *value };
                    context.network.push(signal, vec![op_id]);
                    return Ok(Started::All);
                }
                if !self.has_ring_space() {
                    return Ok(Started::Blocked);
                }
                let (generation, word, value) = (flag.generation, *word, *value);
                let signal = Message::Signal { generation, word, value };
                self.send(Ticket::NONE, None, signal, op_id);
                Ok(Started::All)
            }
        }
    }

    /// Sends a part of an op's bytes through a staging slot in host memory. `target` returns the
    /// destination, if it is not the slot of the peer, and the message for the peer.
    fn send_piece<D: Fabric>(
        &mut self,
        (src, from): (&Registration<D, N>, u64),
        bytes: u64,
        target: impl FnOnce(u64) -> (Option<(Arc<NetRemote<N>>, u64)>, Message),
        op_id: OpId,
        buffers: &LocalBuffers<N>,
        context: &mut Context<'_, D, N>,
    ) -> Result<Started, Error> {
        let Some(slot) = self.free_slot().filter(|_| self.has_ring_space()) else {
            return Ok(Started::Blocked);
        };
        let (ready, local, from) = match &src.backing {
            Backing::Direct(local) => (Ticket::NONE, Arc::clone(local), from),
            Backing::Staged { device, .. } => {
                let at = buffers.layout.slot_offset(self.peer, slot);
                let Some(ticket) = context.copier.copy_from_device((device, from), at, bytes)?
                else {
                    return Ok(Started::Blocked);
                };
                (ticket, Arc::clone(&buffers.outbox), at)
            }
        };
        let (destination, message) = target(slot);
        let (dst, to) = destination.unwrap_or_else(|| {
            let at = buffers.layout.slot_offset(buffers.rank.index(), slot);
            (Arc::clone(&self.inbox), at)
        });
        let payload = Payload { dst, to, src: local, from, bytes };
        self.send(ready, Some(payload), message, op_id);
        Ok(Started::Bytes(bytes))
    }
}

impl<N: Fabric> LocalBuffers<N> {
    fn write(&self, at: u64, message: &[u8; MESSAGE_BYTES]) {
        // The offset lies inside memory, so it fits `usize`.
        let to = self.outbox.base().as_ptr().wrapping_add(at as usize);
        // SAFETY: `InboxLayout` keeps messages inside the outbox, host memory that lives as long as `self`.
        // The message that was here is at least `RING_MESSAGES` older, and the peer has processed it.
        unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), to, MESSAGE_BYTES) };
    }
}

struct OpenGet<D: Fabric, N: Fabric> {
    op_id: OpId,
    dst: Arc<Registration<D, N>>,
    to: u64,
    bytes: u64,
    bytes_left: u64,
    copies: u32,
    dropped: bool,
}

pub(crate) struct OpenGets<D: Fabric, N: Fabric> {
    open: BTreeMap<u64, OpenGet<D, N>>,
    next: u64,
}

impl<D: Fabric, N: Fabric> Default for OpenGets<D, N> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), next: 0 }
    }
}

impl<D: Fabric, N: Fabric> OpenGets<D, N> {
    pub(crate) fn open(
        &mut self,
        op_id: OpId,
        dst: &Arc<Registration<D, N>>,
        to: u64,
        bytes: u64,
    ) -> u64 {
        self.next += 1;
        let dst = Arc::clone(dst);
        let open = OpenGet { op_id, dst, to, bytes, bytes_left: bytes, copies: 0, dropped: false };
        self.open.insert(self.next, open);
        self.next
    }

    /// Returns whether an earlier get to the same peer still waits for replies, because a direct get would
    /// overtake it.
    pub(crate) fn is_incomplete(&self, op_id: OpId) -> bool {
        self.open.values().any(|get| (get.op_id.queue, get.op_id.peer) == (op_id.queue, op_id.peer))
    }

    pub(crate) fn drop_queue(&mut self, queue: u64, mut done: impl FnMut(OpId)) {
        self.open.retain(|_, get| {
            if get.op_id.queue != queue {
                return true;
            }
            get.dropped = true;
            if get.copies == 0 {
                done(get.op_id);
            }
            get.copies > 0
        });
    }

    fn finish_piece(&mut self, get: u64, bytes: u64) -> Option<OpId> {
        let open = self.open.get_mut(&get)?;
        open.copies -= 1;
        open.bytes_left -= bytes;
        let complete = open.bytes_left == 0 || (open.dropped && open.copies == 0);
        if complete { self.open.remove(&get).map(|open| open.op_id) } else { None }
    }
}

/// The action for a received message, which is taken when everything before the message is complete.
enum Action<D: Fabric, N: Fabric> {
    Nothing,
    Store { flags: Arc<Registration<D, N>>, word: usize, value: u64 },
    Reply { get: u64, src: Arc<Registration<D, N>>, from: u64, bytes: u64 },
    FinishGet { get: u64, bytes: u64 },
}

/// The action for a received message, with the ticket of the copy to device memory that must complete before it.
type Pending<D, N> = (Ticket, Action<D, N>);

pub(crate) enum Event<D: Fabric, N: Fabric> {
    FlagStored,
    GetRequested { get: u64, src: Arc<Registration<D, N>>, from: u64, bytes: u64 },
    GetComplete(OpId),
}

pub(crate) struct Receiver<D: Fabric, N: Fabric> {
    peer: usize,
    started: u64,
    done: u64,
    credit_sent: u64,
    pending: VecDeque<Pending<D, N>>,
}

impl<D: Fabric, N: Fabric> Receiver<D, N> {
    pub(crate) fn new(peer: usize) -> Self {
        Self { peer, started: 0, done: 0, credit_sent: 0, pending: VecDeque::new() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    pub(crate) fn take_credit_update(&mut self) -> Option<u64> {
        (self.credit_sent != self.done).then(|| {
            self.credit_sent = self.done;
            self.done
        })
    }

    pub(crate) fn receive(
        &mut self,
        buffers: &LocalBuffers<N>,
        context: &mut Context<'_, D, N>,
        mut emit: impl FnMut(Event<D, N>),
    ) -> Result<bool, Error> {
        let written = buffers.flag(InboxLayout::written_flag(self.peer)).load(Ordering::Acquire);
        if written < self.started || written - self.done > RING_MESSAGES {
            let (started, peer) = (self.started, Rank::at(self.peer));
            let what = format!(
                "sent an invalid count of written messages: {written}, expected {started} to {}",
                self.done + RING_MESSAGES
            );
            return Err(Error::of_peer(peer, what));
        }
        let mut progressed = false;
        while self.started < written {
            let Some(pending) = self.start(buffers, context)? else { break };
            self.pending.push_back(pending);
            self.started += 1;
            progressed = true;
        }
        let copied = context.copier.to_device.done;
        while self.pending.front().is_some_and(|(after, _)| *after <= copied) {
            let Some((_, action)) = self.pending.pop_front() else { break };
            match action {
                Action::Nothing => {}
                Action::Store { flags, word, value } => {
                    if let Some(flag) = flags.flags().and_then(|flags| flags.get(word)) {
                        flag.store(value, Ordering::Release);
                        emit(Event::FlagStored);
                    }
                }
                Action::Reply { get, src, from, bytes } => {
                    emit(Event::GetRequested { get, src, from, bytes });
                }
                Action::FinishGet { get, bytes } => {
                    if let Some(op_id) = context.gets.finish_piece(get, bytes) {
                        emit(Event::GetComplete(op_id));
                    }
                }
            }
            self.done += 1;
            progressed = true;
        }
        Ok(progressed)
    }

    /// Starts to process the next message, or returns `None` if the copy queue of the device is full.
    fn start(
        &self,
        buffers: &LocalBuffers<N>,
        context: &mut Context<'_, D, N>,
    ) -> Result<Option<Pending<D, N>>, Error> {
        let message = Message::decode(&buffers.message(self.peer, self.started));
        let message = message.map_err(|kind| {
            self.peer_error(format!(
                "sent a message of the unknown kind {kind}; run the same Peerlane on all ranks"
            ))
        })?;
        let at_once = |action| Ok(Some((Ticket::NONE, action)));
        match message {
            Message::FreeSlot => at_once(Action::Nothing),
            Message::Copy { generation, offset, bytes, slot } => {
                self.check_slot(buffers, slot, bytes)?;
                let Some(region) = context.regions.find(generation) else {
                    return at_once(Action::Nothing);
                };
                self.check_span(&region, offset, bytes)?;
                let copied =
                    self.copy_from_slot((&region, offset), slot, bytes, buffers, context)?;
                Ok(copied.map(|ticket| (ticket, Action::Nothing)))
            }
            Message::Signal { generation, word, value } => {
                let Some(flags) = context.regions.find(generation) else {
                    return at_once(Action::Nothing);
                };
                let count = flags.flags().map_or(0, <[_]>::len);
                match usize::try_from(word).ok().filter(|word| *word < count) {
                    Some(word) => at_once(Action::Store { flags, word, value }),
                    None => Err(self.peer_error(format!(
                        "sent a signal for flag {word}, expected a flag below {count}, the number \
                         of flags of the region"
                    ))),
                }
            }
            Message::GetRequest { generation, offset, bytes, get } => {
                let Some(src) = context.regions.find(generation) else {
                    return at_once(Action::Nothing);
                };
                self.check_span(&src, offset, bytes)?;
                at_once(Action::Reply { get, src, from: offset, bytes })
            }
            Message::GetReply { get, offset, bytes, slot } => {
                self.check_slot(buffers, slot, bytes)?;
                let Some(open) = context.gets.open.get_mut(&get).filter(|get| !get.dropped) else {
                    return at_once(Action::Nothing);
                };
                let end = offset.checked_add(bytes).filter(|&end| end <= open.bytes);
                if open.op_id.peer != self.peer || end.is_none() {
                    return Err(self.peer_error(format!(
                        "sent {bytes} bytes at offset {offset} for get {get}, but this rank did \
                         not request these bytes from it"
                    )));
                }
                let (dst, to) = (Arc::clone(&open.dst), open.to + offset);
                let copied = self.copy_from_slot((&dst, to), slot, bytes, buffers, context)?;
                let Some(ticket) = copied else { return Ok(None) };
                if let Some(open) = context.gets.open.get_mut(&get) {
                    open.copies += 1;
                }
                Ok(Some((ticket, Action::FinishGet { get, bytes })))
            }
        }
    }

    /// Copies received bytes from a staging slot to their destination, whose bounds the caller has checked.
    fn copy_from_slot(
        &self,
        (region, offset): (&Registration<D, N>, u64),
        slot: u64,
        bytes: u64,
        buffers: &LocalBuffers<N>,
        context: &mut Context<'_, D, N>,
    ) -> Result<Option<Ticket>, Error> {
        let at = buffers.layout.slot_offset(self.peer, slot);
        match &region.backing {
            Backing::Staged { device, .. } => {
                context.copier.copy_to_device((device, offset), at, bytes)
            }
            Backing::Direct(local) => {
                let to = local.base().as_ptr().wrapping_add(offset as usize);
                let from = buffers.inbox.base().as_ptr().wrapping_add(at as usize);
                // SAFETY: the caller has checked both spans. The region is host memory; the rank that
                // submitted the op keeps the contract of ops for it. The slot belongs to this rank until its
                // message is processed.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes as usize) };
                Ok(Some(Ticket::NONE))
            }
        }
    }

    fn check_slot(&self, buffers: &LocalBuffers<N>, slot: u64, bytes: u64) -> Result<(), Error> {
        if slot < SLOTS && bytes <= buffers.layout.slot_bytes {
            return Ok(());
        }
        let slot_bytes = buffers.layout.slot_bytes;
        Err(self.peer_error(format!(
            "sent {bytes} bytes in slot {slot}, expected a slot below {SLOTS} and at most \
             {slot_bytes} bytes"
        )))
    }

    fn check_span(
        &self,
        region: &Registration<D, N>,
        offset: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= region.bytes => Ok(()),
            _ => {
                let all = region.bytes;
                Err(self.peer_error(format!(
                    "sent an access out of range: {bytes} bytes from offset {offset}, but the \
                     region has {all} bytes"
                )))
            }
        }
    }

    fn peer_error(&self, what: String) -> Error {
        Error::of_peer(Rank::at(self.peer), what)
    }
}

impl<N: Fabric> LocalBuffers<N> {
    fn message(&self, peer: usize, number: u64) -> [u8; MESSAGE_BYTES] {
        let at = self.layout.message_offset(peer, number) as usize;
        let from = self.inbox.base().as_ptr().wrapping_add(at);
        let mut message = [0; MESSAGE_BYTES];
        // SAFETY: `InboxLayout` keeps messages inside the inbox, host memory that lives as long as `self`.
        // The peer has counted this message as written, and overwrites it only once it is processed.
        unsafe { std::ptr::copy_nonoverlapping(from, message.as_mut_ptr(), MESSAGE_BYTES) };
        message
    }
}
