//! Copies device memory through host memory, for networks that cannot reach the device.
//!
//! [`Staged`] wraps a network over host memory and uses the engines of a device fabric. Memory that
//! the network can register is transferred directly. Other memory goes through slots in host
//! memory: the device's engine copies a piece into a slot, the network writes it into a slot of the
//! peer, and the peer's device copies it to its destination. Pieces are pipelined, so that all
//! three are busy at the same time. Either end can be staged, or both.
//!
//! Each piece is followed by a message of 64 bytes that says what to do with it. A peer processes
//! messages in order, so a flag is stored when the bytes before it are in device memory (chapter 3
//! of the [contract](peerlane_hal::contract)). Slots and messages are reused in turn. One counter
//! for each direction tells how many messages the peer has processed.
//!
//! | module | holds |
//! | --- | --- |
//! | `memory` | registration, export and import of memory; remote keys |
//! | `engine` | the engine, and the queue that tracks its ops |
//! | `channel` | sending to one peer, and receiving from it |
//! | `queues` | submission to the engines of the network and of the device |
//! | `transport` | all state of a rank under one lock, and the thread that drives it while no caller polls |
//! | `wire` | messages, the layout of the inbox, the address |
//!
//! Plans, lanes and flags are the same as on the network itself, so what runs is what was verified.

mod channel;
mod engine;
mod error;
mod memory;
mod ops;
mod queues;
mod transport;
mod wire;

use std::fmt;
use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use peerlane_hal::{
    BackendId, CopyEngine as _, Deadline, DynRegion, EngineOffer, EngineRequirements, ErrorKind,
    Fabric, Link, LinkKind, PeerMemory, Rank, Region as _, RemoteKey as _, Role,
};

pub use engine::Engine;
pub use error::Error;
pub use memory::{Key, Local, Memory, Remote};

use memory::RegionTable;
use queues::DeviceCopier;
use transport::{ProgressThread, Transport};
use wire::{Address, InboxLayout};

type DevLocal<D> = <<D as Fabric>::Memory as PeerMemory>::Local;
type DevRemote<D> = <<D as Fabric>::Memory as PeerMemory>::Remote;
type NetLocal<N> = <<N as Fabric>::Memory as PeerMemory>::Local;
type NetRemote<N> = <<N as Fabric>::Memory as PeerMemory>::Remote;
type NetKey<N> = <<N as Fabric>::Memory as PeerMemory>::Key;

struct Inner<D: Fabric, N: Fabric> {
    rank: Rank,
    ranks: usize,
    layout: InboxLayout,
    regions: Arc<RegionTable<D, N>>,
    // Dropped before the network, because it holds an engine of it.
    transport: Mutex<Transport<D, N>>,
    network: Mutex<N>,
}

/// The progress thread ends when the last owner of this state is dropped.
struct Shared<D: Fabric, N: Fabric> {
    /// The thread that drives transfers in the background, started when the first engine is
    /// created.
    progress_thread: OnceLock<ProgressThread>,
    inner: Arc<Inner<D, N>>,
}

impl<D: Fabric, N: Fabric> Inner<D, N> {
    fn transport(&self) -> MutexGuard<'_, Transport<D, N>> {
        // A panic while the lock is held is a bug of an engine; the state is consistent after each
        // statement.
        self.transport.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Connects ranks over the network `N`, with memory of the device fabric `D` staged through the
/// host.
///
/// Every rank of a group needs one, including ranks whose memory the network can register.
pub struct Staged<D: Fabric, N: Fabric> {
    memory: Memory<D, N>,
    address: Vec<u8>,
    /// Whether memory of each connected peer is staged, indexed by rank; `None` before the peer is
    /// connected.
    peers: Vec<Option<bool>>,
    /// The addresses of the connected ranks.
    connected: Vec<Option<Vec<u8>>>,
    staged: bool,
}

impl<D: Fabric, N: Fabric> Staged<D, N> {
    /// Opens the fabric over a network that is not connected yet, and a device fabric that is
    /// connected to its own rank.
    ///
    /// `staged` says whether the memory that will be registered needs staging. It affects only the
    /// reported [`link`](Fabric::link)s.
    ///
    /// # Errors
    /// If the network allocates memory that the host cannot read, if the device cannot use that
    /// memory, or if a call to either fabric fails.
    pub fn open(
        device: &D,
        network: N,
        ranks: usize,
        staged: bool,
        deadline: Deadline,
    ) -> Result<Self, Error> {
        let (rank, layout) = (network.rank(), InboxLayout::new(ranks));
        let allocate = |bytes, role| {
            let region = network.memory().allocate(bytes, role);
            let region = region.map_err(Error::backend("allocate slots in host memory"))?;
            Ok::<_, Error>(Arc::new(region))
        };

        let (inbox, outbox) =
            (allocate(layout.bytes(), Role::Data)?, allocate(layout.bytes(), Role::Data)?);
        let flags = allocate(layout.flag_bytes(), Role::Flags)?;
        if flags.flags().is_none() {
            let text = format!(
                "the network fabric {} allocates memory that the host cannot read; use a network \
                 fabric that allocates host memory",
                network.backend()
            );
            return Err(Error::new(ErrorKind::Unavailable, text));
        }

        let key = |region| -> Result<Vec<u8>, Error> {
            let key = network.memory().export(region);
            Ok(key.map_err(Error::backend("export slots in host memory"))?.encode())
        };
        let address = Address {
            rank,
            slot_bytes: layout.slot_bytes,
            staged,
            network: network.address(),
            inbox: key(&inbox)?,
            flags: key(&flags)?,
        };

        let held = |region: &Arc<NetLocal<N>>| DynRegion::new(Arc::clone(region));
        let copier = DeviceCopier::open(device, &held(&outbox), &held(&inbox), deadline)?;
        let regions = Arc::new(RegionTable::default());
        let buffers = channel::LocalBuffers { rank, layout, inbox, outbox, flags };
        let transport = Transport::new(buffers, ranks, copier, Arc::clone(&regions));
        let inner = Inner {
            rank,
            ranks,
            layout,
            regions,
            transport: Mutex::new(transport),
            network: Mutex::new(network),
        };

        let shared = Shared { progress_thread: OnceLock::new(), inner: Arc::new(inner) };
        let memory = Memory { shared: Arc::new(shared) };

        Ok(Self {
            memory,
            address: address.encode(),
            peers: vec![None; ranks],
            connected: vec![None; ranks],
            staged,
        })
    }
}

impl<D: Fabric, N: Fabric> Staged<D, N> {
    /// Calls `use_network` with the network fabric, under its lock.
    pub fn with_network<R>(&self, use_network: impl FnOnce(&N) -> R) -> R {
        use_network(&self.memory.shared.network())
    }
}

// SAFETY: the layer passes all calls on to implementations that uphold the contract.
unsafe impl<D: Fabric, N: Fabric> Fabric for Staged<D, N> {
    type Error = Error;
    type Memory = Memory<D, N>;
    type Engine = Engine<D, N>;

    /// Returns the backend of the network that connects the ranks.
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
                "peer {peer} is out of range: expected a rank below {ranks}, the number of ranks"
            )));
        }

        if self.connected[peer.index()].as_deref() == Some(address) {
            return Ok(());
        }

        let bytes = address;
        let address = Address::decode(peer, address)?;
        let (expected, found) = (shared.layout.slot_bytes, address.slot_bytes);
        if found != expected {
            let what = format!(
                "uses slots of {found} bytes, expected {expected} bytes as on rank {}; open the \
                 fabric with the same number of ranks on every rank",
                shared.rank
            );
            return Err(Error::of_peer(peer, what));
        }

        let mut network = shared.network();
        let connected = network.connect(peer, &address.network, deadline);
        connected.map_err(Error::backend("connect to the peer over the network"))?;
        let import = |key: &[u8], expected: u64| {
            let what = "import the slots of the peer";
            let key = NetKey::<N>::decode(key).map_err(Error::backend(what))?;
            if key.region_bytes() != expected {
                let found = key.region_bytes();
                return Err(Error::of_peer(
                    peer,
                    format_args!(
                        "has an inbox of {found} bytes, expected {expected} bytes; open the fabric \
                         with the same number of ranks on every rank"
                    ),
                ));
            }
            let region = network.memory().import(peer, &key, deadline);
            region.map(Arc::new).map_err(Error::backend(what))
        };

        let inbox = import(&address.inbox, shared.layout.bytes())?;
        let flags = import(&address.flags, shared.layout.flag_bytes())?;
        shared.transport().connect(peer, inbox, flags);
        self.peers[peer.index()] = Some(address.staged);
        self.connected[peer.index()] = Some(bytes.to_vec());

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

    /// Fails, because reopening needs the device fabric, which a staged fabric does not hold.
    /// [`with_network`](Staged::with_network) gives access to the network, which can be reopened.
    fn reopen(&self, _: Rank, _: usize) -> Result<Self, Error> {
        let text = "a staged fabric holds no device fabric; open a new one on a reopened network and device fabric";
        Err(Error::new(ErrorKind::Unavailable, text))
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        let shared = &self.memory.shared;
        let offers = shared.network().offers();
        let offers = offers.map_err(Error::backend("learn the engines of the network fabric"))?;

        // The engine of the network is of the kind that the network prefers.
        let network_align = offers.first().map_or(1, |offer| offer.caps.put_align_bytes);
        Ok(vec![EngineOffer::new(shared.transport().caps(network_align))])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine<D, N>, Error> {
        let offer = requirements.select(&self.offers()?).map_err(Error::argument)?;
        let requirements = EngineRequirements { kind: None, streams: false, ..requirements };

        let shared = &self.memory.shared;
        let network = shared.network();
        let mut transport = shared.transport();
        if transport.needs_network() {
            let engine = network
                .engine(requirements)
                .map_err(Error::backend("create an engine of the network fabric"))?;
            transport.set_network(engine);
        }
        if shared.progress_thread.get().is_none() {
            let parker = network
                .engine(requirements)
                .map_err(Error::backend("create an engine of the network fabric"))?;
            // The lock of the transport is held, so no other thread sets it.
            let _ = shared.progress_thread.set(ProgressThread::start(&shared.inner, parker)?);
        }
        let parker = network
            .engine(requirements)
            .map_err(Error::backend("create an engine of the network fabric"))?;
        let id = transport.add_queue(parker.waker());
        drop((transport, network));
        Ok(Engine::new(id, parker, offer.caps, Arc::clone(shared)))
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Staged<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staged").field("rank", &self.memory.shared.rank).finish_non_exhaustive()
    }
}
