//! From a peer's key to its memory.

use std::os::fd::{AsFd, OwnedFd};

use peerlane_hal::mechanics::handover::{self, Claim, ProcessToken};
use peerlane_hal::{BackendId, Deadline, Rank};

use super::handle::Handle;
use super::import::{Allocation, Identity, Import, Opened};
use super::mapped::Mapped;
use super::pinned::Pinned;
use super::registration::Registration;
use super::{Hold, Memory, Remote, borrowed};
use crate::error::Error;
use crate::key::{Key, Reach};
use crate::sys::CUdeviceptr;

impl Memory {
    /// Whether the memory of a key still lives, which nobody imports.
    pub(crate) fn ask(&self, peer: Rank, key: &Key, deadline: Deadline) -> Result<(), Error> {
        let claim = claim(peer, key);
        if key.process == ProcessToken::own() {
            let found = handover::find::<Registration>(&claim);
            return found.map(drop).ok_or(Error::Freed { peer, generation: key.generation.0 });
        }
        let asked = handover::ask(key.process, &claim, deadline);
        asked.map(drop).map_err(Error::of_handover(peer, key.generation.0))
    }

    /// Imports a region of a peer that need not be connected.
    pub(crate) fn open_key(
        &self,
        peer: Rank,
        key: &Key,
        deadline: Deadline,
    ) -> Result<Remote, Error> {
        let (role, bytes) = (key.role, key.bytes);
        let claim = claim(peer, key);
        if key.process == ProcessToken::own() {
            let found = handover::find::<Registration>(&claim).filter(|found| found.bytes == bytes);
            let Some(registration) = found else {
                return Err(Error::Freed { peer, generation: key.generation.0 });
            };
            let address = registration.allow(&self.context)?;
            let pinned = registration.host().is_some();
            let hold = Hold::SameProcess { _registration: registration };
            return Ok(Remote { peer, role, address, bytes, pinned, _hold: hold });
        }
        if let Reach::Private(why) = key.reach {
            let why = why.text().to_owned();
            return Err(Error::PrivateMemory { peer, why });
        }
        let refused = Error::of_handover(peer, key.generation.0);
        let fds = handover::ask(key.process, &claim, deadline).map_err(refused)?;
        let _current = self.context.enter_relaxed()?;
        let identity = |allocation| {
            let (process, device) = (key.process, self.context.device);
            Identity { process, allocation, device }
        };
        let (head, import) = match &key.reach {
            Reach::Nothing | Reach::Private(_) => {
                let (address, bytes, pinned, _hold) = (0, 0, false, Hold::Nothing);
                return Ok(Remote { peer, role, address, bytes, pinned, _hold });
            }
            Reach::Segments { head, segments } => {
                let identity = identity(Allocation::Registration(key.generation));
                let open = || self.map_segments(peer, segments, &fds);
                (*head, Import::share(identity, open)?)
            }
            Reach::Ipc { head, handle } => {
                let identity = identity(Allocation::Ipc(*handle));
                let import = Import::share(identity, || Opened::ipc(&self.context, *handle))?;
                self.check_extent(peer, import.address(), *head, bytes)?;
                (*head, import)
            }
            Reach::Host { head } => {
                let identity = identity(Allocation::Registration(key.generation));
                (0, Import::share(identity, || self.map_host(peer, fds, (*head, bytes)))?)
            }
        };
        let address = import.address() + head;
        let (pinned, _hold) =
            (matches!(key.reach, Reach::Host { .. }), Hold::OtherProcess { _import: import });
        Ok(Remote { peer, role, address, bytes, pinned, _hold })
    }

    fn map_segments(&self, peer: Rank, segments: &[u64], fds: &[OwnedFd]) -> Result<Opened, Error> {
        if fds.len() != segments.len() {
            let (seen, wanted) = (fds.len(), segments.len());
            let how = format!("it handed over {seen} descriptors, its key has {wanted} segments");
            return Err(Error::PeerLost { peer, how });
        }
        let handles: Result<Vec<Handle>, Error> = segments
            .iter()
            .zip(fds)
            .map(|(bytes, fd)| Handle::import(&self.context, fd.as_fd(), *bytes))
            .collect();
        Ok(Opened::Mapped(Mapped::map(&self.context, &handles?)?))
    }

    fn map_host(&self, peer: Rank, fds: Vec<OwnedFd>, span: (u64, u64)) -> Result<Opened, Error> {
        let count = fds.len();
        let Ok([fd]) = <[_; 1]>::try_from(fds) else {
            let how = format!("it handed over {count} descriptors for host memory, wanted 1");
            return Err(Error::PeerLost { peer, how });
        };
        Ok(Opened::Host(Pinned::import(&self.context, fd, span, peer)?))
    }

    /// Refuses a key that claims more than the allocation has, as far as the driver tells.
    fn check_extent(
        &self,
        peer: Rank,
        address: CUdeviceptr,
        head: u64,
        bytes: u64,
    ) -> Result<(), Error> {
        match borrowed::extent(&self.context, address)? {
            Some(extent) if head + bytes > extent.bytes - (address - extent.address) => {
                Err(Error::ForeignKey {
                    wanted: format!("an allocation of at least {} bytes", head + bytes),
                    seen: format!("one of rank {peer} with {} bytes", extent.bytes),
                })
            }
            _ => Ok(()),
        }
    }
}

fn claim(peer: Rank, key: &Key) -> Claim {
    let (generation, role) = (key.generation, key.role);
    Claim { backend: BackendId::CUDA, generation, owner: peer, role }
}
