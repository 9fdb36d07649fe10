//! Implements the copy engine of the fabric that stages device memory through the host.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;
use std::time::Duration;

use peerlane_hal::{Caps, CopyEngine, Deadline, Fabric, Op, Reducer, Role, StreamOrdered, Ticket};
use peerlane_toolkit::{EngineState, Fault, RegionBounds};

use crate::Shared;
use crate::error::Error;
use crate::memory::{Local, Remote};
use crate::ops::ResolvedOp;
use crate::transport::BUSY_PARK_MAX;

/// The time limit for transfers in flight when an engine is dropped.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

type Addressed<D, N> = (usize, ResolvedOp<D, N>);

/// An in-order queue of ops on a staged fabric; the thread that polls it moves the bytes.
pub struct Engine<D: Fabric, N: Fabric> {
    id: u64,
    /// An idle engine of the network on which this engine only sleeps; no operation is submitted to
    /// it.
    parker: N::Engine,
    state: EngineState<Error>,
    shared: Arc<Shared<D, N>>,
}

impl<D: Fabric, N: Fabric> Engine<D, N> {
    pub(crate) fn new(id: u64, parker: N::Engine, caps: Caps, shared: Arc<Shared<D, N>>) -> Self {
        Self { id, parker, state: EngineState::new(caps), shared }
    }

    /// Returns an op that keeps its memory regions alive, or `None` if the op transfers no bytes.
    ///
    /// # Errors
    /// Returns an error if a staged engine does not have the op.
    fn resolve(op: &Op<'_, Local<D, N>, Remote<D, N>>) -> Result<Option<Addressed<D, N>>, Fault> {
        let (peer, resolved) = match *op {
            Op::Put { bytes: 0, .. } | Op::Get { bytes: 0, .. } => return Ok(None),
            Op::Put { dst, src, bytes } => {
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.0), Arc::clone(&src.region.registration));
                (dst.peer, ResolvedOp::Put { dst, to, src, from, bytes })
            }
            Op::Get { dst, src, bytes } => {
                let (to, from) = (dst.offset, src.offset);
                let (dst, src) = (Arc::clone(&dst.region.registration), Arc::clone(&src.region.0));
                (src.peer, ResolvedOp::Get { dst, to, src, from, bytes })
            }
            Op::Signal { flag, value } => {
                let region = &flag.region.0;
                let signal =
                    ResolvedOp::Signal { flag: Arc::clone(region), word: flag.word, value };
                (region.peer, signal)
            }
            // A staged engine has none of these ops (`caps` and `prepare_reduce`).
            Op::PutRows { .. } | Op::GetRows { .. } | Op::Wait { .. } | Op::Reduce { .. } => {
                return Err(Fault::refused_op(op));
            }
            #[cfg(not(peerlane_workspace))]
            _ => return Err(Fault::refused_op(op)),
        };

        Ok(Some((peer.index(), resolved)))
    }
}

// SAFETY: length and role are those of the registration, whose memory `self` keeps.
unsafe impl<D: Fabric, N: Fabric> RegionBounds for Local<D, N> {
    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn role(&self) -> Role {
        self.registration.role
    }
}

// SAFETY: length and role are those that the owner has put into the key of its registration.
unsafe impl<D: Fabric, N: Fabric> RegionBounds for Remote<D, N> {
    fn bytes(&self) -> u64 {
        self.0.bytes
    }

    fn role(&self) -> Role {
        self.0.role
    }
}

// SAFETY: the layer passes all calls on to implementations that uphold the contract.
unsafe impl<D: Fabric, N: Fabric> CopyEngine for Engine<D, N> {
    type Error = Error;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    fn caps(&self) -> &Caps {
        self.state.caps()
    }

    /// Returns `None`, because a network does not combine memory.
    fn prepare_reduce(&mut self) -> Result<Option<Reducer>, Self::Error> {
        Ok(None)
    }

    unsafe fn submit(
        &mut self,
        ops: &[Op<'_, Local<D, N>, Remote<D, N>>],
    ) -> Result<Ticket, Error> {
        let mut transport = self.shared.transport();
        transport.check()?;
        self.state.check_slice(ops)?;

        let queue = transport.queue(self.id);
        queue.tickets.check_room(queue.len(), ops.len())?;
        // All ops are resolved before the first is queued, because a refused slice adds none.
        let resolved = ops.iter().filter_map(|op| Self::resolve(op).transpose());
        let resolved: Vec<_> = resolved.collect::<Result<_, _>>()?;
        let ticket = queue.push(resolved.into_iter());

        transport.progress(self.id)?;
        Ok(ticket)
    }

    fn completed(&mut self) -> Result<Ticket, Error> {
        // Polls the parker too, so that whatever arrives afterwards ends the next park.
        self.parker.completed().map_err(Error::backend("poll the network"))?;
        let mut transport = self.shared.transport();
        transport.progress(self.id)?;
        Ok(transport.completed(self.id))
    }

    fn park(&mut self, limit: Duration) -> Result<(), Error> {
        let busy = {
            let transport = self.shared.transport();
            transport.check()?;
            transport.is_busy()
        };

        let limit = if busy { limit.min(BUSY_PARK_MAX) } else { limit };
        self.parker.park(limit).map_err(Error::backend("park"))
    }

    /// Returns whether the engine of the network is busy; copies and messages in flight do not
    /// count, because they progress without this rank, and `park` limits its sleep for them.
    fn is_busy(&self) -> bool {
        self.parker.is_busy()
    }

    fn waker(&self) -> Waker {
        self.parker.waker()
    }

    fn release(&mut self) -> Result<(), Error> {
        let mut transport = self.shared.transport();
        transport.check()?;
        if self.state.release() {
            transport.release(self.id);
        }
        transport.progress(self.id)
    }

    /// Returns 0, because copies between a device and the host use copy engines and no compute
    /// units.
    fn compute_bytes(
        &mut self,
        _ops: &[Op<'_, Local<D, N>, Remote<D, N>>],
        _captured: bool,
    ) -> u64 {
        0
    }

    fn streams(&mut self) -> Option<&mut dyn StreamOrdered<Error = Self::Error>> {
        None
    }
}

impl<D: Fabric, N: Fabric> Drop for Engine<D, N> {
    fn drop(&mut self) {
        let mut transport = self.shared.transport();
        transport.release(self.id);

        // Transfers in flight still use the caller's memory.
        let deadline = Deadline::after(CLOSE_TIMEOUT);
        while transport.queue(self.id).len() > 0 && !deadline.has_passed() {
            if transport.progress(self.id).is_err() {
                break;
            }
        }

        transport.remove_queue(self.id);
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Engine<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("id", &self.id).finish_non_exhaustive()
    }
}
