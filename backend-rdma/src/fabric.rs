//! The way to reach peers: one port of one card.
//!
//! An address names a small TCP service of the rank. To connect is to open a connection to it and to
//! say the token of the address; over this connection a rank asks whether memory still lives when it
//! imports a key, and opens the other end of an engine's queue pairs, one a peer, when an op first
//! names that peer. So engines may be made at any time and in any order, only those ranks are connected
//! that talk to each other, and a rank that ends takes the other ends of its queue pairs with it.

mod address;
mod alarm;
mod arrivals;
mod control;
mod ends;
mod options;
mod question;
mod service;

use std::net::IpAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use peerlane_hal::{BackendId, Deadline, Fabric as FabricTrait, Link, LinkKind, Rank};

use address::Address;
use service::Service;

use crate::device::{self, Device, LinkLayer, Place};
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::Memory;
use crate::sys::Domain;

pub(crate) use alarm::Alarm;
pub(crate) use arrivals::{Arrivals, MESSAGE_BYTES, Message, NUMBERS_MAX, STEP_MAX};
pub(crate) use control::Control;
pub(crate) use ends::{End, receive_from, send_to};
pub use options::{Options, SignalBy};

/// What the fabric, its thread, its memory and its engines have in common.
#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) rank: Rank,
    pub(crate) ranks: usize,
    pub(crate) options: Options,
    pub(crate) place: Place,
    pub(crate) domain: Arc<Domain>,
    pub(crate) arrivals: Arrivals,
    token: [u8; 16],
    lost: OnceLock<Error>,
}

impl Inner {
    fn lose_device(&self, event: String) {
        let place = Arc::clone(&self.place.context.name);
        // Once it is lost, how it was lost first is what counts.
        let _ = self.lost.set(Error::DeviceLost { place, event });
        self.arrivals.wake();
    }

    /// Whether the device still works.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.lost.get().cloned().map_or(Ok(()), Err)
    }
}

/// The same with the thread, which ends with the last of these.
#[derive(Debug)]
pub(crate) struct Shared {
    service: Service,
    pub(crate) inner: Arc<Inner>,
    peers: Mutex<Vec<Option<Arc<Peer>>>>,
}

/// A connected peer.
#[derive(Debug)]
pub(crate) struct Peer {
    /// `None` for oneself.
    pub(crate) control: Option<Arc<Control>>,
}

impl Shared {
    pub(crate) fn rank(&self) -> Rank {
        self.inner.rank
    }

    pub(crate) fn domain(&self) -> &Arc<Domain> {
        &self.inner.domain
    }

    pub(crate) fn arrivals(&self) -> &Arrivals {
        &self.inner.arrivals
    }

    pub(crate) fn peer(&self, peer: Rank) -> Result<Arc<Peer>, Error> {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let found = peers.get(peer.index()).cloned().flatten();
        found.ok_or(Error::NotConnected { peer })
    }

    /// How many peers are connected.
    pub(crate) fn connected(&self) -> usize {
        let peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers.iter().flatten().count()
    }
}

/// A port of an RDMA network card, as one rank.
#[derive(Debug)]
pub struct Fabric {
    memory: Memory,
    address: Vec<u8>,
}

impl Fabric {
    /// Opens the fabric as `rank` of `ranks` on the first device that has an active port.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): no library, no device, no active port, no
    /// address that other hosts reach, or no permission;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): no such rank, port or address.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
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
        options.check()?;
        let place = device::choose(&options.device, options.port, options.gid_index)?;
        if place.limits.max_srq == 0 {
            let name = &place.context.name;
            let text = format!("{name} has no shared receive queues, which this backend needs");
            return Err(Error::Unavailable(text));
        }
        let domain = Arc::new(Domain::open(Arc::clone(&place.context))?);
        let receives = options.receives.min(place.limits.max_srq_wr.max(1).cast_unsigned());
        let room = place.limits.max_cqe.max(2).cast_unsigned();
        let receives = receives.min(room / 2);
        let arrivals = Arrivals::open(&domain, receives, receives)?;
        let mut token = [0; 16];
        rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty())
            .map_err(Error::system("ask for random bytes"))?;
        let ip = service_ip(&options, &place);
        let device = place.context.name.to_string();
        let lost = OnceLock::new();
        let inner = Inner { rank, ranks, options, place, domain, arrivals, token, lost };
        let inner = Arc::new(inner);
        let service = Service::start(&inner, ip)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let (at, host) = (service.at, host.trim().to_owned());
        let ranks = u32::try_from(ranks).unwrap_or(u32::MAX);
        let address = Address { rank, ranks, token, service: at, host, device };
        let peers = Mutex::new(vec![None; inner.ranks]);
        let memory = Memory { shared: Arc::new(Shared { service, inner, peers }) };
        Ok(Self { memory, address: address.encode() })
    }

    /// The device on which this rank is, as it is now.
    ///
    /// # Errors
    /// The device does not answer.
    pub fn device(&self) -> Result<Device, Error> {
        device::describe(&self.inner().place.context)
    }

    /// Where this rank listens for its peers.
    pub fn service(&self) -> std::net::SocketAddr {
        self.memory.shared.service.at
    }

    fn inner(&self) -> &Inner {
        &self.memory.shared.inner
    }
}

/// What peers reach the service by: with RoCE the port's own address.
fn service_ip(options: &Options, place: &Place) -> IpAddr {
    let of_port = (place.link == LinkLayer::Ethernet).then(|| place.gid.ip());
    options.service_ip.or(of_port).or_else(own_ip).unwrap_or(IpAddr::from([127, 0, 0, 1]))
}

/// The address that packets to elsewhere would carry; nothing is sent.
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
            return Err(Error::Argument(format!(
                "peer is {peer}, wanted less than the number of ranks, {ranks}"
            )));
        }
        let address = Address::decode(peer, address)?;
        if address.ranks as usize != ranks {
            return Err(Error::Mismatch(format!(
                "rank {peer} opened the fabric for {} ranks, rank {rank} for {ranks}",
                address.ranks
            )));
        }
        let control = if peer != rank {
            Some(Arc::new(Control::open(rank, &address, deadline)?))
        } else if address.token == token {
            None
        } else {
            return Err(Error::Mismatch(format!(
                "rank {peer} is this one, and the address is of another opening of the fabric"
            )));
        };
        let mut peers = self.memory.shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        peers[peer.index()] = Some(Arc::new(Peer { control }));
        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.shared.peer(peer).ok()?;
        let kind = if peer == self.rank() { LinkKind::Own } else { LinkKind::Rdma };
        let rate = self.inner().place.bytes_per_second.filter(|_| kind == LinkKind::Rdma);
        Some(Link { peer, kind, bytes_per_second: rate })
    }

    fn engine(&mut self) -> Result<Engine, Error> {
        Engine::open(&self.memory.shared)
    }
}
