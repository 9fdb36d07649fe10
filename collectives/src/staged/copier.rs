//! The device's own engines: one copies from the device into slots of the host, one back.

use std::collections::VecDeque;
use std::sync::Arc;

use peerlane_hal::{
    At, CopyEngine, Deadline, DynRegion, EngineRequirements, Fabric, Op, PeerMemory,
    RemoteKey as _, Role, Ticket,
};

use super::carrier::full;
use super::error::Error;
use super::{DevLocal, DevRemote};

/// Both ways. A rank's engines all share them: a device has a copy engine for each way, and a second
/// queue would only take turns.
pub(super) struct Copier<D: Fabric> {
    /// From the device.
    pub(super) out: Copies<D>,
    /// To the device.
    pub(super) back: Copies<D>,
    outbox: HostSide<D>,
    inbox: HostSide<D>,
}

/// Memory of the host as the device reaches it.
struct HostSide<D: Fabric> {
    /// Named as a peer's, oneself being one.
    alias: DevRemote<D>,
    _region: DevLocal<D>,
}

impl<D: Fabric> HostSide<D> {
    fn open(device: &D, held: &DynRegion, deadline: Deadline) -> Result<Self, Error> {
        let memory = device.memory();
        let what = "make slots of the host known to the device";
        // SAFETY: `held` is kept by the stage, which drops this first; nobody but the stage uses it.
        let region = unsafe { memory.adopt(held, Role::Data) }.map_err(Error::backend(what))?;
        let key = memory.export(&region).map_err(Error::backend(what))?;
        // As it travels, so that whatever holds of keys of peers holds here.
        let key = <D::Memory as PeerMemory>::Key::decode(&key.encode());
        let key = key.map_err(Error::backend(what))?;
        let alias = memory.import(device.rank(), &key, deadline).map_err(Error::backend(what))?;
        Ok(Self { alias, _region: region })
    }
}

/// Copies of one way.
pub(super) struct Copies<D: Fabric> {
    engine: D::Engine,
    flying: VecDeque<(Ticket, Arc<DevLocal<D>>)>,
    /// The last ticket that is known to be complete.
    pub(super) done: Ticket,
}

impl<D: Fabric> Copies<D> {
    fn open(device: &mut D) -> Result<Self, Error> {
        let engine = device
            .engine(EngineRequirements::default())
            .map_err(Error::backend("make an engine of the device"))?;
        Ok(Self { engine, flying: VecDeque::new(), done: Ticket::NONE })
    }

    pub(super) fn is_idle(&self) -> bool {
        self.flying.is_empty()
    }

    /// Looks how far the copies are.
    pub(super) fn look(&mut self) -> Result<bool, Error> {
        // Nothing comes from elsewhere: the device is connected to itself.
        if self.is_idle() {
            return Ok(false);
        }
        let done = self.engine.completed().map_err(Error::backend("copy on the device"))?;
        let moved = done > self.done;
        self.done = done;
        while self.flying.front().is_some_and(|(ticket, _)| *ticket <= done) {
            self.flying.pop_front();
        }
        Ok(moved)
    }
}

/// Submits one copy; `None` where there is no room yet.
fn submit<D: Fabric>(
    copies: &mut Copies<D>,
    region: &Arc<DevLocal<D>>,
    op: Op<'_, DevLocal<D>, DevRemote<D>>,
) -> Result<Option<Ticket>, Error> {
    // SAFETY: the region is kept until the ticket completes, and so are the slots. A slot is used once
    // at a time; for the region, whoever submitted to the staged engine keeps its contract.
    match unsafe { copies.engine.submit(&[op]) } {
        Ok(ticket) => {
            copies.flying.push_back((ticket, Arc::clone(region)));
            Ok(Some(ticket))
        }
        Err(error) if full(&error) => Ok(None),
        Err(error) => Err(Error::backend("copy on the device")(error)),
    }
}

impl<D: Fabric> Copier<D> {
    /// The device must be connected to itself.
    pub(super) fn open(
        device: &mut D,
        outbox: &DynRegion,
        inbox: &DynRegion,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let (outbox, inbox) =
            (HostSide::open(device, outbox, deadline)?, HostSide::open(device, inbox, deadline)?);
        let (out, back) = (Copies::open(device)?, Copies::open(device)?);
        Ok(Self { out, back, outbox, inbox })
    }

    pub(super) fn put_align_bytes(&self) -> u64 {
        self.out.engine.caps().put_align_bytes
    }

    /// Copies from the device to `slot` bytes behind the begin of the outbox.
    pub(super) fn copy_out(
        &mut self,
        (src, from): (&Arc<DevLocal<D>>, u64),
        slot: u64,
        bytes: u64,
    ) -> Result<Option<Ticket>, Error> {
        let dst = At { region: &self.outbox.alias, offset: slot };
        let src_at = At { region: &**src, offset: from };
        submit(&mut self.out, src, Op::Put { dst, src: src_at, bytes })
    }

    /// Copies to the device from `slot` bytes behind the begin of the inbox.
    pub(super) fn copy_back(
        &mut self,
        (dst, to): (&Arc<DevLocal<D>>, u64),
        slot: u64,
        bytes: u64,
    ) -> Result<Option<Ticket>, Error> {
        let src = At { region: &self.inbox.alias, offset: slot };
        let dst_at = At { region: &**dst, offset: to };
        submit(&mut self.back, dst, Op::Get { dst: dst_at, src, bytes })
    }
}
