//! Implements the RDMA engine, which has a completion queue per NIC and queue pairs to each peer
//! that an op has named.
//!
//! The calling thread posts and completes everything; a thread only opens queue pairs. Puts are
//! writes, gets are reads, and a signal follows the bytes on the same queue pair. The processor
//! does the self copies, and a flag of this rank is stored when all earlier ops are complete.
//!
//! | file | holds |
//! | --- | --- |
//! | `connect.rs` | the thread that opens the queue pairs to a peer |
//! | `endpoint.rs` | the ops for one peer: striping, signals, stall detection |
//! | `mod.rs` | the engine: tickets, progress, release |
//! | `ops.rs` | the addresses of ops |
//! | `park.rs` | sleeping on the completion channels |
//! | `rail.rs` | one queue pair: limits, request ids, copies in flight, chains of requests |

mod connect;
mod endpoint;
mod ops;
mod park;
mod rail;

use std::sync::Arc;
use std::task::Waker;
use std::time::{Duration, Instant};

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::{Caps, CopyEngine, Deadline, Op, Rank, Reducer, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineState, EventParker, Fault, Loopback, LoopbackOp, TicketCounter};

use connect::{CLOSE_TIMEOUT, ConnectJob};
use endpoint::Endpoint;
use ops::ResolvedOp;
use rail::{RailLimits, RequestChain, RequestId};

use crate::connection::{Connections, INCREMENT_MAX, Peer, RAILS_MAX, Resources};
use crate::error::{Error, VerbsStatus};
use crate::memory::{Local, Remote};
use crate::sys::Cq;

const SLICE_OPS_MAX: usize = 1024;
const POLL_BATCH: usize = 32;
/// The number of `completed` calls between two checks for peers that make no progress. A caller
/// that drives the engine polls at least a hundred times a second.
const POLLS_PER_STALL_CHECK: u32 = 64;

/// An in-order queue of puts, gets and signals over RDMA, driven by the thread that polls it.
#[derive(Debug)]
pub struct Engine {
    // Declared first, so that they are dropped before the completion queues and the connections.
    /// The RDMA connection to each rank, indexed by rank; `None` until a put, get or signal names
    /// the rank.
    endpoints: Vec<Option<Endpoint>>,
    loopback: Loopback,
    state: EngineState<Error>,
    limits: RailLimits,
    tickets: TicketCounter,
    /// The number of ops submitted so far, which is also the number of the last op.
    order: u64,
    resolved: Vec<ResolvedOp>,
    chains: Vec<RequestChain>,
    completions: Vec<ibv_wc>,
    parker: EventParker,
    polls: u32,
    cqs: Arc<[Arc<Cq>]>,
    connections: Arc<Connections>,
}

impl Engine {
    pub(crate) fn open(connections: &Arc<Connections>) -> Result<Self, Error> {
        let resources = &connections.resources;
        resources.check()?;
        let options = &resources.options;
        let queue_pairs = connections.queue_pairs_per_nic();
        let limits = rail_limits(resources, queue_pairs)?;
        let cqes = limits.requests.saturating_mul(queue_pairs);
        let cqs =
            resources.nics.iter().map(|nic| Cq::create(&nic.port.context, cqes).map(Arc::new));
        let cqs: Arc<[Arc<Cq>]> = cqs.collect::<Result<_, _>>()?;
        let queue_ops = options.queue_ops;
        let caps = caps(queue_ops, &limits);

        Ok(Self {
            endpoints: (0..resources.ranks).map(|_| None).collect(),
            loopback: Loopback::default(),
            state: EngineState::new(caps),
            limits,
            tickets: TicketCounter::with_capacity(queue_ops),
            order: 0,
            resolved: Vec::with_capacity(caps.slice_ops_max),
            chains: (0..RAILS_MAX).map(|_| RequestChain::new()).collect(),
            completions: vec![ibv_wc::default(); POLL_BATCH],
            parker: EventParker::new(&resources.receiver.sleepers, options.spin)?,
            polls: 0,
            cqs,
            connections: Arc::clone(connections),
        })
    }

    /// Returns the capabilities of engines over these connections.
    pub(crate) fn offered_caps(connections: &Connections) -> Result<Caps, Error> {
        let resources = &connections.resources;
        let limits = rail_limits(resources, connections.queue_pairs_per_nic())?;
        Ok(caps(resources.options.queue_ops, &limits))
    }

    /// Creates the connection to a peer unless it exists; a background thread opens its queue
    /// pairs.
    fn open_endpoint(&mut self, peer: Rank) -> Result<(), Error> {
        if self.endpoints[peer.index()].is_some() {
            return Ok(());
        }

        let Peer::Other(control) = self.connections.peer(peer)? else {
            return Err(Fault::NotConnected { peer }.into());
        };

        let job = ConnectJob {
            resources: Arc::clone(&self.connections.resources),
            control,
            cqs: Arc::clone(&self.cqs),
            limits: self.limits,
            wakeup: self.parker.wakeup(),
        };

        self.endpoints[peer.index()] = Some(Endpoint::open(job)?);

        Ok(())
    }

    fn enqueue(&mut self) -> Result<Ticket, Error> {
        for index in 0..self.resolved.len() {
            if let ResolvedOp::Peer(peer, _) = self.resolved[index] {
                self.open_endpoint(peer)?;
            }
        }
        let ticket = Ticket(self.tickets.last().0 + 1);
        // Number of completions that end the ticket: one per loopback op, and one per endpoint.
        let mut pending = 0_u32;
        for op in self.resolved.drain(..) {
            self.order += 1;
            match op {
                ResolvedOp::Empty => {}
                ResolvedOp::Loopback(op) => {
                    // A flag of this rank is stored after all earlier ops, so their completions are
                    // needed.
                    if matches!(op, LoopbackOp::Store { .. }) {
                        self.endpoints.iter_mut().flatten().for_each(Endpoint::signal_last);
                    }
                    // SAFETY: the op was checked against its regions, which the caller of `submit`
                    // keeps accessible; words of a region of flags are aligned.
                    unsafe { self.loopback.push(ticket, self.order, op) };
                    pending += 1;
                }
                ResolvedOp::Peer(peer, op) => {
                    let endpoint = self.endpoints[peer.index()].as_mut();
                    endpoint.expect("it was just opened").push(ticket, self.order, op);
                }
            }
        }
        for endpoint in self.endpoints.iter_mut().flatten() {
            pending += u32::from(endpoint.end_slice(ticket));
        }
        let issued = self.tickets.issue(pending);
        debug_assert_eq!(issued, ticket);
        self.parker.record_progress();
        self.progress()?;
        Ok(ticket)
    }

    fn progress(&mut self) -> Result<(), Error> {
        for endpoint in self.endpoints.iter_mut().flatten() {
            if endpoint.has_work() {
                endpoint.post_queued(&mut self.chains)?;
            }
        }

        if !self.loopback.is_empty() {
            let (endpoints, tickets) = (&self.endpoints, &mut self.tickets);
            let is_complete =
                |order| endpoints.iter().flatten().all(|endpoint| endpoint.is_complete(order));
            if self.loopback.run(is_complete, |ticket| tickets.finish_op(ticket)) {
                self.connections.receiver().wake();
            }
        }

        Ok(())
    }

    fn poll_completions(&mut self) -> Result<(), Error> {
        self.connections.resources.check()?;
        let mut progressed = self.connections.receiver().poll()?;
        for nic in 0..self.cqs.len() {
            loop {
                let count = self.cqs[nic].poll(&mut self.completions)?;
                progressed |= count > 0;
                for index in 0..count {
                    let completion = self.completions[index];
                    self.complete(nic, &completion)?;
                }
                if count < POLL_BATCH {
                    break;
                }
            }
        }

        if progressed {
            self.parker.record_progress();
        }

        Ok(())
    }

    fn complete(&mut self, nic: usize, completion: &ibv_wc) -> Result<(), Error> {
        let RequestId { peer, rail, sequence } = RequestId::decode(completion.wr_id);
        let Some(endpoint) = self.endpoints.get_mut(peer).and_then(Option::as_mut) else {
            return Ok(());
        };

        if completion.status != ibv_wc_status::SUCCESS && !self.state.is_released() {
            let is_read = completion.opcode == ibv_wc_opcode::RDMA_READ;
            let nic = &self.connections.nics()[nic];
            let context = &nic.port.context;
            return Err(Error::Completion {
                what: if is_read { "a get from" } else { "a put or signal to" },
                peer: endpoint.control.peer,
                address: endpoint.control.location.clone(),
                device: Arc::clone(&context.name),
                status: VerbsStatus {
                    code: completion.status.0,
                    text: context.status_text(completion.status),
                    vendor: completion.vendor_err,
                },
                port_warning: nic.port_warning(),
            });
        }

        let (tickets, released) = (&mut self.tickets, self.state.is_released());
        endpoint.complete((rail, sequence), |ticket| {
            if !released {
                tickets.finish_op(ticket);
            }
        });

        Ok(())
    }

    fn finish_release(&mut self) {
        if self.state.is_released() && self.endpoints.iter().flatten().all(Endpoint::is_drained) {
            self.tickets.finish_all();
        }
    }

    fn stall_time_left(&mut self) -> Result<Duration, Error> {
        let mut least = Duration::MAX;
        if !self.state.is_released() {
            let now = Instant::now();
            let limit = self.connections.resources.options.stall_timeout;
            for endpoint in self.endpoints.iter_mut().flatten() {
                let left = endpoint.stall_time_left(now, limit)?;
                least = least.min(left.unwrap_or(Duration::MAX));
            }
        }
        Ok(least)
    }

    /// Checks for lost peers in every [`POLLS_PER_STALL_CHECK`]th call, because a thread that
    /// drives several engines may never park on this one.
    fn check_stalls(&mut self) -> Result<(), Error> {
        self.polls = (self.polls + 1) % POLLS_PER_STALL_CHECK;
        if self.polls == 0 {
            self.stall_time_left()?;
        }
        Ok(())
    }

    fn queued(&self) -> usize {
        self.loopback.len() + self.endpoints.iter().flatten().map(Endpoint::queued).sum::<usize>()
    }
}

/// Returns the limits of a queue pair that the options and all NICs allow.
///
/// # Errors
/// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): a completion queue of a NIC is too small.
fn caps(queue_ops: usize, limits: &RailLimits) -> Caps {
    Caps {
        gets: true,
        polled: true,
        signal_growth_max: INCREMENT_MAX,
        slice_ops_max: SLICE_OPS_MAX.min(queue_ops),
        piece_bytes_max: limits.piece_bytes,
        ..Caps::new("queue pairs")
    }
}

fn rail_limits(resources: &Resources, queue_pairs: u32) -> Result<RailLimits, Error> {
    let options = &resources.options;
    let mut limits = RailLimits {
        requests: options.requests_max,
        bytes: options.posted_bytes_max,
        piece_bytes: options.piece_bytes_max,
    };
    for nic in &*resources.nics {
        let device = &nic.port.limits;
        // A queue pair in error completes every request, so the completion queue needs room for all
        // of them.
        let requests_max = device.max_cqe.max(1).cast_unsigned() / queue_pairs;
        let requests_max = requests_max.min(device.max_qp_wr.max(1).cast_unsigned());
        if requests_max < 8 {
            let (name, cqe) = (&nic.port.context.name, device.max_cqe);
            return Err(Error::unavailable(format!(
                "a completion queue of {name} holds {cqe} completions, too few for {queue_pairs} \
                 queue pairs"
            )));
        }
        limits.requests = limits.requests.min(requests_max);
        limits.piece_bytes = limits.piece_bytes.min(nic.port.message_bytes_max.max(1).into());
    }
    Ok(limits)
}

// SAFETY: ops are checked against their regions, and tickets complete after their ops.
unsafe impl CopyEngine for Engine {
    type Error = Error;
    type Local = Local;
    type Remote = Remote;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    /// Returns `None`, because a NIC does not combine memory.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error> {
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
        self.state.keep(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        self.state.check()?;
        let result = self.poll_completions().and_then(|()| self.progress());
        let result = result.and_then(|()| self.check_stalls());
        self.state.keep(result)?;
        self.finish_release();
        Ok(self.tickets.completed())
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        self.state.check()?;
        if self.is_busy() {
            return Ok(());
        }
        // Only a park that sleeps needs the limit; the others are polls.
        let stall_limit =
            if self.parker.is_announced() { self.stall_time_left() } else { Ok(Duration::MAX) };
        let parked = stall_limit.and_then(|stall_limit| {
            let limit = limit.min(stall_limit);
            park::park(&mut self.parker, self.connections.receiver(), &self.cqs, limit)
        });
        self.state.keep(parked)
    }

    fn is_busy(&self) -> bool {
        self.loopback.is_copying()
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        self.state.check()?;
        if self.state.release() {
            self.loopback.clear();
            self.endpoints.iter_mut().flatten().for_each(Endpoint::fail);
        }
        self.finish_release();
        Ok(())
    }

    /// Returns 0, because NICs copy without compute units.
    fn compute_bytes(&mut self, _ops: &[Op<'_, Local, Remote>], _captured: bool) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.parker.record_progress();
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        // The endpoints close when they are dropped, right after this.
        self.endpoints.iter_mut().flatten().for_each(|endpoint| endpoint.close_by(deadline));
    }
}
