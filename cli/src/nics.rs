//! Defines the options that select network devices, ports, addresses and queue pairs.

use std::net::{IpAddr, Ipv4Addr};

use clap::Args;
use peerlane::open::{Backend, FabricOptions, Survey};
use peerlane::rdma;

use crate::error::{Failure, Result};
use crate::options::first_given;

/// The options that select network devices, and the ports, addresses and queue pairs of RDMA.
#[derive(Args, Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NicOptions {
    /// Use these network devices, such as mlx5_0 for rdma or eth0 for ucx, or mlx5_0+mlx5_1 for one
    /// rank with two devices; the ranks of this machine take the entries of a list in turn
    /// [default: for rdma the first device with an active port, for ucx what UCX selects]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub(crate) device: Vec<String>,
    /// Use this port of the RDMA device, such as 1 (rdma only) [default: the first active port]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    pub(crate) port: Option<u8>,
    /// Use the address with this index in the GID table of the port, such as 3 (rdma only);
    /// `peerlane doctor` shows the table [default: the best address, preferably RoCE v2 over IPv4,
    /// never link-local]
    #[arg(long, value_name = "N")]
    pub(crate) gid_index: Option<u32>,
    /// Set the number of queue pairs for each peer and device, 1 to 8 (rdma only); large messages
    /// are split over all of them [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    pub(crate) queue_pairs: Option<u32>,
}

impl NicOptions {
    /// Checks that `network` has these options, and that this machine has the devices that they
    /// name.
    pub(crate) fn check(&self, network: Backend) -> Result<()> {
        self.check_fits(Some(network.name()))?;
        let devices = Survey::of_network(network).map_err(|reason| {
            Failure::failed(reason).with_advice(match network {
                Backend::Rdma => {
                    "run `peerlane doctor` for details; for tests, create a Soft-RoCE device from a \
                     network interface: `rdma link add rxe0 type rxe netdev eth0`"
                }
                _ => "run `peerlane doctor` to see the backends and devices of this machine",
            })
        })?;

        let names: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
        let requested = self.device.iter().flat_map(|names| names.split('+'));
        match requested.into_iter().find(|name| !names.contains(name)) {
            None => Ok(()),
            Some(name) => {
                let available = names.join(", ");
                Err(Failure::usage(format!(
                    "--device names {name:?}, expected a device of this machine: {available}"
                ))
                .with_advice("run `peerlane doctor` to see what it finds of each device"))
            }
        }
    }

    /// Rejects options that the network of the ranks does not have, given by its name; `None` if
    /// they use no network.
    pub(crate) fn check_fits(&self, network: Option<&str>) -> Result<()> {
        let of_rdma = first_given([
            ("--port", self.port.is_some()),
            ("--gid-index", self.gid_index.is_some()),
            ("--queue-pairs", self.queue_pairs.is_some()),
        ]);
        let of_any = first_given([("--device", !self.device.is_empty())]);

        let (text, backends) = match (network, of_any, of_rdma) {
            (Some("rdma"), ..) | (Some(_), _, None) | (None, None, None) => return Ok(()),
            (Some(network), _, Some(option)) => {
                let text = format!("{option} is an option of rdma, but these ranks use {network}");
                (text, "--backend rdma".to_owned())
            }
            (None, Some(option), _) => (no_network(option), one_of("--backend")),
            (None, None, Some(option)) => (no_network(option), "--backend rdma".to_owned()),
        };
        let advice = format!("use {backends}, or remove the option");
        Err(Failure::usage(text).with_advice(advice))
    }

    /// Sets the options of every network for the rank with this index on its host; `single_host`
    /// says that all ranks are on it.
    pub(crate) fn apply(&self, fabrics: &mut FabricOptions, local_rank: usize, single_host: bool) {
        fabrics.rdma = self.options(local_rank, single_host);
        fabrics.ucx.devices = self.devices(local_rank).map(str::to_owned).collect();
    }

    /// Returns the names of the devices of the rank with this index on its host.
    fn devices(&self, local_rank: usize) -> impl Iterator<Item = &str> {
        let own = local_rank.checked_rem(self.device.len()).map(|index| &self.device[index]);
        own.into_iter().flat_map(|names| names.split('+'))
    }

    pub(crate) fn queue_pairs(&self) -> u32 {
        self.queue_pairs.unwrap_or(rdma::Options::default().queue_pairs)
    }

    fn options(&self, local_rank: usize, single_host: bool) -> rdma::Options {
        let mut names = self.devices(local_rank);
        let named = |name: &str| rdma::DeviceChoice::Name(name.to_owned());
        let defaults = rdma::Options::default();
        rdma::Options {
            device: names.next().map_or(rdma::DeviceChoice::Any, named),
            further_devices: names.map(named).collect(),
            queue_pairs: self.queue_pairs(),
            port: self.port,
            gid_index: self.gid_index,
            // This process may not be part of the network behind the device, for instance in a
            // container.
            service_ip: single_host.then_some(IpAddr::V4(Ipv4Addr::LOCALHOST)),
            ..defaults
        }
    }
}

/// Returns the ways to name a network with an option, such as `--backend rdma or --backend ucx`.
pub(crate) fn one_of(option: &str) -> String {
    Backend::NETWORKS.map(|network| format!("{option} {}", network.name())).join(" or ")
}

fn no_network(option: &str) -> String {
    format!("{option} selects a network device, but these ranks use no network")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_machine_take_the_nics_in_turn() {
        let device = vec!["mlx5_0".to_owned(), "mlx5_1+mlx5_2".to_owned()];
        let nics = NicOptions { device, port: Some(1), gid_index: Some(3), queue_pairs: Some(2) };
        let options = |local_rank| nics.options(local_rank, false);
        let names: Vec<_> = (0..3).map(|local| options(local).device.to_string()).collect();
        assert_eq!(names, [r#""mlx5_0""#, r#""mlx5_1""#, r#""mlx5_0""#]);
        assert_eq!(options(1).further_devices, [rdma::DeviceChoice::Name("mlx5_2".to_owned())]);
        assert_eq!((options(0).further_devices.len(), options(0).queue_pairs), (0, 2));
        let mut fabrics = FabricOptions::default();
        nics.apply(&mut fabrics, 1, false);
        assert_eq!(fabrics.ucx.devices, ["mlx5_1", "mlx5_2"]);
        NicOptions::default().apply(&mut fabrics, 1, false);
        assert_eq!(fabrics.ucx.devices, [""; 0]);
    }

    #[test]
    fn ranks_of_one_machine_use_the_loopback_address() {
        let of = |single_host| NicOptions::default().options(0, single_host);
        assert_eq!(of(false), rdma::Options::default());
        assert_eq!(of(true).service_ip, Some(IpAddr::V4(Ipv4Addr::LOCALHOST)));
    }
}
