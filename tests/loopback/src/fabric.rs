//! Connects ranks that are threads or processes of this machine.
//!
//! The address of a rank is the key of a region that lives as long as the fabric. A key names its
//! backend, rank and process, and shows whether it was damaged.

use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, Link, LinkKind,
    PeerMemory, Rank, RemoteKey, Role,
};
use peerlane_toolkit::handover::Server;

use crate::engine::CAPS;
use crate::memory::{Local, Memory, Registration};
use crate::{BACKEND, Engine, Error, Key};

/// The connections of one rank.
#[derive(Debug)]
pub struct Fabric {
    ranks: usize,
    memory: Memory,
    presence: Local,
    /// Hands memory of this process to other ones.
    _server: Server,
}

impl Fabric {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such rank, and the error of a system call.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        if rank.index() >= ranks {
            let text =
                format!("rank is {rank}, expected a rank below {ranks}, the number of ranks");
            return Err(Error::Argument(text));
        }
        let memory = Memory::new(rank, ranks);
        let presence = memory.allocate(8, Role::Flags)?;
        let _server = Server::enter().map_err(Error::of_handover(rank, 0))?;
        Ok(Self { ranks, memory, presence, _server })
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

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        if peer.index() >= self.ranks {
            let text = format!("peer is {peer}, expected a rank below {}", self.ranks);
            return Err(Error::Argument(text));
        }

        let malformed = |what: String| Error::Address { peer, what };
        let key = Key::decode(address).map_err(|error| malformed(error.to_string()))?;
        if key.rank != peer {
            return Err(malformed(format!("it is the address of rank {}", key.rank)));
        }

        // Its memory can be opened only while the peer has its fabric.
        match Registration::open(peer, &key, deadline) {
            Err(Error::Freed { .. }) => {
                let how = "it has closed the fabric with this address".to_owned();
                return Err(Error::PeerLost { peer, how });
            }
            answer => drop(answer?),
        }
        self.memory.connected()[peer.index()] = true;
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        let is_own = peer == self.memory.rank;
        let kind = if is_own { LinkKind::Local } else { LinkKind::SharedMemory };
        self.memory.connected().get(peer.index())?.then_some(Link {
            peer,
            kind,
            bytes_per_second: None,
        })
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open(rank, ranks)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        Ok(vec![EngineOffer::new(CAPS)])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine, Error> {
        requirements.select(&self.offers()?).map_err(Error::Argument)?;
        Ok(Engine::new())
    }
}
