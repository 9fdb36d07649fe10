//! What goes out to one peer: its slots and its ring, and how the next op of a line begins.

use std::collections::VecDeque;
use std::sync::Arc;

use peerlane_hal::{Fabric, Region as _, Ticket};

use super::carrier::{Carrier, Move};
use super::error::Error;
use super::memory::{Backing, Imported, Registered};
use super::queue::{Entry, Part};
use super::record::{RECORD_BYTES, Record};
use super::room::{RECORDS, Room, SLOTS};
use super::stage::{Own, Tools};
use super::{NetLocal, NetRemote};

/// An op of an engine whose regions are known, and which it keeps.
pub(super) enum Work<D: Fabric, N: Fabric> {
    Put {
        dst: Arc<Imported<D, N>>,
        to: u64,
        src: Arc<Registered<D, N>>,
        from: u64,
        bytes: u64,
    },
    Get {
        dst: Arc<Registered<D, N>>,
        to: u64,
        src: Arc<Imported<D, N>>,
        from: u64,
        bytes: u64,
    },
    Signal {
        flag: Arc<Imported<D, N>>,
        word: u64,
        value: u64,
    },
    /// What a peer has asked for.
    Answer {
        get: u64,
        src: Arc<Registered<D, N>>,
        from: u64,
        bytes: u64,
    },
}

/// The bytes behind a record.
struct Payload<N: Fabric> {
    dst: Arc<NetRemote<N>>,
    to: u64,
    src: Arc<NetLocal<N>>,
    from: u64,
    bytes: u64,
}

/// A record that waits for its bytes to leave the device.
struct Outgoing<N: Fabric> {
    ready: Ticket,
    payload: Option<Payload<N>>,
    record: Record,
    part: Option<Part>,
}

/// The way to one peer.
pub(super) struct Outbound<N: Fabric> {
    peer: usize,
    inbox: Arc<NetRemote<N>>,
    flags: Arc<NetRemote<N>>,
    /// Records that were numbered, and those that the peer is done with.
    numbered: u64,
    credited: u64,
    /// For each slot in use, by turns, the record that frees it.
    slots: VecDeque<u64>,
    turns: u64,
    outgoing: VecDeque<Outgoing<N>>,
    /// To oneself an op is done when its record is.
    awaiting: VecDeque<(u64, Part)>,
}

/// What beginning an op came to.
pub(super) enum Begun {
    /// It has to wait.
    Blocked,
    /// So many bytes more are under way.
    Some(u64),
    /// Nothing more has to be begun.
    Whole,
    /// It is done at once.
    Done,
}

impl<N: Fabric> Outbound<N> {
    pub(super) fn new(peer: usize, inbox: Arc<NetRemote<N>>, flags: Arc<NetRemote<N>>) -> Self {
        Self {
            peer,
            inbox,
            flags,
            numbered: 0,
            credited: 0,
            slots: VecDeque::new(),
            turns: 0,
            outgoing: VecDeque::new(),
            awaiting: VecDeque::new(),
        }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.outgoing.is_empty()
    }

    /// Whether everything that the peer has to do is done, so that a flag may be written past its ring.
    fn is_clean(&self) -> bool {
        self.outgoing.is_empty() && self.credited == self.numbered
    }

    /// Whether bytes that the network was not given yet will go past the slots of the peer: what it is
    /// given now would come before them.
    fn writes_past(&self) -> bool {
        let mut payloads = self.outgoing.iter().filter_map(|it| it.payload.as_ref());
        payloads.any(|payload| !Arc::ptr_eq(&payload.dst, &self.inbox))
    }

    /// The same of bytes that it will take from where they are.
    fn reads_past(&self, own: &Own<N>) -> bool {
        let mut payloads = self.outgoing.iter().filter_map(|it| it.payload.as_ref());
        payloads.any(|payload| !Arc::ptr_eq(&payload.src, &own.outbox))
    }

    fn has_room(&self) -> bool {
        self.numbered - self.credited < RECORDS
    }

    fn free_slot(&self) -> Option<u64> {
        (self.slots.len() as u64 != SLOTS).then_some(self.turns % SLOTS)
    }

    /// The next record, with a slot if it has bytes.
    fn send(&mut self, ready: Ticket, payload: Option<Payload<N>>, record: Record, part: Part) {
        if payload.is_some() {
            self.slots.push_back(self.numbered);
            self.turns += 1;
        }
        // A get is done when its answers are here.
        let part = (!matches!(record, Record::Ask { .. })).then_some(part);
        self.outgoing.push_back(Outgoing { ready, payload, record, part });
        self.numbered += 1;
    }

    /// What the peer says that it is done with.
    pub(super) fn credit(&mut self, credited: u64, mut done: impl FnMut(Part)) -> Result<bool, ()> {
        if credited == self.credited {
            return Ok(false);
        }
        if credited < self.credited || credited > self.numbered {
            return Err(());
        }
        self.credited = credited;
        while self.slots.front().is_some_and(|record| *record < credited) {
            self.slots.pop_front();
        }
        while self.awaiting.front().is_some_and(|(record, _)| *record < credited) {
            let Some((_, part)) = self.awaiting.pop_front() else { break };
            done(part);
        }
        Ok(true)
    }

    /// Hands to the network whatever has left the device.
    pub(super) fn pump(&mut self, carrier: &mut Carrier<N>, own: &Own<N>, done: Ticket) -> bool {
        let count = self.outgoing.iter().take_while(|it| it.ready <= done).count();
        if count == 0 {
            return false;
        }
        let first = self.numbered - self.outgoing.len() as u64;
        let mut parts = Vec::new();
        for (number, outgoing) in (first..).zip(self.outgoing.drain(..count)) {
            own.write(own.room.record(self.peer, number), &outgoing.record.encode());
            if let Some(Payload { dst, to, src, from, bytes }) = outgoing.payload {
                carrier.push(Move::Put { dst, to, src, from, bytes }, Vec::new());
            }
            match outgoing.part {
                Some(part) if self.peer == own.rank.index() => {
                    self.awaiting.push_back((number, part));
                }
                part => parts.extend(part),
            }
        }
        let end = first + count as u64;
        let mut from = first;
        while from < end {
            // Neighbours, but for the end of the ring.
            let run = (RECORDS - from % RECORDS).min(end - from);
            let put = Move::Put {
                dst: Arc::clone(&self.inbox),
                to: own.room.record(own.rank.index(), from),
                src: Arc::clone(&own.outbox),
                from: own.room.record(self.peer, from),
                bytes: run * RECORD_BYTES as u64,
            };
            carrier.push(put, Vec::new());
            from += run;
        }
        self.signal(carrier, Room::mail(own.rank.index()), end, parts);
        true
    }

    /// Sets one of the counters that the peer has of this rank.
    pub(super) fn signal(&self, carrier: &mut Carrier<N>, word: u64, value: u64, parts: Vec<Part>) {
        carrier.push(Move::Signal { flag: Arc::clone(&self.flags), word, value }, parts);
    }

    /// Begins an op to a peer, or goes on with it. `waits` says that a get before it is not complete.
    pub(super) fn begin<D: Fabric>(
        &mut self,
        entry: &Entry<Work<D, N>>,
        part: Part,
        waits: bool,
        own: &Own<N>,
        tools: &mut Tools<'_, D, N>,
    ) -> Result<Begun, Error> {
        // What is overwritten or announced may not be what a get before it still reads.
        if waits && matches!(entry.work, Work::Put { .. } | Work::Signal { .. }) {
            return Ok(Begun::Blocked);
        }
        match &entry.work {
            Work::Put { dst, to, src, from, bytes } => {
                if let (Some(remote), Backing::Direct(local)) = (&dst.direct, &src.backing) {
                    if self.writes_past() {
                        return Ok(Begun::Blocked);
                    }
                    let (dst, src) = (Arc::clone(remote), Arc::clone(local));
                    let put = Move::Put { dst, to: *to, src, from: *from, bytes: *bytes };
                    tools.carrier.push(put, vec![part]);
                    return Ok(Begun::Whole);
                }
                let at = entry.begun;
                let piece = (bytes - at).min(own.room.slot_bytes);
                let (remote, generation, offset) = (&dst.direct, dst.generation, to + at);
                let landing = |slot| match remote {
                    Some(remote) => (Some((Arc::clone(remote), offset)), Record::Pass),
                    None => (None, Record::Land { generation, offset, bytes: piece, slot }),
                };
                self.piece((src, from + at), piece, landing, part, own, tools)
            }
            Work::Answer { get, src, from, bytes } => {
                let (get, offset) = (*get, entry.begun);
                let piece = (bytes - offset).min(own.room.slot_bytes);
                let landing = |slot| (None, Record::Answer { get, offset, bytes: piece, slot });
                self.piece((src, from + offset), piece, landing, part, own, tools)
            }
            Work::Get { dst, to, src, from, bytes } => {
                if let (Backing::Direct(local), Some(remote)) = (&dst.backing, &src.direct) {
                    if self.writes_past() || self.reads_past(own) || tools.gets.is_awaited(part) {
                        return Ok(Begun::Blocked);
                    }
                    let (dst, src) = (Arc::clone(local), Arc::clone(remote));
                    let get = Move::Get { dst, to: *to, src, from: *from, bytes: *bytes };
                    tools.carrier.push(get, vec![part]);
                    return Ok(Begun::Whole);
                }
                if !self.has_room() {
                    return Ok(Begun::Blocked);
                }
                let get = tools.gets.open(part, dst, *to, *bytes);
                let (generation, offset, bytes) = (src.generation, *from, *bytes);
                let ask = Record::Ask { generation, offset, bytes, get };
                self.send(Ticket::NONE, None, ask, part);
                Ok(Begun::Whole)
            }
            Work::Signal { flag, word, value } => {
                if let (true, Some(flag)) = (self.is_clean(), &flag.direct) {
                    let signal =
                        Move::Signal { flag: Arc::clone(flag), word: *word, value: *value };
                    tools.carrier.push(signal, vec![part]);
                    return Ok(Begun::Whole);
                }
                if !self.has_room() {
                    return Ok(Begun::Blocked);
                }
                let (generation, word, value) = (flag.generation, *word, *value);
                let signal = Record::Signal { generation, word, value };
                self.send(Ticket::NONE, None, signal, part);
                Ok(Begun::Whole)
            }
        }
    }

    /// Sends a piece through a slot. `landing` says where it goes, if not into the slot of the peer, and
    /// what the peer has to do.
    fn piece<D: Fabric>(
        &mut self,
        (src, from): (&Registered<D, N>, u64),
        bytes: u64,
        landing: impl FnOnce(u64) -> (Option<(Arc<NetRemote<N>>, u64)>, Record),
        part: Part,
        own: &Own<N>,
        tools: &mut Tools<'_, D, N>,
    ) -> Result<Begun, Error> {
        let Some(slot) = self.free_slot().filter(|_| self.has_room()) else {
            return Ok(Begun::Blocked);
        };
        let (ready, local, from) = match &src.backing {
            Backing::Direct(local) => (Ticket::NONE, Arc::clone(local), from),
            Backing::Staged { device, .. } => {
                let at = own.room.slot(self.peer, slot);
                let Some(ticket) = tools.copier.copy_out((device, from), at, bytes)? else {
                    return Ok(Begun::Blocked);
                };
                (ticket, Arc::clone(&own.outbox), at)
            }
        };
        let (place, record) = landing(slot);
        let (dst, to) = place
            .unwrap_or_else(|| (Arc::clone(&self.inbox), own.room.slot(own.rank.index(), slot)));
        let payload = Payload { dst, to, src: local, from, bytes };
        self.send(ready, Some(payload), record, part);
        Ok(Begun::Some(bytes))
    }
}

impl<N: Fabric> Own<N> {
    /// Writes a record into the outbox, from where the network takes it.
    fn write(&self, at: u64, record: &[u8; RECORD_BYTES]) {
        // Inside memory, so it fits.
        let to = self.outbox.base().as_ptr().wrapping_add(at as usize);
        // SAFETY: `Room` keeps records inside the outbox, memory of the host that lives as long as
        // this. The place was used `RECORDS` records ago at the latest, with which the peer is done.
        unsafe { std::ptr::copy_nonoverlapping(record.as_ptr(), to, RECORD_BYTES) };
    }
}
