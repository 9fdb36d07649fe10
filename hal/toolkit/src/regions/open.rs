//! From a peer's key to its memory.

use std::os::fd::{AsFd, OwnedFd};

use super::Memory;
use super::device::{RegionDevice, Vendor, backend};
use super::import::{Allocation, Identity, Import, Opened};
use super::key::{Key, Reach};
use super::mapped::Mapped;
use super::physical::Physical;
use super::pinned::Pinned;
use super::registration::Registration;
use super::remote::{Hold, Remote};
use crate::device::{DevicePtr, Fault};
use crate::handover::{self, Claim, ProcessToken};
use peerlane_hal::Deadline;
use peerlane_hal::Rank;

impl<D: RegionDevice> Memory<D> {
    /// Whether the memory of a key still lives, which nobody imports.
    pub(crate) fn ask(
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

    /// Imports a region of a peer that need not be connected.
    pub(crate) fn open_key(
        &self,
        peer: Rank,
        key: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<Remote<D>, D::Error> {
        let (role, bytes) = (key.role, key.bytes);
        let claim = claim(peer, key);
        if key.process == ProcessToken::own() {
            let found =
                handover::find::<Registration<D>>(&claim).filter(|found| found.bytes == bytes);
            let Some(registration) = found else {
                return Err(Fault::Freed { peer, generation: key.generation.0 }.into());
            };
            let address = registration.allow(&self.context)?;
            let host = registration.host().map(|host| host.base.as_ptr() as u64);
            let hold = Hold::SameProcess { _registration: registration };
            return Ok(Remote { peer, role, address, bytes, host, _hold: hold });
        }
        if let Reach::Private(why) = key.reach {
            let why = why.text::<D::Vendor>().to_owned();
            return Err(Fault::PrivateMemory { peer, why }.into());
        }
        let refused = Fault::of_handover(peer, key.generation.0);
        let fds = handover::ask(key.process, &claim, deadline).map_err(refused)?;
        let _current = self.context.enter_relaxed()?;
        let identity = |allocation| {
            let (process, device) = (key.process, self.context.device());
            Identity { backend: backend::<D>(), process, allocation, device }
        };
        let (head, import) = match &key.reach {
            Reach::Nothing | Reach::Private(_) => {
                let (address, bytes, host, _hold) = (0, 0, None, Hold::Nothing);
                return Ok(Remote { peer, role, address, bytes, host, _hold });
            }
            Reach::Segments { head, segments } => {
                let identity = identity(Allocation::Registration(key.generation));
                let open = || self.map_segments(peer, segments, &fds);
                (*head, Import::share(identity, open)?)
            }
            Reach::Ipc { head, handle } => {
                let identity = identity(Allocation::Ipc(*handle));
                let import = Import::share(identity, || Opened::ipc(&self.context, handle))?;
                self.check_extent(peer, import.address(), *head, bytes)?;
                (*head, import)
            }
            Reach::Host { head } => {
                let identity = identity(Allocation::Registration(key.generation));
                (0, Import::share(identity, || self.map_host(peer, fds, (*head, bytes)))?)
            }
        };
        let address = import.address() + head;
        let (host, _hold) = (import.host(), Hold::OtherProcess { _import: import });
        Ok(Remote { peer, role, address, bytes, host, _hold })
    }

    fn map_segments(
        &self,
        peer: Rank,
        segments: &[u64],
        fds: &[OwnedFd],
    ) -> Result<Opened<D>, D::Error> {
        if fds.len() != segments.len() {
            let (seen, wanted) = (fds.len(), segments.len());
            let how = format!("it handed over {seen} descriptors, its key has {wanted} segments");
            return Err(Fault::PeerLost { peer, how }.into());
        }
        let parts: Result<Vec<Physical<D>>, D::Error> = segments
            .iter()
            .zip(fds)
            .map(|(bytes, fd)| Physical::import(&self.context, fd.as_fd(), *bytes))
            .collect();
        Ok(Opened::Mapped(Mapped::map(&self.context, &parts?)?))
    }

    fn map_host(
        &self,
        peer: Rank,
        fds: Vec<OwnedFd>,
        span: (u64, u64),
    ) -> Result<Opened<D>, D::Error> {
        let count = fds.len();
        let Ok([fd]) = <[_; 1]>::try_from(fds) else {
            let how = format!("it handed over {count} descriptors for host memory, wanted 1");
            return Err(Fault::PeerLost { peer, how }.into());
        };
        Ok(Opened::Host(Pinned::import(&self.context, fd, span, peer)?))
    }

    /// Refuses a key that claims more than the allocation has, as far as the driver tells.
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
                    wanted: format!("an allocation of at least {} bytes", head + bytes),
                    seen: format!("one of rank {peer} with {} bytes", extent.bytes),
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
