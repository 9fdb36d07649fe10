//! Opens fabrics for device memory on a network that cannot reach it.

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::{
    BackendId, Deadline, DynRegion, EngineOffer, EngineRequirements, Fabric, Link, PeerMemory,
    Rank, Role,
};
use peerlane_staged::{Engine, Error, Key, Local, Memory, Remote, Staged};

use peerlane_conformance::{FabricOf, Harness, LocalOf, OwnMemory};

/// The timeout of a connection of a device to itself.
const REOPEN_TIMEOUT: Duration = Duration::from_secs(10);

/// Runs checks on staged device memory: the device of one harness, the network of another. All data
/// is in device memory, on each rank's own device.
#[derive(Debug)]
pub struct StagedHarness<D, N> {
    name: String,
    device: D,
    network: N,
}

impl<D: Harness, N: Harness> StagedHarness<D, N> {
    /// Creates a harness for ranks of `network` with memory of `device`.
    pub fn new(device: D, network: N) -> Self {
        let name = format!("{}-staged-on-{}", device.name(), network.name());
        Self { name, device, network }
    }
}

impl<D: Harness, N: Harness> Harness for StagedHarness<D, N> {
    type Fabric = StagedFabric<FabricOf<D>, FabricOf<N>>;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Self::Fabric, Error> {
        let deadline = Deadline::after(self.timeout());
        let network = self.network.open(rank, ranks);
        let network = network.map_err(|error| Error::of_backend("open the network", error))?;
        // Each rank opens its device as the only rank of a node.
        let device = self.device.open(Rank(0), 1);
        let device = device.map_err(|error| Error::of_backend("open the device", error))?;
        StagedFabric::over(device, network, ranks, deadline)
    }

    fn required(&self) -> bool {
        self.network.required()
    }

    fn timeout(&self) -> Duration {
        self.device.timeout().max(self.network.timeout())
    }

    fn write(&self, region: &LocalOf<Self>, offset: u64, bytes: &[u8]) {
        self.device.write(device_of::<D, N>(region), offset, bytes);
    }

    fn read(&self, region: &LocalOf<Self>, offset: u64, bytes: &mut [u8]) {
        self.device.read(device_of::<D, N>(region), offset, bytes);
    }

    fn own_memory(&self, _rank: Rank, bytes: u64) -> Option<Arc<dyn OwnMemory>> {
        // That of the rank as which `open` opens the device.
        self.device.own_memory(Rank(0), bytes)
    }
}

fn device_of<D: Harness, N: Harness>(region: &Local<FabricOf<D>, FabricOf<N>>) -> &LocalOf<D> {
    region.device().expect("a check's data is in device memory")
}

/// Allocates a staged fabric's data on the device.
pub struct StagedFabric<D: Fabric, N: Fabric> {
    staged: Staged<D, N>,
    memory: StagedMemory<D, N>,
}

impl<D: Fabric, N: Fabric> StagedFabric<D, N> {
    fn over(mut device: D, network: N, ranks: usize, deadline: Deadline) -> Result<Self, Error> {
        let address = device.address();
        let connected = device.connect(Rank(0), &address, deadline);
        connected.map_err(|error| Error::of_backend("connect the device", error))?;
        let staged = Staged::open(&device, network, ranks, true, deadline)?;
        let memory = StagedMemory { device: Mutex::new(device), memory: staged.memory().clone() };
        Ok(Self { staged, memory })
    }
}

/// The memory of a [`StagedFabric`].
pub struct StagedMemory<D: Fabric, N: Fabric> {
    memory: Memory<D, N>,
    device: Mutex<D>,
}

impl<D: Fabric, N: Fabric> StagedMemory<D, N> {
    fn device(&self) -> MutexGuard<'_, D> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl<D: Fabric, N: Fabric> Fabric for StagedFabric<D, N> {
    type Error = Error;
    type Memory = StagedMemory<D, N>;
    type Engine = Engine<D, N>;

    fn backend(&self) -> BackendId {
        self.staged.backend()
    }

    fn rank(&self) -> Rank {
        self.staged.rank()
    }

    fn memory(&self) -> &Self::Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.staged.address()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        self.staged.connect(peer, address, deadline)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.staged.link(peer)
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        let device = self.memory.device().reopen(Rank(0), 1);
        let device = device.map_err(|error| Error::of_backend("reopen the device", error))?;
        let network = self.staged.with_network(|network| network.reopen(rank, ranks));
        let network = network.map_err(|error| Error::of_backend("reopen the network", error))?;
        Self::over(device, network, ranks, Deadline::after(REOPEN_TIMEOUT))
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        self.staged.offers()
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Self::Engine, Error> {
        self.staged.engine(requirements)
    }
}

type NetKey<N> = <<N as Fabric>::Memory as PeerMemory>::Key;

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl<D: Fabric, N: Fabric> PeerMemory for StagedMemory<D, N> {
    type Error = Error;
    type Key = Key<NetKey<N>>;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    fn allocate(&self, bytes: u64, role: Role) -> Result<Self::Local, Error> {
        if role == Role::Flags {
            return self.memory.allocate(bytes, role);
        }
        let region = self.device().memory().allocate(bytes, role);
        let region = region.map_err(|error| Error::of_backend("allocate on the device", error))?;
        // SAFETY: the staged region keeps the device's region alive.
        unsafe { self.memory.adopt(&DynRegion::new(Arc::new(region)), role) }
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Self::Local, Error> {
        self.memory.allocate_polled_flags(bytes)
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<Self::Local, Error> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.memory.adopt(region, role) }
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Self::Local, Error> {
        if role == Role::Data {
            // SAFETY: the caller keeps the rules of `register`.
            let region = unsafe { self.device().memory().register(base, bytes, role) };
            let region = region.map_err(|error| Error::of_backend("register", error))?;
            // SAFETY: the caller keeps the rules of `register`.
            return unsafe { self.memory.adopt(&DynRegion::new(Arc::new(region)), role) };
        }
        // SAFETY: the caller keeps the rules of `register`.
        unsafe { self.memory.register(base, bytes, role) }
    }

    fn export(&self, local: &Self::Local) -> Result<Self::Key, Error> {
        self.memory.export(local)
    }

    fn import(
        &self,
        peer: Rank,
        key: &Self::Key,
        deadline: Deadline,
    ) -> Result<Self::Remote, Error> {
        self.memory.import(peer, key, deadline)
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for StagedFabric<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.staged.fmt(f)
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for StagedMemory<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}
