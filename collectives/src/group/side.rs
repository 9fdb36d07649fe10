//! Registers the buffers, imports the peers' memory and creates the engines of an operation on one fabric.
//!
//! With two fabrics, one registers the memory that the other has allocated.

use std::collections::BTreeMap;
use std::sync::Arc;

use peerlane_hal::{
    BackendId, Caps, CopyEngine, Deadline, DynEngine, DynFabric, DynKey, DynRegion,
    EngineRequirements, ErrorKind, Fabric, Link, PeerMemory, Rank, Region, RemoteKey, Space,
};
use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::plan::Tier;
use crate::run::buffers::{BufferId, DoubleBuffering, OperationBuffers, RankRegions, Start};
use crate::run::port::{BoundStep, EnginePort, Port, resolve};

#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Keys(BTreeMap<BufferId, Vec<u8>>);

#[derive(Clone)]
pub(crate) struct SharedBuffer {
    backend: BackendId,
    window: RankRegions,
    keep: Vec<DynRegion>,
}

impl SharedBuffer {
    pub(crate) fn region(&self) -> &DynRegion {
        self.window.local()
    }
}

pub(crate) struct Side<'f> {
    fabric: &'f mut DynFabric,
    engines: Vec<DynEngine>,
    windows: BTreeMap<BufferId, RankRegions>,
    keep: Vec<DynRegion>,
}

impl<'f> Side<'f> {
    pub(crate) fn new(fabric: &'f mut DynFabric) -> Self {
        Self { fabric, engines: Vec::new(), windows: BTreeMap::new(), keep: Vec::new() }
    }

    pub(crate) fn backend(&self) -> BackendId {
        self.fabric.backend()
    }

    pub(crate) fn link(&self, peer: Rank) -> Option<Link> {
        self.fabric.link(peer)
    }

    pub(crate) fn insert(&mut self, buffer: BufferId, region: DynRegion) {
        self.windows.insert(buffer, RankRegions::new(region));
    }

    /// The flags of an operation must be allocated after its engines.
    pub(crate) fn allocate(&mut self, buffer: BufferId, bytes: u64) -> Result<(), Error> {
        let polled = self.engines.iter().any(|engine| !engine.caps().queued_wait);
        let memory = self.fabric.memory();
        let region = match buffer {
            BufferId::Flags if polled => memory.allocate_polled_flags(bytes),
            buffer => memory.allocate(bytes, buffer.role()),
        };
        let region =
            region.map_err(|error| Error::of_fabric(format!("allocate {buffer}"), error))?;
        self.insert(buffer, region);
        Ok(())
    }

    pub(crate) fn register(&mut self, buffer: BufferId, other: &Side<'_>) -> Result<(), Error> {
        let region = other.window(buffer).local().clone();
        let is_foreign = other.backend() != self.backend();
        let what = || format!("register {buffer} with the fabric {}", self.fabric.backend());
        if buffer == BufferId::CrossTierFlags && is_foreign && region.space() != Space::Host {
            let text = format!(
                "cannot {}: the flags are in device memory, expected host memory, because fabrics \
                 of two backends access them",
                what()
            );
            return Err(Error::new(ErrorKind::Mismatch, text));
        }
        // SAFETY: `keep` keeps the memory until this registration is dropped. The plan ensures that peers no longer use it by
        // then, or `Shared::quarantine` after an abort.
        let registered = unsafe { self.fabric.memory().adopt(&region, buffer.role()) };
        let registered = registered.map_err(|error| Error::of_fabric(what(), error))?;
        self.insert(buffer, registered);
        self.keep.push(region);
        Ok(())
    }

    pub(crate) fn share(&self, buffer: BufferId) -> SharedBuffer {
        let window = self.window(buffer).clone();
        SharedBuffer { backend: self.backend(), window, keep: self.keep.clone() }
    }

    pub(crate) fn adopt(&mut self, buffer: BufferId, shared: &SharedBuffer) {
        debug_assert_eq!(shared.backend, self.backend());
        self.windows.insert(buffer, shared.window.clone());
        self.keep.extend(shared.keep.iter().cloned());
    }

    pub(crate) fn keys(&self, buffers: &[BufferId]) -> Result<Keys, Error> {
        let key = |&buffer| {
            let key = self.fabric.memory().export(self.window(buffer).local());
            let key = key.map_err(|error| Error::of_fabric(format!("export {buffer}"), error))?;
            Ok((buffer, key.encode()))
        };
        buffers.iter().map(key).collect::<Result<_, Error>>().map(Keys)
    }

    pub(crate) fn import(
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
            key.map_err(|error| failed(Error::of_fabric(&what, error)))?
        } else {
            let Some(key) = keys.0.get(&buffer) else {
                let text = format!("cannot {what}: rank {peer} did not send its remote key");
                return Err(failed(Error::new(ErrorKind::Mismatch, text)));
            };
            DynKey::decode(key).map_err(|error| failed(Error::of_backend(&what, error)))?
        };
        if key.region_bytes() < bytes {
            let found = key.region_bytes();
            let text = format!(
                "cannot {what}: the buffer has {found} bytes, expected at least {bytes} bytes"
            );
            return Err(failed(Error::new(ErrorKind::Mismatch, text)));
        }
        let region = memory.import(peer, &key, deadline);
        let region = region.map_err(|error| failed(Error::of_fabric(&what, error)))?;
        self.windows.entry(buffer).or_default().set_peer(peer, region);
        Ok(())
    }

    pub(crate) fn has_host_flags(&self, buffer: BufferId) -> bool {
        self.window(buffer).local().flags().is_some()
    }

    pub(crate) fn engine(&mut self, requirements: EngineRequirements) -> Result<Caps, Error> {
        let engine = self.fabric.engine(requirements);
        let engine = engine.map_err(|error| Error::of_fabric("create an engine", error))?;
        let caps = *engine.caps();
        self.engines.push(engine);
        Ok(caps)
    }

    pub(crate) fn has_streams(&mut self, engine: usize) -> bool {
        self.engines[engine].streams().is_some()
    }

    pub(crate) fn compute_bytes<'s>(
        &mut self,
        engine: usize,
        slices: impl Iterator<Item = &'s [BoundStep]>,
        start: Start,
        buffering: DoubleBuffering,
    ) -> u64 {
        let buffers = self.buffers(buffering);
        let engine = &mut self.engines[engine];
        let bytes = |steps: &[BoundStep]| {
            let ops: Vec<_> = steps.iter().map(|step| resolve(&buffers, step, start)).collect();
            engine.compute_bytes(&ops, start == Start::Captured)
        };
        slices.map(bytes).sum()
    }

    pub(crate) fn finish(
        self,
        buffering: DoubleBuffering,
    ) -> (Vec<Box<dyn Port>>, Arc<OperationBuffers>) {
        let (backend, buffers) = (self.fabric.backend(), Arc::new(self.buffers(buffering)));
        let port = |engine| Box::new(EnginePort::new(engine, backend, Arc::clone(&buffers))) as _;
        (self.engines.into_iter().map(port).collect(), Arc::clone(&buffers))
    }

    fn window(&self, buffer: BufferId) -> &RankRegions {
        self.windows.get(&buffer).expect("a buffer is made before it is used")
    }

    fn buffers(&self, buffering: DoubleBuffering) -> OperationBuffers {
        OperationBuffers {
            inputs: self.numbered(BufferId::Input),
            outputs: self.numbered(BufferId::Output),
            flags: self.window(BufferId::Flags).clone(),
            cross_tier_flags: self.windows.get(&BufferId::CrossTierFlags).cloned(),
            buffering,
            _keep: self.keep.clone(),
        }
    }

    fn numbered(&self, name: fn(u32) -> BufferId) -> Vec<RankRegions> {
        let (first, last) = (name(0), name(u32::MAX));
        let count = match self.windows.range(first..=last).next_back() {
            Some((BufferId::Input(last) | BufferId::Output(last), _)) => last + 1,
            _ => 0,
        };
        let buffer = |number| self.windows.get(&name(number)).cloned().unwrap_or_default();
        (0..count).map(buffer).collect()
    }
}

pub(in crate::group) struct Sides<'g> {
    pub(in crate::group) local: Side<'g>,
    pub(in crate::group) network: Option<Side<'g>>,
}

impl<'g> Sides<'g> {
    pub(in crate::group) fn iter(&self) -> impl Iterator<Item = (Tier, &Side<'g>)> {
        let network = self.network.as_ref().map(|network| (Tier::Network, network));
        [(Tier::Local, &self.local)].into_iter().chain(network)
    }

    pub(in crate::group) fn backend(&self, tier: Tier) -> BackendId {
        let network = self.network.as_ref().filter(|_| tier == Tier::Network);
        network.unwrap_or(&self.local).backend()
    }

    pub(in crate::group) fn of(&mut self, tier: Tier) -> Result<&mut Side<'g>, Error> {
        match (tier, &mut self.network) {
            (Tier::Local, _) => Ok(&mut self.local),
            (Tier::Network, Some(network)) => Ok(network),
            (Tier::Network, None) => {
                let text = "the plan has network lanes, but the group has no network fabric; open \
                            it with `open_tiers`";
                Err(Error::new(ErrorKind::Other, text))
            }
        }
    }
}
