//! Imports the memory that a remote key of a peer names.
//!
//! Memory of another process is opened once per process and device, however often it is imported:
//! the driver opens an IPC handle only once, and address space is limited.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use super::Memory;
use super::allocation::{Mapped, Physical};
use super::host::PinnedHost;
use super::key::{Access, Key};
use super::registration::Registration;
use crate::device::{DevicePtr, IpcHandle, RegionDevice, Vendor, backend_id};
use crate::handover::{self, Claim, ProcessToken};
use crate::mapping::LengthGuard;
use crate::{EngineRegion, Fault, PeerRegion, RegionBounds};
use peerlane_hal::{BackendId, Deadline, Generation, Rank, Role};

/// An imported region of a peer.
#[derive(Debug)]
pub struct Remote<D: RegionDevice> {
    peer: Rank,
    role: Role,
    address: DevicePtr,
    bytes: u64,
    host: Option<u64>,
    _keep_alive: KeepAlive<D>,
}

#[derive(Debug)]
enum KeepAlive<D: RegionDevice> {
    SameProcess { _registration: Arc<Registration<D>> },
    OtherProcess { _import: Import },
    Nothing,
}

impl<D: RegionDevice> Remote<D> {
    /// Returns the address at which this rank's device accesses the first byte of the region.
    pub fn device_ptr(&self) -> DevicePtr {
        self.address
    }

    /// Returns whether the region is pinned host memory instead of device memory.
    pub fn is_on_host(&self) -> bool {
        self.host.is_some()
    }

    /// Returns the length of the region in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the role of the memory, which its owner has registered.
    pub fn role(&self) -> Role {
        self.role
    }

    /// Returns the rank that owns the memory.
    pub fn peer(&self) -> Rank {
        self.peer
    }
}

// SAFETY: length and role are those of the key, which the import has compared with the registration
// of the owner.
unsafe impl<D: RegionDevice> RegionBounds for Remote<D> {
    fn bytes(&self) -> u64 {
        Self::bytes(self)
    }

    fn role(&self) -> Role {
        Self::role(self)
    }
}

// SAFETY: the addresses are those of the import, which `self` keeps.
unsafe impl<D: RegionDevice> EngineRegion for Remote<D> {
    fn address(&self) -> DevicePtr {
        self.device_ptr()
    }

    fn host_address(&self) -> Option<u64> {
        self.host
    }
}

// SAFETY: the import has asked this rank for the memory.
unsafe impl<D: RegionDevice> PeerRegion for Remote<D> {
    fn peer(&self) -> Rank {
        Self::peer(self)
    }
}

impl<D: RegionDevice> Memory<D> {
    /// Checks that the memory of a remote key is still alive, without importing it.
    ///
    /// # Errors
    /// Returns [`Fault::Freed`], or why the owner did not answer.
    pub(crate) fn check_alive(
        &self,
        peer: Rank,
        key: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<(), Fault> {
        let claim = claim(peer, key);
        if key.process == ProcessToken::own() {
            let found = handover::find::<Registration<D>>(&claim);
            return found.map(drop).ok_or(Fault::Freed { peer, generation: key.generation.0 });
        }
        let asked = handover::ask(key.process, &claim, deadline);
        asked.map(drop).map_err(Fault::of_handover(peer, key.generation.0))
    }

    /// Imports a region of a peer, even before the peer is connected.
    ///
    /// # Errors
    /// Returns the reason why the memory cannot be opened here, or the driver's error.
    pub(crate) fn open_key(
        &self,
        peer: Rank,
        key: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<Remote<D>, D::Error> {
        let (role, bytes) = (key.role, key.bytes);
        let claim = claim(peer, key);

        // Ranks of one process share addresses and registrations.
        if key.process == ProcessToken::own() {
            let found =
                handover::find::<Registration<D>>(&claim).filter(|found| found.bytes == bytes);
            let Some(registration) = found else {
                return Err(Fault::Freed { peer, generation: key.generation.0 }.into());
            };
            let address = registration.permit(&self.context)?;
            let host = registration.host().map(|host| host.base.as_ptr() as u64);
            let hold = KeepAlive::SameProcess { _registration: registration };
            return Ok(Remote { peer, role, address, bytes, host, _keep_alive: hold });
        }

        if let Access::Private(why) = key.access {
            let why = why.text::<D::Vendor>().to_owned();
            return Err(Fault::PrivateMemory { peer, why }.into());
        }

        // The answer shows that the memory is alive, even if it has no descriptor.
        let refused = Fault::of_handover(peer, key.generation.0);
        let fds = handover::ask(key.process, &claim, deadline).map_err(refused)?;

        let _current = self.context.enter_relaxed()?;
        let identity = |allocation| {
            let (process, device) = (key.process, self.context.device());
            Identity { backend: backend_id::<D>(), process, allocation, device }
        };
        let (head, import) = match &key.access {
            Access::Nothing | Access::Private(_) => {
                let (address, bytes, host, _keep_alive) = (0, 0, None, KeepAlive::Nothing);
                return Ok(Remote { peer, role, address, bytes, host, _keep_alive });
            }
            Access::Segments { head, segments } => {
                let identity = identity(Allocation::Registration(key.generation));
                let open = || self.map_segments(peer, segments, &fds);
                (*head, Import::share(identity, open)?)
            }
            Access::Ipc { head, handle } => {
                let identity = identity(Allocation::Ipc(*handle));
                let import = Import::share(identity, || Opened::ipc(&self.context, handle))?;
                self.check_extent(peer, import.address(), *head, bytes)?;
                (*head, import)
            }
            Access::Host { head, guard } => {
                let identity = identity(Allocation::Registration(key.generation));
                let open = || self.map_host(peer, fds, (*head, bytes), *guard);
                // The address of such an import is that of the region, not of its first page.
                (0, Import::share(identity, open)?)
            }
        };

        let address = import.address() + head;
        let (host, _keep_alive) = (import.host(), KeepAlive::OtherProcess { _import: import });
        Ok(Remote { peer, role, address, bytes, host, _keep_alive })
    }

    fn map_segments(
        &self,
        peer: Rank,
        segments: &[u64],
        fds: &[OwnedFd],
    ) -> Result<Opened<D>, D::Error> {
        if fds.len() != segments.len() {
            let (found, expected) = (fds.len(), segments.len());
            let how = format!(
                "the peer sent {found} file descriptors, expected {expected}, the number in the \
                 remote key"
            );
            return Err(Fault::PeerLost { peer, how }.into());
        }
        let physical: Result<Vec<Physical<D>>, D::Error> = segments
            .iter()
            .zip(fds)
            .map(|(bytes, fd)| Physical::import(&self.context, fd.as_fd(), *bytes))
            .collect();
        Ok(Opened::Mapped(Mapped::map(&self.context, &physical?)?))
    }

    fn map_host(
        &self,
        peer: Rank,
        fds: Vec<OwnedFd>,
        span: (u64, u64),
        guard: LengthGuard,
    ) -> Result<Opened<D>, D::Error> {
        let count = fds.len();
        let Ok([fd]) = <[_; 1]>::try_from(fds) else {
            let how = format!(
                "the peer sent {count} file descriptors for one region of host memory, expected 1"
            );
            return Err(Fault::PeerLost { peer, how }.into());
        };
        Ok(Opened::Host(PinnedHost::import(&self.context, fd, span, guard, peer)?))
    }

    /// Rejects a remote key that claims more bytes than the allocation has, if the driver reports
    /// its length.
    fn check_extent(
        &self,
        peer: Rank,
        address: DevicePtr,
        head: u64,
        bytes: u64,
    ) -> Result<(), D::Error> {
        match self.context.extent(address)? {
            Some(extent) if head + bytes > extent.bytes - (address - extent.address) => {
                Err(Fault::ForeignKey {
                    expected: format!("a key of an allocation of at least {} bytes", head + bytes),
                    found: format!("an allocation of rank {peer} with {} bytes", extent.bytes),
                }
                .into())
            }
            _ => Ok(()),
        }
    }
}

fn claim<V: Vendor>(peer: Rank, key: &Key<V>) -> Claim {
    let (generation, role) = (key.generation, key.role);
    Claim { backend: V::BACKEND, generation, owner: peer, role }
}

/// Identifies imported memory, so that a second import shares the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Identity {
    pub(super) backend: BackendId,
    pub(super) process: ProcessToken,
    pub(super) allocation: Allocation,
    /// The device that imported the memory, because a mapping is accessible to one device only.
    pub(super) device: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Allocation {
    /// Memory that is imported from file descriptors, identified by its generation, because
    /// descriptors have no name that both processes know.
    Registration(Generation),
    /// An allocation with an IPC handle, which is the same for all regions in the allocation.
    Ipc(IpcHandle),
}

#[derive(Debug)]
pub(super) enum Opened<D: RegionDevice> {
    Mapped(Mapped<D>),
    Ipc { context: Arc<D>, address: DevicePtr },
    Host(PinnedHost<D>),
}

impl<D: RegionDevice> Opened<D> {
    pub(super) fn ipc(context: &Arc<D>, handle: &IpcHandle) -> Result<Self, D::Error> {
        let address = context.open_ipc(handle)?;
        Ok(Self::Ipc { context: Arc::clone(context), address })
    }

    fn address(&self) -> DevicePtr {
        match self {
            Self::Mapped(mapped) => mapped.address(),
            Self::Ipc { address, .. } => *address,
            Self::Host(pinned) => pinned.view().address,
        }
    }

    fn host(&self) -> Option<u64> {
        match self {
            Self::Host(pinned) => Some(pinned.view().base.as_ptr() as u64),
            Self::Mapped(_) | Self::Ipc { .. } => None,
        }
    }
}

impl<D: RegionDevice> Drop for Opened<D> {
    fn drop(&mut self) {
        let Self::Ipc { context, address } = self else { return };
        // An error means that the device is lost, and its memory with it.
        let Ok(_current) = context.enter_relaxed() else { return };
        // SAFETY: opened once by `ipc`, and the last user is gone.
        unsafe { context.close_ipc(*address) };
    }
}

struct SharedImport {
    users: usize,
    address: DevicePtr,
    host: Option<u64>,
    /// Keeps the peer's memory open until dropped, as a type-erased [`Opened`].
    _opened: Box<dyn Send>,
}

/// Memory of other processes is opened and closed under this lock, so that no handle is open twice.
static OPEN: LazyLock<Mutex<HashMap<Identity, SharedImport>>> = LazyLock::new(Mutex::default);

/// A reference to imported memory, which is closed when the last reference is dropped.
#[derive(Debug)]
pub(super) struct Import {
    identity: Identity,
    address: DevicePtr,
    host: Option<u64>,
}

impl Import {
    pub(super) fn share<D: RegionDevice>(
        identity: Identity,
        open: impl FnOnce() -> Result<Opened<D>, D::Error>,
    ) -> Result<Self, D::Error> {
        let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(shared) = all.get_mut(&identity) {
            shared.users += 1;
            return Ok(Self { identity, address: shared.address, host: shared.host });
        }
        let opened = open()?;
        let (address, host) = (opened.address(), opened.host());
        all.insert(identity, SharedImport { users: 1, address, host, _opened: Box::new(opened) });
        Ok(Self { identity, address, host })
    }

    pub(super) fn address(&self) -> DevicePtr {
        self.address
    }

    pub(super) fn host(&self) -> Option<u64> {
        self.host
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        let mut all = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(shared) = all.get_mut(&self.identity) else { return };
        shared.users -= 1;
        if shared.users == 0 {
            // Closed under the lock, see `OPEN`.
            all.remove(&self.identity);
        }
    }
}
