//! Regions: those of the network, and those of the device with a witness on the network.

use std::collections::HashMap;
use std::fmt;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use peerlane_hal::{
    Deadline, DmaBuf, DynRegion, ErrorKind, Fabric, Flush, Generation, PeerMemory, Rank, Region,
    RemoteKey as _, Role, Space,
};

use super::error::Error;
use super::key::Key;
use super::{DevLocal, NetKey, NetLocal, NetRemote, Shared};

/// A witness needs no bytes, but not every network registers nothing.
const WITNESS_BYTES: u64 = 8;

/// Registers memory with the network, or keeps it for the device.
pub struct Memory<D: Fabric, N: Fabric> {
    pub(super) shared: Arc<Shared<D, N>>,
}

/// Registered memory of this rank.
pub struct Local<D: Fabric, N: Fabric> {
    pub(super) registered: Arc<Registered<D, N>>,
    shared: Arc<Shared<D, N>>,
}

/// Imported memory of a peer.
pub struct Remote<D: Fabric, N: Fabric>(pub(super) Arc<Imported<D, N>>);

/// Where the bytes of a region are.
pub(super) enum Backing<D: Fabric, N: Fabric> {
    /// Where the network reaches them.
    Direct(Arc<NetLocal<N>>),
    /// Where only the device does. The witness is what peers import, so that the network says
    /// whether the region lives.
    Staged { device: Arc<DevLocal<D>>, witness: NetLocal<N> },
}

/// One registration; ops that are under way keep it.
pub(super) struct Registered<D: Fabric, N: Fabric> {
    pub(super) backing: Backing<D, N>,
    pub(super) bytes: u64,
    role: Role,
    generation: Generation,
}

/// One import.
pub(super) struct Imported<D: Fabric, N: Fabric> {
    pub(super) peer: Rank,
    pub(super) role: Role,
    pub(super) bytes: u64,
    pub(super) generation: u64,
    /// `None` where it is staged.
    pub(super) direct: Option<Arc<NetRemote<N>>>,
    /// Keeps the memory, as far as the network does.
    _witness: Option<NetRemote<N>>,
    pub(super) own: Option<Arc<Registered<D, N>>>,
}

/// The live registrations of a rank, as records name them.
pub(super) struct Regions<D: Fabric, N: Fabric>(Mutex<HashMap<u64, Weak<Registered<D, N>>>>);

impl<D: Fabric, N: Fabric> Default for Regions<D, N> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<D: Fabric, N: Fabric> Regions<D, N> {
    pub(super) fn find(&self, generation: u64) -> Option<Arc<Registered<D, N>>> {
        let regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.get(&generation)?.upgrade()
    }

    fn enter(&self, registered: &Arc<Registered<D, N>>) {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.insert(registered.generation.0, Arc::downgrade(registered));
    }

    fn forget(&self, generation: Generation) {
        let mut regions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        regions.remove(&generation.0);
    }
}

impl<D: Fabric, N: Fabric> Registered<D, N> {
    /// The flags, where it has some.
    pub(super) fn flags(&self) -> Option<&[AtomicU64]> {
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

    /// What peers import.
    fn named(&self) -> &NetLocal<N> {
        match self {
            Self::Direct(region) => region,
            Self::Staged { witness, .. } => witness,
        }
    }
}

impl<D: Fabric, N: Fabric> Memory<D, N> {
    fn enter(&self, backing: Backing<D, N>, role: Role) -> Result<Local<D, N>, Error> {
        let named = self.shared.network().memory().export(backing.named());
        let generation = named.map_err(Error::backend("name a region"))?.generation();
        let bytes = backing.region().bytes();
        let registered = Arc::new(Registered { backing, bytes, role, generation });
        self.shared.regions.enter(&registered);
        Ok(Local { registered, shared: Arc::clone(&self.shared) })
    }

    fn direct(&self, region: NetLocal<N>, role: Role) -> Result<Local<D, N>, Error> {
        self.enter(Backing::Direct(Arc::new(region)), role)
    }
}

impl<D: Fabric, N: Fabric> PeerMemory for Memory<D, N> {
    type Error = Error;
    type Key = Key<NetKey<N>>;
    type Local = Local<D, N>;
    type Remote = Remote<D, N>;

    /// Memory of the host, as the network allocates it.
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
        // SAFETY: the caller's.
        let region = unsafe { self.shared.network().memory().register(base, bytes, role) };
        self.direct(region.map_err(Error::backend("register"))?, role)
    }

    /// What the network refuses, and the device of this fabric holds, is staged.
    unsafe fn adopt(&self, held: &DynRegion, role: Role) -> Result<Local<D, N>, Error> {
        // SAFETY: the caller's.
        let adopted = unsafe { self.shared.network().memory().adopt(held, role) };
        let refused = match adopted {
            Ok(region) => return self.direct(region, role),
            Err(error) => error,
        };
        let device = held.downcast::<DevLocal<D>>().filter(|_| role == Role::Data);
        let Some(device) = device else { return Err(Error::backend("register")(refused)) };
        let witness = self.shared.network().memory().allocate(WITNESS_BYTES, Role::Data);
        let witness = witness.map_err(Error::backend("allocate a witness"))?;
        self.enter(Backing::Staged { device, witness }, role)
    }

    fn export(&self, local: &Local<D, N>) -> Result<Key<NetKey<N>>, Error> {
        // Made anew, for networks that only then hand memory out.
        let Registered { backing, bytes, role, .. } = &*local.registered;
        let network = self.shared.network().memory().export(backing.named());
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
            let seen = key.rank;
            return Err(invalid(format!(
                "remote key is of rank {seen}, wanted one of rank {peer}"
            )));
        }
        let region = self.shared.network().memory().import(peer, &key.network, deadline);
        let region = region.map_err(Error::backend("import"))?;
        let generation = key.generation().0;
        let own = (peer == self.shared.rank).then(|| {
            self.shared.regions.find(generation).ok_or_else(|| {
                invalid(format!("remote key of generation {generation}: the memory has been freed"))
            })
        });
        let (direct, witness) =
            if key.staged { (None, Some(region)) } else { (Some(Arc::new(region)), None) };
        let Key { role, bytes, .. } = *key;
        let own = own.transpose()?;
        let imported = Imported { peer, role, bytes, generation, direct, _witness: witness, own };
        Ok(Remote(Arc::new(imported)))
    }
}

impl<D: Fabric, N: Fabric> Clone for Memory<D, N> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

impl<D: Fabric, N: Fabric> Local<D, N> {
    /// The memory of the device, where it is staged.
    pub fn device(&self) -> Option<&DevLocal<D>> {
        match &self.registered.backing {
            Backing::Direct(_) => None,
            Backing::Staged { device, .. } => Some(device),
        }
    }
}

impl<D: Fabric, N: Fabric> Drop for Local<D, N> {
    fn drop(&mut self) {
        // What comes from now on finds nothing.
        self.shared.regions.forget(self.registered.generation);
    }
}

impl<D: Fabric, N: Fabric> Region for Local<D, N> {
    fn base(&self) -> NonNull<u8> {
        self.registered.backing.region().base()
    }

    fn bytes(&self) -> u64 {
        self.registered.bytes
    }

    fn space(&self) -> Space {
        self.registered.backing.region().space()
    }

    fn flags(&self) -> Option<&[AtomicU64]> {
        self.registered.flags()
    }

    fn flag_value(&self, word: u64) -> Option<u64> {
        if self.registered.role == Role::Data {
            return None;
        }
        self.registered.backing.region().flag_value(word)
    }

    fn dma_buf(&self) -> Result<DmaBuf, String> {
        self.registered.backing.region().dma_buf()
    }

    fn flush(&self) -> Option<Arc<dyn Flush>> {
        self.registered.backing.region().flush()
    }
}

impl<D: Fabric, N: Fabric> Remote<D, N> {
    /// Whose memory it is.
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
        let staged = matches!(self.registered.backing, Backing::Staged { .. });
        f.debug_struct("Local")
            .field("bytes", &self.registered.bytes)
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
