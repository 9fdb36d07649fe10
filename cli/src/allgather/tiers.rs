//! Virtual nodes: the ranks of this machine as if they were on several, with a second fabric of the
//! same backend between them, which can be made as slow as a network.

use std::time::Duration;

use clap::Args;
use peerlane::bootstrap::Bootstrap;
use peerlane::cost::{Link, Links};
use peerlane::hal::Fabric;
use peerlane::topology::Topology;
use peerlane::{Group, GroupOptions};
use peerlane_layers::{ThrottleLayer, Wrapped};

use super::circle::Circle;
use super::options::Options;
use crate::error::{Failure, Result};
use crate::nodes::Nodes;
use crate::rate::{Delay, Rate};

/// The options of nodes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Tiers {
    /// Take the ranks for ranks of several nodes, which a second fabric connects: 2 for so many, 2x4
    /// for 2 nodes of 4 ranks, 2+1+3 for the ranks of each, 0,0,1,1 for the node of each rank
    #[arg(long, value_name = "NODES")]
    pub(crate) nodes: Option<Nodes>,
    /// What a rank sends and gets between nodes at most, such as 2GB/s
    #[arg(long, value_name = "RATE", requires = "nodes")]
    pub(crate) network_bandwidth: Option<Rate>,
    /// How much later everything between nodes takes effect, such as 20us
    #[arg(long, value_name = "TIME", requires = "nodes")]
    pub(crate) network_delay: Option<Delay>,
    /// What a rank sends and gets inside its node at most (host): so that cores which ranks share do
    /// not set the pace
    #[arg(long, value_name = "RATE")]
    pub(crate) local_bandwidth: Option<Rate>,
}

impl Tiers {
    /// The nodes of so many ranks, if they are given.
    ///
    /// # Errors
    /// If they do not fit.
    pub(super) fn topology(&self, ranks: usize) -> Result<Option<Topology>> {
        let topology = self.nodes.as_ref().map(|nodes| nodes.topology(ranks)).transpose();
        topology.map_err(|text| {
            Failure::usage(format!("--nodes: {text}"))
                .with_advice("give the ranks of each node, such as 2+1+3, or another --ranks")
        })
    }

    /// How slow it is made inside of nodes.
    pub(super) fn throttle_inside(&self) -> Option<ThrottleLayer> {
        let layer =
            |Rate(bytes_per_second)| ThrottleLayer { bytes_per_second, delay: Duration::ZERO };
        self.local_bandwidth.map(layer)
    }

    /// What is known of the links of virtual nodes: between them it is as inside, and then slower.
    pub(super) fn between(&self, mut links: Links) -> Links {
        let Some(ThrottleLayer { bytes_per_second: rate, delay }) = self.throttle() else {
            return Links { network: links.local.clone(), ..links };
        };
        let local = &links.local;
        links.network = Link {
            flag_seconds: local.flag_seconds + delay.as_secs_f64(),
            bytes_per_second: local.bytes_per_second.min(rate),
            engine_bytes_per_second: local.engine_bytes_per_second.min(rate),
            send_bytes_per_second: local.send_bytes_per_second.min(rate),
            receive_bytes_per_second: local.receive_bytes_per_second.min(rate),
            // A wire, which nobody's processor is busy with.
            by_processor: false,
            ..local.clone()
        };
        links
    }

    fn throttle(&self) -> Option<ThrottleLayer> {
        if self.network_bandwidth.is_none() && self.network_delay.is_none() {
            return None;
        }
        Some(ThrottleLayer {
            bytes_per_second: self.network_bandwidth.map_or(f64::INFINITY, |Rate(rate)| rate),
            delay: self.network_delay.map_or(Duration::ZERO, |Delay(delay)| delay),
        })
    }
}

/// Opens the group over the fabric `local`, and over what `network` opens if there are several nodes.
/// Collective.
///
/// # Errors
/// That of the group.
pub(super) fn open<F: Fabric, N: Fabric + 'static>(
    options: &Options,
    circle: &Circle,
    local: F,
    network: impl FnOnce() -> Result<N>,
) -> Result<Group<F>> {
    let group = GroupOptions::default().timeout(options.timeout).strict(options.strict);
    let circle = circle.clone();
    let Some(topology) = options.tiers.topology(circle.ranks())? else {
        return Ok(group.open(circle, local)?);
    };
    let has_network = topology.nodes() > 1;
    let group = group.topology(topology);
    Ok(match options.tiers.throttle() {
        _ if !has_network => group.open(circle, local)?,
        None => group.open_tiers(circle, local, network()?)?,
        Some(layer) => group.open_tiers(circle, local, Wrapped::new(network()?, layer))?,
    })
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    #[test]
    fn what_does_not_fit_names_the_option() {
        let refusal = |line: &str| parse(line).unwrap().tiers.topology(4).unwrap_err();
        insta::assert_snapshot!(refusal("--nodes 2+1"), @"
        error: --nodes: 2+1 is 3 ranks on 2 nodes, not 4
         help: give the ranks of each node, such as 2+1+3, or another --ranks
        ");
        insta::assert_snapshot!(refusal("--nodes 5"), @"
        error: --nodes: 5 nodes are too many for 4 ranks
         help: give the ranks of each node, such as 2+1+3, or another --ranks
        ");
        assert!(parse("--nodes 0").is_err());
        assert!(parse("--network-delay 20us").unwrap_err().contains("--nodes"));
        assert_eq!(parse("").unwrap().tiers.topology(4), Ok(None));
        let topology = parse("--nodes 2").unwrap().tiers.topology(5).unwrap().unwrap();
        assert_eq!(topology.notation(), "3+2");
    }

    #[test]
    fn a_throttled_network_is_predicted_as_such() {
        let known = Links::default();
        let of = |line: &str| parse(line).unwrap().tiers.between(known.clone()).network;
        assert_eq!(of("--nodes 2"), known.local);
        let slow = of("--nodes 2 --network-bandwidth 1GB/s --network-delay 20us");
        assert_eq!((slow.bytes_per_second, slow.receive_bytes_per_second), (1e9, 1e9));
        assert!((slow.flag_seconds - known.local.flag_seconds - 20e-6).abs() < 1e-12);
    }
}
