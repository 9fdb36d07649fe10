//! Opens the RDMA NICs of a rank, and connects the rank to its peers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use peerlane_hal::{
    BackendId, Deadline, EngineOffer, EngineRequirements, Fabric as FabricTrait, Link, LinkKind,
    Rank,
};

use crate::connection::{Address, Connections, Control, Peer, Resources, Service};
use crate::device::{self, Device, DeviceChoice, LinkLayer, OpenPort};
use crate::engine::Engine;
use crate::error::Error;
use crate::memory::Memory;
use crate::nic::Nic;
use crate::options::Options;

/// Connects a rank to its peers over one or several ports of RDMA NICs.
#[derive(Debug)]
pub struct Fabric {
    memory: Memory,
    address: Vec<u8>,
    /// The addresses of the connected ranks.
    connected: Vec<Option<Vec<u8>>>,
}

impl Fabric {
    /// Opens the fabric as `rank` of `ranks` on the first device that has an active port.
    ///
    /// # Errors
    /// [`Unavailable`](peerlane_hal::ErrorKind::Unavailable): there is no library, no device, no
    /// active port, no address that other hosts reach, or no permission;
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument): the rank, port or address
    /// does not exist.
    pub fn open(rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, Options::default())
    }

    /// Opens the fabric as `rank` of `ranks` with the given options.
    ///
    /// # Errors
    /// Returns the errors of [`open`](Self::open).
    pub fn open_with(rank: Rank, ranks: usize, options: Options) -> Result<Self, Error> {
        if rank.index() >= ranks {
            return Err(Error::argument(format!(
                "rank is {rank}, expected less than the number of ranks, {ranks}"
            )));
        }

        options.check()?;
        let nics = open_nics(&options)?;
        let ips = service_ips(&options, &nics[0].port);
        let devices: Vec<&str> = nics.iter().map(|nic| &*nic.port.context.name).collect();
        let device = devices.join(" and ");
        let resources = Arc::new(Resources::new(rank, ranks, options, nics)?);
        let service = Service::start(&resources, &ips)?;
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let address = Address {
            rank,
            ranks: u32::try_from(ranks).unwrap_or(u32::MAX),
            tokens: resources.tokens,
            service: service.address,
            nics: resources.nics.len() as u16,
            host: host.trim().to_owned(),
            device,
        };

        let memory = Memory { connections: Arc::new(Connections::new(service, resources)) };

        Ok(Self { memory, address: address.encode(), connected: vec![None; ranks] })
    }

    /// Queries the first RDMA device of this rank, with its current state.
    ///
    /// # Errors
    /// Returns an error if the device does not answer.
    pub fn device(&self) -> Result<Device, Error> {
        device::describe(&self.resources().nics[0].port.context)
    }

    /// Returns the TCP address at which this rank listens for its peers.
    pub fn service(&self) -> SocketAddr {
        self.memory.connections.service.address
    }

    fn resources(&self) -> &Resources {
        &self.memory.connections.resources
    }
}

fn open_nics(options: &Options) -> Result<Arc<[Nic]>, Error> {
    let open = |device: &DeviceChoice, port, gid_index| {
        Nic::open(device::choose(device, port, gid_index)?, options.receives)
    };
    let first = open(&options.device, options.port, options.gid_index);
    let further = options.further_devices.iter().map(|device| open(device, None, None));
    std::iter::once(first).chain(further).collect()
}

/// Returns the IP addresses of which the first that this process can listen at is that of the TCP
/// service.
///
/// With RoCE, it is by default the address of the port, which can belong to another network
/// namespace.
fn service_ips(options: &Options, port: &OpenPort) -> Vec<IpAddr> {
    if let Some(ip) = options.service_ip {
        return vec![ip];
    }
    let of_port = (port.link == LinkLayer::Ethernet).then(|| port.gid.ip());
    let loopback = IpAddr::from([127, 0, 0, 1]);
    of_port.into_iter().chain(outgoing_ip()).chain([loopback]).collect()
}

/// Returns the local IP address from which packets to other hosts are sent, without sending any.
fn outgoing_ip() -> Option<IpAddr> {
    let socket = std::net::UdpSocket::bind(("0.0.0.0", 0)).ok()?;
    // The address is of a range that is reserved for documentation.
    socket.connect(("192.0.2.1", 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

// SAFETY: the rank is constant, and memory and engines uphold their contracts.
unsafe impl FabricTrait for Fabric {
    type Error = Error;
    type Memory = Memory;
    type Engine = Engine;

    fn backend(&self) -> BackendId {
        BackendId::RDMA
    }

    fn rank(&self) -> Rank {
        self.resources().rank
    }

    fn memory(&self) -> &Memory {
        &self.memory
    }

    fn address(&self) -> Vec<u8> {
        self.address.clone()
    }

    fn connect(&mut self, peer: Rank, address: &[u8], deadline: Deadline) -> Result<(), Error> {
        let Resources { rank, ranks, tokens, .. } = *self.resources();
        if peer.index() >= ranks {
            return Err(Error::argument(format!(
                "peer is {peer}, expected less than the number of ranks, {ranks}"
            )));
        }

        if self.connected[peer.index()].as_deref() == Some(address) {
            return Ok(());
        }

        let bytes = address;
        let address = Address::decode(peer, address)?;
        if address.ranks as usize != ranks {
            return Err(Error::mismatch(format!(
                "rank {peer} opened the fabric for {} ranks, rank {rank} for {ranks}",
                address.ranks
            )));
        }

        let connected = if peer != rank {
            Peer::Other(Arc::new(Control::open(rank, &address, deadline)?))
        } else if address.tokens == tokens {
            Peer::Own
        } else {
            return Err(Error::mismatch(format!(
                "rank {peer} is this one, and the address is of another fabric that it opened"
            )));
        };

        self.memory.connections.add(peer, connected);
        self.connected[peer.index()] = Some(bytes.to_vec());

        Ok(())
    }

    fn link(&self, peer: Rank) -> Option<Link> {
        self.memory.connections.peer(peer).ok()?;
        let kind = if peer == self.rank() { LinkKind::Local } else { LinkKind::Rdma };
        // The sum is unknown if one port does not report its rate.
        let rates = self.resources().nics.iter().map(|nic| nic.port.bytes_per_second);
        let rate = rates.sum::<Option<f64>>().filter(|_| kind == LinkKind::Rdma);
        Some(Link { peer, kind, bytes_per_second: rate })
    }

    fn reopen(&self, rank: Rank, ranks: usize) -> Result<Self, Error> {
        Self::open_with(rank, ranks, self.resources().options.clone())
    }

    fn offers(&self) -> Result<Vec<EngineOffer>, Error> {
        Ok(vec![EngineOffer::new(Engine::offered_caps(&self.memory.connections)?)])
    }

    fn engine(&self, requirements: EngineRequirements) -> Result<Engine, Error> {
        requirements.select(&self.offers()?).map_err(Error::argument)?;
        Engine::open(&self.memory.connections)
    }
}
