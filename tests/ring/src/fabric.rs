//! Connects ranks that are threads of this process, each with a device.
//!
//! The address of a rank is the key of a registration that lives as long as the fabric. A key names its backend and rank, and
//! shows whether it was damaged.

use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, Link, LinkKind,
    PeerMemory, Rank, RemoteKey, Role,
};

use crate::engine::CAPS;
use crate::memory::{Local, Memory, Registration};
use crate::model::Device;
use crate::{BACKEND, Engine, Error, Key};

/// The connections of one rank.
#[derive(Debug)]
pub struct Fabric {
    memory: Memory,
    presence: Local,
}

impl Fabric {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks, on the device with the number of the rank.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such rank, [`Error::Unavailable`] if there is no such device.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        let device = Device::open(rank.0).map_err(|error| {
            Error::Unavailable(format!("cannot open device {rank}: {error}; use fewer ranks"))
        })?;
        Self::open_on(device, rank, ranks)
    }

    fn open_on(device: Device, rank: Rank, ranks: usize) -> Result<Self, Error> {
        if rank.index() >= ranks {
            let text =
                format!("rank is {rank}, expected a rank below {ranks}, the number of ranks");
            return Err(Error::Argument(text));
        }
        let memory = Memory { rank, device, connected: vec![false; ranks] };
        let presence = memory.allocate(8, Role::Flags)?;
        Ok(Self { memory, presence })
    }
}

// SAFETY: the rank is constant, and memory and engines uphold their contracts.
unsafe impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BACKEND
    }

    fn rank(&self) -> Rank {
        self.memory.rank
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.presence.key().encode()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], _deadline: Deadline) -> Result<(), Error> {
        let Some(is_connected) = self.memory.connected.get_mut(peer.index()) else {
            return Err(Error::Argument(format!("peer is {peer}, expected a rank of the group")));
        };
        let malformed = |what: String| Error::Address { peer, what };
        let key = Key::decode(address).map_err(|error| malformed(error.to_string()))?;
        if key.rank != peer {
            return Err(malformed(format!("it is the address of rank {}", key.rank)));
        }
        if Registration::find(&key).is_none() {
            let how = "no fabric of this process has the address".to_owned();
            return Err(Error::PeerLost { peer, how });
        }
        *is_connected = true;
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        let is_own = peer == self.memory.rank;
        let kind = if is_own { LinkKind::Local } else { LinkKind::Other("interconnect") };
        let is_connected = *self.memory.connected.get(peer.index())?;
        is_connected.then_some(Link { peer, kind, bytes_per_second: None })
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_on(self.memory.device, rank, ranks)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        Ok(vec![EngineOffer::new(CAPS)])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine, Error> {
        requirements.select(&self.offers()?).map_err(Error::Argument)?;
        Engine::new(self.memory.device)
    }
}
