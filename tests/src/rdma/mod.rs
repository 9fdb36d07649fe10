//! The harness of the RDMA backend.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use peerlane_hal::Rank;
use peerlane_rdma::{DeviceChoice, Error, Fabric, Options};

use crate::harness::Harness;

/// The devices of the tests, by name, with commas in between.
const DEVICES: &str = "PEERLANE_TEST_RDMA_DEVICES";

/// The RDMA backend with any options; ranks take the devices in turn.
#[derive(Clone, Debug)]
pub struct RdmaHarness {
    name: String,
    options: Options,
    cards: usize,
}

impl RdmaHarness {
    /// The RDMA backend under a name of its own.
    pub fn new(name: impl Into<String>, options: Options) -> Self {
        // The ranks are threads of one process; the network of a device may be another namespace's.
        let service_ip = Some(IpAddr::V4(Ipv4Addr::LOCALHOST));
        Self { name: name.into(), options: Options { service_ip, ..options }, cards: 1 }
    }

    /// With so many cards a rank, if the machine has them: the same ones, in another order for each.
    pub fn cards(self, cards: usize) -> Self {
        Self { cards, ..self }
    }

    /// The device of a rank; any where the environment names none.
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
        let further = (1..self.cards).map(next).filter(|device| *device != DeviceChoice::Any);
        let (device, further_devices) = (next(0), further.collect());
        let options = Options { device, further_devices, ..self.options.clone() };
        Fabric::open_with(rank, ranks, options)
    }

    // Whoever names devices wants them tested.
    fn required(&self) -> bool {
        std::env::var_os(DEVICES).is_some()
    }

    // Software that plays a card is slow, in a virtual machine above all.
    fn timeout(&self) -> Duration {
        Duration::from_secs(30)
    }
}
