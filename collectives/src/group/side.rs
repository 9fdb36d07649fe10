//! The regions, imports and engines of an operation on one fabric, while it is prepared.
//!
//! With two fabrics, one registers the memory that the other has allocated.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use peerlane_hal::{
    BackendId, Caps, CopyEngine, Deadline, Demand, ErrorKind, Fabric, Held, Link, PeerMemory, Rank,
    Region, RemoteKey, Space,
};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::run::buffers::{
    BufferId, DoubleBuffering, HostView, Kept, OperationBuffers, RankRegions,
};
use crate::run::port::{EnginePort, Port};

/// The keys of one rank's buffers on one fabric.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Keys(BTreeMap<BufferId, Vec<u8>>);

/// Memory that one fabric holds and another registers.
pub(crate) struct Lendable {
    by: BackendId,
    held: Held,
}

/// A buffer of one fabric that several operations use, without types.
pub(crate) struct Adoptable {
    pub(crate) region: Arc<dyn Region>,
    shared: Box<dyn Any + Send + Sync>,
}

/// A buffer of one fabric with its types.
struct Lent<M: PeerMemory> {
    window: RankRegions<M>,
    keep: Vec<Kept>,
}

/// The regions, imports and engines of an operation on one fabric, without types.
pub(crate) trait Side {
    fn backend(&self) -> BackendId;

    /// Allocates a buffer; flags must be allocated after the engines.
    fn allocate(&mut self, buffer: BufferId, bytes: u64) -> Result<(), Error>;

    /// Returns the memory of a buffer, to be registered with the other fabric.
    fn held(&self, buffer: BufferId) -> Lendable;

    /// Registers a buffer that the other fabric holds.
    fn register(&mut self, buffer: BufferId, lent: Lendable) -> Result<(), Error>;

    /// Returns a buffer and its imports, for other operations to [adopt](Self::adopt).
    fn share(&self, buffer: BufferId) -> Adoptable;

    /// Uses a buffer that an operation on this fabric has shared.
    fn adopt(&mut self, buffer: BufferId, shared: &Adoptable) -> Result<(), Error>;

    /// Returns the keys with which peers import these buffers.
    fn keys(&self, buffers: &[BufferId]) -> Result<Keys, Error>;

    /// Imports a buffer of `peer`, which must have at least `bytes` bytes. Repeated calls import it once.
    fn import(
        &mut self,
        peer: Rank,
        buffer: BufferId,
        keys: &Keys,
        bytes: u64,
        deadline: Deadline,
    ) -> Result<(), Error>;

    /// Creates one more engine.
    fn engine(&mut self, demand: Demand) -> Result<Caps, Error>;

    /// Returns the link to `peer`.
    fn link(&self, peer: Rank) -> Option<Link>;

    /// Returns the ports of the engines, in the order of their creation, and the host's view of the buffers.
    fn finish(
        self: Box<Self>,
        buffering: DoubleBuffering,
    ) -> (Vec<Box<dyn Port>>, Arc<dyn HostView>);
}

/// The regions, imports and engines of an operation on one fabric.
pub(crate) struct FabricSide<'f, F: Fabric> {
    fabric: &'f mut F,
    engines: Vec<F::Engine>,
    windows: BTreeMap<BufferId, RankRegions<F::Memory>>,
    keep: Vec<Kept>,
}

impl<'f, F: Fabric> FabricSide<'f, F> {
    pub(crate) fn new(fabric: &'f mut F) -> Self {
        Self { fabric, engines: Vec::new(), windows: BTreeMap::new(), keep: Vec::new() }
    }

    /// Uses a region of the caller.
    pub(crate) fn insert(&mut self, buffer: BufferId, region: <F::Memory as PeerMemory>::Local) {
        self.windows.insert(buffer, RankRegions::new(region));
    }

    fn window(&self, buffer: BufferId) -> &RankRegions<F::Memory> {
        self.windows.get(&buffer).expect("a buffer is made before it is used")
    }

    /// Returns the buffers from number 0 to the last one; missing ones are empty.
    fn take(&mut self, name: fn(u32) -> BufferId) -> Vec<RankRegions<F::Memory>> {
        let (first, last) = (name(0), name(u32::MAX));
        let count = match self.windows.range(first..=last).next_back() {
            Some((BufferId::Input(last) | BufferId::Output(last), _)) => last + 1,
            _ => 0,
        };
        let take =
            |number| self.windows.remove(&name(number)).unwrap_or_else(RankRegions::of_peers);
        (0..count).map(take).collect()
    }
}

impl<F: Fabric> Side for FabricSide<'_, F> {
    fn backend(&self) -> BackendId {
        self.fabric.backend()
    }

    fn allocate(&mut self, buffer: BufferId, bytes: u64) -> Result<(), Error> {
        let polled = self.engines.iter().any(|engine| !engine.caps().queued_wait);
        let memory = self.fabric.memory();
        let region = match buffer {
            BufferId::Flags if polled => memory.allocate_polled_flags(bytes),
            buffer => memory.allocate(bytes, buffer.role()),
        };
        let region =
            region.map_err(|error| Error::of_backend(format!("allocate {buffer}"), error))?;
        self.insert(buffer, region);
        Ok(())
    }

    fn held(&self, buffer: BufferId) -> Lendable {
        let local = Arc::clone(self.window(buffer).local());
        Lendable { by: self.fabric.backend(), held: Held::new(local) }
    }

    fn register(&mut self, buffer: BufferId, lent: Lendable) -> Result<(), Error> {
        let Lendable { by, held } = lent;
        let foreign = by != self.fabric.backend();
        let what = || format!("register {buffer} with the fabric {}", self.fabric.backend());
        if buffer == BufferId::CrossTierFlags && foreign && held.region().space() != Space::Host {
            let text = format!(
                "{}: it is memory of a device, wanted memory of the host, where fabrics of two \
                 kinds see each other's flags",
                what()
            );
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        // SAFETY: `held` keeps the memory until this registration is dropped; that peers are done
        // with it by then is the plan's doing, and an abort's: see `Shared::quarantine`.
        let region = unsafe { self.fabric.memory().adopt(&held, buffer.role()) };
        let region = region.map_err(|error| Error::of_backend(what(), error))?;
        self.insert(buffer, region);
        self.keep.push(Arc::new(held));
        Ok(())
    }

    fn share(&self, buffer: BufferId) -> Adoptable {
        let local = Arc::clone(self.window(buffer).local());
        let shared =
            Lent::<F::Memory> { window: self.window(buffer).clone(), keep: self.keep.clone() };
        Adoptable { region: local, shared: Box::new(shared) }
    }

    fn adopt(&mut self, buffer: BufferId, shared: &Adoptable) -> Result<(), Error> {
        let Some(Lent { window, keep }) = shared.shared.downcast_ref::<Lent<F::Memory>>() else {
            let text = format!("{buffer} is not memory of the fabric {}", self.fabric.backend());
            return Err(Error::new(ErrorKind::Mismatch, text));
        };
        self.windows.insert(buffer, window.clone());
        self.keep.extend(keep.iter().cloned());
        Ok(())
    }

    fn keys(&self, buffers: &[BufferId]) -> Result<Keys, Error> {
        let key = |&buffer| {
            let key = self.fabric.memory().export(self.window(buffer).local());
            let key = key.map_err(|error| Error::of_backend(format!("export {buffer}"), error))?;
            Ok((buffer, key.encode()))
        };
        buffers.iter().map(key).collect::<Result<_, Error>>().map(Keys)
    }

    fn import(
        &mut self,
        peer: Rank,
        buffer: BufferId,
        keys: &Keys,
        bytes: u64,
        deadline: Deadline,
    ) -> Result<(), Error> {
        if self.windows.get(&buffer).is_some_and(|window| window.has(peer)) {
            return Ok(());
        }
        let what = format!("import {buffer} of rank {peer}");
        let failed = |error: Error| error.with_peer(peer);
        let memory = self.fabric.memory();
        let key = if peer == self.fabric.rank() {
            // Some memory is exported to nobody else.
            let key = memory.export(self.window(buffer).local());
            key.map_err(|error| failed(Error::of_backend(&what, error)))?
        } else {
            let Some(key) = keys.0.get(&buffer) else {
                let text = format!("{what}: it was not offered");
                return Err(failed(Error::new(ErrorKind::Mismatch, text)));
            };
            let key = <F::Memory as PeerMemory>::Key::decode(key);
            key.map_err(|error| failed(Error::of_backend(&what, error)))?
        };
        if key.region_bytes() < bytes {
            let seen = key.region_bytes();
            let text = format!("{what}: it has {seen} bytes, wanted at least {bytes}");
            return Err(failed(Error::new(ErrorKind::Mismatch, text)));
        }
        let region = memory.import(peer, &key, deadline);
        let region = region.map_err(|error| failed(Error::of_backend(&what, error)))?;
        self.windows.entry(buffer).or_insert_with(RankRegions::of_peers).set_peer(peer, region);
        Ok(())
    }

    fn engine(&mut self, demand: Demand) -> Result<Caps, Error> {
        let engine = self.fabric.engine_for(demand);
        let engine = engine.map_err(|error| Error::of_backend("make an engine", error))?;
        let caps = *engine.caps();
        self.engines.push(engine);
        Ok(caps)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.fabric.link(peer)
    }

    fn finish(
        mut self: Box<Self>,
        buffering: DoubleBuffering,
    ) -> (Vec<Box<dyn Port>>, Arc<dyn HostView>) {
        let backend = self.fabric.backend();
        let (inputs, outputs) = (self.take(BufferId::Input), self.take(BufferId::Output));
        let flags = self.windows.remove(&BufferId::Flags).expect("every side has flags");
        let cross_tier_flags = self.windows.remove(&BufferId::CrossTierFlags);
        let keep = std::mem::take(&mut self.keep);
        let windows = Arc::new(OperationBuffers {
            inputs,
            outputs,
            flags,
            cross_tier_flags,
            buffering,
            keep,
        });
        let bind = |engine| Box::new(EnginePort::new(engine, backend, Arc::clone(&windows))) as _;
        (self.engines.into_iter().map(bind).collect(), Arc::clone(&windows) as _)
    }
}
