//! Implements the fabric of the host backend, which connects the ranks of a machine through shared
//! memory.
//!
//! An address names the host, the process and the rank's doorbell, a small region on which parked
//! ranks sleep. `connect` imports that doorbell.

use std::sync::{Arc, Mutex, PoisonError};

use super::cache::streaming_bytes_min;
use super::cores::Mover;
use super::doorbell::{CoreNeighbours, Doorbell, Patience, Peers};
use super::engine::Engine;
use super::error::Error;
use super::key::{Access, Key};
use super::memory::{Local, Memory};
use super::options::Options;
use super::share::QueuedEngines;
use peerlane_hal::wire::{Reader, Truncated, Writer};
use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, Generation, Link,
    LinkKind, PeerMemory as _, Rank, Region as _, Role,
};
use peerlane_toolkit::handover::{Host, ProcessToken, Server};
use peerlane_toolkit::mapping::LengthGuard;

const ADDRESS_MAGIC: [u8; 4] = *b"PLRA";
const ADDRESS_VERSION: u16 = 3;

/// A fabric that connects the ranks of one machine through shared memory.
#[derive(Debug)]
pub struct Fabric {
    ranks: usize,
    options: Options,
    memory: Memory,
    doorbell: Arc<Doorbell>,
    /// What the engines of this rank have learned from their waits.
    patience: Arc<Patience>,
    /// The number of engines of this rank that have ops in their queues.
    queued_engines: Arc<QueuedEngines>,
    /// Keeps the doorbell's memory registered, so that peers can import it.
    doorbell_region: Local,
    _server: Server,
}

impl Fabric {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks.
    ///
    /// # Errors
    /// Returns [`Error::Argument`] if there is no such rank, and [`Error::System`] if the system
    /// has no shared memory.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
    }

    /// Opens the fabric of rank `rank` in a group of `ranks` ranks with the given options.
    ///
    /// # Errors
    /// As [`open`](Self::open), and [`Error::Argument`] for options that contradict each other.
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        check_rank(rank, ranks)?;
        options.check()?;

        let server = Server::enter().map_err(Error::of_handover(rank, 0))?;
        let doorbell_region = Local::allocate(rank, Doorbell::BYTES, Role::Flags)?;
        let doorbell = Doorbell::of(doorbell_region.share());
        let peers = Arc::new(Peers(Mutex::new(vec![None; ranks])));
        let memory = Memory { rank, peers };
        let queued_engines = Arc::default();
        let patience = Arc::new(Patience::new(Mover::new(options.bind, ranks)));

        Ok(Self {
            ranks,
            options,
            memory,
            doorbell,
            patience,
            queued_engines,
            doorbell_region,
            _server: server,
        })
    }

    /// Opens a second fabric of this rank, with its own options and connections. The two share one
    /// doorbell: an engine of one that parks is also woken by signals that arrive over the other.
    ///
    /// # Errors
    /// As [`open_with`](Self::open_with).
    pub fn second(&self, options: Options) -> Result<Self, Error> {
        options.check()?;
        self.with_doorbell(self.memory.rank, self.ranks, options)
    }

    fn with_doorbell(&self, rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        let server = Server::enter().map_err(Error::of_handover(rank, 0))?;
        let peers = Arc::new(Peers(Mutex::new(vec![None; ranks])));
        let memory = Memory { rank, peers };

        // Both fabrics of the rank have the doorbell, each with a registration of its own.
        let base = self.doorbell_region.base();
        // SAFETY: the doorbell keeps the memory allocated, and it is accessed as atomics only.
        let doorbell_region = unsafe { memory.register(base, Doorbell::BYTES, Role::Flags) }?;
        let doorbell = Arc::clone(&self.doorbell);
        let patience = Arc::clone(&self.patience);
        let queued_engines = Arc::clone(&self.queued_engines);

        Ok(Self {
            ranks,
            options,
            memory,
            doorbell,
            patience,
            queued_engines,
            doorbell_region,
            _server: server,
        })
    }

    fn parse_address(&self, peer: Rank, address: &[u8]) -> Result<Key, Error> {
        let malformed = |what: String| Err(Error::Address { peer, what });
        let short = |truncated: Truncated| Error::Address { peer, what: truncated.to_string() };

        let mut reader = Reader::new(address);
        let magic = reader.array("magic").map_err(short)?;
        if magic != ADDRESS_MAGIC {
            return malformed(format!(
                "the address starts with the bytes {magic:02x?}, expected {ADDRESS_MAGIC:02x?}"
            ));
        }

        let version = reader.u16("version").map_err(short)?;
        if version != ADDRESS_VERSION {
            return malformed(format!(
                "the address has version {version}, expected {ADDRESS_VERSION}; run the same \
                 Peerlane on all ranks"
            ));
        }

        let backend = BackendId(reader.u16("backend").map_err(short)?);
        if backend != BackendId::HOST {
            return malformed(format!(
                "the address was written by the backend {backend}, expected {}",
                BackendId::HOST
            ));
        }

        let rank = Rank(reader.u32("rank").map_err(short)?);
        if rank != peer {
            return malformed(format!("the address belongs to rank {rank}, expected rank {peer}"));
        }
        let host = Host::read(&mut reader).map_err(short)?;
        let process = ProcessToken(reader.array("process token").map_err(short)?);
        let generation = reader.u64("doorbell").map(Generation).map_err(short)?;
        if !reader.rest().is_empty() {
            return malformed(format!(
                "the address has {} bytes after its last field, expected none",
                reader.rest().len()
            ));
        }
        Host::own().check_reaches(self.rank(), peer, &host)?;
        let (role, access, bytes) = (
            Role::Flags,
            Access::Shared { head: 0, guard: LengthGuard::Allocated },
            Doorbell::BYTES,
        );
        Ok(Key { process, generation, rank, role, access, bytes })
    }
}

fn check_rank(rank: Rank, ranks: usize) -> Result<(), Error> {
    if rank.index() >= ranks {
        return Err(Error::Argument(format!(
            "rank {rank} is out of range: expected a rank below {ranks}, the number of ranks"
        )));
    }
    Ok(())
}

// SAFETY: the rank is constant, and memory and engines uphold their contracts.
unsafe impl FabricTrait for Fabric {
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
        let start = Writer::new()
            .bytes(&ADDRESS_MAGIC)
            .u16(ADDRESS_VERSION)
            .u16(BackendId::HOST.0)
            .u32(self.memory.rank.0);
        Host::own()
            .write(start)
            .bytes(&ProcessToken::own().0)
            .u64(self.doorbell_region.generation().0)
            .finish()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        if peer.index() >= self.ranks {
            return Err(Error::Argument(format!(
                "peer {peer} is out of range: expected a rank below {}, the number of ranks",
                self.ranks
            )));
        }

        let key = self.parse_address(peer, address)?;
        let doorbell = match super::memory::open(peer, &key, deadline) {
            Err(Error::Freed { .. }) => {
                let how = "the peer has closed the fabric with this address".to_owned();
                return Err(Error::PeerLost { peer, how });
            }
            opened => Doorbell::of(opened?),
        };
        self.memory.peers.insert(peer, doorbell);
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.peers.doorbell(peer)?;
        let kind = if peer == self.rank() { LinkKind::Local } else { LinkKind::SharedMemory };
        Some(Link { peer, kind, bytes_per_second: None })
    }

    fn moves(&self) -> u64 {
        self.patience.mover.lock().unwrap_or_else(PoisonError::into_inner).moves()
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        check_rank(rank, ranks)?;
        self.with_doorbell(rank, ranks, self.options)
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        Ok(vec![EngineOffer::new(self.options.caps)])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine, Error> {
        requirements.select(&self.offers()?).map_err(Error::Argument)?;
        let neighbours =
            CoreNeighbours::new(self.memory.peers.doorbells().into_iter(), &self.doorbell);
        self.patience
            .mover
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .bind(neighbours.position());

        let streaming_bytes_min =
            self.options.streaming_bytes_min.unwrap_or_else(|| streaming_bytes_min(self.ranks));

        Ok(Engine::new(
            self.options,
            streaming_bytes_min,
            Arc::clone(&self.doorbell),
            (neighbours, Arc::clone(&self.patience)),
            Arc::clone(&self.queued_engines),
            requirements.priority,
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use std::time::Duration;

    use super::*;
    use crate::options::Bind;
    use crate::share::Share;
    use peerlane_hal::{At, CopyEngine, Flag, Op, Priority, Ticket};

    /// Returns how many polls a copy of 32 MiB takes, while an engine of another priority has an op
    /// or none has.
    fn polls(other: Option<Priority>) -> usize {
        const BYTES: u64 = 32 << 20;
        let deadline = Deadline::after(Duration::from_secs(20));
        let mut fabric = Fabric::open(Rank(0), 1).unwrap();
        let address = fabric.address();
        fabric.connect(Rank(0), &address, deadline).unwrap();

        let flags = fabric.memory().allocate(8, Role::Flags).unwrap();
        let [from, to] = [0, 1].map(|_| fabric.memory().allocate(BYTES, Role::Data).unwrap());
        let key = fabric.memory().export(&to).unwrap();
        let to = fabric.memory().import(Rank(0), &key, deadline).unwrap();

        let mut copies = fabric.engine(Default::default()).unwrap();
        let priority = other.unwrap_or_default();
        let requirements = EngineRequirements { priority, ..Default::default() };
        let mut waits = fabric.engine(requirements).unwrap();
        if other.is_some() {
            let wait = Op::Wait { flag: Flag { region: &flags, word: 0 }, value: 1, reset: false };
            // SAFETY: the region lives longer than the engine.
            unsafe { waits.submit(&[wait]) }.unwrap();
        }

        let (dst, src) = (At { region: &to, offset: 0 }, At { region: &from, offset: 0 });
        // SAFETY: as above, and nobody else uses the memory.
        let ticket = unsafe { copies.submit(&[Op::Put { dst, src, bytes: BYTES }]) }.unwrap();
        assert_eq!(ticket, Ticket(1));
        let polls = (1..).find(|_| copies.completed().unwrap() == ticket).unwrap();

        // What is released has no ops any more.
        waits.release().unwrap();
        assert_eq!(copies.share(), Share::Whole);
        polls
    }

    #[test]
    fn polls_of_a_long_copy_are_short_while_engines_of_no_lower_priority_have_ops() {
        assert_eq!(polls(None), 5);
        assert_eq!(polls(Some(Priority::Low)), 5);
        assert!(polls(Some(Priority::Normal)) >= 16);

        // Each poll copies 64 KiB, and the submission and the first poll do too.
        assert_eq!(polls(Some(Priority::High)), 511);
    }

    #[test]
    fn a_rank_that_waits_on_the_core_of_another_one_moves_unless_it_must_not() {
        if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
            eprintln!("not covered: a move to another core: this process may use only one");
            return;
        }

        let deadline = Deadline::after(Duration::from_secs(20));
        for bind in [Bind::Auto, Bind::None] {
            let mut fabrics = [Rank(0), Rank(1)].map(|rank| {
                Fabric::open_with(rank, 2, Options { bind, ..Default::default() }).unwrap()
            });
            let addresses = fabrics.each_ref().map(FabricTrait::address);
            for fabric in &mut fabrics {
                for (peer, address) in [Rank(0), Rank(1)].into_iter().zip(&addresses) {
                    fabric.connect(peer, address, deadline).unwrap();
                }
            }

            // The scheduler may move this thread between the two calls, so that it is alone on its
            // core.
            let mut waits = 0..1000;
            let is_crowded = |fabrics: &[Fabric; 2]| {
                let [mut waiting, _here] =
                    fabrics.each_ref().map(|fabric| fabric.engine(Default::default()).unwrap());
                waiting.park(Duration::ZERO).unwrap();
                fabrics[0].moves() > 0
            };
            assert_eq!(waits.any(|_| is_crowded(&fabrics)), bind == Bind::Auto, "{bind:?}");
        }
    }

    #[test]
    fn a_park_on_one_fabric_is_ended_by_a_signal_over_the_second() {
        let late = Duration::from_secs(20);
        let mut first = Fabric::open(Rank(0), 1).unwrap();
        let mut second = first.second(Options::default()).unwrap();
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
