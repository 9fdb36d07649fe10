//! The queue of copies, signals and waits: a completion queue a card, and queue pairs to each peer that
//! an op has named.
//!
//! Everything is posted and completed by whoever calls; there is no thread. Puts are writes, gets are
//! reads, a signal travels behind the bytes on the same queue pair. What goes to oneself is copied by
//! the processor, and a flag of one's own waits until all before it is complete.

mod chain;
mod look;
mod numbers;
mod opening;
mod own;
mod pair;
mod park;
mod resolve;
mod stillness;
mod strand;

use std::convert::Infallible;
use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::{Caps, CopyEngine, Deadline, Op, Rank, Ticket};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::{Ledger, Poison};

use chain::Chain;
use opening::Job;
use own::{Done, Own};
use pair::Pair;
use park::Parker;
use resolve::Resolved;
use strand::{RequestId, Room};

use crate::error::{Error, VerbsStatus};
use crate::fabric::{STRANDS_MAX, Shared};
use crate::memory::{Local, Remote};
use crate::sys::Cq;

/// Most ops of a slice; a queue holds more.
const SLICE_OPS_MAX: usize = 1024;
/// Completions taken at once.
const BATCH: usize = 32;
/// Every so many looks, what stays incomplete is asked for. Somebody who drives looks at least a
/// hundred times a second.
const LOOKS: u32 = 64;
/// How long the other ends may take to close when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An in-order queue over RDMA, driven by its caller.
#[derive(Debug)]
pub struct Engine {
    // Before the completion queues and all that is shared.
    pairs: Vec<Option<Pair>>,
    own: Own,
    caps: Caps,
    queue_ops: usize,
    room: Room,
    ledger: Ledger,
    poison: Poison<Error>,
    released: bool,
    /// Ops ever submitted.
    order: u64,
    resolved: Vec<Resolved>,
    /// One a queue pair of the peer that is being posted to.
    chains: Vec<Chain>,
    done: Done,
    batch: Vec<ibv_wc>,
    parker: Parker,
    /// Looks since the last one that asked what stays incomplete.
    looks: u32,
    /// One a card.
    cqs: Arc<[Arc<Cq>]>,
    shared: Arc<Shared>,
}

impl Engine {
    pub(crate) fn open(shared: &Arc<Shared>) -> Result<Self, Error> {
        let inner = &shared.inner;
        inner.check()?;
        let options = &inner.options;
        let pairs = shared.pairs_max();
        let mut room = Room {
            requests: options.requests_max,
            bytes: options.posted_bytes_max,
            piece_bytes: options.piece_bytes_max,
        };
        for card in &*inner.cards {
            let limits = &card.place.limits;
            // A queue pair in error completes every request, so there must be room for all of them.
            let most = limits.max_cqe.max(1).cast_unsigned() / pairs;
            let most = most.min(limits.max_qp_wr.max(1).cast_unsigned());
            if most < 8 {
                let (name, cqe) = (&card.place.context.name, limits.max_cqe);
                return Err(Error::unavailable(format!(
                    "a completion queue of {name} holds {cqe} completions, too few for {pairs} queue \
                     pairs"
                )));
            }
            room.requests = room.requests.min(most);
            room.piece_bytes = room.piece_bytes.min(card.place.message_bytes_max.max(1).into());
        }
        let room_of_queue = room.requests.saturating_mul(pairs);
        let cqs = inner
            .cards
            .iter()
            .map(|card| Cq::create(&card.place.context, room_of_queue).map(Arc::new));
        let cqs: Arc<[Arc<Cq>]> = cqs.collect::<Result<_, _>>()?;
        let queue_ops = options.queue_ops;
        let caps = Caps {
            kind: "queue pairs",
            queued_wait: false,
            polled: true,
            flags_batched: false,
            slice_ops_max: SLICE_OPS_MAX.min(queue_ops),
            piece_bytes_max: room.piece_bytes,
            put_align_bytes: 1,
        };
        Ok(Self {
            pairs: (0..inner.ranks).map(|_| None).collect(),
            own: Own::default(),
            caps,
            queue_ops,
            room,
            ledger: Ledger::with_capacity(queue_ops),
            poison: Poison::new(),
            released: false,
            order: 0,
            resolved: Vec::with_capacity(caps.slice_ops_max),
            chains: (0..STRANDS_MAX).map(|_| Chain::new()).collect(),
            done: Done::default(),
            batch: vec![ibv_wc::default(); BATCH],
            parker: Parker::new(&inner.arrivals, options.spin)?,
            looks: 0,
            cqs,
            shared: Arc::clone(shared),
        })
    }

    /// The queue to a peer, whose queue pairs begin to open when it is first needed.
    fn open_pair(&mut self, peer: Rank) -> Result<(), Error> {
        if self.pairs[peer.index()].is_some() {
            return Ok(());
        }
        let connected = self.shared.peer(peer)?;
        let control = connected.control.as_ref().ok_or(Fault::NotConnected { peer })?;
        let job = Job {
            inner: Arc::clone(&self.shared.inner),
            control: Arc::clone(control),
            cqs: Arc::clone(&self.cqs),
            room: self.room,
            alarm: self.parker.alarm(),
        };
        self.pairs[peer.index()] = Some(Pair::open(job)?);
        Ok(())
    }

    /// Takes a checked slice into the queues.
    fn take(&mut self) -> Result<Ticket, Error> {
        for index in 0..self.resolved.len() {
            if let Resolved::Peer(peer, _) = self.resolved[index] {
                self.open_pair(peer)?;
            }
        }
        let ticket = Ticket(self.ledger.last().0 + 1);
        let mut parts = 0_u32;
        for resolved in self.resolved.drain(..) {
            self.order += 1;
            match resolved {
                Resolved::Nothing => {}
                Resolved::Own(work) => {
                    // A flag of one's own waits for what is before it.
                    if matches!(work, own::OwnWork::Store { .. }) {
                        self.pairs.iter_mut().flatten().for_each(|pair| pair.ask());
                    }
                    self.own.push(ticket, self.order, work);
                    parts += 1;
                }
                Resolved::Peer(peer, work) => {
                    let pair = self.pairs[peer.index()].as_mut().expect("it was just opened");
                    pair.push(ticket, self.order, work);
                }
            }
        }
        for pair in self.pairs.iter_mut().flatten() {
            parts += u32::from(pair.end_slice(ticket));
        }
        let issued = self.ledger.issue(parts);
        debug_assert_eq!(issued, ticket);
        self.parker.busy(&self.shared.inner.arrivals);
        self.drive()?;
        Ok(ticket)
    }

    /// Posts what there is room for and does what is one's own.
    fn drive(&mut self) -> Result<(), Error> {
        for pair in self.pairs.iter_mut().flatten() {
            if pair.has_work() {
                pair.pump(&mut self.chains)?;
            }
        }
        if self.own.len() > 0 {
            let pairs = &self.pairs;
            self.own.run(&mut self.done, |order| {
                pairs.iter().flatten().all(|pair| pair.is_over(order))
            });
            for ticket in self.done.tickets.drain(..) {
                self.ledger.finish_part(ticket);
            }
            if std::mem::take(&mut self.done.stored) {
                self.shared.arrivals().wake();
            }
        }
        Ok(())
    }

    /// Takes what is complete.
    fn harvest(&mut self) -> Result<(), Error> {
        self.shared.inner.check()?;
        let mut moved = self.shared.arrivals().take()?;
        for card in 0..self.cqs.len() {
            loop {
                let taken = self.cqs[card].poll(&mut self.batch)?;
                moved |= taken > 0;
                for index in 0..taken {
                    let completion = self.batch[index];
                    self.complete(card, &completion)?;
                }
                if taken < BATCH {
                    break;
                }
            }
        }
        if moved {
            self.parker.busy(&self.shared.inner.arrivals);
        }
        Ok(())
    }

    fn complete(&mut self, card: usize, completion: &ibv_wc) -> Result<(), Error> {
        let RequestId { peer, strand, number } = RequestId::of(completion.wr_id);
        let Some(pair) = self.pairs.get_mut(peer).and_then(Option::as_mut) else {
            return Ok(());
        };
        if completion.status != ibv_wc_status::SUCCESS && !self.released {
            let is_read = completion.opcode == ibv_wc_opcode::RDMA_READ;
            let what = if is_read { "a get from" } else { "a put or signal to" };
            let (peer, address) = (pair.control.peer, pair.control.place.clone());
            let card = &self.shared.inner.cards[card];
            let context = &card.place.context;
            let status = VerbsStatus {
                code: completion.status.0,
                text: context.status_text(completion.status),
                vendor: completion.vendor_err,
            };
            let place = Arc::clone(&context.name);
            let trouble = card.trouble();
            return Err(Error::Completion { what, peer, address, place, status, trouble });
        }
        let (ledger, released) = (&mut self.ledger, self.released);
        pair.complete((strand, number), |ticket| {
            if !released {
                ledger.finish_part(ticket);
            }
        });
        Ok(())
    }

    /// What is complete of a released engine: everything, once nothing is posted.
    fn settle_release(&mut self) {
        if self.released && self.pairs.iter().flatten().all(Pair::is_drained) {
            self.ledger.finish_all();
        }
    }

    /// How long what is posted may still stay incomplete.
    fn patience(&mut self) -> Result<Duration, Error> {
        let mut most = Duration::MAX;
        if !self.released {
            let (now, limit) = (Instant::now(), self.shared.inner.options.stall_timeout);
            for pair in self.pairs.iter_mut().flatten() {
                most = most.min(pair.patience(now, limit)?.unwrap_or(Duration::MAX));
            }
        }
        Ok(most)
    }

    /// Asks for it at some of the looks: who drives other engines beside this one may never park here.
    fn watch(&mut self) -> Result<(), Error> {
        self.looks = (self.looks + 1) % LOOKS;
        if self.looks == 0 {
            self.patience()?;
        }
        Ok(())
    }

    fn queued(&self) -> usize {
        self.own.len() + self.pairs.iter().flatten().map(Pair::waiting).sum::<usize>()
    }
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;
    type Stream = Infallible;

    fn caps(&self) -> &Caps {
        &self.caps
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.poison.check()?;
        if self.released {
            return Err(Fault::Released.into());
        }
        let slice_ops_max = self.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(Error::argument(format!(
                "a slice has {} ops, wanted at most slice_ops_max = {slice_ops_max}",
                ops.len()
            )));
        }
        let (queued, room) = (self.queued(), self.queue_ops);
        // Slices without ops take tickets, which have no more room than ops.
        if queued + ops.len() > room || self.ledger.open() >= room {
            return Err(Error::QueueFull { queued, room, wanted: ops.len() });
        }
        self.resolved.clear();
        for op in ops {
            self.resolved.push(resolve::resolve(op)?);
        }
        let taken = self.take();
        self.poison.keep(taken)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.poison.check()?;
        let done = self.harvest().and_then(|()| self.drive()).and_then(|()| self.watch());
        self.poison.keep(done)?;
        self.settle_release();
        Ok(self.ledger.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.poison.check()?;
        if self.is_busy() {
            return Ok(());
        }
        // A park that does not sleep is a look.
        let most = if self.parker.is_announced() { self.patience() } else { Ok(Duration::MAX) };
        let parked = most
            .and_then(|most| self.parker.park(self.shared.arrivals(), &self.cqs, limit.min(most)));
        self.poison.keep(parked)
    }

    fn is_busy(&self) -> bool {
        self.own.is_copying()
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.poison.check()?;
        if !self.released {
            self.released = true;
            self.own.clear();
            self.pairs.iter_mut().flatten().for_each(Pair::fail);
        }
        self.settle_release();
        Ok(())
    }

    fn is_capturing(&mut self, stream: &Infallible) -> Result<bool, Error> {
        match *stream {}
    }

    fn fork(&mut self, from: &Infallible) -> Result<(), Error> {
        match *from {}
    }

    fn join(&mut self, into: &Infallible) -> Result<(), Error> {
        match *into {}
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.parker.busy(&self.shared.inner.arrivals);
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        // They close when they are dropped, right after this.
        self.pairs.iter_mut().flatten().for_each(|pair| pair.close_by(deadline));
    }
}
