//! The fabric of one machine: every rank reaches every other through shared memory.
//!
//! An address names the process and the rank's bell, a small region that sleepers wait on; to
//! connect is to import that bell.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::engine::{Bell, Crowd, Engine};
use super::error::Error;
use super::key::{Key, Reach};
use super::memory::{Local, Memory};
use peerlane_hal::Caps;
use peerlane_hal::Deadline;
use peerlane_hal::EngineRequirements;
use peerlane_hal::Rank;
use peerlane_hal::Role;
use peerlane_hal::wire::{Reader, Writer};
use peerlane_hal::{BackendId, Generation};
use peerlane_hal::{Fabric as FabricTrait, Link, LinkKind};
use peerlane_toolkit::handover::{ProcessToken, Server};

const ADDRESS_MAGIC: [u8; 4] = *b"PLRA";
const ADDRESS_VERSION: u16 = 1;

/// How engines of a fabric behave; the defaults are what the backend does best.
///
/// Every capability can be switched down, for tests of what an algorithm does without it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// What engines claim and keep to.
    pub caps: Caps,
    /// Ops that a queue holds; at least `caps.slice_ops_max`.
    pub queue_ops: usize,
    /// How long [`park`](peerlane_hal::CopyEngine::park) spins at most before it sleeps; it does not spin
    /// while another rank is awake on its core. By default 100 µs, or 20 µs where ranks share the
    /// core.
    pub spin: Option<Duration>,
    /// Copies of at least so many bytes bypass the cache; by default the measured best.
    pub streaming_bytes_min: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            caps: Caps {
                kind: "processor",
                queued_wait: true,
                polled: true,
                flags_batched: false,
                slice_ops_max: 1024,
                piece_bytes_max: u64::MAX,
                put_align_bytes: 1,
            },
            queue_ops: 4096,
            spin: None,
            streaming_bytes_min: None,
        }
    }
}

impl Options {
    fn check(&self) -> Result<(), Error> {
        let refuse = |text: String| Err(Error::Argument(text));
        let Caps { slice_ops_max, piece_bytes_max, put_align_bytes, .. } = self.caps;
        if slice_ops_max == 0 || piece_bytes_max == 0 || put_align_bytes == 0 {
            return refuse(format!("limits must be at least 1, seen {:?}", self.caps));
        }
        if self.queue_ops < slice_ops_max {
            let queue_ops = self.queue_ops;
            return refuse(format!(
                "queue_ops is {queue_ops}, wanted at least slice_ops_max = {slice_ops_max}"
            ));
        }
        Ok(())
    }
}

/// The bells of the connected peers, shared by a fabric's memory and engines.
#[derive(Debug)]
pub(super) struct Peers(Mutex<Vec<Option<Arc<Bell>>>>);

impl Peers {
    pub(super) fn bell(&self, peer: Rank) -> Option<Arc<Bell>> {
        let bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bells.get(peer.index()).cloned().flatten()
    }

    fn bells(&self) -> Vec<Arc<Bell>> {
        let bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bells.iter().flatten().cloned().collect()
    }

    fn enter(&self, peer: Rank, bell: Arc<Bell>) {
        let mut bells = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        bells[peer.index()] = Some(bell);
    }
}

/// Shared memory of one machine, as one rank.
#[derive(Debug)]
pub struct Fabric {
    ranks: usize,
    options: Options,
    memory: Memory,
    bell: Arc<Bell>,
    /// Keeps the bell importable.
    bell_region: Arc<Local>,
    _server: Server,
}

impl Fabric {
    /// Opens the fabric as `rank` of `ranks`.
    ///
    /// # Errors
    /// If there is no such rank, or the system refuses shared memory.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`open`](Self::open), and for options that contradict each other.
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        if rank.index() >= ranks {
            return Err(Error::Argument(format!(
                "rank is {rank}, wanted less than the number of ranks, {ranks}"
            )));
        }
        options.check()?;
        let server = Server::enter().map_err(Error::of_handover(rank, Generation(0)))?;
        let bell_region = Arc::new(Local::allocate(rank, Bell::BYTES, Role::Flags)?);
        let bell = Bell::of(bell_region.share());
        let peers = Arc::new(Peers(Mutex::new(vec![None; ranks])));
        let memory = Memory { rank, peers };
        Ok(Self { ranks, options, memory, bell, bell_region, _server: server })
    }

    /// Opens a second fabric of this rank, with options of its own and connections to be made. The two
    /// have one bell: whoever parks on an engine of either is woken by signals that come over the
    /// other, too.
    ///
    /// # Errors
    /// As [`open_with`](Self::open_with).
    pub fn beside(&self, options: Options) -> Result<Self, Error> {
        options.check()?;
        let (rank, ranks) = (self.memory.rank, self.ranks);
        let server = Server::enter().map_err(Error::of_handover(rank, Generation(0)))?;
        let peers = Arc::new(Peers(Mutex::new(vec![None; ranks])));
        let memory = Memory { rank, peers };
        let (bell, bell_region) = (Arc::clone(&self.bell), Arc::clone(&self.bell_region));
        Ok(Self { ranks, options, memory, bell, bell_region, _server: server })
    }

    fn parse_address(&self, peer: Rank, address: &[u8]) -> Result<Key, Error> {
        let malformed = |what: String| Err(Error::Address { peer, what });
        let mut reader = Reader::new(address);
        let magic = reader.array("magic").map_err(Error::address(peer))?;
        if magic != ADDRESS_MAGIC {
            return malformed(format!("it starts with {magic:02x?}, wanted {ADDRESS_MAGIC:02x?}"));
        }
        let version = reader.u16("version").map_err(Error::address(peer))?;
        if version != ADDRESS_VERSION {
            return malformed(format!("it has version {version}, wanted {ADDRESS_VERSION}"));
        }
        let backend = BackendId(reader.u16("backend").map_err(Error::address(peer))?);
        if backend != BackendId::HOST {
            return malformed(format!("it is of backend {backend}, wanted {}", BackendId::HOST));
        }
        let rank = Rank(reader.u32("rank").map_err(Error::address(peer))?);
        if rank != peer {
            return malformed(format!("it is of rank {rank}"));
        }
        let process = ProcessToken(reader.array("process token").map_err(Error::address(peer))?);
        let generation = reader.u64("bell").map(Generation).map_err(Error::address(peer))?;
        if !reader.rest().is_empty() {
            return malformed(format!("it has {} bytes too many", reader.rest().len()));
        }
        let (role, reach, bytes) = (Role::Flags, Reach::Shared { head: 0 }, Bell::BYTES);
        Ok(Key { process, generation, rank, role, reach, bytes })
    }
}

impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BackendId::HOST
    }

    fn rank(&self) -> Rank {
        self.memory.rank
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        Writer::new()
            .bytes(&ADDRESS_MAGIC)
            .u16(ADDRESS_VERSION)
            .u16(BackendId::HOST.0)
            .u32(self.memory.rank.0)
            .bytes(&ProcessToken::own().0)
            .u64(self.bell_region.generation().0)
            .finish()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        if peer.index() >= self.ranks {
            return Err(Error::Argument(format!(
                "peer is {peer}, wanted less than the number of ranks, {}",
                self.ranks
            )));
        }
        let key = self.parse_address(peer, address)?;
        let bell = match super::memory::open(peer, &key, deadline) {
            Err(Error::Freed { .. }) => {
                let how = "the process at its address has closed this fabric".to_owned();
                return Err(Error::PeerLost { peer, how });
            }
            opened => Bell::of(opened?),
        };
        self.memory.peers.enter(peer, bell);
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.peers.bell(peer)?;
        let kind = if peer == self.rank() { LinkKind::Own } else { LinkKind::SharedMemory };
        Some(Link { peer, kind, bytes_per_second: None })
    }

    fn engine(&mut self, _: EngineRequirements) -> Result<Engine, Error> {
        let crowd = Crowd::new(self.memory.peers.bells().into_iter(), &self.bell);
        Ok(Engine::new(self.options, Arc::clone(&self.bell), crowd))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use peerlane_hal::{CopyEngine, Flag, Op};
    use peerlane_hal::{PeerMemory, Region};

    #[test]
    fn who_parks_on_one_fabric_is_woken_over_the_one_beside_it() {
        let late = Duration::from_secs(20);
        let mut first = Fabric::open(Rank(0), 1).unwrap();
        let mut second = first.beside(Options::default()).unwrap();
        for fabric in [&mut first, &mut second] {
            let address = fabric.address();
            fabric.connect(Rank(0), &address, Deadline::after(late)).unwrap();
        }
        let flags = first.memory().allocate(8, Role::Flags).unwrap();
        // SAFETY: the region outlives its second registration, and only engines touch the flags.
        let again = unsafe { second.memory().register(flags.base(), 8, Role::Flags) }.unwrap();
        let key = second.memory().export(&again).unwrap();
        let alias = second.memory().import(Rank(0), &key, Deadline::after(late)).unwrap();
        let (mut parked, mut other) =
            (first.engine(Default::default()).unwrap(), second.engine(Default::default()).unwrap());
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                let signal = Op::Signal { flag: Flag { region: &alias, word: 0 }, value: 1 };
                // SAFETY: the region lives, and this engine is the flag's only writer.
                unsafe { other.submit(&[signal]) }.unwrap();
            });
            while flags.flag_value(0) != Some(1) {
                parked.completed().unwrap();
                parked.park(late).unwrap();
            }
        });
        assert!(start.elapsed() < late / 2, "{:?}", start.elapsed());
    }
}
