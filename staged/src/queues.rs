//! Submits transfers to the engine of the network, and copies to the engines of the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

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

/// Limits the import of memory of this rank, for which no peer must answer.
const IMPORT_TIMEOUT: Duration = Duration::from_secs(10);

/// Copies between the device and slots in host memory, with one engine for each direction.
///
/// All engines of a rank share it: a device has one copy engine for each direction, and further queues
/// would only take turns on it.
pub(crate) struct DeviceCopier<D: Fabric> {
    pub(crate) from_device: CopyQueue<D>,
    pub(crate) to_device: CopyQueue<D>,
    outbox: Mapping<D>,
    inbox: Mapping<D>,
    /// The device fabric of `to_device` and `inbox`, if the engines of the device have no gets. Puts to the device need memory of
    /// the device as a remote region.
    importer: Option<D>,
}

/// Memory that the copy engine of the device can read and write.
struct Mapping<D: Fabric> {
    /// The memory as a remote region, which this rank imported from itself.
    alias: DevRemote<D>,
    region: DevLocal<D>,
}

impl<D: Fabric> Mapping<D> {
    fn open(device: &D, held: &DynRegion, deadline: Deadline) -> Result<Self, Error> {
        let memory = device.memory();
        let what = "register memory with the device";
        // SAFETY: the owner of the mapping keeps `held` and drops it after the mapping. Only the transport uses the slots, and the
        // contract of ops covers other memory.
        let region = unsafe { memory.adopt(held, Role::Data) }.map_err(Error::backend(what))?;
        let key = memory.export(&region).map_err(Error::backend(what))?;
        // Encoded and decoded, so that the key passes the same checks as a peer's.
        let key = <D::Memory as PeerMemory>::Key::decode(&key.encode());
        let key = key.map_err(Error::backend(what))?;
        let alias = memory.import(device.rank(), &key, deadline).map_err(Error::backend(what))?;
        Ok(Self { alias, region })
    }
}

/// A copy that is not complete, with what must live until it is.
struct InFlight<D: Fabric> {
    ticket: Ticket,
    _mapping: Option<Mapping<D>>,
    _region: Arc<DevLocal<D>>,
}

pub(crate) struct CopyQueue<D: Fabric> {
    engine: D::Engine,
    in_flight: VecDeque<InFlight<D>>,
    pub(crate) done: Ticket,
}

impl<D: Fabric> CopyQueue<D> {
    fn open(device: &D) -> Result<Self, Error> {
        let engine = device
            .engine(Default::default())
            .map_err(Error::backend("create an engine of the device fabric"))?;
        Ok(Self { engine, in_flight: VecDeque::new(), done: Ticket::NONE })
    }

    /// Keeps what a copy uses, if it was submitted.
    fn keep(
        &mut self,
        ticket: Option<Ticket>,
        mapping: Option<Mapping<D>>,
        region: &Arc<DevLocal<D>>,
    ) {
        let _region = Arc::clone(region);
        let in_flight = ticket.map(|ticket| InFlight { ticket, _mapping: mapping, _region });
        self.in_flight.extend(in_flight);
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
        while self.in_flight.front().is_some_and(|copy| copy.ticket <= done) {
            self.in_flight.pop_front();
        }
        Ok(progressed)
    }
}

/// Submits one copy to an engine of the device, or returns `None` if the engine's queue is full.
fn submit<D: Fabric>(
    engine: &mut D::Engine,
    op: Op<'_, DevLocal<D>, DevRemote<D>>,
) -> Result<Option<Ticket>, Error> {
    // SAFETY: the caller keeps the region and the slots until the ticket completes. A slot has one use at a time; the caller of
    // the staged engine keeps the contract of ops for the region.
    match unsafe { engine.submit(&[op]) } {
        Ok(ticket) => Ok(Some(ticket)),
        Err(error) if is_full(&error) => Ok(None),
        Err(error) => Err(Error::backend("copy between slots and device memory")(error)),
    }
}

/// Opens the device fabric a second time, connected to its own rank.
fn reopen<D: Fabric>(device: &D, deadline: Deadline) -> Result<D, Error> {
    let rank = device.rank();
    let again = device.reopen(rank, rank.index() + 1);
    let mut again = again.map_err(Error::backend("reopen the device fabric"))?;
    let connected = again.connect(rank, &again.address(), deadline);
    connected.map_err(Error::backend("connect the device fabric to itself"))?;
    Ok(again)
}

impl<D: Fabric> DeviceCopier<D> {
    /// Opens the copy engines of a device fabric, which must be connected to its own rank.
    pub(crate) fn open(
        device: &D,
        outbox: &DynRegion,
        inbox: &DynRegion,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let from_device = CopyQueue::open(device)?;
        let outbox = Mapping::open(device, outbox, deadline)?;
        let gets = from_device.engine.caps().gets;
        let importer = (!gets).then(|| reopen(device, deadline)).transpose()?;
        let device = importer.as_ref().unwrap_or(device);
        let to_device = CopyQueue::open(device)?;
        let inbox = Mapping::open(device, inbox, deadline)?;
        Ok(Self { from_device, to_device, outbox, inbox, importer })
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
        let op = Op::Put { dst, src: src_at, bytes };
        let ticket = submit::<D>(&mut self.from_device.engine, op)?;
        self.from_device.keep(ticket, None, src);
        Ok(ticket)
    }

    pub(crate) fn copy_to_device(
        &mut self,
        (dst, to): (&Arc<DevLocal<D>>, u64),
        slot: u64,
        bytes: u64,
    ) -> Result<Option<Ticket>, Error> {
        let (engine, inbox) = (&mut self.to_device.engine, &self.inbox);
        let (ticket, mapping) = match &self.importer {
            None => {
                let src = At { region: &inbox.alias, offset: slot };
                let dst = At { region: &**dst, offset: to };
                (submit::<D>(engine, Op::Get { dst, src, bytes })?, None)
            }
            Some(device) => {
                let held = DynRegion::new(Arc::clone(dst));
                let mapping = Mapping::open(device, &held, Deadline::after(IMPORT_TIMEOUT))?;
                let src = At { region: &inbox.region, offset: slot };
                let dst = At { region: &mapping.alias, offset: to };
                (submit::<D>(engine, Op::Put { dst, src, bytes })?, Some(mapping))
            }
        };
        self.to_device.keep(ticket, mapping, dst);
        Ok(ticket)
    }
}
