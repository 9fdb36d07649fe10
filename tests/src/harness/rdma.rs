//! Opens the RDMA backend.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_rdma::{DeviceChoice, Error, Fabric, Options};

use peerlane_conformance::Harness;

/// Environment variable with the names of the devices to test, separated by commas.
const DEVICES: &str = "PEERLANE_TEST_RDMA_DEVICES";

/// Runs checks on the RDMA backend with any options; ranks take the devices in turn.
#[derive(Clone, Debug)]
pub struct RdmaHarness {
    name: String,
    options: Options,
    nics: usize,
}

impl RdmaHarness {
    /// Creates a harness with a name of its own.
    pub fn new(name: impl Into<String>, options: Options) -> Self {
        // The ranks are threads of one process. A device's network may belong to another namespace.
        let service_ip = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        // A packet that is late on a busy machine is not lost.
        let options = Options { service_ip, timeout_exponent: 17, ..options };
        Self { name: name.into(), options, nics: 1 }
    }

    /// Sets how many NICs each rank uses, if the machine has them. Every rank uses the same ones,
    /// in another order.
    pub fn nics(self, nics: usize) -> Self {
        Self { nics, ..self }
    }

    /// Returns the device of a rank; any device if the environment names none.
    pub fn device(rank: Rank) -> DeviceChoice {
        let names = std::env::var(DEVICES).unwrap_or_default();
        let names: Vec<&str> = names.split(',').filter(|name| !name.is_empty()).collect();
        match names.len() {
            0 => DeviceChoice::Any,
            count => DeviceChoice::Name(names[rank.index() % count].to_owned()),
        }
    }
}

impl Harness for RdmaHarness {
    type Fabric = Fabric;

    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, rank: Rank, ranks: usize) -> Result<Fabric, Error> {
        let next = |step: usize| Self::device(Rank(rank.0 + step as u32));
        let further = (1..self.nics).map(next).filter(|device| *device != DeviceChoice::Any);
        let (device, further_devices) = (next(0), further.collect());
        let options = Options { device, further_devices, ..self.options.clone() };
        Fabric::open_with(rank, ranks, options)
    }

    // If the environment names devices, they must be tested.
    fn required(&self) -> bool {
        std::env::var_os(DEVICES).is_some()
    }

    // Software RDMA is slow, most of all in a virtual machine.
    fn timeout(&self) -> Duration {
        Duration::from_secs(30)
    }
}
