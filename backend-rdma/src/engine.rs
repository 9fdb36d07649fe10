//! The queue of copies, signals and waits: one completion queue, and a queue pair to each peer that an
//! op has named.
//!
//! Everything is posted and completed by whoever calls; there is no thread. Puts are writes, gets are
//! reads, a signal travels behind the bytes on the same queue pair. What goes to oneself is copied by
//! the processor, and a flag of one's own waits until all before it is complete.

mod chain;
mod own;
mod pair;
mod park;
mod resolve;

use std::convert::Infallible;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::mechanics::{Ledger, Poison};
use peerlane_hal::{Caps, CopyEngine, Deadline, Op, Rank, Ticket};

use chain::Chain;
use own::{Done, Own};
use pair::{Pair, Room};
use park::Parker;
use resolve::Resolved;

use crate::error::{Error, VerbsStatus};
use crate::fabric::Shared;
use crate::memory::{Local, Remote};
use crate::sys::Cq;

/// Most ops of a slice; a queue holds more.
const SLICE_OPS_MAX: usize = 1024;
/// Completions taken at once.
const BATCH: usize = 32;
/// Numbers of requests in a completion; above them the peer.
const NUMBER_MASK: u64 = (1 << 48) - 1;
/// How long the other ends may take to close when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An in-order queue over RDMA, driven by its caller.
#[derive(Debug)]
pub struct Engine {
    // Before the completion queue and all that is shared.
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
    chain: Chain,
    done: Done,
    batch: Vec<ibv_wc>,
    parker: Parker,
    cq: Arc<Cq>,
    shared: Arc<Shared>,
}

impl Engine {
    pub(crate) fn open(shared: &Arc<Shared>) -> Result<Self, Error> {
        let inner = &shared.inner;
        inner.check()?;
        let (options, limits) = (&inner.options, &inner.place.limits);
        // A queue pair in error completes every request, so there must be room for all of them.
        let peers = u32::try_from(shared.connected().max(1)).unwrap_or(u32::MAX);
        let most = limits.max_cqe.max(1).cast_unsigned() / peers;
        let requests = options.requests_max.min(most);
        let requests = requests.min(limits.max_qp_wr.max(1).cast_unsigned());
        if requests < 8 {
            let (name, cqe) = (&inner.place.context.name, limits.max_cqe);
            return Err(Error::Unavailable(format!(
                "a completion queue of {name} holds {cqe} completions, too few for {peers} peers"
            )));
        }
        let cq = Arc::new(Cq::create(&inner.place.context, requests.saturating_mul(peers))?);
        let piece_bytes = options.piece_bytes_max.min(inner.place.message_bytes_max.max(1).into());
        let queue_ops = options.queue_ops;
        let caps = Caps {
            queued_wait: false,
            polled: true,
            flags_batched: false,
            slice_ops_max: SLICE_OPS_MAX.min(queue_ops),
            piece_bytes_max: piece_bytes,
            put_align_bytes: 1,
        };
        Ok(Self {
            pairs: (0..inner.ranks).map(|_| None).collect(),
            own: Own::default(),
            caps,
            queue_ops,
            room: Room { requests, piece_bytes },
            ledger: Ledger::with_capacity(queue_ops),
            poison: Poison::new(),
            released: false,
            order: 0,
            resolved: Vec::with_capacity(caps.slice_ops_max),
            chain: Chain::new(),
            done: Done::default(),
            batch: vec![ibv_wc::default(); BATCH],
            parker: Parker::new(&inner.arrivals, options.spin)?,
            cq,
            shared: Arc::clone(shared),
        })
    }

    /// The queue pair to a peer, opened when it is first needed.
    fn open_pair(&mut self, peer: Rank) -> Result<(), Error> {
        if self.pairs[peer.index()].is_some() {
            return Ok(());
        }
        let connected = self.shared.peer(peer)?;
        let control = connected.control.as_ref().ok_or(Error::NotConnected { peer })?;
        let pair = Pair::open(&self.shared.inner, control, &self.cq, peer.0, self.room)?;
        self.pairs[peer.index()] = Some(pair);
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
            if pair.waiting() > 0 {
                pair.pump(&mut self.chain)?;
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
        loop {
            let taken = self.cq.poll(&mut self.batch)?;
            moved |= taken > 0;
            for index in 0..taken {
                let completion = self.batch[index];
                self.complete(&completion)?;
            }
            if taken < BATCH {
                break;
            }
        }
        if moved {
            self.parker.busy(&self.shared.inner.arrivals);
        }
        Ok(())
    }

    fn complete(&mut self, completion: &ibv_wc) -> Result<(), Error> {
        let index = (completion.wr_id >> 48) as usize;
        let Some(pair) = self.pairs.get_mut(index).and_then(Option::as_mut) else {
            return Ok(());
        };
        if completion.status != ibv_wc_status::SUCCESS && !self.released {
            let what = Pair::what(completion.opcode == ibv_wc_opcode::RDMA_READ);
            let (peer, address) = (pair.control.peer, pair.control.place.clone());
            let context = &self.shared.inner.place.context;
            let status = VerbsStatus {
                code: completion.status.0,
                text: context.status_text(completion.status),
                vendor: completion.vendor_err,
            };
            let place = Arc::clone(&context.name);
            return Err(Error::Completion { what, peer, address, place, status });
        }
        let (ledger, released) = (&mut self.ledger, self.released);
        pair.complete(completion.wr_id & NUMBER_MASK, |ticket| {
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
            return Err(Error::Released);
        }
        let slice_ops_max = self.caps.slice_ops_max;
        if ops.len() > slice_ops_max {
            return Err(Error::Argument(format!(
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
        let done = self.harvest().and_then(|()| self.drive());
        self.poison.keep(done)?;
        self.settle_release();
        Ok(self.ledger.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.poison.check()?;
        // A copy that is cut short can go on at once.
        if self.own.is_copying() {
            return Ok(());
        }
        let parked = self.parker.park(self.shared.arrivals(), &self.cq, limit);
        self.poison.keep(parked)
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
        for pair in self.pairs.iter_mut().filter_map(Option::take) {
            pair.close(deadline);
        }
    }
}
