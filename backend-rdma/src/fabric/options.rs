//! How a fabric behaves.

use std::net::IpAddr;
use std::time::Duration;

use super::card::CARDS_MAX;
use crate::device::DeviceChoice;
use crate::error::Error;

/// How a signal gets to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SignalBy {
    /// A message, whose completion at the peer proves that the bytes before it have come; the peer
    /// stores the flag, and may sleep until then.
    Message,
    /// A write of the flag itself. Only right where the receiving card says that it writes in order
    /// (`ibv_query_qp_data_in_order`); the peer has to look at its flags from time to time.
    Write,
}

/// How memory of devices is registered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum DeviceMemory {
    /// In whichever way works, dma-bufs first.
    #[default]
    Any,
    /// By dma-buf: the kernel and the card's driver must take them.
    DmaBuf,
    /// By its address: a kernel module must know that, such as `nvidia_peermem`.
    PeerMemory,
    /// Not at all.
    Refused,
}

/// How a fabric behaves; the defaults are what the backend does best.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which device.
    pub device: DeviceChoice,
    /// Further devices, at most three: large puts and gets are cut over these too, on their first active
    /// port and best address.
    pub further_devices: Vec<DeviceChoice>,
    /// Queue pairs to each peer and device, 1 to 8. With more than one of them, or several devices,
    /// puts and gets of at least two stripes are cut over all; at most 8 are used.
    pub queue_pairs: u32,
    /// Which bytes of a large put or get go over which queue pair: stripes of so many bytes of the
    /// peer's memory take turns. A power of two, at least 4096.
    pub stripe_bytes: u64,
    /// Which port, from 1; by default the first active one.
    pub port: Option<u8>,
    /// Which address of the port; by default the best: RoCE version 2, IPv4, never link-local.
    pub gid_index: Option<u32>,
    /// The address at which peers reach this host by TCP to connect; by default that of the port where
    /// it has one, else that of the way to the default gateway.
    pub service_ip: Option<IpAddr>,
    /// How signals get to peers; by default, what the receiving card allows.
    pub signal: Option<SignalBy>,
    /// How memory of devices is registered.
    pub device_memory: DeviceMemory,
    /// InfiniBand's service level, 0 to 15.
    pub service_level: u8,
    /// The traffic class of packets: with RoCE, the type of service of the IP header.
    pub traffic_class: u8,
    /// How long a packet waits for its acknowledgement: 4.096 µs × 2 to the power of this, 1 to 31.
    pub timeout_exponent: u8,
    /// How often it is then sent again, 0 to 7. With the default timeout of 67 ms and the default of 7
    /// a peer that does not answer is lost after half a second, with some cards after two.
    pub retries: u8,
    /// How long posted requests may stay incomplete before the peer counts as lost. A card that answers
    /// keeps asking for ever where the peer has no place for a message.
    pub stall_timeout: Duration,
    /// Ops that a queue holds.
    pub queue_ops: usize,
    /// Most requests that one queue pair has posted at a time; the device may have fewer.
    pub requests_max: u32,
    /// Most bytes that are under way to one peer, give or take a piece.
    pub posted_bytes_max: u64,
    /// The largest piece of a put or get in bytes; the port may have less.
    pub piece_bytes_max: u64,
    /// Puts of at most so many bytes travel inside their request; the device may have less.
    pub inline_bytes: u32,
    /// Places for messages from all peers together; the device may have fewer.
    pub receives: u32,
    /// How long `park` looks before it sleeps, without giving way to anybody: for ranks that have a
    /// core to themselves. By default it yields while it looks, for 100 µs, and up to 1 ms where that
    /// makes waits shorter.
    pub spin: Option<Duration>,
    /// How long the queue pairs to a peer may take to open once an op has named it; nobody is blocked
    /// meanwhile.
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
    pub(super) fn check(&self) -> Result<(), Error> {
        let wrong = |field, seen: u64, wanted| {
            Err(Error::argument(format!("{field} is {seen}, wanted {wanted}")))
        };
        match self {
            Self { service_level: 16.., .. } => {
                wrong("service_level", self.service_level.into(), "0 to 15")
            }
            Self { timeout_exponent: 0 | 32.., .. } => {
                wrong("timeout_exponent", self.timeout_exponent.into(), "1 to 31")
            }
            Self { further_devices, .. } if further_devices.len() >= CARDS_MAX => {
                let seen = further_devices.len() as u64;
                wrong("number of further_devices", seen, "at most 3")
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
        assert_eq!(text(retries), "retries is 8, wanted 0 to 7");
        let timeout = Options { timeout_exponent: 0, ..Options::default() };
        assert_eq!(text(timeout), "timeout_exponent is 0, wanted 1 to 31");
        let pairs = Options { queue_pairs: 9, ..Options::default() };
        assert_eq!(text(pairs), "queue_pairs is 9, wanted 1 to 8");
        let odd = Options { stripe_bytes: 5000, ..Options::default() };
        assert_eq!(text(odd), "stripe_bytes is 5000, wanted a power of two from 4096");
        let many = Options { further_devices: vec![DeviceChoice::Any; 4], ..Options::default() };
        assert_eq!(text(many), "number of further_devices is 4, wanted at most 3");
        let few = Options { receives: 7, ..Options::default() };
        assert_eq!(text(few), "receives is 7, wanted at least 8");
    }
}
