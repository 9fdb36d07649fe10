//! Submits transfers to the engine of the network, and copies to the engines of the device.

use std::collections::VecDeque;
use std::sync::Arc;

use peerlane_hal::{
    At, Caps, CopyEngine, Deadline, DynRegion, ErrorKind, Fabric, Flag, Op, PeerMemory,
    RemoteKey as _, Role, Ticket,
};

use crate::error::Error;
use crate::ops::OpId;
use crate::{DevLocal, DevRemote, NetLocal, NetRemote};

pub(crate) enum NetworkOp<N: Fabric> {
    Put { dst: Arc<NetRemote<N>>, to: u64, src: Arc<NetLocal<N>>, from: u64, bytes: u64 },
    Get { dst: Arc<NetLocal<N>>, to: u64, src: Arc<NetRemote<N>>, from: u64, bytes: u64 },
    Signal { flag: Arc<NetRemote<N>>, word: u64, value: u64 },
}

impl<N: Fabric> NetworkOp<N> {
    fn op(&self) -> Op<'_, NetLocal<N>, NetRemote<N>> {
        match self {
            Self::Put { dst, to, src, from, bytes } => {
                let (dst, src) = (At { region: &**dst, offset: *to }, at(src, *from));
                Op::Put { dst, src, bytes: *bytes }
            }
            Self::Get { dst, to, src, from, bytes } => {
                let (dst, src) = (at(dst, *to), At { region: &**src, offset: *from });
                Op::Get { dst, src, bytes: *bytes }
            }
            Self::Signal { flag, word, value } => {
                Op::Signal { flag: Flag { region: &**flag, word: *word }, value: *value }
            }
        }
    }
}

fn at<L>(region: &Arc<L>, offset: u64) -> At<'_, L> {
    At { region: &**region, offset }
}

pub(crate) struct NetworkQueue<N: Fabric> {
    engine: N::Engine,
    waiting: VecDeque<(NetworkOp<N>, Vec<OpId>)>,
    posted: VecDeque<(Ticket, NetworkOp<N>, Vec<OpId>)>,
}

impl<N: Fabric> NetworkQueue<N> {
    pub(crate) fn new(engine: N::Engine) -> Self {
        Self { engine, waiting: VecDeque::new(), posted: VecDeque::new() }
    }

    pub(crate) fn caps(&self) -> &Caps {
        self.engine.caps()
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.posted.is_empty()
    }

    pub(crate) fn push(&mut self, op: NetworkOp<N>, op_ids: Vec<OpId>) {
        self.waiting.push_back((op, op_ids));
    }

    pub(crate) fn post(&mut self) -> Result<(), Error> {
        while !self.waiting.is_empty() {
            let count = self.waiting.len().min(self.engine.caps().slice_ops_max);
            let ops: Vec<_> = self.waiting.iter().take(count).map(|(it, _)| it.op()).collect();
            // SAFETY: the queued ops keep their regions until the ticket completes. Sources, destinations
            // and flags are either those of ops, for which the caller of the staged engine keeps the
            // contract, or slots, messages and counters. Each of these has one writer, and is not used
            // again before the reader has reported that it is processed.
            let submitted = unsafe { self.engine.submit(&ops) };
            let ticket = match submitted {
                Ok(ticket) => ticket,
                Err(error) if is_full(&error) => return Ok(()),
                Err(error) => {
                    return Err(Error::backend("submit ops to the network fabric")(error));
                }
            };
            drop(ops);
            let posted = self.waiting.drain(..count).map(|(it, op_ids)| (ticket, it, op_ids));
            self.posted.extend(posted);
        }
        Ok(())
    }

    pub(crate) fn poll(&mut self, mut done: impl FnMut(OpId)) -> Result<bool, Error> {
        let completed =
            self.engine.completed().map_err(Error::backend("poll the network fabric"))?;
        let mut progressed = false;
        while self.posted.front().is_some_and(|(ticket, ..)| *ticket <= completed) {
            let Some((_, _, op_ids)) = self.posted.pop_front() else { break };
            op_ids.into_iter().for_each(&mut done);
            progressed = true;
        }
        Ok(progressed)
    }

    pub(crate) fn release(&mut self) -> Result<(), Error> {
        self.waiting.clear();
        self.engine.release().map_err(Error::backend("release the engine of the network fabric"))
    }
}

/// Returns whether an error means that the queue of an engine is full.
fn is_full(error: &impl peerlane_hal::Error) -> bool {
    error.kind() == ErrorKind::QueueFull
}

/// Copies between the device and slots in host memory, with one engine for each direction.
///
/// All engines of a rank share it: a device has one copy engine for each direction, and further queues
/// would only take turns on it.
pub(crate) struct DeviceCopier<D: Fabric> {
    pub(crate) from_device: CopyQueue<D>,
    pub(crate) to_device: CopyQueue<D>,
    outbox: HostMapping<D>,
    inbox: HostMapping<D>,
}

/// A buffer in host memory that the copy engine of the device can access.
struct HostMapping<D: Fabric> {
    /// The host buffer as a remote region, which this rank imported from itself.
    alias: DevRemote<D>,
    _region: DevLocal<D>,
}

impl<D: Fabric> HostMapping<D> {
    fn open(device: &D, held: &DynRegion, deadline: Deadline) -> Result<Self, Error> {
        let memory = device.memory();
        let what = "register slots in host memory with the device";
        // SAFETY: the transport keeps `held` and drops this first; only the transport uses it.
        let region = unsafe { memory.adopt(held, Role::Data) }.map_err(Error::backend(what))?;
        let key = memory.export(&region).map_err(Error::backend(what))?;
        // Encoded and decoded, so that the key passes the same checks as a peer's.
        let key = <D::Memory as PeerMemory>::Key::decode(&key.encode());
        let key = key.map_err(Error::backend(what))?;
        let alias = memory.import(device.rank(), &key, deadline).map_err(Error::backend(what))?;
        Ok(Self { alias, _region: region })
    }
}

pub(crate) struct CopyQueue<D: Fabric> {
    engine: D::Engine,
    in_flight: VecDeque<(Ticket, Arc<DevLocal<D>>)>,
    pub(crate) done: Ticket,
}

impl<D: Fabric> CopyQueue<D> {
    fn open(device: &D) -> Result<Self, Error> {
        let engine = device
            .engine(Default::default())
            .map_err(Error::backend("create an engine of the device fabric"))?;
        Ok(Self { engine, in_flight: VecDeque::new(), done: Ticket::NONE })
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.is_empty()
    }

    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        // An idle queue has nothing to receive either: the device is connected only to itself.
        if self.is_idle() {
            return Ok(false);
        }
        let done = self
            .engine
            .completed()
            .map_err(Error::backend("copy between slots and device memory"))?;
        let progressed = done > self.done;
        self.done = done;
        while self.in_flight.front().is_some_and(|(ticket, _)| *ticket <= done) {
            self.in_flight.pop_front();
        }
        Ok(progressed)
    }
}

/// Submits one copy to an engine of the device, or returns `None` if the engine's queue is full.
fn submit<D: Fabric>(
    copies: &mut CopyQueue<D>,
    region: &Arc<DevLocal<D>>,
    op: Op<'_, DevLocal<D>, DevRemote<D>>,
) -> Result<Option<Ticket>, Error> {
    // SAFETY: the region and the slots are kept until the ticket completes. A slot has one use at a time;
    // the caller of the staged engine keeps the contract of ops for the region.
    match unsafe { copies.engine.submit(&[op]) } {
        Ok(ticket) => {
            copies.in_flight.push_back((ticket, Arc::clone(region)));
            Ok(Some(ticket))
        }
        Err(error) if is_full(&error) => Ok(None),
        Err(error) => Err(Error::backend("copy between slots and device memory")(error)),
    }
}

impl<D: Fabric> DeviceCopier<D> {
    /// Opens the copy engines of a device fabric, which must be connected to its own rank.
    pub(crate) fn open(
        device: &D,
        outbox: &DynRegion,
        inbox: &DynRegion,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let (outbox, inbox) = (
            HostMapping::open(device, outbox, deadline)?,
            HostMapping::open(device, inbox, deadline)?,
        );
        let (from_device, to_device) = (CopyQueue::open(device)?, CopyQueue::open(device)?);
        Ok(Self { from_device, to_device, outbox, inbox })
    }

    pub(crate) fn put_align_bytes(&self) -> u64 {
        self.from_device.engine.caps().put_align_bytes
    }

    pub(crate) fn copy_from_device(
        &mut self,
        (src, from): (&Arc<DevLocal<D>>, u64),
        slot: u64,
        bytes: u64,
    ) -> Result<Option<Ticket>, Error> {
        let dst = At { region: &self.outbox.alias, offset: slot };
        let src_at = At { region: &**src, offset: from };
        submit(&mut self.from_device, src, Op::Put { dst, src: src_at, bytes })
    }

    pub(crate) fn copy_to_device(
        &mut self,
        (dst, to): (&Arc<DevLocal<D>>, u64),
        slot: u64,
        bytes: u64,
    ) -> Result<Option<Ticket>, Error> {
        let src = At { region: &self.inbox.alias, offset: slot };
        let dst_at = At { region: &**dst, offset: to };
        submit(&mut self.to_device, dst, Op::Get { dst: dst_at, src, bytes })
    }
}
