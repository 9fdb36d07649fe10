//! Connects a rank to its peers over a port of a NIC, or over several.
//!
//! An address names a small TCP service of the rank. To connect, a peer opens a connection to the service and sends the token of
//! the address. It uses the connection to ask whether a region still exists when it imports a key, and to open the other end of an
//! engine's queue pairs, one per peer, when an op first names that peer. So engines can be created at any time and in any order,
//! only ranks that communicate are connected, and a rank that ends takes the other ends of its queue pairs with it.

mod address;
mod alarm;
mod arrivals;
mod card;
mod control;
mod ends;
mod options;
mod question;
mod service;
mod streams;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use peerlane_hal::{
    BackendId, Deadline, EngineRequirements, Fabric as FabricTrait, Link, LinkKind, Rank,
};
use peerlane_toolkit::device::Fault;

use address::Address;
use service::Service;

use crate::device::{self, Device, DeviceChoice, LinkLayer, Place};
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::Memory;

pub(crate) use alarm::Alarm;
pub(crate) use arrivals::Arrivals;
pub(crate) use card::{CARDS_MAX, Card};
pub(crate) use control::Control;
pub(crate) use ends::{End, receive_from, send_to};
pub use options::{DeviceMemory, Options, SignalBy};
pub(crate) use question::Opening;
pub(crate) use streams::{
    Immediate, MESSAGE_BYTES, Message, NUMBERS_MAX, STEP_MAX, STRANDS_MAX, Strand,
};

/// The state that the fabric, its service thread, its memory and its engines share.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) rank: Rank,
    pub(crate) ranks: usize,
    pub(crate) options: Options,
    /// The NICs; the first is that of `Options::device` and carries the primary queue pairs.
    pub(crate) cards: Arc<[Card]>,
    pub(crate) arrivals: Arrivals,
    token: [u8; 16],
    lost: OnceLock<Error>,
}

impl Inner {
    /// Returns the port of the first NIC.
    fn place(&self) -> &Place {
        &self.cards[0].place
    }

    fn lose_device(&self, card: usize, event: String) {
        let place = Arc::clone(&self.cards[card].place.context.name);
        // Once it is lost, how it was lost first is what counts.
        let _ = self.lost.set(Error::DeviceLost { place, event });
        self.arrivals.wake();
    }

    /// Returns the number of queue pairs that an engine has to a peer with `peer_cards` NICs.
    pub(crate) fn strands(&self, peer_cards: usize) -> usize {
        let cards = self.cards.len().max(peer_cards);
        (self.options.queue_pairs as usize * cards).min(STRANDS_MAX)
    }

    /// Checks that the device still works.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.lost.get().cloned().map_or(Ok(()), Err)
    }
}

/// The shared state with the service thread, which ends when the last of these is dropped.
#[derive(Debug)]
pub(crate) struct Shared {
    service: Service,
    pub(crate) inner: Arc<Inner>,
    peers: Mutex<Vec<Option<Arc<Peer>>>>,
}

/// The connection to a peer.
#[derive(Debug)]
pub(crate) struct Peer {
    /// `None` for this rank itself.
    pub(crate) control: Option<Arc<Control>>,
}

impl Shared {
    pub(crate) fn rank(&self) -> Rank {
        self.inner.rank
    }

    pub(crate) fn cards(&self) -> &[Card] {
        &self.inner.cards
    }

    pub(crate) fn arrivals(&self) -> &Arrivals {
        &self.inner.arrivals
    }

    pub(crate) fn peer(&self, peer: Rank) -> Result<Arc<Peer>, Error> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = peers.get(peer.index()).cloned().flatten();
        Ok(found.ok_or(Fault::NotConnected { peer })?)
    }

    /// Returns the number of queue pairs that an engine has on one NIC if it uses every connected peer; at least 1.
    pub(crate) fn pairs_max(&self) -> u32 {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let cards = self.inner.cards.len();
        let pairs = peers.iter().flatten().filter_map(|peer| peer.control.as_ref());
        let pairs = pairs.map(|peer| self.inner.strands(peer.cards).div_ceil(cards));
        u32::try_from(pairs.sum::<usize>().max(1)).unwrap_or(u32::MAX)
    }
}

/// Connects a rank to its peers over a port of an RDMA NIC, or over several.
#[derive(Debug)]
pub struct Fabric {
    memory: Memory,
    address: Vec<u8>,
}

impl Fabric {
    /// Opens the fabric as `rank` of `ranks` on the first device that has an active port.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): there is no library, no device, no active port, no
    /// address that other hosts reach, or no permission;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): the rank, port or address does not exist.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
    }

    /// Opens the fabric with options.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        if rank.index() >= ranks {
            return Err(Error::argument(format!(
                "rank is {rank}, expected less than the number of ranks, {ranks}"
            )));
        }
        options.check()?;
        let cards = open_cards(&options)?;
        let arrivals = Arrivals::new(Arc::clone(&cards));
        let mut token = [0; 16];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
            .map_err(Error::system("ask for random bytes"))?;
        let ip = service_ip(&options, &cards[0].place);
        let device: Vec<&str> = cards.iter().map(|card| &*card.place.context.name).collect();
        let device = device.join(" and ");
        let (lost, count) = (OnceLock::new(), cards.len() as u16);
        let inner = Inner { rank, ranks, options, cards, arrivals, token, lost };
        let inner = Arc::new(inner);
        let service = Service::start(&inner, ip)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (at, host) = (service.at, host.trim().to_owned());
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX);
        let address = Address { rank, ranks, token, service: at, cards: count, host, device };
        let peers = Mutex::new(vec![None; inner.ranks]);
        let memory = Memory { shared: Arc::new(Shared { service, inner, peers }) };
        Ok(Self { memory, address: address.encode() })
    }

    /// Returns the first device of this rank, with its current state.
    ///
    /// # Errors
    /// If the device does not answer.
    pub fn device(&self) -> Result<Device, Error> {
        device::describe(&self.inner().place().context)
    }

    /// Returns the address at which this rank listens for its peers.
    pub fn service(&self) -> std::net::SocketAddr {
        self.memory.shared.service.at
    }

    fn inner(&self) -> &Inner {
        &self.memory.shared.inner
    }
}

/// Opens the NICs of the options, in order.
fn open_cards(options: &Options) -> Result<Arc<[Card]>, Error> {
    let open = |device: &DeviceChoice, port, gid_index| {
        Card::open(device::choose(device, port, gid_index)?, options.receives)
    };
    let first = open(&options.device, options.port, options.gid_index);
    let further = options.further_devices.iter().map(|device| open(device, None, None));
    std::iter::once(first).chain(further).collect()
}

/// Returns the address at which peers reach the service: with RoCE, the address of the port.
fn service_ip(options: &Options, place: &Place) -> IpAddr {
    let of_port = (place.link == LinkLayer::Ethernet).then(|| place.gid.ip());
    options.service_ip.or(of_port).or_else(own_ip).unwrap_or(IpAddr::from([127, 0, 0, 1]))
}

/// Returns the source address of packets to other hosts. Sends nothing.
fn own_ip() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).ok()?;
    // Of the range that is kept for documentation.
    socket.connect(("192.0.2.1", 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BackendId::RDMA
    }

    fn rank(&self) -> Rank {
        self.inner().rank
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        let Inner { rank, ranks, token, .. } = *self.inner();
        if peer.index() >= ranks {
            return Err(Error::argument(format!(
                "peer is {peer}, expected less than the number of ranks, {ranks}"
            )));
        }
        let address = Address::decode(peer, address)?;
        if address.ranks as usize != ranks {
            return Err(Error::mismatch(format!(
                "rank {peer} opened the fabric for {} ranks, rank {rank} for {ranks}",
                address.ranks
            )));
        }
        let control = if peer != rank {
            Some(Arc::new(Control::open(rank, &address, deadline)?))
        } else if address.token == token {
            None
        } else {
            return Err(Error::mismatch(format!(
                "rank {peer} is this one, and the address is of another opening of the fabric"
            )));
        };
        let mut peers = self.memory.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers[peer.index()] = Some(Arc::new(Peer { control }));
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.shared.peer(peer).ok()?;
        let kind = if peer == self.rank() { LinkKind::Local } else { LinkKind::Rdma };
        // Of a port that does not say how fast it is, nobody knows what it adds.
        let rates = self.inner().cards.iter().map(|card| card.place.bytes_per_second);
        let rate = rates.sum::<Option<f64>>().filter(|_| kind == LinkKind::Rdma);
        Some(Link { peer, kind, bytes_per_second: rate })
    }

    fn engine(&mut self, _: EngineRequirements) -> Result<Engine, Error> {
        Engine::open(&self.memory.shared)
    }
}
