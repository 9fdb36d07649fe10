//! All of a rank under one lock: its queues, the ways to and from its peers, and the engines that move
//! the bytes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{Caps, Fabric, Rank, Region as _, Ticket};
use peerlane_toolkit::Poison;

use super::carrier::Carrier;
use super::copier::Copier;
use super::error::Error;
use super::inbound::{Gets, Inbound, Told};
use super::memory::Regions;
use super::outbound::{Begun, Outbound, Work};
use super::queue::{Part, Queue};
use super::room::Room;
use super::{NetLocal, NetRemote};

/// Ops that a queue holds.
pub(super) const QUEUE_OPS: usize = 4096;
const SLICE_OPS_MAX: usize = 1024;
/// The queue of what peers have asked for, and the name of the thread.
pub(super) const SERVICE: u64 = 0;
/// A sleep while something moves that no flag tells of.
pub(super) const BUSY_PARK_MAX: Duration = Duration::from_micros(20);
/// Whoever has polled so long ago polls again, or leaves it to the thread.
pub(super) const ATTENDED: Duration = Duration::from_millis(1);
/// How often one call looks again because something moved: it is not to block for long.
const LOOKS: usize = 8;
/// What is under way on the network when an engine is released ends by itself, unless the network is
/// stuck; after so long it is released as well, and nothing goes through it any more.
const RELEASE_TIMEOUT: Duration = Duration::from_millis(500);

/// What this rank has that peers write to, and from where it sends.
pub(super) struct Own<N: Fabric> {
    pub(super) rank: Rank,
    pub(super) room: Room,
    pub(super) inbox: Arc<NetLocal<N>>,
    /// Divided as the inboxes of peers are.
    pub(super) outbox: Arc<NetLocal<N>>,
    pub(super) flags: Arc<NetLocal<N>>,
}

impl<N: Fabric> Own<N> {
    /// One of the counters that peers keep here.
    pub(super) fn flag(&self, word: u64) -> &AtomicU64 {
        let flags = self.flags.flags().expect("checked when the fabric was opened");
        &flags[word as usize]
    }
}

/// What ops and records are done with.
pub(super) struct Tools<'a, D: Fabric, N: Fabric> {
    pub(super) copier: &'a mut Copier<D>,
    pub(super) carrier: &'a mut Carrier<N>,
    pub(super) gets: &'a mut Gets<D, N>,
    pub(super) regions: &'a Regions<D, N>,
}

/// The ways to and from a peer.
struct Channel<D: Fabric, N: Fabric> {
    out: Outbound<N>,
    back: Inbound<D, N>,
}

/// Everything that engines share.
pub(super) struct Stage<D: Fabric, N: Fabric> {
    // The engines before the memory that they use.
    copier: Copier<D>,
    carrier: Option<Carrier<N>>,
    /// How many peers the carrier reaches.
    carried: usize,
    channels: Vec<Option<Channel<D, N>>>,
    queues: BTreeMap<u64, Queue<Work<D, N>>>,
    next_queue: u64,
    gets: Gets<D, N>,
    regions: Arc<Regions<D, N>>,
    /// Of whoever may sleep until a flag of this rank is stored.
    wakers: BTreeMap<u64, Waker>,
    poison: Poison<Error>,
    own: Own<N>,
    /// When somebody has polled an engine last.
    polled: Instant,
    /// Parts that are done, between two steps of a look.
    landed: Vec<Part>,
}

impl<D: Fabric, N: Fabric> Stage<D, N> {
    pub(super) fn new(
        own: Own<N>,
        ranks: usize,
        copier: Copier<D>,
        regions: Arc<Regions<D, N>>,
    ) -> Self {
        let service = Queue::new(ranks, QUEUE_OPS);
        Self {
            copier,
            carrier: None,
            carried: 0,
            channels: (0..ranks).map(|_| None).collect(),
            queues: BTreeMap::from([(SERVICE, service)]),
            next_queue: SERVICE + 1,
            gets: Gets::default(),
            regions,
            wakers: BTreeMap::new(),
            poison: Poison::new(),
            own,
            polled: Instant::now(),
            landed: Vec::new(),
        }
    }

    pub(super) fn connect(
        &mut self,
        peer: Rank,
        inbox: Arc<NetRemote<N>>,
        flags: Arc<NetRemote<N>>,
    ) {
        let peer = peer.index();
        let (out, back) = (Outbound::new(peer, inbox, flags), Inbound::new(peer));
        self.channels[peer] = Some(Channel { out, back });
    }

    fn connected(&self) -> usize {
        self.channels.iter().flatten().count()
    }

    /// Whether there is no carrier that reaches all peers.
    pub(super) fn wants_carrier(&self) -> bool {
        let idle = self.carrier.as_ref().is_none_or(Carrier::is_idle);
        idle && self.carried != self.connected()
    }

    pub(super) fn set_carrier(&mut self, engine: N::Engine) {
        self.carried = self.connected();
        self.carrier = Some(Carrier::new(engine));
    }

    pub(super) fn caps(&self) -> Caps {
        let network = self.carrier.as_ref().map_or(1, |it| it.caps().put_align_bytes);
        Caps {
            kind: "staged",
            queued_wait: false,
            polled: true,
            flags_batched: false,
            slice_ops_max: SLICE_OPS_MAX,
            piece_bytes_max: self.own.room.slot_bytes,
            put_align_bytes: self.copier.put_align_bytes().max(network),
        }
    }

    /// A new queue, and who is to be woken.
    pub(super) fn enter(&mut self, waker: Waker) -> u64 {
        let id = self.next_queue;
        self.next_queue += 1;
        self.queues.insert(id, Queue::new(self.channels.len(), QUEUE_OPS));
        self.wakers.insert(id, waker);
        id
    }

    /// The queue's last trace.
    pub(super) fn leave(&mut self, id: u64) {
        self.wakers.remove(&id);
        self.queues.remove(&id);
    }

    pub(super) fn queue(&mut self, id: u64) -> &mut Queue<Work<D, N>> {
        self.queues.get_mut(&id).expect("an engine's queue lives as long as it")
    }

    pub(super) fn check(&self) -> Result<(), Error> {
        self.poison.check()
    }

    /// Whether something moves that no flag of this rank tells of.
    pub(super) fn is_busy(&self) -> bool {
        let idle = self.copier.out.is_idle()
            && self.copier.back.is_idle()
            && self.carrier.as_ref().is_none_or(Carrier::is_idle)
            && self.channels.iter().flatten().all(|it| it.out.is_idle() && it.back.is_idle());
        !idle
    }

    /// Whether somebody polls engines.
    pub(super) fn is_attended(&self) -> bool {
        self.polled.elapsed() < ATTENDED
    }

    /// Drops what a queue has not begun.
    pub(super) fn release(&mut self, id: u64) {
        self.queue(id).release();
        let landed = &mut self.landed;
        self.gets.drop_queue(id, |part| landed.push(part));
        self.land();
        self.queue(id).settle_release();
    }

    /// Moves whatever can move; `by` needs not to be woken.
    pub(super) fn drive(&mut self, by: u64) -> Result<(), Error> {
        self.poison.check()?;
        if by != SERVICE {
            self.polled = Instant::now();
        }
        let mut driven = Ok(true);
        for _ in 0..LOOKS {
            driven = self.look(by);
            if !matches!(driven, Ok(true)) {
                break;
            }
        }
        let driven = driven.and_then(|_| self.settle_releases());
        self.poison.keep(driven)
    }

    /// One look at everything; whether anything moved.
    fn look(&mut self, by: u64) -> Result<bool, Error> {
        let Some(carrier) = &mut self.carrier else { return Ok(false) };
        let mut moved = self.copier.out.look()? | self.copier.back.look()?;
        let landed = &mut self.landed;
        moved |= carrier.look(|part| landed.push(part))?;
        let mut stored = false;
        let mut asked = Vec::new();
        for (peer, channel) in self.channels.iter_mut().enumerate() {
            let Some(Channel { out, back }) = channel else { continue };
            let credit = self.own.flag(Room::credit(peer)).load(Ordering::Acquire);
            moved |= out.credit(credit, |part| landed.push(part)).map_err(|()| {
                let what =
                    format!("says that it is done with {credit} records, which it did not get");
                Error::of_peer(Rank::at(peer), what)
            })?;
            let mut tools = Tools {
                copier: &mut self.copier,
                carrier: &mut *carrier,
                gets: &mut self.gets,
                regions: &self.regions,
            };
            moved |= back.take(&self.own, &mut tools, |told| match told {
                Told::Stored => stored = true,
                Told::Got(part) => landed.push(part),
                Told::Asked { get, src, from, bytes } => {
                    asked.push((peer, Work::Answer { get, src, from, bytes }));
                }
            })?;
            if let Some(done) = back.news() {
                let me = self.own.rank.index();
                out.signal(carrier, Room::credit(me), done, Vec::new());
            }
        }
        if !asked.is_empty() {
            self.queue(SERVICE).push(asked.into_iter());
        }
        self.land();
        moved |= self.begin(&mut stored)?;
        if stored {
            let others = self.wakers.iter().filter(|(id, _)| **id != by);
            others.for_each(|(_, waker)| waker.wake_by_ref());
        }
        let Some(carrier) = &mut self.carrier else { return Ok(false) };
        for Channel { out, .. } in self.channels.iter_mut().flatten() {
            moved |= out.pump(carrier, &self.own, self.copier.out.done);
        }
        carrier.pump()?;
        Ok(moved)
    }

    /// Parts that are done, to their ops.
    fn land(&mut self) {
        for part in self.landed.drain(..) {
            // The queue of an engine that is gone is gone.
            if let Some(queue) = self.queues.get_mut(&part.queue) {
                queue.land(part);
            }
        }
    }

    /// Begins the ops that can begin.
    fn begin(&mut self, stored: &mut bool) -> Result<bool, Error> {
        let Some(carrier) = &mut self.carrier else { return Ok(false) };
        let me = self.own.rank.index();
        let mut moved = false;
        for (&id, queue) in &mut self.queues {
            for peer in 0..queue.lines.len() {
                let Some(Channel { out, .. }) = &mut self.channels[peer] else { continue };
                while let Some(order) = queue.lines[peer].next().map(|entry| entry.order) {
                    let over = peer == me && queue.is_over(order);
                    let line = &mut queue.lines[peer];
                    let waits = line.has_open(|work| matches!(work, Work::Get { .. }));
                    let Some(entry) = line.next() else { break };
                    let begun = match &entry.work {
                        Work::Signal { .. } if peer == me && !over => Begun::Blocked,
                        Work::Signal { flag, word, value } if peer == me => {
                            let flags = flag.own.as_ref().and_then(|own| own.flags());
                            // In bounds, as `submit` has checked.
                            if let Some(flag) = flags.and_then(|flags| flags.get(*word as usize)) {
                                flag.store(*value, Ordering::Release);
                                *stored = true;
                            }
                            Begun::Done
                        }
                        _ => {
                            let part = Part { queue: id, peer, order };
                            let mut tools = Tools {
                                copier: &mut self.copier,
                                carrier: &mut *carrier,
                                gets: &mut self.gets,
                                regions: &self.regions,
                            };
                            out.begin(entry, part, waits, &self.own, &mut tools)?
                        }
                    };
                    let whole = match begun {
                        Begun::Blocked => break,
                        Begun::Some(bytes) => {
                            entry.fly();
                            entry.begun += bytes;
                            entry.begun == bytes_of(&entry.work)
                        }
                        Begun::Whole => {
                            entry.fly();
                            true
                        }
                        Begun::Done => true,
                    };
                    moved = true;
                    if whole {
                        line.advance();
                        queue.settle(peer);
                    }
                }
            }
        }
        Ok(moved)
    }

    /// What a released queue has under way must end, also where the network is stuck.
    fn settle_releases(&mut self) -> Result<(), Error> {
        let mut stuck = false;
        for queue in self.queues.values_mut() {
            queue.settle_release();
            stuck |= queue.len() > 0
                && queue.released.is_some_and(|since| since.elapsed() > RELEASE_TIMEOUT);
        }
        match &mut self.carrier {
            Some(carrier) if stuck => carrier.release(),
            _ => Ok(()),
        }
    }

    /// How far a queue is.
    pub(super) fn completed(&mut self, id: u64) -> Ticket {
        self.queue(id).ledger.completed()
    }
}

fn bytes_of<D: Fabric, N: Fabric>(work: &Work<D, N>) -> u64 {
    match work {
        Work::Put { bytes, .. } | Work::Get { bytes, .. } | Work::Answer { bytes, .. } => *bytes,
        Work::Signal { .. } => 0,
    }
}
