//! The way to peers of one host: each other's memory, over what connects the devices.
//!
//! A backend says in [`PeerDevice`] what its driver knows of other devices and what its engine is, and
//! names its `Fabric` by this one.
//!
//! An address names host, process and device of a rank, and carries the key of a few flags. To
//! connect is to import them: what would stand against a gather (another host, access between the
//! devices turned off, a process that is gone) shows here. Where two devices do not reach each other,
//! the memory that their ranks allocate from then on lies on the host, unless the options say
//! `strict`. Before the first engine is made, a signal is written to each peer's flags and read back,
//! because not every driver writes to a peer's address from a stream.

mod address;
mod device;
mod signal;
mod way;

use std::sync::Arc;

use address::{Address, Host};
use way::Found;

use crate::device::Fault;
use crate::handover::Server;
use crate::regions::{Local, Memory, Owner, Remote, Vendor};
use crate::streams::SignalBy;
use peerlane_hal::Deadline;
use peerlane_hal::Rank;
use peerlane_hal::{BackendId, RemoteKey as _};
use peerlane_hal::{EngineRequirements, Fabric as FabricTrait, Link, LinkKind};
use peerlane_hal::{PeerMemory as _, Role};

pub use address::DeviceId;
pub use device::{PeerDevice, PeerOptions, Purpose, Reached, Way};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// A connected peer.
#[derive(Debug)]
struct Peer<D: PeerDevice> {
    place: DeviceId,
    kind: LinkKind,
    bytes_per_second: Option<f64>,
    striped_rate: u64,
    /// Its flags, where its device is reached; the one with this rank's number is for trials.
    flags: Option<Remote<D>>,
}

/// The GPUs of one host, as one rank.
#[derive(Debug)]
pub struct Fabric<D: PeerDevice> {
    ranks: usize,
    options: D::Options,
    context: Arc<D>,
    memory: Memory<D>,
    peers: Vec<Option<Peer<D>>>,
    striped_rate: u64,
    /// Where peers try their signals.
    _flags: Local<D>,
    address: Vec<u8>,
    _server: Server,
}

impl<D: PeerDevice> Fabric<D> {
    /// Opens the fabric as `rank` of `ranks` on the device with that ordinal. Several ranks may have
    /// one device, in one process or in several.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): no driver, no device, or one that others hold;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): no such rank or device.
    pub fn open(rank: Rank, ranks: usize, device: u32) -> Result<Self, D::Error> {
        Self::open_with(rank, ranks, D::Options::on_device(device))
    }

    /// The same, with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(rank: Rank, ranks: usize, options: D::Options) -> Result<Self, D::Error> {
        if rank.index() >= ranks {
            let text = format!("rank is {rank}, wanted less than the number of ranks, {ranks}");
            return Err(Fault::Argument(text).into());
        }
        let context = D::open(&options)?;
        let server = Server::enter().map_err(Fault::of_handover(rank, 0))?;
        let on_host = context.wants_flags_on_host(&options);
        let memory = Memory::open(&context, rank, ranks, options.is_strict(), on_host)?;
        let flags = memory.allocate(ranks as u64 * WORD_BYTES, Role::Flags)?;
        let probe = memory.export(&flags)?;
        let (place, striped_rate) = (context.device_id(), context.striped_rate(&options));
        let address = Address { rank, host: Host::own(), place, striped_rate, probe }.encode();
        let peers = (0..ranks).map(|_| None).collect();
        let (_flags, _server) = (flags, server);
        Ok(Self { ranks, options, context, memory, peers, striped_rate, _flags, address, _server })
    }

    /// The device on which this rank is.
    pub fn device(&self) -> &D::Found {
        self.context.found()
    }

    /// How signals get to the peers that are connected: as the options say, or what a trial shows,
    /// which is made once for each pair of devices.
    fn signal(&self) -> Result<SignalBy, D::Error> {
        if let Some(signal) = self.options.signal() {
            return Ok(signal);
        }
        // No stream writes such flags, and one need not be able to.
        if self.context.wants_flags_on_host(&self.options) {
            return Ok(SignalBy::Copy);
        }
        let word = u64::from(self.memory.rank().0) * WORD_BYTES;
        for (rank, peer) in self.connected() {
            // Streams write to memory of their own device, and of the host, with every driver.
            let Some(flags) = peer.flags.as_ref().filter(|_| peer.kind != LinkKind::Own) else {
                continue;
            };
            let pair = (self.backend(), self.context.uuid(), peer.place.uuid);
            let signal = signal::tried(pair, || {
                let flag = flags.device_ptr() + word;
                let tried = self.context.try_signal(flag);
                tried.map_err(|error| unreachable_peer::<D>(rank, &peer.place, error))
            })?;
            // What works to the last peer works to all.
            if signal == SignalBy::Copy {
                return Ok(signal);
            }
        }
        Ok(SignalBy::StreamWrite)
    }

    fn connected(&self) -> impl Iterator<Item = (Rank, &Peer<D>)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(index, peer)| Some((Rank::at(index), peer.as_ref()?)))
    }
}

/// The driver's own words, and between whom.
fn unreachable_peer<D: PeerDevice>(peer: Rank, place: &DeviceId, error: D::Error) -> D::Error {
    D::unreachable(error, format!("cannot reach rank {peer} on {}", place.label()))
}

impl<D: PeerDevice> FabricTrait for Fabric<D> {
    type Error = D::Error;
    type Memory = Memory<D>;
    type Engine = D::Engine;

    fn backend(&self) -> BackendId {
        D::Vendor::BACKEND
    }

    fn rank(&self) -> Rank {
        self.memory.rank()
    }

    fn memory(&self) -> &Memory<D> {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), D::Error> {
        if peer.index() >= self.ranks {
            let text =
                format!("peer is {peer}, wanted less than the number of ranks, {}", self.ranks);
            return Err(Fault::Argument(text).into());
        }
        let Address { host, place, striped_rate, probe, .. } = Address::decode(peer, address)?;
        let own = Host::own();
        if host.boot != own.boot {
            let text = format!(
                "rank {peer} runs on host {}, rank {} on {}: memory of a GPU is shared inside one \
                 host only",
                host.name,
                self.rank(),
                own.name
            );
            return Err(Fault::Mismatch(text).into());
        }
        let wanted = self.ranks as u64 * WORD_BYTES;
        if probe.region_bytes() != wanted || probe.role != Role::Flags {
            let text = format!(
                "rank {peer} opened the fabric for {} ranks, rank {} for {}",
                probe.region_bytes() / WORD_BYTES,
                self.rank(),
                self.ranks
            );
            return Err(Fault::Mismatch(text).into());
        }
        let found = self.way_to(peer, &place, &probe, deadline)?;
        let Found { kind, bytes_per_second, flags, apart } = found;
        let owner = Owner { process: probe.process, device: probe.device };
        self.memory.connect(peer, owner, apart);
        let known = Peer { place, kind, bytes_per_second, striped_rate, flags };
        self.peers[peer.index()] = Some(known);
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        let Peer { kind, bytes_per_second, .. } = self.peers.get(peer.index())?.as_ref()?;
        if self.memory.is_on_host(peer) {
            return Some(Link { peer, kind: LinkKind::HostStaged, bytes_per_second: None });
        }
        Some(Link { peer, kind: *kind, bytes_per_second: *bytes_per_second })
    }

    fn engine(&mut self, requirements: EngineRequirements) -> Result<D::Engine, D::Error> {
        let peers = self.connected().map(|(rank, peer)| Reached {
            peer: rank,
            device: peer.place.uuid,
            kind: peer.kind,
        });
        let (rank, peers, signal) = (self.rank(), peers.collect(), self.signal()?);
        let rates = self.connected().map(|(_, peer)| peer.striped_rate);
        let striped_rate = rates.chain([self.striped_rate]).min().unwrap_or(0);
        let purpose = Purpose { rank, peers, signal, requirements, striped_rate };
        D::engine(&self.context, &self.options, purpose)
    }
}
