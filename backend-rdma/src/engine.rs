//! Implements the RDMA engine: one completion queue per NIC, and an endpoint for each peer that an op has
//! named.
//!
//! The calling thread posts and completes everything; the engine has no thread. Puts are writes, gets are
//! reads, and a signal follows the bytes on the same queue pair. The processor does the self copies, and a
//! flag of the own rank is stored when all earlier ops are complete.
//!
//! | file | holds |
//! | --- | --- |
//! | `chain.rs` | posting several requests with one doorbell |
//! | `look.rs` | how long `park` polls before it sleeps |
//! | `numbers.rs` | encoding of signals: by word, later by a short flag id |
//! | `opening.rs` | the thread that opens the queue pairs to a peer |
//! | `own.rs` | copies and flags of the own rank |
//! | `pair.rs` | the ops for one peer: striping, signals, stall detection |
//! | `park.rs` | sleeping on the completion channels |
//! | `resolve.rs` | checks of an op against its regions |
//! | `stillness.rs` | detection of a peer that makes no progress |
//! | `strand.rs` | one queue pair: limits, request ids, copies in flight |

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

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::{Caps, CopyEngine, Deadline, Op, Rank, StreamOrdered, Ticket};
use peerlane_toolkit::device::Fault;
use peerlane_toolkit::{Poison, TicketCounter};

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

/// Maximum number of ops in a slice; a queue holds more.
const SLICE_OPS_MAX: usize = 1024;
/// Maximum number of completions per `ibv_poll_cq`.
const BATCH: usize = 32;
/// Number of `completed` calls between two stall checks. A caller that drives the engine polls at least a
/// hundred times a second.
const POLLS_PER_STALL_CHECK: u32 = 64;
/// Time to wait for the peers to close their queue pairs when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// An in-order queue of ops over RDMA, driven by its caller.
#[derive(Debug)]
pub struct Engine {
    // Declared first, so that they are dropped before the completion queues and the shared state.
    pairs: Vec<Option<Pair>>,
    own: Own,
    caps: Caps,
    queue_ops: usize,
    room: Room,
    ledger: TicketCounter,
    poison: Poison<Error>,
    released: bool,
    /// Number of ops submitted so far.
    order: u64,
    resolved: Vec<Resolved>,
    /// One chain per rail of the endpoint that is being posted to.
    chains: Vec<Chain>,
    done: Done,
    batch: Vec<ibv_wc>,
    parker: Parker,
    /// Number of `completed` calls since the last stall check.
    looks: u32,
    /// One completion queue per NIC.
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
            // A queue pair in error completes every request, so the completion queue needs room for all of them.
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
            ledger: TicketCounter::with_capacity(queue_ops),
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

    /// Creates the endpoint of a peer unless it exists; its queue pairs open in the background.
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

    /// Queues a checked slice and posts what the limits allow.
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
                    // A flag of the own rank is stored after all earlier ops, so their completions are needed.
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

    /// Posts what the limits allow and runs the loopback ops.
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
                self.ledger.finish_op(ticket);
            }
            if std::mem::take(&mut self.done.stored) {
                self.shared.arrivals().wake();
            }
        }
        Ok(())
    }

    /// Takes completions and arrived signals.
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

    /// Handles one completion; `nic` is the index of the completion queue.
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
                ledger.finish_op(ticket);
            }
        });
        Ok(())
    }

    /// Completes every ticket of a released engine once no request is posted any more.
    fn settle_release(&mut self) {
        if self.released && self.pairs.iter().flatten().all(Pair::is_drained) {
            self.ledger.finish_all();
        }
    }

    /// Returns the time left until a peer without progress counts as lost.
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

    /// Checks for a stall every [`POLLS_PER_STALL_CHECK`] calls: a thread that drives several engines may
    /// never park on this one.
    fn watch(&mut self) -> Result<(), Error> {
        self.looks = (self.looks + 1) % POLLS_PER_STALL_CHECK;
        if self.looks == 0 {
            self.patience()?;
        }
        Ok(())
    }

    /// Returns the number of ops that wait to be posted or run.
    fn queued(&self) -> usize {
        self.own.len() + self.pairs.iter().flatten().map(Pair::waiting).sum::<usize>()
    }
}

impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

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
                "a slice has {} ops, expected at most slice_ops_max = {slice_ops_max}",
                ops.len()
            )));
        }
        let (queued, room) = (self.queued(), self.queue_ops);
        // Slices without ops use tickets, and open tickets are limited as ops are.
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
        // Only a park that sleeps needs the limit; the others are polls.
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

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.parker.busy(&self.shared.inner.arrivals);
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        // The endpoints close when they are dropped, right after this.
        self.pairs.iter_mut().flatten().for_each(|pair| pair.close_by(deadline));
    }
}
