//! Registers memory with the network, or stages it through the host if the network cannot reach it.

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use peerlane_hal::wire::{Reader, Writer, checksum};
use peerlane_hal::{
    BackendId, Deadline, DmaBuf, DynRegion, Envelope, ErrorKind, Fabric, Flush, Generation,
    KeyError, PeerMemory, Rank, Region, RemoteKey, Role, Space,
};

use crate::error::Error;
use crate::{DevLocal, NetKey, NetLocal, NetRemote, Shared};

const DIRECT: u32 = 0;
const STAGED: u32 = 1;
/// The size of the placeholder region that peers import instead of staged memory. It needs no bytes, but not
/// every network registers zero bytes.
const PLACEHOLDER_BYTES: u64 = 8;

/// Registers memory with the network, or keeps it for staging if only the device reaches it.
pub struct Memory<D: Fabric, N: Fabric> {
    pub(crate) shared: Arc<Shared<D, N>>,
}

/// A registered region of this rank, which is transferred directly or staged.
pub struct Local<D: Fabric, N: Fabric> {
    pub(crate) registration: Arc<Registration<D, N>>,
    shared: Arc<Shared<D, N>>,
}

/// A peer's memory region, imported through a remote key.
pub struct Remote<D: Fabric, N: Fabric>(pub(crate) Arc<Import<D, N>>);

pub(crate) enum Backing<D: Fabric, N: Fabric> {
    /// Memory that the network transfers directly.
    Direct(Arc<NetLocal<N>>),
    /// Memory that only the device reaches, so that its bytes are copied through host memory. Peers import
    /// the placeholder, so that the network decides whether the region still exists.
    Staged { device: Arc<DevLocal<D>>, placeholder: NetLocal<N> },
}

pub(crate) struct Registration<D: Fabric, N: Fabric> {
    pub(crate) backing: Backing<D, N>,
    pub(crate) bytes: u64,
    pub(crate) role: Role,
    generation: Generation,
}

pub(crate) struct Import<D: Fabric, N: Fabric> {
    pub(crate) peer: Rank,
    pub(crate) role: Role,
    pub(crate) bytes: u64,
    pub(crate) generation: u64,
    /// The peer's memory as the network reaches it, or `None` if the memory is staged through the host.
    pub(crate) direct: Option<Arc<NetRemote<N>>>,
    /// Keeps the placeholder region of staged memory imported.
    _placeholder: Option<NetRemote<N>>,
    pub(crate) local: Option<Arc<Registration<D, N>>>,
}

/// Finds a region of this rank by the number that a message carries, as long as the region exists.
pub(crate) struct RegionTable<D: Fabric, N: Fabric>(Mutex<HashMap<u64, Weak<Registration<D, N>>>>);

impl<D: Fabric, N: Fabric> Default for RegionTable<D, N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<D: Fabric, N: Fabric> RegionTable<D, N> {
    pub(crate) fn find(&self, generation: u64) -> Option<Arc<Registration<D, N>>> {
        let regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.get(&generation)?.upgrade()
    }

    fn insert(&self, registration: &Arc<Registration<D, N>>) {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.insert(registration.generation.0, Arc::downgrade(registration));
    }

    fn remove(&self, generation: Generation) {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.remove(&generation.0);
    }
}

impl<D: Fabric, N: Fabric> Registration<D, N> {
    pub(crate) fn flags(&self) -> Option<&[AtomicU64]> {
        match &self.backing {
            Backing::Direct(region) => region.flags(),
            Backing::Staged { .. } => None,
        }
    }
}

impl<D: Fabric, N: Fabric> Backing<D, N> {
    fn region(&self) -> &dyn Region {
        match self {
            Self::Direct(region) => &**region,
            Self::Staged { device, .. } => &**device,
        }
    }

    /// Returns the network region that peers import, which is the memory itself or its placeholder.
    fn exported(&self) -> &NetLocal<N> {
        match self {
            Self::Direct(region) => region,
            Self::Staged { placeholder, .. } => placeholder,
        }
    }
}

impl<D: Fabric, N: Fabric> Memory<D, N> {
    fn add(&self, backing: Backing<D, N>, role: Role) -> Result<Local<D, N>, Error> {
        let exported = self.shared.network().memory().export(backing.exported());
        let generation = exported.map_err(Error::backend("export the region"))?.generation();
        let bytes = backing.region().bytes();
        let registration = Arc::new(Registration { backing, bytes, role, generation });
        self.shared.regions.insert(&registration);
        Ok(Local { registration, shared: Arc::clone(&self.shared) })
    }

    fn direct(&self, region: NetLocal<N>, role: Role) -> Result<Local<D, N>, Error> {
        self.add(Backing::Direct(Arc::new(region)), role)
    }
}

// SAFETY: the layer passes all calls on to implementations that uphold the contract.
unsafe impl<D: Fabric, N: Fabric> PeerMemory for Memory<D, N> {
    type Error = Error;
    type Key = Key<NetKey<N>>;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    /// Allocates host memory through the network fabric.
    fn allocate(&self, bytes: u64, role: Role) -> Result<Local<D, N>, Error> {
        let region = self.shared.network().memory().allocate(bytes, role);
        self.direct(region.map_err(Error::backend("allocate"))?, role)
    }

    fn allocate_polled_flags(&self, bytes: u64) -> Result<Local<D, N>, Error> {
        let region = self.shared.network().memory().allocate_polled_flags(bytes);
        self.direct(region.map_err(Error::backend("allocate"))?, Role::Flags)
    }

    unsafe fn register(
        &self,
        base: NonNull<u8>,
        bytes: u64,
        role: Role,
    ) -> Result<Local<D, N>, Error> {
        // SAFETY: the caller keeps the contract of `register`, which is the same here.
        let region = unsafe { self.shared.network().memory().register(base, bytes, role) };
        self.direct(region.map_err(Error::backend("register"))?, role)
    }

    /// Registers memory of another fabric with the network. Memory that the network refuses is staged if it
    /// belongs to the device of this fabric.
    unsafe fn adopt(&self, held: &DynRegion, role: Role) -> Result<Local<D, N>, Error> {
        // SAFETY: the caller keeps the contract of `adopt`, which is the same here.
        let adopted = unsafe { self.shared.network().memory().adopt(held, role) };
        let refused = match adopted {
            Ok(region) => return self.direct(region, role),
            Err(error) => error,
        };
        let device = held.downcast::<DevLocal<D>>().filter(|_| role == Role::Data);
        let Some(device) = device else { return Err(Error::backend("register")(refused)) };
        let placeholder = self.shared.network().memory().allocate(PLACEHOLDER_BYTES, Role::Data);
        let placeholder = placeholder
            .map_err(Error::backend("allocate placeholder memory on the network fabric"))?;
        self.add(Backing::Staged { device, placeholder }, role)
    }

    fn export(&self, local: &Local<D, N>) -> Result<Key<NetKey<N>>, Error> {
        // Exported again each time: some networks hand the memory out only then.
        let Registration { backing, bytes, role, .. } = &*local.registration;
        let network = self.shared.network().memory().export(backing.exported());
        let network = network.map_err(Error::backend("export"))?;
        let staged = matches!(backing, Backing::Staged { .. });
        Ok(Key { rank: self.shared.rank, role: *role, bytes: *bytes, staged, network })
    }

    fn import(
        &self,
        peer: Rank,
        key: &Key<NetKey<N>>,
        deadline: Deadline,
    ) -> Result<Remote<D, N>, Error> {
        let invalid = |text: String| Error::new(ErrorKind::InvalidKey, text);
        if key.rank != peer {
            let found = key.rank;
            return Err(invalid(format!(
                "remote key belongs to rank {found}, expected a key of rank {peer}"
            )));
        }
        let region = self.shared.network().memory().import(peer, &key.network, deadline);
        let region = region.map_err(Error::backend("import"))?;
        let generation = key.generation().0;
        let local = (peer == self.shared.rank).then(|| {
            self.shared.regions.find(generation).ok_or_else(|| {
                invalid(format!(
                    "remote key of this rank is stale: the memory has been freed (generation \
                     {generation})"
                ))
            })
        });
        let (direct, placeholder) =
            if key.staged { (None, Some(region)) } else { (Some(Arc::new(region)), None) };
        let Key { role, bytes, .. } = *key;
        let local = local.transpose()?;
        let import =
            Import { peer, role, bytes, generation, direct, _placeholder: placeholder, local };
        Ok(Remote(Arc::new(import)))
    }
}

impl<D: Fabric, N: Fabric> Clone for Memory<D, N> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<D: Fabric, N: Fabric> Local<D, N> {
    /// Returns the device's region if the memory is staged, otherwise `None`.
    pub fn device(&self) -> Option<&DevLocal<D>> {
        match &self.registration.backing {
            Backing::Direct(_) => None,
            Backing::Staged { device, .. } => Some(device),
        }
    }
}

impl<D: Fabric, N: Fabric> Drop for Local<D, N> {
    fn drop(&mut self) {
        // Messages that arrive later no longer find the region.
        self.shared.regions.remove(self.registration.generation);
    }
}

// SAFETY: the layer passes all calls on to implementations that uphold the contract.
unsafe impl<D: Fabric, N: Fabric> Region for Local<D, N> {
    fn base(&self) -> NonNull<u8> {
        self.registration.backing.region().base()
    }

    fn bytes(&self) -> u64 {
        self.registration.bytes
    }

    fn space(&self) -> Space {
        self.registration.backing.region().space()
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.registration.flags()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        if self.registration.role == Role::Data {
            return None;
        }
        self.registration.backing.region().flag_value(word)
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        self.registration.backing.region().dma_buf()
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.registration.backing.region().flush()
    }

    unsafe fn allow_reuse(&self) {
        // SAFETY: peers write to this region through its backing only, and the caller guarantees that none does any more.
        unsafe { self.registration.backing.region().allow_reuse() };
    }
}

impl<D: Fabric, N: Fabric> Remote<D, N> {
    /// Returns the rank that owns the imported memory.
    pub fn peer(&self) -> Rank {
        self.0.peer
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Memory<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memory").field("rank", &self.shared.rank).finish_non_exhaustive()
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Local<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let staged = matches!(self.registration.backing, Backing::Staged { .. });
        f.debug_struct("Local")
            .field("bytes", &self.registration.bytes)
            .field("staged", &staged)
            .finish()
    }
}

impl<D: Fabric, N: Fabric> fmt::Debug for Remote<D, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (peer, staged) = (self.peer(), self.0.direct.is_none());
        f.debug_struct("Remote").field("peer", &peer).field("staged", &staged).finish()
    }
}

/// The remote key of a region, which holds the network's key and whether the region is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key<K> {
    pub(crate) rank: Rank,
    pub(crate) role: Role,
    pub(crate) bytes: u64,
    /// Whether the memory region is staged through the host; `network` is then the key of its placeholder.
    pub(crate) staged: bool,
    pub(crate) network: K,
}

impl<K: RemoteKey> Key<K> {
    fn sum(generation: Generation, fields: &[u8]) -> u64 {
        checksum(&Writer::new().u64(generation.0).bytes(fields).finish())
    }
}

impl<K: RemoteKey> RemoteKey for Key<K> {
    fn encode(&self) -> Vec<u8> {
        let fields = Writer::new()
            .u32(if self.staged { STAGED } else { DIRECT })
            .u32(self.rank.0)
            .u32(match self.role {
                Role::Data => 0,
                Role::Flags => 1,
            })
            .u64(self.bytes)
            .bytes(&self.network.encode())
            .finish();
        let generation = self.generation();
        let sum = Self::sum(generation, &fields);
        let payload = Writer::new().u64(sum).bytes(&fields).finish();
        Envelope { backend: BackendId::STAGED, generation, payload: &payload }.seal()
    }

    fn decode(bytes: &[u8]) -> Result<Self, KeyError> {
        let envelope = Envelope::open(bytes, BackendId::STAGED)?;
        let mut reader = Reader::new(envelope.payload);
        let sum = reader.u64("checksum")?;
        let expected = Self::sum(envelope.generation, reader.rest());
        let field = |field, found, expected| Err(KeyError::Field { field, found, expected });
        if sum != expected {
            // The owner checks only the network's key, so the other fields have their own checksum.
            return field("checksum", sum, "the checksum of the other fields");
        }
        let staged = match reader.u32("way")? {
            DIRECT => false,
            STAGED => true,
            other => return field("way", other.into(), "0 or 1"),
        };
        let rank = Rank(reader.u32("rank")?);
        let role = match reader.u32("role")? {
            0 => Role::Data,
            1 if !staged => Role::Flags,
            other => return field("role", other.into(), "0 (data), or 1 (flags) for host memory"),
        };
        let bytes = reader.u64("region bytes")?;
        let network = K::decode(reader.rest())?;
        if !staged && network.region_bytes() != bytes {
            return field("region bytes", bytes, "the value inside the network's key");
        }
        Ok(Self { rank, role, bytes, staged, network })
    }

    fn region_bytes(&self) -> u64 {
        self.bytes
    }

    fn generation(&self) -> Generation {
        self.network.generation()
    }
}
