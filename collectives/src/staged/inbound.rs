//! What comes in from one peer: records in order, each with what it does once everything before it is
//! done.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use peerlane_hal::{Fabric, Rank, Region as _, Ticket};

use super::error::Error;
use super::memory::{Backing, Registered};
use super::queue::Part;
use super::record::{RECORD_BYTES, Record};
use super::room::{RECORDS, Room, SLOTS};
use super::stage::{Own, Tools};

/// A get whose answers are under way.
struct Open<D: Fabric, N: Fabric> {
    part: Part,
    dst: Arc<Registered<D, N>>,
    to: u64,
    bytes: u64,
    /// Bytes that are not here yet.
    left: u64,
    /// Answers that are being copied to their place.
    copying: u32,
    /// Nobody waits for it any more.
    dropped: bool,
}

/// The gets of a rank that wait for answers.
pub(super) struct Gets<D: Fabric, N: Fabric> {
    open: BTreeMap<u64, Open<D, N>>,
    next: u64,
}

impl<D: Fabric, N: Fabric> Default for Gets<D, N> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), next: 0 }
    }
}

impl<D: Fabric, N: Fabric> Gets<D, N> {
    pub(super) fn open(
        &mut self,
        part: Part,
        dst: &Arc<Registered<D, N>>,
        to: u64,
        bytes: u64,
    ) -> u64 {
        self.next += 1;
        let dst = Arc::clone(dst);
        let open = Open { part, dst, to, bytes, left: bytes, copying: 0, dropped: false };
        self.open.insert(self.next, open);
        self.next
    }

    /// Whether a get of the same line waits for answers: one past the host would come before it.
    pub(super) fn is_awaited(&self, part: Part) -> bool {
        self.open.values().any(|get| (get.part.queue, get.part.peer) == (part.queue, part.peer))
    }

    /// The gets of a queue are not wanted any more; those that end with it.
    pub(super) fn drop_queue(&mut self, queue: u64, mut done: impl FnMut(Part)) {
        self.open.retain(|_, get| {
            if get.part.queue != queue {
                return true;
            }
            get.dropped = true;
            if get.copying == 0 {
                done(get.part);
            }
            get.copying > 0
        });
    }

    /// Bytes of a get are at their place.
    fn landed(&mut self, get: u64, bytes: u64) -> Option<Part> {
        let open = self.open.get_mut(&get)?;
        open.copying -= 1;
        open.left -= bytes;
        let over = open.left == 0 || (open.dropped && open.copying == 0);
        if over { self.open.remove(&get).map(|open| open.part) } else { None }
    }
}

/// What a record does when its turn has come.
enum Effect<D: Fabric, N: Fabric> {
    Nothing,
    Store { flags: Arc<Registered<D, N>>, word: usize, value: u64 },
    Serve { get: u64, src: Arc<Registered<D, N>>, from: u64, bytes: u64 },
    Landed { get: u64, bytes: u64 },
}

/// An effect, and the copy to the device that it waits for.
type Pending<D, N> = (Ticket, Effect<D, N>);

/// What the effects of records are for others.
pub(super) enum Told<D: Fabric, N: Fabric> {
    /// A flag of this rank was stored.
    Stored,
    /// A peer wants bytes.
    Asked { get: u64, src: Arc<Registered<D, N>>, from: u64, bytes: u64 },
    /// A get is complete.
    Got(Part),
}

/// The way from one peer.
pub(super) struct Inbound<D: Fabric, N: Fabric> {
    peer: usize,
    /// Records that were looked at, and those that are done.
    begun: u64,
    done: u64,
    /// What the peer was told of the latter.
    said: u64,
    pending: VecDeque<Pending<D, N>>,
}

impl<D: Fabric, N: Fabric> Inbound<D, N> {
    pub(super) fn new(peer: usize) -> Self {
        Self { peer, begun: 0, done: 0, said: 0, pending: VecDeque::new() }
    }

    pub(super) fn is_idle(&self) -> bool {
        self.pending.is_empty()
    }

    /// What the peer is to be told of the records that are done, if it is not told yet.
    pub(super) fn news(&mut self) -> Option<u64> {
        (self.said != self.done).then(|| {
            self.said = self.done;
            self.done
        })
    }

    /// Takes what has come, and does what can be done.
    pub(super) fn take(
        &mut self,
        own: &Own<N>,
        tools: &mut Tools<'_, D, N>,
        mut tell: impl FnMut(Told<D, N>),
    ) -> Result<bool, Error> {
        let mail = own.flag(Room::mail(self.peer)).load(Ordering::Acquire);
        if mail < self.begun || mail - self.done > RECORDS {
            let (begun, peer) = (self.begun, Rank::at(self.peer));
            let what = format!("says that it has written {mail} records, after {begun}");
            return Err(Error::of_peer(peer, what));
        }
        let mut moved = false;
        while self.begun < mail {
            let Some(pending) = self.begin(own, tools)? else { break };
            self.pending.push_back(pending);
            self.begun += 1;
            moved = true;
        }
        let copied = tools.copier.back.done;
        while self.pending.front().is_some_and(|(after, _)| *after <= copied) {
            let Some((_, effect)) = self.pending.pop_front() else { break };
            match effect {
                Effect::Nothing => {}
                Effect::Store { flags, word, value } => {
                    if let Some(flag) = flags.flags().and_then(|flags| flags.get(word)) {
                        flag.store(value, Ordering::Release);
                        tell(Told::Stored);
                    }
                }
                Effect::Serve { get, src, from, bytes } => {
                    tell(Told::Asked { get, src, from, bytes });
                }
                Effect::Landed { get, bytes } => {
                    if let Some(part) = tools.gets.landed(get, bytes) {
                        tell(Told::Got(part));
                    }
                }
            }
            self.done += 1;
            moved = true;
        }
        Ok(moved)
    }

    /// Begins the next record; `None` where the device has no room.
    fn begin(
        &self,
        own: &Own<N>,
        tools: &mut Tools<'_, D, N>,
    ) -> Result<Option<Pending<D, N>>, Error> {
        let record = Record::decode(&own.record(self.peer, self.begun));
        let record = record.map_err(|kind| self.wrong(format!("wrote a record of kind {kind}")))?;
        let at_once = |effect| Ok(Some((Ticket::NONE, effect)));
        match record {
            Record::Pass => at_once(Effect::Nothing),
            Record::Land { generation, offset, bytes, slot } => {
                self.check_slot(own, slot, bytes)?;
                let Some(region) = tools.regions.find(generation) else {
                    return at_once(Effect::Nothing);
                };
                self.check_span(&region, offset, bytes)?;
                let copied = self.to_place((&region, offset), slot, bytes, own, tools)?;
                Ok(copied.map(|ticket| (ticket, Effect::Nothing)))
            }
            Record::Signal { generation, word, value } => {
                let Some(flags) = tools.regions.find(generation) else {
                    return at_once(Effect::Nothing);
                };
                let count = flags.flags().map_or(0, <[_]>::len);
                match usize::try_from(word).ok().filter(|word| *word < count) {
                    Some(word) => at_once(Effect::Store { flags, word, value }),
                    None => Err(self.wrong(format!("signals flag {word} of {count}"))),
                }
            }
            Record::Ask { generation, offset, bytes, get } => {
                let Some(src) = tools.regions.find(generation) else {
                    return at_once(Effect::Nothing);
                };
                self.check_span(&src, offset, bytes)?;
                at_once(Effect::Serve { get, src, from: offset, bytes })
            }
            Record::Answer { get, offset, bytes, slot } => {
                self.check_slot(own, slot, bytes)?;
                let Some(open) = tools.gets.open.get_mut(&get).filter(|get| !get.dropped) else {
                    return at_once(Effect::Nothing);
                };
                let end = offset.checked_add(bytes).filter(|&end| end <= open.bytes);
                if open.part.peer != self.peer || end.is_none() {
                    return Err(
                        self.wrong(format!("answers get {get} with what it did not ask for"))
                    );
                }
                let (dst, to) = (Arc::clone(&open.dst), open.to + offset);
                let copied = self.to_place((&dst, to), slot, bytes, own, tools)?;
                let Some(ticket) = copied else { return Ok(None) };
                if let Some(open) = tools.gets.open.get_mut(&get) {
                    open.copying += 1;
                }
                Ok(Some((ticket, Effect::Landed { get, bytes })))
            }
        }
    }

    /// Copies from a slot to its place, whose bounds are checked.
    fn to_place(
        &self,
        (region, offset): (&Registered<D, N>, u64),
        slot: u64,
        bytes: u64,
        own: &Own<N>,
        tools: &mut Tools<'_, D, N>,
    ) -> Result<Option<Ticket>, Error> {
        let at = own.room.slot(self.peer, slot);
        match &region.backing {
            Backing::Staged { device, .. } => tools.copier.copy_back((device, offset), at, bytes),
            Backing::Direct(local) => {
                let to = local.base().as_ptr().wrapping_add(offset as usize);
                let from = own.inbox.base().as_ptr().wrapping_add(at as usize);
                // SAFETY: the caller has checked both spans; the region is memory of the host, where
                // whoever asked for these bytes keeps the contract of ops, and the slot is this rank's
                // until its record is done.
                unsafe { std::ptr::copy_nonoverlapping(from, to, bytes as usize) };
                Ok(Some(Ticket::NONE))
            }
        }
    }

    fn check_slot(&self, own: &Own<N>, slot: u64, bytes: u64) -> Result<(), Error> {
        if slot < SLOTS && bytes <= own.room.slot_bytes {
            return Ok(());
        }
        let room = own.room.slot_bytes;
        Err(self.wrong(format!("fills slot {slot} of {SLOTS} with {bytes} bytes of {room}")))
    }

    fn check_span(&self, region: &Registered<D, N>, offset: u64, bytes: u64) -> Result<(), Error> {
        match offset.checked_add(bytes) {
            Some(end) if end <= region.bytes => Ok(()),
            _ => {
                let all = region.bytes;
                Err(self.wrong(format!(
                    "names {bytes} bytes from offset {offset} on of a region of {all}"
                )))
            }
        }
    }

    fn wrong(&self, what: String) -> Error {
        Error::of_peer(Rank::at(self.peer), what)
    }
}

impl<N: Fabric> Own<N> {
    /// What a peer wrote.
    fn record(&self, peer: usize, number: u64) -> [u8; RECORD_BYTES] {
        let at = self.room.record(peer, number) as usize;
        let from = self.inbox.base().as_ptr().wrapping_add(at);
        let mut record = [0; RECORD_BYTES];
        // SAFETY: `Room` keeps records inside the inbox, memory of the host that lives as long as this.
        // The peer has said that the record is there, and writes here again only once it is done.
        unsafe { std::ptr::copy_nonoverlapping(from, record.as_mut_ptr(), RECORD_BYTES) };
        record
    }
}
