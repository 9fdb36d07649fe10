//! Defines type-erased fabrics and regions, for programs that choose a backend at run time.
//!
//! A program that selects a backend at run time uses these. Each type implements the trait of the
//! typed one, so code that is generic over [`Fabric`] takes a [`DynFabric`] as well. A call costs
//! one virtual call more, and an op one comparison of types per region.

use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::deadline::Deadline;
use crate::dynamic_engine::DynEngine;
use crate::dynamic_error::{DynError, wrong_type};
use crate::error::{Error, ErrorKind};
use crate::fabric::{EngineOffer, EngineRequirements, Fabric, Link};
use crate::key::{BackendId, Envelope, Generation, KeyError, RemoteKey};
use crate::memory::{DynImport, DynRegion, PeerMemory, Region, Role};
use crate::rank::Rank;
use crate::wire::{Reader, Writer};

/// A remote key of any backend, together with the length of its region.
///
/// It is encoded as the backend's key, followed by the length of the region.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DynKey {
    region_bytes: u64,
    generation: Generation,
    key: Vec<u8>,
}

impl DynKey {
    fn from_key<K: RemoteKey>(key: &K) -> Self {
        // `K` can be this type, and a key is wrapped only once.
        if let Some(key) = (key as &dyn Any).downcast_ref::<Self>() {
            return key.clone();
        }

        let (region_bytes, generation) = (key.region_bytes(), key.generation());
        Self { region_bytes, generation, key: key.encode() }
    }

    fn typed<K: RemoteKey>(&self) -> Result<K, KeyError> {
        // `K` can be this type.
        let mut same = Some(self.clone());
        if let Some(key) = (&mut same as &mut dyn Any).downcast_mut::<Option<K>>() {
            return Ok(key.take().expect("set above"));
        }

        let key = K::decode(&self.key)?;
        if key.region_bytes() != self.region_bytes {
            let (field, found) = ("region bytes after the key", self.region_bytes);
            return Err(KeyError::Field { field, found, expected: "the value inside the key" });
        }
        Ok(key)
    }
}

impl RemoteKey for DynKey {
    fn encode(&self) -> Vec<u8> {
        Writer::new().bytes(&self.key).u64(self.region_bytes).finish()
    }

    /// Checks only the header of a remote key. The fabric checks the backend and the payload when
    /// it imports the region.
    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let mut reader = Reader::new(bytes);
        let key = reader.bytes("key", bytes.len().saturating_sub(size_of::<u64>()))?.to_vec();
        let region_bytes = reader.u64("region bytes after the key")?;
        let generation = Envelope::parse(&key)?.generation;
        Ok(Self { region_bytes, generation, key })
    }

    fn region_bytes(&self) -> u64 {
        self.region_bytes
    }

    fn generation(&self) -> Generation {
        self.generation
    }
}

/// A type-erased fabric of any backend, chosen at run time.
///
/// ```
/// use peerlane::hal::{BackendId, Fabric, PeerMemory, Region, Role};
/// use peerlane::{DynFabric, Rank, host};
///
/// let fabric = DynFabric::new(host::Fabric::open(Rank(0), 1)?);
/// assert_eq!(fabric.backend(), BackendId::HOST);
/// assert_eq!(fabric.memory().allocate(64, Role::Data)?.bytes(), 64);
/// assert!(fabric.downcast_ref::<host::Fabric>().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DynFabric(Box<dyn ErasedFabric>);

impl DynFabric {
    /// Wraps a fabric of any backend and erases its type. A `DynFabric` is returned as it is.
    pub fn new<F: Fabric>(fabric: F) -> Self {
        let mut fabric = Some(fabric);
        match (&mut fabric as &mut dyn Any).downcast_mut::<Option<Self>>() {
            Some(erased) => erased.take().expect("set above"),
            None => Self(Box::new(TypedFabric(fabric.expect("set above")))),
        }
    }

    /// Returns the fabric as the backend's type `F`, or `None` if it belongs to another backend.
    pub fn downcast_ref<F: Fabric>(&self) -> Option<&F> {
        self.0.as_any().downcast_ref()
    }
}

impl fmt::Debug for DynFabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DynFabric")
            .field("backend", &self.backend())
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl Fabric for DynFabric {
    type Error = DynError;
    type Memory = Self;
    type Engine = DynEngine;

    fn backend(&self) -> BackendId {
        self.0.backend()
    }

    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn memory(&self) -> &Self {
        self
    }

    fn address(&self) -> Vec<u8> {
        self.0.address()
    }

    fn connect(
        &mut self,
        peer: Rank,
        address: &[u8],
        deadline: Deadline,
    ) -> Result<(), Self::Error> {
        self.0.connect(peer, address, deadline)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.0.link(peer)
    }

    fn moves(&self) -> u64 {
        self.0.moves()
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, DynError> {
        self.0.reopen(rank, ranks)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, DynError> {
        self.0.offers()
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<DynEngine, DynError> {
        self.0.engine(requirements)
    }
}

// SAFETY: all calls are passed on to an implementation that upholds the contract.
unsafe impl PeerMemory for DynFabric {
    type Error = DynError;
    type Key = DynKey;
    type Local = DynRegion;
    type Remote = DynImport;

    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        self.0.allocate(bytes, role)
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        self.0.allocate_on_demand(bytes, role)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError> {
        self.0.allocate_polled_flags(bytes)
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.register(base, bytes, role) }
    }

    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        unsafe { self.0.adopt(region, role) }
    }

    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError> {
        self.0.export(local)
    }

    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError> {
        self.0.import(peer, key, deadline)
    }
}

trait ErasedFabric: Send + Sync {
    fn as_any(&self) -> &dyn Any;
    fn backend(&self) -> BackendId;
    fn rank(&self) -> Rank;
    fn address(&self) -> Vec<u8>;
    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), DynError>;
    fn link(&self, peer: Rank) -> Option<Link>;
    fn moves(&self) -> u64;
    fn reopen(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError>;
    fn offers(&self) -> Result<Vec<EngineOffer>, DynError>;
    fn engine(&self, requirements: EngineRequirements) -> Result<DynEngine, DynError>;
    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError>;
    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError>;
    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError>;
    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError>;
    unsafe fn adopt(&self, region: &DynRegion, role: Role) -> Result<DynRegion, DynError>;
    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError>;
    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError>;
}

struct TypedFabric<F>(F);

impl<F: Fabric> ErasedFabric for TypedFabric<F> {
    fn as_any(&self) -> &dyn Any {
        &self.0
    }

    fn backend(&self) -> BackendId {
        self.0.backend()
    }

    fn rank(&self) -> Rank {
        self.0.rank()
    }

    fn address(&self) -> Vec<u8> {
        self.0.address()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), DynError> {
        self.0.connect(peer, address, deadline).map_err(DynError::new)
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.0.link(peer)
    }

    fn moves(&self) -> u64 {
        self.0.moves()
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<DynFabric, DynError> {
        self.0.reopen(rank, ranks).map(DynFabric::new).map_err(DynError::new)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, DynError> {
        self.0.offers().map_err(DynError::new)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<DynEngine, DynError> {
        let engine = self.0.engine(requirements).map_err(DynError::new)?;
        Ok(DynEngine::new(engine, self.0.backend()))
    }

    fn allocate(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate(bytes, role))
    }

    fn allocate_on_demand(&self, bytes: u64, role: Role) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate_on_demand(bytes, role))
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<DynRegion, DynError> {
        region(self.0.memory().allocate_polled_flags(bytes))
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        region(unsafe { self.0.memory().register(base, bytes, role) })
    }

    unsafe fn adopt(&self, held: &DynRegion, role: Role) -> Result<DynRegion, DynError> {
        // SAFETY: the caller upholds the same contract.
        region(unsafe { self.0.memory().adopt(held, role) })
    }

    fn export(&self, local: &DynRegion) -> Result<DynKey, DynError> {
        let Some(local) = local.typed() else {
            return wrong_type(ErrorKind::Mismatch, "region", self.0.backend());
        };
        self.0.memory().export(local).map(|key| DynKey::from_key(&key)).map_err(DynError::new)
    }

    fn import(&self, peer: Rank, key: &DynKey, deadline: Deadline) -> Result<DynImport, DynError> {
        let key = key.typed().map_err(DynError::new)?;
        let imported = self.0.memory().import(peer, &key, deadline).map_err(DynError::new)?;
        Ok(DynImport(Arc::new(imported)))
    }
}

fn region<R: Region, E: Error>(region: Result<R, E>) -> Result<DynRegion, DynError> {
    region.map(|region| DynRegion::new(Arc::new(region))).map_err(DynError::new)
}
