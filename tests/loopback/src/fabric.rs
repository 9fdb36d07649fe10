//! Connects ranks that are threads of this process.
//!
//! An address names the backend, the rank, and a registration that lives as long as the fabric.

use peerlane_hal::wire::{Reader, Truncated, Writer};
use peerlane_hal::{
    BackendId, Deadline, EngineRequirements, Fabric as FabricTrait, Generation, Link, LinkKind,
    Rank, Role,
};

use crate::memory::{Local, Memory, Registration};
use crate::{BACKEND, Engine, Error};

const MAGIC: [u8; 4] = *b"PLLB";
const VERSION: u16 = 1;

/// The connections of one rank.
#[derive(Debug)]
pub struct Fabric {
    ranks: usize,
    memory: Memory,
    presence: Local,
}

impl Fabric {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is no such rank.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        if rank.index() >= ranks {
            let text =
                format!("rank is {rank}, expected a rank below {ranks}, the number of ranks");
            return Err(Error::Argument(text));
        }
        let memory = Memory::new(rank, ranks);
        Ok(Self { ranks, memory, presence: Local::allocate(rank, 8, Role::Data)? })
    }
}

fn generation(peer: Rank, address: &[u8]) -> Result<Generation, Error> {
    let malformed = |what: String| Error::Address { peer, what };
    let short = |error: Truncated| malformed(error.to_string());
    let mut reader = Reader::new(address);
    let found = (
        reader.array::<4>("magic").map_err(short)?,
        reader.u16("version").map_err(short)?,
        BackendId(reader.u16("backend").map_err(short)?),
        Rank(reader.u32("rank").map_err(short)?),
    );
    let expected = (MAGIC, VERSION, BACKEND, peer);
    let generation = Generation(reader.u64("generation").map_err(short)?);
    if found != expected || !reader.rest().is_empty() {
        return Err(malformed(format!(
            "magic, version, backend and rank are {found:?} and {} bytes follow, expected {expected:?} and none",
            reader.rest().len()
        )));
    }
    Ok(generation)
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
        let start = Writer::new().bytes(&MAGIC).u16(VERSION).u16(BACKEND.0).u32(self.memory.rank.0);
        start.u64(self.presence.generation().0).finish()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], _deadline: Deadline) -> Result<(), Error> {
        if peer.index() >= self.ranks {
            let text = format!("peer is {peer}, expected a rank below {}", self.ranks);
            return Err(Error::Argument(text));
        }
        let generation = generation(peer, address)?;
        if Registration::find(generation, peer, Role::Data).is_none() {
            let how = "no fabric of this process has the address".to_owned();
            return Err(Error::PeerLost { peer, how });
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

    fn engine(&self, _: EngineRequirements) -> Result<Engine, Error> {
        Ok(Engine::new())
    }
}
