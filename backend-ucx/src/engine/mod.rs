//! Implements the engine, which sends a message for each op with a peer.
//!
//! A thread that polls any engine of the rank sends and receives for all. The processor copies for
//! ops of the rank with itself, and a flag of this rank is stored when all earlier ops are
//! complete.
//!
//! | file | holds |
//! | --- | --- |
//! | `mod.rs` | the engine: tickets, progress, parking, release |
//! | `ops.rs` | where an op runs, with its addresses |
//! | `queue.rs` | the ops with one peer, and the messages for them |

mod ops;
mod queue;

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use peerlane_hal::{Caps, CopyEngine, Op, Rank, Reducer, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineState, EventParker, Loopback, ParkStep, TicketCounter};

use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::network::{Completions, DROP_TIMEOUT, Network, Outcome};
use crate::options::Options;
use ops::ResolvedOp;
use queue::{Limits, PeerQueue, peer_of};

const SLICE_OPS_MAX: usize = 1024;

/// An in-order queue of puts, gets and signals, driven by the thread that polls it.
#[derive(Debug)]
pub struct Engine {
    /// The ops with each rank, by rank; `None` until an op names the rank.
    queues: Vec<Option<PeerQueue>>,
    loopback: Loopback,
    state: EngineState<Error>,
    tickets: TicketCounter,
    /// The number of ops submitted so far, which is also the number of the last one.
    order: u64,
    resolved: Vec<ResolvedOp>,
    completions: Arc<Completions>,
    ended: Vec<(u64, Outcome)>,
    parker: EventParker,
    limits: Limits,
    /// The number of the engine in its messages.
    number: u32,
    /// When the engine was released.
    released: Option<Instant>,
    network: Arc<Network>,
}

impl Engine {
    pub(crate) fn open(network: &Arc<Network>, options: &Options) -> Result<Self, Error> {
        let Options { spin, queue_ops, message_bytes_max, messages_max, .. } = *options;

        Ok(Self {
            queues: Vec::new(),
            loopback: Loopback::default(),
            state: EngineState::new(Self::offered_caps(options)),
            tickets: TicketCounter::with_capacity(queue_ops),
            order: 0,
            resolved: Vec::new(),
            completions: Arc::default(),
            ended: Vec::new(),
            parker: EventParker::new(&network.sleepers, spin)?,
            limits: Limits { messages_max, message_bytes_max },
            number: network.new_engine(),
            released: None,
            network: Arc::clone(network),
        })
    }

    /// Returns the capabilities of engines with these options.
    pub(crate) fn offered_caps(options: &Options) -> Caps {
        Caps {
            gets: true,
            polled: true,
            slice_ops_max: SLICE_OPS_MAX.min(options.queue_ops),
            piece_bytes_max: options.message_bytes_max,
            ..Caps::new("messages")
        }
    }

    fn enqueue(&mut self) -> Ticket {
        let ticket = Ticket(self.tickets.last().0 + 1);
        let mut pending = 0;
        for op in self.resolved.drain(..) {
            self.order += 1;
            match op {
                ResolvedOp::Empty => {}
                ResolvedOp::Loopback(op) => {
                    // SAFETY: the op was checked against its regions, which the caller of `submit`
                    // keeps accessible; words of a region of flags are aligned.
                    unsafe { self.loopback.push(ticket, self.order, op) };
                    pending += 1;
                }
                ResolvedOp::Peer(to, op) => {
                    let index = to.rank.index();
                    if self.queues.len() <= index {
                        self.queues.resize_with(index + 1, || None);
                    }
                    let queue = self.queues[index].get_or_insert_with(|| PeerQueue::new(to));
                    pending += queue.push(ticket, self.order, op);
                }
            }
        }

        let issued = self.tickets.issue(pending);
        debug_assert_eq!(issued, ticket);
        ticket
    }

    /// Sends and receives what is possible now, and runs the ops of the rank with itself.
    fn advance(&mut self, receives: bool) -> Result<(), Error> {
        let network = Arc::clone(&self.network);
        let mut driver = network.lock();
        let mut has_progressed = receives && network.drive(&mut driver)?;

        // Sends that end at once make room for others.
        loop {
            if !self.state.is_released() {
                let (of_engine, completions) = ((self.number, self.limits), &self.completions);
                // A message of the next slice can carry signals, until the engine is polled.
                let is_due = |queue: &&mut PeerQueue| {
                    queue.can_send(self.limits) && (receives || !queue.has_only_signals())
                };
                for queue in self.queues.iter_mut().flatten().filter(is_due) {
                    queue.send(&mut driver, of_engine, completions, &mut self.ended)?;
                }
            }
            self.completions.drain_into(&mut self.ended);
            if self.ended.is_empty() {
                break;
            }
            self.end_requests()?;
            has_progressed = true;
        }
        drop(driver);

        self.run_loopback();
        if has_progressed {
            self.parker.record_progress();
        }
        Ok(())
    }

    /// Takes note of the requests that have ended.
    fn end_requests(&mut self) -> Result<(), Error> {
        let is_released = self.state.is_released();
        let mut result = Ok(());
        for (tag, outcome) in self.ended.drain(..) {
            let Some(queue) = self.queues.get_mut(peer_of(tag)).and_then(Option::as_mut) else {
                continue;
            };
            let tickets = &mut self.tickets;
            let finish = |ticket| {
                if !is_released {
                    tickets.finish_op(ticket);
                }
            };
            let ended = queue.end(tag, outcome, finish);
            // The requests of a released engine end with errors.
            if !is_released && result.is_ok() {
                result = ended;
            }
        }
        result
    }

    fn run_loopback(&mut self) {
        if self.loopback.is_empty() {
            return;
        }

        let (queues, tickets) = (&self.queues, &mut self.tickets);
        let is_complete = |order| queues.iter().flatten().all(|queue| queue.is_complete(order));
        if self.loopback.run(is_complete, |ticket| tickets.finish_op(ticket)) {
            self.network.sleepers.wake();
        }
    }

    /// Drops all ops, and ends the requests of the engine within a bound.
    fn release_ops(&mut self) {
        self.state.release();
        self.loopback.clear();
        self.queues.iter_mut().flatten().for_each(PeerQueue::clear);
        self.released.get_or_insert_with(Instant::now);
    }

    /// Completes all tickets of a released engine whose requests have ended.
    fn finish_release(&mut self) {
        let Some(since) = self.released else { return };
        let mut driver = self.network.lock();
        let arriving = driver.remove_gets(&self.completions);
        let is_sending = self.queues.iter().flatten().any(PeerQueue::is_sending);
        if arriving.is_empty() && !is_sending {
            drop(driver);
            self.tickets.finish_all();
            return;
        }

        if since.elapsed() > DROP_TIMEOUT {
            // The peers neither take nor send the rest.
            let arrives = |peer: Rank| arriving.iter().any(|tag| peer_of(*tag) == peer.index());
            let queues = self.queues.iter().flatten();
            for queue in queues.filter(|queue| queue.is_sending() || arrives(queue.peer())) {
                driver.abandon(queue.peer());
            }
        }
    }

    /// Returns whether UCX may still access memory for the engine.
    fn is_open(&self) -> bool {
        self.tickets.open() > 0 || self.queues.iter().flatten().any(PeerQueue::is_sending)
    }

    fn queued(&self) -> usize {
        self.loopback.len() + self.queues.iter().flatten().map(PeerQueue::len).sum::<usize>()
    }
}

// SAFETY: ops are checked against their regions, and tickets complete after their ops.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    /// Returns `None`, because UCX does not combine memory.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Error> {
        Ok(None)
    }

    unsafe fn submit(&mut self, ops: &[Op<'_, Local, Remote>]) -> Result<Ticket, Error> {
        self.state.check_slice(ops)?;
        self.tickets.check_room(self.queued(), ops.len())?;
        self.resolved.clear();
        for op in ops {
            self.resolved.push(ops::resolve(op)?);
        }

        let ticket = self.enqueue();
        let sent = self.advance(false);
        self.state.keep(sent)?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.state.check()?;
        let advanced = self.advance(true);
        self.state.keep(advanced)?;
        self.finish_release();
        Ok(self.tickets.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.state.check()?;
        if self.is_busy() || self.parker.step(limit) != ParkStep::Sleep {
            return Ok(());
        }

        let slept = self.network.sleep(&self.parker, limit);
        self.state.keep(slept)
    }

    fn is_busy(&self) -> bool {
        let can_send = |queue: &PeerQueue| queue.can_send(self.limits);
        let is_released = self.state.is_released();
        self.loopback.is_copying() || !is_released && self.queues.iter().flatten().any(can_send)
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.state.check()?;
        if !self.state.is_released() {
            self.release_ops();
        }
        self.finish_release();
        Ok(())
    }

    /// Returns 0, because processors copy.
    fn compute_bytes(&mut self, _ops: &[Op<'_, Local, Remote>], _captured: bool) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Error>> {
        None
    }
}

impl Drop for Engine {
    /// Ends the requests of the engine, so that its memory can be freed.
    fn drop(&mut self) {
        self.release_ops();
        let since = Instant::now();
        self.released = Some(since);

        loop {
            self.finish_release();
            if !self.is_open() || self.advance(true).is_err() {
                break;
            }
            if since.elapsed() > 2 * DROP_TIMEOUT {
                self.network.lock().destroy();
                break;
            }
            std::thread::yield_now();
        }
        let mut driver = self.network.lock();
        for queue in self.queues.iter_mut().flatten() {
            queue.send_end(&mut driver, self.number);
        }
    }
}
