//! Defines the options for nodes and for the fabric between nodes.

use std::time::Duration;

use clap::Args;
use clap::builder::TypedValueParser;
use peerlane::open::Backend;
use peerlane::topology::Topology;
use peerlane_layers::ThrottleLayer;

use crate::error::{Failure, Result};
use crate::options::{Nodes, one_of};
use crate::units::{Delay, Rate};

/// The choice of the fabric between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    Auto,
    Same,
    /// A backend of [`Backend::NETWORKS`].
    Backend(Backend),
}

impl Network {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Same => "same",
            Self::Backend(backend) => backend.name(),
        }
    }

    fn parser() -> impl TypedValueParser<Value = Self> {
        let backends = Backend::NETWORKS.into_iter().map(Self::Backend);
        one_of([Self::Auto, Self::Same].into_iter().chain(backends), Self::name)
    }
}

/// The options that distribute the ranks over nodes and throttle the links between them.
#[derive(Args, Clone, Debug)]
pub(crate) struct NodeOptions {
    /// Distribute the ranks over nodes, given as 2 (number of nodes), 2x4 (2 nodes of 4 ranks),
    /// 2+1+3 (ranks of each node) or 0,0,1,1 (node of each rank); one host can have several virtual
    /// nodes [default: one node per host; hosts differ by kernel or network namespace]
    #[arg(long, value_name = "NODES")]
    pub(crate) nodes: Option<Nodes>,
    /// Select the fabric between nodes, either same (the backend of the ranks inside a node), rdma
    /// (NICs), ucx (such as Ethernet), or auto (rdma between hosts, or ucx if a rank has no RDMA
    /// device; same between virtual nodes)
    #[arg(long, default_value = "auto", value_name = "BACKEND", value_parser = Network::parser())]
    pub(crate) network: Network,
    /// Limit the rate at which a rank sends and receives between nodes, such as 2GB/s
    #[arg(long, value_name = "RATE", requires = "nodes")]
    pub(crate) network_bandwidth: Option<Rate>,
    /// Add this latency to all copies and signals between nodes, such as 20us
    #[arg(long, value_name = "TIME", requires = "nodes")]
    pub(crate) network_delay: Option<Delay>,
    /// Limit the rate of each rank inside its node, such as 2GB/s, to simulate a slower link
    /// (backend host only)
    #[arg(long, value_name = "RATE")]
    pub(crate) local_bandwidth: Option<Rate>,
}

impl NodeOptions {
    /// Returns the topology of `ranks` ranks by `--nodes`; `None` without the option.
    pub(super) fn topology(&self, ranks: usize) -> Result<Option<Topology>> {
        let topology = self.nodes.as_ref().map(|nodes| nodes.topology(ranks)).transpose();
        topology.map_err(|text| {
            Failure::usage(format!("--nodes: {text}"))
                .with_advice("give the ranks of each node, such as 2+1+3, or change --ranks")
        })
    }

    pub(super) fn throttle_inside(&self) -> Option<ThrottleLayer> {
        let layer =
            |Rate(bytes_per_second)| ThrottleLayer { bytes_per_second, delay: Duration::ZERO };
        self.local_bandwidth.map(layer)
    }

    pub(super) fn is_throttled(&self) -> bool {
        self.throttle().is_some()
    }

    pub(super) fn throttle(&self) -> Option<ThrottleLayer> {
        if self.network_bandwidth.is_none() && self.network_delay.is_none() {
            return None;
        }
        Some(ThrottleLayer {
            bytes_per_second: self.network_bandwidth.map_or(f64::INFINITY, |Rate(rate)| rate),
            delay: self.network_delay.map_or(Duration::ZERO, |Delay(delay)| delay),
        })
    }
}
