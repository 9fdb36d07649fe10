//! Nodes: the hosts that ranks are on, with network cards between them; or virtual ones, the ranks of
//! this machine as if they were on several. What is between them can be made as slow as is wished for.

use std::time::Duration;

use clap::Args;
use peerlane::cost::{Link, Links};
use peerlane::hal::Fabric;
use peerlane::topology::Topology;
use peerlane::{Group, GroupOptions};
use peerlane_layers::{ThrottleLayer, Wrapped};

use super::options::Options;
use super::place::{Carrier, Network, Place};
use crate::error::{Failure, Result};
use crate::nodes::Nodes;
use crate::ranks::circle::Circle;
use crate::rate::{Delay, Rate};

/// The options of nodes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Tiers {
    /// Which ranks share a node: 2 for so many nodes, 2x4 for 2 nodes of 4 ranks, 2+1+3 for the ranks of
    /// each, 0,0,1,1 for the node of each rank; nodes of one host are virtual [default: those that share
    /// a host, which is a kernel and a network namespace]
    #[arg(long, value_name = "NODES")]
    pub(crate) nodes: Option<Nodes>,
    /// What moves the bytes between nodes: a second fabric of the same backend, or rdma; auto takes rdma
    /// between hosts, and the same between virtual nodes
    #[arg(long, value_enum, default_value_t = Network::Auto, value_name = "BACKEND")]
    pub(crate) network: Network,
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

    /// What is known of the links: between virtual nodes it is as inside; and then all is slower.
    pub(super) fn between(&self, carrier: Carrier, mut links: Links) -> Links {
        let mut network = match carrier {
            Carrier::Same => links.local.clone(),
            Carrier::None | Carrier::Rdma => links.network.clone(),
        };
        if let Some(ThrottleLayer { bytes_per_second: rate, delay }) = self.throttle() {
            network = Link {
                flag_seconds: network.flag_seconds + delay.as_secs_f64(),
                bytes_per_second: network.bytes_per_second.min(rate),
                engine_bytes_per_second: network.engine_bytes_per_second.min(rate),
                send_bytes_per_second: network.send_bytes_per_second.min(rate),
                receive_bytes_per_second: network.receive_bytes_per_second.min(rate),
                // A wire, which nobody's processor is busy with.
                by_processor: false,
                ..network
            };
        }
        links.network = network;
        links
    }

    /// Whether what is between nodes is made slower.
    pub(super) fn is_throttled(&self) -> bool {
        self.throttle().is_some()
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

/// Opens the group over the fabric `local`, and over a second one where there is one between nodes:
/// what `same` opens, or the network card of this rank. Collective.
///
/// # Errors
/// That of the group, or of a network card.
pub(super) fn open<F: Fabric, N: Fabric + 'static>(
    options: &Options,
    circle: &Circle,
    place: &Place,
    local: F,
    same: impl FnOnce() -> Result<N>,
) -> Result<Group<F>> {
    match place.carrier {
        Carrier::None => Ok(group(options, place).open(circle.clone(), local)?),
        Carrier::Same => open_tiers(options, circle, place, local, same()?),
        Carrier::Rdma => {
            let card = options.cards.open(place.holder(circle), None)?;
            open_tiers(options, circle, place, local, card)
        }
    }
}

fn open_tiers<F: Fabric, N: Fabric + 'static>(
    options: &Options,
    circle: &Circle,
    place: &Place,
    local: F,
    network: N,
) -> Result<Group<F>> {
    let (group, circle) = (group(options, place), circle.clone());
    Ok(match options.tiers.throttle() {
        None => group.open_tiers(circle, local, network)?,
        Some(layer) => group.open_tiers(circle, local, Wrapped::new(network, layer))?,
    })
}

fn group(options: &Options, place: &Place) -> GroupOptions {
    let group = GroupOptions::default().timeout(options.timeout).strict(options.strict);
    group.topology(place.topology.clone())
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
        let of =
            |line: &str| parse(line).unwrap().tiers.between(Carrier::Same, known.clone()).network;
        assert_eq!(of("--nodes 2"), known.local);
        let slow = of("--nodes 2 --network-bandwidth 1GB/s --network-delay 20us");
        assert_eq!((slow.bytes_per_second, slow.receive_bytes_per_second), (1e9, 1e9));
        let tiers = parse("--nodes 2 --network-bandwidth 1kB/s").unwrap().tiers;
        let cards = tiers.between(Carrier::Rdma, known.clone()).network;
        assert_eq!((cards.bytes_per_second, cards.flag_seconds), (1e3, known.network.flag_seconds));
        assert!((slow.flag_seconds - known.local.flag_seconds - 20e-6).abs() < 1e-12);
    }
}
