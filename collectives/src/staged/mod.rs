//! Memory of devices on a network that does not reach it: through memory of the host.
//!
//! A [`Staged`] fabric stands around a network over memory of the host, and beside the fabric of a
//! device. What the network registers, it carries as it always does. What only the device has goes
//! through slots of the host: the device's own engine copies a piece into a slot, the network carries it
//! into a slot of the peer, and there the peer's device copies it to its place. Pieces follow each other,
//! so that all three are busy at once. Either end may be staged, or both.
//!
//! Beside the bytes go records, one line each of what to do: `record`. Whoever reads them does it in
//! the order in which they came, so a flag is stored when the bytes before it are in the device's memory
//! (chapter 3 of the [contract](peerlane_hal::contract)). Slots and records are used in turn, and one
//! number for each direction says how many the reader is done with.
//!
//! | what | where |
//! | --- | --- |
//! | what engines have taken, and how far it is | `queue` |
//! | what goes out, and the slots of a peer | `outbound` |
//! | what comes in | `inbound` |
//! | the device's engines, the network's engine | `copier`, `carrier` |
//! | all of it under one lock, driven by whoever polls an engine | `stage` |
//! | and by a thread while nobody does | `service` |
//!
//! Plans, lanes and flags are those of the network itself; what runs is what was verified.

mod address;
mod carrier;
mod copier;
mod engine;
mod error;
mod inbound;
mod key;
mod memory;
mod outbound;
mod queue;
mod record;
mod room;
mod service;
mod stage;

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use peerlane_hal::{
    BackendId, CopyEngine as _, Deadline, DynRegion, EngineRequirements, ErrorKind, Fabric, Link,
    LinkKind, PeerMemory, Rank, Region as _, RemoteKey as _, Role,
};

pub use engine::Engine;
pub use error::Error;
pub use key::Key;
pub use memory::{Local, Memory, Remote};

use address::Address;
use copier::Copier;
use memory::Regions;
use room::Room;
use service::Service;
use stage::Stage;

type DevLocal<D> = <<D as Fabric>::Memory as PeerMemory>::Local;
type DevRemote<D> = <<D as Fabric>::Memory as PeerMemory>::Remote;
type NetLocal<N> = <<N as Fabric>::Memory as PeerMemory>::Local;
type NetRemote<N> = <<N as Fabric>::Memory as PeerMemory>::Remote;
type NetKey<N> = <<N as Fabric>::Memory as PeerMemory>::Key;

/// What a staged fabric, its memory, its engines and its thread have in common.
struct Inner<D: Fabric, N: Fabric> {
    rank: Rank,
    ranks: usize,
    room: Room,
    regions: Arc<Regions<D, N>>,
    // Before the network, whose engine it has.
    stage: Mutex<Stage<D, N>>,
    network: Mutex<N>,
}

/// The same with the thread, which ends with the last of these.
struct Shared<D: Fabric, N: Fabric> {
    /// As soon as there is an engine.
    service: OnceLock<Service>,
    inner: Arc<Inner<D, N>>,
}

impl<D: Fabric, N: Fabric> Inner<D, N> {
    fn stage(&self) -> MutexGuard<'_, Stage<D, N>> {
        // A panic inside is a bug of an engine; every number is whole after each statement.
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn network(&self) -> MutexGuard<'_, N> {
        self.network.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<D: Fabric, N: Fabric> Deref for Shared<D, N> {
    type Target = Inner<D, N>;

    fn deref(&self) -> &Inner<D, N> {
        &self.inner
    }
}

/// The network `N` for memory of the device that the fabric `D` has.
///
/// All ranks that are to reach each other have one, also those whose memory the network registers.
pub struct Staged<D: Fabric, N: Fabric> {
    memory: Memory<D, N>,
    address: Vec<u8>,
    /// By rank, whether bytes from or to it go through the host, of those that are connected.
    peers: Vec<Option<bool>>,
    staged: bool,
}

impl<D: Fabric, N: Fabric> Staged<D, N> {
    /// Takes a network that is not yet connected, one of `ranks`, and engines of a device, which must be
    /// connected to itself. `staged` says what is known of the memory that will be registered; it
    /// matters to what is said of links, and to nothing else.
    ///
    /// # Errors
    /// If the network allocates memory that the host cannot read, or the device cannot use it; those of
    /// both fabrics.
    pub fn open(
        device: &mut D,
        network: N,
        ranks: usize,
        staged: bool,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let (rank, room) = (network.rank(), Room::new(ranks));
        let allocate = |bytes, role| {
            let region = network.memory().allocate(bytes, role);
            let region = region.map_err(Error::backend("allocate slots of the host"))?;
            Ok::<_, Error>(Arc::new(region))
        };
        let (inbox, outbox) =
            (allocate(room.bytes(), Role::Data)?, allocate(room.bytes(), Role::Data)?);
        let flags = allocate(room.flag_bytes(), Role::Flags)?;
        if flags.flags().is_none() {
            let text = format!(
                "the network {} allocates memory that the host cannot read, wanted memory of the host",
                network.backend()
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        let key = |region| -> Result<Vec<u8>, Error> {
            let key = network.memory().export(region);
            Ok(key.map_err(Error::backend("export slots of the host"))?.encode())
        };
        let address = Address {
            rank,
            slot_bytes: room.slot_bytes,
            staged,
            network: network.address(),
            inbox: key(&inbox)?,
            flags: key(&flags)?,
        };
        let held = |region: &Arc<NetLocal<N>>| DynRegion::new(Arc::clone(region));
        let copier = Copier::open(device, &held(&outbox), &held(&inbox), deadline)?;
        let regions = Arc::new(Regions::default());
        let own = stage::Own { rank, room, inbox, outbox, flags };
        let stage = Stage::new(own, ranks, copier, Arc::clone(&regions));
        let inner = Inner {
            rank,
            ranks,
            room,
            regions,
            stage: Mutex::new(stage),
            network: Mutex::new(network),
        };
        let shared = Shared { service: OnceLock::new(), inner: Arc::new(inner) };
        let memory = Memory { shared: Arc::new(shared) };
        Ok(Self { memory, address: address.encode(), peers: vec![None; ranks], staged })
    }
}

impl<D: Fabric, N: Fabric> Fabric for Staged<D, N> {
    type Error = Error;
    type Memory = Memory<D, N>;
    type Engine = Engine<D, N>;

    /// That of the network.
    fn backend(&self) -> BackendId {
        self.memory.shared.network().backend()
    }

    fn rank(&self) -> Rank {
        self.memory.shared.rank
    }

    fn memory(&self) -> &Memory<D, N> {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        let shared = &self.memory.shared;
        if peer.index() >= shared.ranks {
            let ranks = shared.ranks;
            return Err(Error::argument(format!(
                "peer is {peer}, wanted less than the number of ranks, {ranks}"
            )));
        }
        let address = Address::decode(peer, address)?;
        let (wanted, seen) = (shared.room.slot_bytes, address.slot_bytes);
        if seen != wanted {
            let what = format!(
                "has slots of {seen} bytes, rank {} of {wanted}; open all for one number of ranks",
                shared.rank
            );
            return Err(Error::of_peer(peer, what));
        }
        let mut network = shared.network();
        let connected = network.connect(peer, &address.network, deadline);
        connected.map_err(Error::backend("connect the network"))?;
        let import = |key: &[u8], wanted: u64| {
            let what = "import slots of a peer";
            let key = NetKey::<N>::decode(key).map_err(Error::backend(what))?;
            if key.region_bytes() != wanted {
                let seen = key.region_bytes();
                return Err(Error::of_peer(
                    peer,
                    format_args!("has {seen} bytes, wanted {wanted}"),
                ));
            }
            let region = network.memory().import(peer, &key, deadline);
            region.map(Arc::new).map_err(Error::backend(what))
        };
        let inbox = import(&address.inbox, shared.room.bytes())?;
        let flags = import(&address.flags, shared.room.flag_bytes())?;
        shared.stage().connect(peer, inbox, flags);
        self.peers[peer.index()] = Some(address.staged);
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        let staged = self.staged || (*self.peers.get(peer.index())?)?;
        let mut link = self.memory.shared.network().link(peer)?;
        if staged && peer != self.rank() {
            link.kind = LinkKind::HostStaged;
        }
        Some(link)
    }

    fn engine(&mut self, requirements: EngineRequirements) -> Result<Engine<D, N>, Error> {
        let shared = &self.memory.shared;
        let mut network = shared.network();
        let mut stage = shared.stage();
        if stage.wants_carrier() {
            let carrier = network.engine(requirements).map_err(Error::backend("make an engine"))?;
            stage.set_carrier(carrier);
        }
        if shared.service.get().is_none() {
            let parker = network.engine(requirements).map_err(Error::backend("make an engine"))?;
            // Nobody else sets it, under the lock of the stage.
            let _ = shared.service.set(Service::start(&shared.inner, parker)?);
        }
        let parker = network.engine(requirements).map_err(Error::backend("make an engine"))?;
        let id = stage.enter(parker.waker());
        let caps = stage.caps();
        drop((stage, network));
        Ok(Engine::new(id, parker, caps, Arc::clone(shared)))
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Staged<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("rank", &self.memory.shared.rank).finish_non_exhaustive()
    }
}
