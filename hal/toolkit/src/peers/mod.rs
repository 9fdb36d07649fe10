//! Implements a fabric for the GPUs of one host, whose ranks access each other's memory directly.
//!
//! A backend implements [`PeerDevice`] and names its `Fabric` by [`Fabric`].
//!
//! The address of a rank names its host, process and device, and holds the key of a few flags.
//! `connect` imports these flags. An obstacle to an all-gather (another host, disabled access
//! between the devices, a process that has ended) is found there. Where two devices do not reach
//! each other, the memory that their ranks allocate from then on is host memory, unless the options
//! are `strict`. Both ranks of a pair must decide alike, because each allocates the memory that the
//! other one imports; so one working direction is not enough.
//!
//! Before the first engine is created, a signal is written to the flags of each peer and read back,
//! because not every driver writes to a peer's address from a stream.

mod address;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use address::Address;

pub use crate::device::{ConnectedPeer, EngineRequest, PeerDevice, PeerOptions, Reachability};
pub use address::DeviceId;

use crate::Fault;
use crate::handover::{Host, Server};
use crate::regions::{Key, Local, Memory, Owner, Remote, Vendor};
use crate::streams::SignalBy;
use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, FusedLimits, Link,
    LinkKind, PeerMemory as _, Rank, RemoteKey as _, Role,
};

const WORD_BYTES: u64 = size_of::<u64>() as u64;

#[derive(Debug)]
struct Peer<D: PeerDevice> {
    device: DeviceId,
    kind: LinkKind,
    bytes_per_second: Option<f64>,
    /// Flags of the peer for a test of signals, or `None` if this rank's device cannot reach the
    /// peer. Each rank writes the flag with its own number.
    flags: Option<Remote<D>>,
}

/// A fabric that connects the GPUs of one host and serves one rank.
#[derive(Debug)]
pub struct Fabric<D: PeerDevice> {
    ranks: usize,
    options: D::Options,
    context: Arc<D>,
    memory: Memory<D>,
    peers: Vec<Option<Peer<D>>>,
    /// The offers of the device, once they were asked for, because a backend may look at all
    /// devices for them.
    offers: OnceLock<Vec<EngineOffer>>,
    _flags: Local<D>,
    address: Vec<u8>,
    _server: Server,
}

impl<D: PeerDevice> Fabric<D> {
    /// Opens the fabric of rank `rank` in a group of `ranks` ranks on the device with the ordinal
    /// `device`. Several ranks may share one device, in one process or in several.
    ///
    /// # Errors
    /// Returns an error of kind [`Unavailable`](peerlane_hal::ErrorKind::Unavailable) without a
    /// driver or a device or if another process holds the device, and
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if there is no such rank or
    /// device.
    pub fn open(rank: Rank, ranks: usize, device: u32) -> Result<Self, D::Error> {
        Self::open_with(rank, ranks, D::Options::on_device(device))
    }

    /// Opens the fabric of rank `rank` in a group of `ranks` ranks with the given options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(rank: Rank, ranks: usize, options: D::Options) -> Result<Self, D::Error> {
        check_rank(rank, ranks)?;
        let context = D::open(&options)?;
        Self::on_context(rank, ranks, options, context)
    }

    fn on_context(
        rank: Rank,
        ranks: usize,
        options: D::Options,
        context: Arc<D>,
    ) -> Result<Self, D::Error> {
        let server = Server::enter().map_err(Fault::of_handover(rank, 0))?;
        let on_host = context.needs_host_flags(&options);
        let memory = Memory::open(&context, rank, ranks, options.is_strict(), on_host)?;
        let flags = memory.allocate(ranks as u64 * WORD_BYTES, Role::Flags)?;
        let probe = memory.export(&flags)?;
        let device = context.device_id();
        let address = Address { rank, host: Host::own().clone(), device, probe }.encode();
        let peers = (0..ranks).map(|_| None).collect();
        let (_flags, _server) = (flags, server);
        let offers = OnceLock::new();
        Ok(Self { ranks, options, context, memory, peers, offers, _flags, address, _server })
    }

    /// Returns a description of this rank's device.
    pub fn device(&self) -> &D::DeviceInfo {
        self.context.info()
    }

    fn signal(&self) -> Result<SignalBy, D::Error> {
        if let Some(signal) = self.options.signal() {
            return Ok(signal);
        }
        // No stream writes such flags, and a stream need not be able to.
        if self.context.needs_host_flags(&self.options) {
            return Ok(SignalBy::Copy);
        }
        let word = u64::from(self.memory.rank().0) * WORD_BYTES;
        for (rank, peer) in self.connected() {
            // Every driver writes from a stream to memory of its own device and of the host.
            let Some(flags) = peer.flags.as_ref().filter(|_| peer.kind != LinkKind::Local) else {
                continue;
            };
            let pair = (self.backend(), self.context.uuid(), peer.device.uuid);
            let signal = cached_probe(pair, || {
                let flag = flags.device_ptr() + word;
                let probed = self.context.try_signal(flag);
                probed.map_err(|error| unreachable_peer::<D>(rank, &peer.device, error))
            })?;
            // Copies work to every peer, so no further probe is needed.
            if signal == SignalBy::Copy {
                return Ok(signal);
            }
        }
        Ok(SignalBy::StreamWrite)
    }

    fn known_offers(&self) -> Result<&[EngineOffer], D::Error> {
        if let Some(known) = self.offers.get() {
            return Ok(known);
        }

        let mut found = D::offers(&self.context, &self.options)?;
        found.retain_mut(|offer| offer.fused.as_mut().is_none_or(|limits| self.can_fuse(limits)));
        Ok(self.offers.get_or_init(|| found))
    }

    /// Returns whether a launch reaches all ranks, and notes whether ranks share a device.
    fn can_fuse(&self, limits: &mut FusedLimits) -> bool {
        let peers = || self.connected().filter(|(rank, _)| *rank != self.rank());
        limits.shares_device = peers().any(|(_, peer)| peer.kind == LinkKind::Local);

        let is_direct = |(_, peer): (_, &Peer<D>)| peer.kind != LinkKind::HostStaged;
        self.ranks <= limits.ranks_max && peers().all(is_direct)
    }

    fn connected(&self) -> impl Iterator<Item = (Rank, &Peer<D>)> {
        let peers = self.peers.iter().enumerate();
        peers.filter_map(|(index, peer)| Some((Rank::at(index), peer.as_ref()?)))
    }
}

fn check_rank(rank: Rank, ranks: usize) -> Result<(), Fault> {
    if rank.index() >= ranks {
        let text = format!(
            "rank {rank} is out of range: expected a rank below {ranks}, the number of ranks"
        );
        return Err(Fault::Argument(text));
    }
    Ok(())
}

fn unreachable_peer<D: PeerDevice>(peer: Rank, device: &DeviceId, error: D::Error) -> D::Error {
    D::unreachable(error, format!("cannot access the memory of rank {peer} on {}", device.label()))
}

// SAFETY: the rank is constant, and memory and engines uphold their contracts.
unsafe impl<D: PeerDevice> FabricTrait for Fabric<D> {
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
            let text = format!(
                "peer {peer} is out of range: expected a rank below {}, the number of ranks",
                self.ranks
            );
            return Err(Fault::Argument(text).into());
        }

        let Address { host, device, probe, .. } = Address::decode(peer, address)?;
        Host::own().check_reaches(self.rank(), peer, &host)?;
        let expected = self.ranks as u64 * WORD_BYTES;
        if probe.region_bytes() != expected || probe.role != Role::Flags {
            let text = format!(
                "number of ranks differs: rank {peer} opened the fabric for {} ranks, rank {} for \
                 {}; pass the same number on all ranks",
                probe.region_bytes() / WORD_BYTES,
                self.rank(),
                self.ranks
            );
            return Err(Fault::Mismatch(text).into());
        }

        let found = self.access_to(peer, &device, &probe, deadline)?;
        let PeerAccess { kind, bytes_per_second, flags, unreachable } = found;
        let owner = Owner { process: probe.process, device: probe.device };
        self.memory.connect(peer, owner, unreachable);
        let known = Peer { device, kind, bytes_per_second, flags };
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

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, D::Error> {
        check_rank(rank, ranks)?;
        Self::on_context(rank, ranks, self.options.clone(), Arc::clone(&self.context))
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, D::Error> {
        self.known_offers().map(<[_]>::to_vec)
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<D::Engine, D::Error> {
        let offer = requirements.select(self.known_offers()?).map_err(Fault::Argument)?;
        let peers = self.connected().map(|(rank, peer)| ConnectedPeer {
            peer: rank,
            device: peer.device.uuid,
            kind: peer.kind,
        });
        let (rank, peers, signal) = (self.rank(), peers.collect(), self.signal()?);
        let request = EngineRequest { rank, peers, signal, kind: offer.kind(), requirements };
        D::engine(&self.context, &self.options, request)
    }
}

#[derive(Debug)]
struct PeerAccess<D: PeerDevice> {
    kind: LinkKind,
    bytes_per_second: Option<f64>,
    flags: Option<Remote<D>>,
    unreachable: Option<String>,
}

impl<D: PeerDevice> Fabric<D> {
    fn access_to(
        &self,
        peer: Rank,
        device: &DeviceId,
        probe: &Key<D::Vendor>,
        deadline: Deadline,
    ) -> Result<PeerAccess<D>, D::Error> {
        let import = || self.memory.open_key(peer, probe, deadline);
        let direct = |kind, bytes_per_second, flags| {
            Ok(PeerAccess { kind, bytes_per_second, flags: Some(flags), unreachable: None })
        };
        let reachability = match device.uuid == self.context.uuid() {
            true => Reachability::Direct { kind: LinkKind::Local, bytes_per_second: None },
            false => self.context.reachability(device)?,
        };
        match reachability {
            Reachability::Direct { kind, bytes_per_second } => {
                let flags = import().map_err(|error| refused::<D>(peer, device, error))?;
                direct(kind, bytes_per_second, flags)
            }
            // The import shows whether there is access; the link that carries the bytes stays
            // unknown.
            Reachability::NotVisible => match import() {
                Ok(flags) => direct(LinkKind::Pcie, None, flags),
                Err(error) if D::is_no_access(&error) => Ok(self.via_host(
                    peer,
                    device,
                    "the driver refuses to map the memory of one device for the other",
                )?),
                Err(error) => Err(refused::<D>(peer, device, error)),
            },
            Reachability::Unreachable(why) => {
                // Nothing is imported, but a process that has ended is detected.
                self.memory
                    .check_alive(peer, probe, deadline)
                    .map_err(|fault| closed(peer, fault))?;
                Ok(self.via_host(peer, device, why)?)
            }
        }
    }

    fn via_host(&self, peer: Rank, device: &DeviceId, why: &str) -> Result<PeerAccess<D>, Fault> {
        let own = self.context.device_id();
        let unreachable = format!(
            "rank {} on {} cannot access the memory of rank {peer} on {}: {why}",
            self.rank(),
            own.label(),
            device.label()
        );

        if self.options.is_strict() {
            return Err(Fault::Unavailable(format!(
                "{unreachable}; the option `strict` forbids copies through host memory: use \
                 devices with peer access, or turn `strict` off"
            )));
        }

        let (kind, bytes_per_second) = (LinkKind::HostStaged, None);

        Ok(PeerAccess { kind, bytes_per_second, flags: None, unreachable: Some(unreachable) })
    }
}

fn closed(peer: Rank, fault: Fault) -> Fault {
    match fault {
        Fault::Freed { .. } => {
            let how = "the peer has closed the fabric with this address".to_owned();
            Fault::PeerLost { peer, how }
        }
        fault => fault,
    }
}

fn refused<D: PeerDevice>(peer: Rank, device: &DeviceId, error: D::Error) -> D::Error {
    match D::fault(&error) {
        Some(fault @ Fault::Freed { .. }) => closed(peer, fault.clone()).into(),
        _ => unreachable_peer::<D>(peer, device, error),
    }
}

/// A backend and the UUIDs of two devices, the key of a cached probe result.
type Pair = (BackendId, [u8; 16], [u8; 16]);

static SIGNAL_PROBES: LazyLock<Mutex<HashMap<Pair, SignalBy>>> = LazyLock::new(Mutex::default);

/// Returns how signals are written between two devices, from a cache or by a probe. Errors are not
/// cached.
///
/// # Errors
/// Returns the error of the probe.
fn cached_probe<E>(
    pair: Pair,
    probe_pair: impl FnOnce() -> Result<SignalBy, E>,
) -> Result<SignalBy, E> {
    let lock = || SIGNAL_PROBES.lock().unwrap_or_else(PoisonError::into_inner);
    let known = lock().get(&pair).copied();
    // Not under the lock, since a probe may take long.
    match known {
        Some(signal) => Ok(signal),
        None => {
            let signal = probe_pair()?;
            lock().insert(pair, signal);
            Ok(signal)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trial_that_showed_something_is_made_once_for_a_pair() {
        let pair = |other| (BackendId(0x8002), [1; 16], [other; 16]);
        assert_eq!(cached_probe(pair(2), || Err("nothing arrives")), Err("nothing arrives"));
        assert_eq!(cached_probe(pair(2), || Ok::<_, &str>(SignalBy::Copy)), Ok(SignalBy::Copy));
        assert_eq!(
            cached_probe(pair(2), || -> Result<_, &str> { panic!("known") }),
            Ok(SignalBy::Copy)
        );
        let stream = cached_probe(pair(3), || Ok::<_, &str>(SignalBy::StreamWrite));
        assert_eq!(stream, Ok(SignalBy::StreamWrite));
    }
}
