//! Defines the options with which an RDMA fabric is opened, such as its NICs and timeouts.

use std::net::IpAddr;
use std::time::Duration;

use crate::device::DeviceChoice;
use crate::error::Error;

pub(crate) const NICS_MAX: usize = 4;

/// The method by which an engine signals a flag of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignalBy {
    /// Sends a message, after which the peer stores the flag. The completion of the message at the peer
    /// proves that the data before it has arrived. The peer can sleep until then.
    Message,
    /// Writes the flag directly into the peer's memory. This is correct only if the receiving NIC writes in
    /// order (`ibv_query_qp_data_in_order`), and the peer must poll its flags.
    Write,
}

/// The method by which device memory, such as that of a GPU, is registered with a NIC.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceMemory {
    /// Tries every method of registering device memory, dma-bufs first.
    #[default]
    Any,
    /// Registers device memory as a dma-buf, which the kernel and the NIC's driver must support.
    DmaBuf,
    /// Registers device memory by its address, which needs a kernel module such as `nvidia_peermem`.
    PeerMemory,
    /// Refuses to register device memory.
    Refused,
}

/// The options with which an RDMA fabric is opened. The defaults suit most machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The RDMA device that this rank uses.
    pub device: DeviceChoice,
    /// Up to three further RDMA devices, over which large puts and gets are striped as well. On each, the
    /// first active port and the best address are used.
    pub further_devices: Vec<DeviceChoice>,
    /// The number of queue pairs per peer and device, 1 to 8. With several queue pairs or devices, puts and
    /// gets of at least two stripes are striped over all of them, at most 8.
    pub queue_pairs: u32,
    /// The size of a stripe in bytes, a power of two of at least 4096. Stripes of the peer's memory go over
    /// the queue pairs in turn.
    pub stripe_bytes: u64,
    /// The port number on the first device, from 1; by default the first active port.
    pub port: Option<u8>,
    /// The index of the port's address in its GID table; by default that of the best address. The best
    /// address is RoCE v2 over IPv4 and never link-local.
    pub gid_index: Option<u32>,
    /// The IP address at which this rank listens for TCP connections of its peers, an address of this host that
    /// they reach. By default it is that of the RDMA port, or of the route to the default gateway if the port has
    /// none of this host. [`Fabric::service`](crate::Fabric::service) returns it.
    pub service_ip: Option<IpAddr>,
    /// The method by which flags of peers are signalled; by default the one that the receiving NIC supports.
    pub signal: Option<SignalBy>,
    /// The method by which device memory is registered with the NICs.
    pub device_memory: DeviceMemory,
    /// The InfiniBand service level of packets, 0 to 15.
    pub service_level: u8,
    /// The traffic class of packets; with RoCE, the type of service in the IP header.
    pub traffic_class: u8,
    /// The exponent of the acknowledgement timeout, 1 to 31. The timeout is 4.096 µs × 2 to the power of
    /// this.
    pub timeout_exponent: u8,
    /// The number of times that a NIC retransmits a packet that is not acknowledged, 0 to 7. With the default
    /// timeout of 67 ms and 7 retries, a peer that does not answer is lost after half a second; with some
    /// NICs after two.
    pub retries: u8,
    /// The time after which a peer that makes no progress counts as lost. Without it, a NIC would retry
    /// without a limit while the peer has no receive buffer.
    pub stall_timeout: Duration,
    /// The maximum number of ops in an engine's queue.
    pub queue_ops: usize,
    /// The maximum number of posted work requests per queue pair; the device may support fewer.
    pub requests_max: u32,
    /// The maximum number of bytes in flight to one peer, which the last posted part of a copy may exceed.
    pub posted_bytes_max: u64,
    /// The largest part of a put or get in one work request, in bytes; the port may support less.
    pub piece_bytes_max: u64,
    /// The largest put in bytes whose data is posted inline; the device may support less.
    pub inline_bytes: u32,
    /// The number of receive buffers for messages of all peers; the device may support fewer.
    pub receives: u32,
    /// The time for which `park` polls before it sleeps, without yielding the processor. Set it for ranks
    /// with a core of their own. By default `park` yields while it polls, for 100 µs, or up to 1 ms if that
    /// makes waits shorter.
    pub spin: Option<Duration>,
    /// The time limit for opening the queue pairs to a peer. Opening does not block other peers.
    pub open_timeout: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Any,
            further_devices: Vec::new(),
            queue_pairs: 1,
            stripe_bytes: 64 << 10,
            port: None,
            gid_index: None,
            service_ip: None,
            signal: None,
            device_memory: DeviceMemory::Any,
            service_level: 0,
            traffic_class: 0,
            timeout_exponent: 14,
            retries: 7,
            stall_timeout: Duration::from_secs(60),
            queue_ops: 4096,
            requests_max: 512,
            posted_bytes_max: 8 << 20,
            piece_bytes_max: 1 << 20,
            inline_bytes: 220,
            receives: 1024,
            spin: None,
            open_timeout: Duration::from_secs(10),
        }
    }
}

impl Options {
    pub(crate) fn check(&self) -> Result<(), Error> {
        let wrong = |field, found: u64, expected| {
            Err(Error::argument(format!("{field} is {found}, expected {expected}")))
        };
        match self {
            Self { service_level: 16.., .. } => {
                wrong("service_level", self.service_level.into(), "0 to 15")
            }
            Self { timeout_exponent: 0 | 32.., .. } => {
                wrong("timeout_exponent", self.timeout_exponent.into(), "1 to 31")
            }
            Self { further_devices, .. } if further_devices.len() >= NICS_MAX => {
                let found = further_devices.len() as u64;
                wrong("number of further_devices", found, "at most 3")
            }
            Self { queue_pairs: 0 | 9.., .. } => {
                wrong("queue_pairs", self.queue_pairs.into(), "1 to 8")
            }
            Self { stripe_bytes, .. }
                if *stripe_bytes < 4096 || !stripe_bytes.is_power_of_two() =>
            {
                wrong("stripe_bytes", *stripe_bytes, "a power of two from 4096")
            }
            Self { retries: 8.., .. } => wrong("retries", self.retries.into(), "0 to 7"),
            Self { queue_ops: 0, .. } => wrong("queue_ops", 0, "at least 1"),
            Self { requests_max: 0..8, .. } => {
                wrong("requests_max", self.requests_max.into(), "at least 8")
            }
            Self { posted_bytes_max: 0, .. } => wrong("posted_bytes_max", 0, "at least 1"),
            Self { piece_bytes_max: 0, .. } => wrong("piece_bytes_max", 0, "at least 1"),
            Self { receives: 0..8, .. } => wrong("receives", self.receives.into(), "at least 8"),
            Self { service_ip: Some(ip), .. } if ip.is_unspecified() => Err(Error::argument(
                format!("service_ip is {ip}, expected one address of this host that peers reach"),
            )),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_out_of_range_are_named() {
        Options::default().check().unwrap();
        let text = |options: Options| options.check().unwrap_err().to_string();
        let retries = Options { retries: 8, ..Options::default() };
        assert_eq!(text(retries), "retries is 8, expected 0 to 7");
        let timeout = Options { timeout_exponent: 0, ..Options::default() };
        assert_eq!(text(timeout), "timeout_exponent is 0, expected 1 to 31");
        let pairs = Options { queue_pairs: 9, ..Options::default() };
        assert_eq!(text(pairs), "queue_pairs is 9, expected 1 to 8");
        let odd = Options { stripe_bytes: 5000, ..Options::default() };
        assert_eq!(text(odd), "stripe_bytes is 5000, expected a power of two from 4096");
        let many = Options { further_devices: vec![DeviceChoice::Any; 4], ..Options::default() };
        assert_eq!(text(many), "number of further_devices is 4, expected at most 3");
        let any = Options { service_ip: Some([0; 4].into()), ..Options::default() };
        assert_eq!(
            text(any),
            "service_ip is 0.0.0.0, expected one address of this host that peers reach"
        );
        let few = Options { receives: 7, ..Options::default() };
        assert_eq!(text(few), "receives is 7, expected at least 8");
    }
}
