//! The way to reach peers of one host: each other's memory, over NVLink or PCI Express.
//!
//! An address names host, process and device of a rank, and carries the key of a few flags. To
//! connect is to import them: what would stand against a gather (another host, access between the
//! devices turned off, a process that is gone) shows here. Where two devices do not reach each other,
//! the memory that their ranks allocate from then on lies on the host, unless the options say
//! `strict`. Before the first engine is made, a signal
//! is written to each peer's flags and read back, because not every driver writes to a peer's address
//! from a stream.

mod address;
mod way;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use peerlane_hal::mechanics::handover::Server;
use peerlane_hal::{
    BackendId, Deadline, ErrorKind, Fabric as FabricTrait, Link, LinkKind, PeerMemory, Rank,
    RemoteKey as _, Role,
};

use address::{Address, Host, Place};
use way::Way;

use crate::device::Context;
use crate::engine::{Engine, EngineSetup, OwnCopy, SignalBy, probe_signal};
use crate::error::Error;
use crate::memory::{Local, Memory, Owner, Remote};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// How a fabric behaves; the defaults are what the backend does best.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Which of the visible devices.
    pub device: u32,
    /// Whether a way that is only second best is refused: memory without a descriptor where the
    /// device says that it has them, and memory of the host between devices that do not reach each
    /// other.
    pub strict: bool,
    /// How signals get to peers; by default, what works.
    pub signal: Option<SignalBy>,
    /// How a rank's own bytes get to their place in its own memory.
    pub own_copy: OwnCopy,
}

/// A connected peer.
#[derive(Debug)]
struct Peer {
    place: Place,
    kind: LinkKind,
    /// Its flags, where its device is reached; the one with this rank's number is for trials.
    flags: Option<Remote>,
}

/// The GPUs of one host, as one rank.
#[derive(Debug)]
pub struct Fabric {
    ranks: usize,
    options: Options,
    context: Arc<Context>,
    memory: Memory,
    peers: Vec<Option<Peer>>,
    /// Where peers try their signals.
    _flags: Local,
    address: Vec<u8>,
    _server: Server,
}

impl Fabric {
    /// Opens the fabric as `rank` of `ranks` on the device with that ordinal. Several ranks may have
    /// one device, in one process or in several.
    ///
    /// # Errors
    /// [`Unavailable`](ErrorKind::Unavailable): no driver, no device, or one that others hold;
    /// [`InvalidArgument`](ErrorKind::InvalidArgument): no such rank or device.
    pub fn open(rank: Rank, ranks: usize, device: u32) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options { device, ..Options::default() })
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        if rank.index() >= ranks {
            return Err(Error::Argument(format!(
                "rank is {rank}, wanted less than the number of ranks, {ranks}"
            )));
        }
        let context = Context::open(options.device)?;
        let server = Server::enter().map_err(Error::of_handover(rank, 0))?;
        let memory = Memory::open(&context, rank, ranks, options.strict)?;
        let flags = memory.allocate(ranks as u64 * WORD_BYTES, Role::Flags)?;
        let probe = memory.export(&flags)?;
        let place = Place::of(&context.found);
        let address = Address { rank, host: Host::own(), place, probe }.encode();
        let peers = (0..ranks).map(|_| None).collect();
        Ok(Self { ranks, options, context, memory, peers, _flags: flags, address, _server: server })
    }

    /// The device on which this rank is.
    pub fn device(&self) -> &crate::Device {
        &self.context.found
    }

    /// How signals get to the peers that are connected: as the options say, or what a trial shows,
    /// which is made once for each pair of devices.
    fn signal(&self) -> Result<SignalBy, Error> {
        if let Some(signal) = self.options.signal {
            return Ok(signal);
        }
        let word = u64::from(self.memory.rank().0) * WORD_BYTES;
        for (rank, peer) in self.connected() {
            // Streams write to memory of their own device, and of the host, with every driver.
            let Some(flags) = peer.flags.as_ref().filter(|_| peer.kind != LinkKind::Own) else {
                continue;
            };
            let pair = (self.context.found.uuid, peer.place.uuid);
            let known = lock(&TRIED).get(&pair).copied();
            let signal = match known {
                Some(signal) => signal,
                None => {
                    let signal = probe_signal(&self.context, flags.address() + word)
                        .map_err(|error| unreachable_peer(rank, &peer.place, error))?;
                    lock(&TRIED).insert(pair, signal);
                    signal
                }
            };
            // What works to the last peer works to all.
            if signal == SignalBy::Copy {
                return Ok(signal);
            }
        }
        Ok(SignalBy::StreamWrite)
    }

    fn connected(&self) -> impl Iterator<Item = (Rank, &Peer)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(index, peer)| Some((Rank::at(index), peer.as_ref()?)))
    }
}

/// How signals work between two devices, by their UUIDs.
static TRIED: LazyLock<Mutex<HashMap<Pair, SignalBy>>> = LazyLock::new(Mutex::default);

type Pair = ([u8; 16], [u8; 16]);

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The driver's own words, and between whom.
fn unreachable_peer(peer: Rank, place: &Place, error: Error) -> Error {
    match error {
        Error::Driver { result, kind, .. } if kind != ErrorKind::DeviceLost => Error::Unavailable {
            text: format!("cannot reach rank {peer} on {}: {result}", place.text()),
            result: Some(result),
        },
        error => error,
    }
}

impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BackendId::CUDA
    }

    fn rank(&self) -> Rank {
        self.memory.rank()
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        if peer.index() >= self.ranks {
            return Err(Error::Argument(format!(
                "peer is {peer}, wanted less than the number of ranks, {}",
                self.ranks
            )));
        }
        let Address { host, place, probe, .. } = Address::decode(peer, address)?;
        let own = Host::own();
        if host.boot != own.boot {
            return Err(Error::Mismatch(format!(
                "rank {peer} runs on host {}, rank {} on {}: memory of a GPU is shared inside one \
                 host only",
                host.name,
                self.rank(),
                own.name
            )));
        }
        let wanted = self.ranks as u64 * WORD_BYTES;
        if probe.region_bytes() != wanted || probe.role != Role::Flags {
            return Err(Error::Mismatch(format!(
                "rank {peer} opened the fabric for {} ranks, rank {} for {}",
                probe.region_bytes() / WORD_BYTES,
                self.rank(),
                self.ranks
            )));
        }
        let Way { kind, flags, apart } = self.way_to(peer, &place, &probe, deadline)?;
        let owner = Owner { process: probe.process, device: probe.device };
        self.memory.connect(peer, owner, apart);
        self.peers[peer.index()] = Some(Peer { place, kind, flags });
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        let mut kind = self.peers.get(peer.index())?.as_ref()?.kind;
        if self.memory.is_on_host(peer) {
            kind = LinkKind::HostStaged;
        }
        // The driver names no rate; only a measurement does.
        Some(Link { peer, kind, bytes_per_second: None })
    }

    fn engine(&mut self) -> Result<Engine, Error> {
        let signal = self.signal()?;
        let peers = self.connected().map(|(rank, _)| rank).collect();
        let own_copy = self.options.own_copy;
        let staged = self.connected().any(|(_, peer)| peer.kind == LinkKind::HostStaged);
        let setup = EngineSetup { rank: self.rank(), peers, signal, own_copy, staged };
        Engine::open(Arc::clone(&self.context), setup)
    }
}
