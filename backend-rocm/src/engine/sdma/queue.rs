//! The order of everything: chains of work for each peer, and the engines that copy it.
//!
//! Nothing here knows a runtime. What is pushed goes to the engines as far as they may hold it, at once
//! and whenever somebody drives the queue; what engines have complete is noticed in their signals.

use std::time::Duration;

use peerlane_hal::{Deadline, Ticket};
use peerlane_toolkit::{Ledger, device::Fault};

use super::chain::{Chain, FlagPlace, WORD_BYTES, Work};
use super::hardware::{Copy, Direction, Given, Hardware, Span};
use super::loads::Loads;
use super::placement::{Placement, SdmaId};
use super::slots::{Held, Slots};
use super::stripe;

/// How long the runtime may have no room while nothing of this queue is on its way.
const EXHAUSTED_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two looks while a queue closes.
const CLOSE_PAUSE: Duration = Duration::from_micros(50);

/// The engines of this rank's GPU that copy to a peer, and from it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ways {
    pub(crate) put: Placement,
    pub(crate) get: Placement,
}

/// An op for a peer, with its places known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) peer: usize,
    pub(crate) work: Work,
}

/// What came of giving work to engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Moved,
    /// Nothing of this chain can go on now.
    Stuck,
    /// The runtime has no room for anything.
    Exhausted,
}

#[derive(Debug)]
pub(crate) struct Queue<H: Hardware> {
    pub(super) hardware: H,
    me: usize,
    ways: Vec<Option<Ways>>,
    chains: Vec<Chain>,
    slots: Slots,
    loads: Loads,
    ledger: Ledger,
    order: u64,
    /// Who is first to give engines something.
    turn: usize,
    piece_bytes_max: u64,
    /// The slots that a copy is to look at.
    after: Vec<usize>,
    exhausted: Option<Deadline>,
    /// Slots of copies that failed; what looks at them stands still.
    failed: Vec<usize>,
    released: bool,
}

impl<H: Hardware> Queue<H> {
    /// A queue of rank `me` that reaches the ranks with a way.
    pub(crate) fn new(
        hardware: H,
        me: usize,
        ways: Vec<Option<Ways>>,
        (queue_ops, piece_bytes_max): (usize, u64),
    ) -> Self {
        let slots = Slots::new(hardware.slots());
        Self {
            me,
            chains: ways.iter().map(|_| Chain::default()).collect(),
            ways,
            loads: Loads::default(),
            ledger: Ledger::with_capacity(queue_ops),
            order: 0,
            turn: me,
            piece_bytes_max: piece_bytes_max.min(stripe::PIECE_BYTES_MAX),
            after: Vec::with_capacity(hardware.slots()),
            exhausted: None,
            failed: Vec::new(),
            released: false,
            slots,
            hardware,
        }
    }

    /// Ops that are not complete.
    pub(crate) fn len(&self) -> usize {
        self.chains.iter().map(Chain::len).sum()
    }

    pub(crate) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The ways as they are now: an engine that the runtime refused is no longer among them.
    pub(crate) fn ways(&self) -> impl Iterator<Item = (usize, &Ways)> {
        self.ways.iter().enumerate().filter_map(|(peer, ways)| Some((peer, ways.as_ref()?)))
    }

    /// Takes a slice.
    pub(crate) fn push(&mut self, requests: &[Request]) -> Ticket {
        let ticket = Ticket(self.ledger.last().0 + 1);
        for request in requests {
            self.order += 1;
            self.chains[request.peer].push(ticket, self.order, request.work);
        }
        // A slice is far shorter.
        let issued = self.ledger.issue(requests.len() as u32);
        debug_assert_eq!(issued, ticket);
        ticket
    }

    /// Notices what is complete and gives engines what they may hold; whether anything moved.
    ///
    /// # Safety
    /// What was pushed is valid until its ticket completes.
    pub(crate) unsafe fn drive(&mut self) -> Result<bool, H::Error> {
        let mut moved = self.harvest()?;
        // A flag that was stored may let others go.
        loop {
            // SAFETY: the caller's.
            let pumped = unsafe { self.pump() }?;
            let settled = self.settle();
            moved |= pumped || settled;
            if !settled {
                return Ok(moved);
            }
        }
    }

    /// Whether a signal has changed since the last look.
    pub(crate) fn has_news(&self) -> bool {
        let mut slots = self.chains.iter().flat_map(|chain| &chain.on_their_way);
        slots.any(|slot| self.hardware.value(*slot) < 1)
    }

    /// Copies on their way.
    pub(crate) fn on_their_way(&self) -> usize {
        self.chains.iter().map(|chain| chain.on_their_way.len()).sum()
    }

    /// Takes off what engines have complete.
    fn harvest(&mut self) -> Result<bool, H::Error> {
        let (mut moved, mut failure) = (false, Ok(()));
        for peer in 0..self.chains.len() {
            let mut index = 0;
            while let Some(&slot) = self.chains[peer].on_their_way.get(index) {
                let value = self.hardware.value(slot);
                if value > 0 {
                    index += 1;
                    continue;
                }
                self.chains[peer].on_their_way.remove(index);
                let held = self.finish(slot);
                moved = true;
                if value < 0 {
                    self.failed.push(slot);
                    failure = failure.and(Err(self.hardware.failure(&held.copy, value)));
                }
            }
        }
        failure?;
        Ok(self.settle() || moved)
    }

    fn finish(&mut self, slot: usize) -> Held {
        let held = self.slots.finish(slot);
        self.loads.take_off(held.load, held.copy.span.bytes);
        let engine = held.copy.on.map_or(0, SdmaId::index);
        self.chains[held.copy.peer].finished(held.item, engine);
        held
    }

    /// Finishes tickets and stores flags whose turn it is.
    fn settle(&mut self) -> bool {
        let mut over = 0;
        // Oneself last: its flags wait for all others.
        let others = (0..self.chains.len()).filter(|peer| *peer != self.me);
        for peer in others.chain([self.me]) {
            let bound = self.bound(peer);
            let (ledger, released) = (&mut self.ledger, self.released);
            let Some(chain) = self.chains.get_mut(peer) else { continue };
            over += chain.settle(bound, |ticket| {
                if !released {
                    ledger.finish_part(ticket);
                }
            });
        }
        if self.released && self.on_their_way() == 0 {
            self.ledger.finish_all();
        }
        over > 0
    }

    /// Flags of `peer` that were submitted from here on wait for the chains of others.
    fn bound(&self, peer: usize) -> u64 {
        if peer != self.me {
            return u64::MAX;
        }
        let others = self.chains.iter().enumerate().filter(|(other, _)| *other != peer);
        others.filter_map(|(_, chain)| chain.first_order()).min().unwrap_or(u64::MAX)
    }

    /// # Safety
    /// As [`drive`](Self::drive).
    unsafe fn pump(&mut self) -> Result<bool, H::Error> {
        let (mut moved, ranks) = (false, self.chains.len());
        // Each time another peer is first: signals may be too few for all.
        self.turn = self.turn.wrapping_add(1);
        let first = self.turn;
        for peer in (0..ranks).map(|step| first.wrapping_add(step) % ranks) {
            loop {
                // SAFETY: the caller's.
                match unsafe { self.step(peer) }? {
                    Step::Moved => moved = true,
                    Step::Stuck => break,
                    Step::Exhausted => return self.note_exhaustion().map(|()| moved),
                }
            }
        }
        self.exhausted = None;
        Ok(moved)
    }

    /// Gives the next piece of a chain to an engine.
    ///
    /// # Safety
    /// As [`drive`](Self::drive).
    unsafe fn step(&mut self, peer: usize) -> Result<Step, H::Error> {
        let bound = self.bound(peer);
        let chain = &mut self.chains[peer];
        let Some((number, item)) = chain.next() else { return Ok(Step::Stuck) };
        let Some(slot) = self.slots.vacant() else { return Ok(Step::Stuck) };
        let ways = self.ways[peer].as_ref().expect("ops are checked against the ways");
        let (direction, order, work, given) = match item.work {
            Work::Copy { direction, .. } => (direction, item.order, item.work, item.given),
            Work::Signal { .. } => (Direction::Put, item.order, item.work, item.given),
        };
        let set = if direction == Direction::Put { ways.put.set } else { ways.get.set };
        if let Work::Copy { span, .. } = work
            && item.piece_bytes == 0
        {
            item.piece_bytes = stripe::piece_bytes(span.bytes, set.len(), self.piece_bytes_max);
        }
        let (held, piece_bytes, left) = (item.held, item.piece_bytes, item.left());
        let span = match work {
            Work::Copy { span, .. } => span.part(given, piece_bytes.min(left)),
            Work::Signal { flag: FlagPlace::Device(dst), .. } => {
                // Flags that the host stores come first, and oneself last of all.
                if chain.has_stores() || order >= bound {
                    return Ok(Step::Stuck);
                }
                Span { dst, src: 0, bytes: WORD_BYTES }
            }
            Work::Signal { flag: FlagPlace::Host(_), .. } => unreachable!("the host stores these"),
        };
        let left = left.div_ceil(piece_bytes.max(1));
        let Some((load, on)) = self.loads.taker(set, &held, left) else {
            return Ok(Step::Stuck);
        };
        self.after.clear();
        for before in &self.chains[peer].on_their_way {
            let earlier = self.slots.held(*before);
            let depends = match work {
                Work::Signal { .. } => true,
                Work::Copy { .. } => earlier.item != number && earlier.copy.span.meets(span),
            };
            if depends {
                self.after.push(*before);
            }
        }
        if !self.after.is_empty() && !self.hardware.waits_for_signals() {
            return Ok(Step::Stuck);
        }
        let mut copy = Copy { peer, direction, on, span };
        if let Work::Signal { value, .. } = work {
            copy.span.src = self.hardware.store_word(slot, value);
        }
        self.hardware.arm(slot);
        // SAFETY: the spans are parts of what was pushed, which the caller answers for; a word is the
        // hardware's.
        match unsafe { self.hardware.copy(&copy, &self.after, slot) } {
            Given::Taken => {}
            Given::Exhausted => return Ok(Step::Exhausted),
            Given::Refused(error) => {
                let Some(engine) = on else { return Err(error) };
                self.withdraw(peer, direction, engine);
                return Ok(Step::Moved);
            }
        }
        self.loads.put_on(load, span.bytes);
        self.slots.start(slot, Held { copy, item: number, load }, &self.after);
        let engine = on.map_or(0, SdmaId::index);
        self.chains[peer].started(number, engine, span.bytes, slot);
        Ok(Step::Moved)
    }

    /// The runtime does not take copies of this direction for an engine; without any left it chooses.
    fn withdraw(&mut self, peer: usize, direction: Direction, engine: SdmaId) {
        let ways = self.ways[peer].as_mut().expect("it has just carried a copy");
        let way = if direction == Direction::Put { &mut ways.put } else { &mut ways.get };
        way.set.remove(engine);
        if way.set.is_empty() {
            *way = Placement::RUNTIME;
        }
    }

    /// The runtime has no room; that passes while something is on its way.
    fn note_exhaustion(&mut self) -> Result<(), H::Error> {
        if self.on_their_way() > 0 {
            self.exhausted = None;
            return Ok(());
        }
        let deadline = *self.exhausted.get_or_insert_with(|| Deadline::after(EXHAUSTED_TIMEOUT));
        if !deadline.has_passed() {
            return Ok(());
        }
        let what = "the runtime had no room for a copy while no other was on its way".to_owned();
        Err(Fault::Timeout { what, timeout: deadline.timeout() }.into())
    }

    /// Drops what engines have not begun.
    pub(crate) fn release(&mut self) {
        self.released = true;
        // Flags behind a copy that failed tell peers of bytes that are not there. Before a release every
        // peer was told of the abort; and who never lets them go keeps an engine from its process.
        for slot in self.failed.drain(..) {
            self.hardware.excuse(slot);
        }
        self.chains.iter_mut().for_each(Chain::drop_pending);
        self.settle();
    }

    /// Waits for the engines, also after an error; what they still hold at the deadline is abandoned.
    pub(crate) fn close(&mut self, deadline: Deadline) {
        self.release();
        while self.on_their_way() > 0 {
            // The engine is gone, and so is whoever would hear of an error.
            if self.harvest().is_err() {
                self.release();
            }
            if deadline.has_passed() {
                return self.hardware.abandon();
            }
            self.hardware.pause(CLOSE_PAUSE);
        }
    }
}

#[cfg(test)]
mod tests;
