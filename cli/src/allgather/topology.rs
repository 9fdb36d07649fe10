//! Determines which ranks form a node, and opens the fabrics inside and between nodes.
//!
//! A node is a host whose ranks reach other hosts through a network. Nodes can also be virtual:
//! ranks of one machine that are treated as if they were on several. The fabric between nodes can
//! be throttled.

use std::collections::BTreeMap;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::DynFabric;
use peerlane::open::{Backend, FabricOptions, OpenOptions};
use peerlane::topology::Topology;
use peerlane::{Group, GroupOptions, Rank, Selection};
use peerlane_layers::{ThrottleLayer, Wrapped};
use peerlane_planning::cost::{Link, Links};

use super::node_options::Network;
use super::options::Options;
use crate::error::{Failure, Result};
use crate::nics;
use crate::ranks::comm::Comm;

/// The fabric that connects the nodes of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NetworkFabric {
    /// One fabric reaches all ranks, or there is only one node.
    None,
    Same,
    /// This backend; `None` for the first network that all ranks have.
    Network(Option<Backend>),
}

impl NetworkFabric {
    /// Returns the links from which times are predicted, with the throttle applied to the links
    /// between nodes. Between virtual nodes they are those inside a node; the throttle is applied
    /// in both cases.
    pub(super) fn links(self, throttle: Option<ThrottleLayer>, mut links: Links) -> Links {
        let mut network = match self {
            Self::Same => links.local.clone(),
            Self::None | Self::Network(_) => links.network.clone(),
        };
        if let Some(ThrottleLayer { bytes_per_second: rate, delay }) = throttle {
            network = Link {
                flag_seconds: network.flag_seconds + delay.as_secs_f64(),
                bytes_per_second: network.bytes_per_second.min(rate),
                engine_bytes_per_second: network.engine_bytes_per_second.min(rate),
                send_bytes_per_second: network.send_bytes_per_second.min(rate),
                receive_bytes_per_second: network.receive_bytes_per_second.min(rate),
                // The throttle is like a wire, which uses no processor.
                by_processor: false,
                ..network
            };
        }
        links.network = network;
        links
    }
}

/// The topology of the ranks, with the position of this rank in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RankTopology {
    pub(super) topology: Topology,
    pub(super) network_fabric: NetworkFabric,
    pub(super) hosts: usize,
    /// The index of this rank among the ranks of its host.
    pub(super) local_rank: usize,
}

impl RankTopology {
    /// Determines the topology from the hosts of all ranks and the options. Collective.
    pub(super) fn find(options: &Options, comm: &Comm, backend: Backend) -> Result<Self> {
        let hosts = comm.share("host", &comm.host().to_owned())?;
        Self::of_hosts(options, &hosts, comm.rank(), backend)
    }

    fn of_hosts(options: &Options, hosts: &[String], me: Rank, backend: Backend) -> Result<Self> {
        let node_of_rank = nodes_of_hosts(hosts);
        let given = options.node_options.topology(hosts.len())?;
        let own = Topology::of_nodes(&node_of_rank)?;
        let hosts = own.nodes();
        let topology = given.unwrap_or_else(|| own.clone());
        if !backend.is_network() {
            check_nodes(&topology, &own, backend)?;
        }

        let network_fabric = network_fabric(options, backend, topology.nodes(), hosts)?;
        let is_network = matches!(network_fabric, NetworkFabric::Network(_));
        if options.limit && is_network {
            let text = "--limit cannot be used here: it measures bare copies over one fabric, but \
                        these ranks use a network between nodes";
            return Err(Failure::usage(text)
                .with_advice(format!("remove the option, or use {}", nics::one_of("--backend"))));
        }

        match network_fabric {
            // The library selects the network when the group opens.
            NetworkFabric::Network(None) => {}
            NetworkFabric::Network(Some(network)) => {
                options.nics.check_fits(Some(network.name()))?
            }
            _ if backend.is_network() => options.nics.check_fits(Some(backend.name()))?,
            _ => options.nics.check_fits(None)?,
        }

        Ok(Self { topology, network_fabric, hosts, local_rank: own.local_index(me) })
    }

    /// Returns the text that says why a network connects the nodes, if the library has selected it.
    pub(super) fn network_note(&self, selection: &Selection) -> Option<String> {
        let is_automatic = self.network_fabric == NetworkFabric::Network(None);
        is_automatic.then(|| format!("auto selected {}", selection.reasons.join("; ")))
    }
}

/// Numbers the hosts in the order of their first rank, and returns the number of each rank's host.
fn nodes_of_hosts(hosts: &[String]) -> Vec<u32> {
    let mut numbers: BTreeMap<&str, u32> = BTreeMap::new();
    let number = |host| {
        let next = numbers.len() as u32;
        *numbers.entry(host).or_insert(next)
    };
    hosts.iter().map(String::as_str).map(number).collect()
}

/// Checks that all ranks of a node run on one host, because they share memory.
fn check_nodes(nodes: &Topology, hosts: &Topology, backend: Backend) -> Result<()> {
    for node in 0..nodes.nodes() as u32 {
        let members = nodes.members(node);
        let Some(other) = members.iter().find(|rank| hosts.node(**rank) != hosts.node(members[0]))
        else {
            continue;
        };

        let (first, backend) = (members[0], backend.name());
        let text = format!(
            "--nodes puts rank {first} and rank {other} on one node, but they run on two hosts, \
             which the backend {backend} cannot connect"
        );
        let advice = format!("remove --nodes, or use {}", nics::one_of("--backend"));
        return Err(Failure::usage(text).with_advice(advice));
    }
    Ok(())
}

fn network_fabric(
    options: &Options,
    backend: Backend,
    nodes: usize,
    hosts: usize,
) -> Result<NetworkFabric> {
    let network = options.node_options.network;
    if backend.is_network() {
        // One fabric reaches all ranks, unless the network between nodes is throttled.
        let is_separate =
            nodes > 1 && (network != Network::Auto || options.node_options.is_throttled());
        return Ok(if is_separate { NetworkFabric::Same } else { NetworkFabric::None });
    }
    match (network, nodes, hosts) {
        (Network::Auto | Network::Same, 1, _) => Ok(NetworkFabric::None),
        (Network::Backend(network), 1, _) => {
            let network = network.name();
            let text = format!(
                "--network {network} needs more than one node, but all ranks are on one node"
            );
            let advice = format!("add --nodes, or use --backend {network}");
            Err(Failure::usage(text).with_advice(advice))
        }
        (Network::Auto | Network::Same, _, 1) => Ok(NetworkFabric::Same),
        (Network::Auto, ..) => Ok(NetworkFabric::Network(None)),
        (Network::Backend(network), ..) => Ok(NetworkFabric::Network(Some(network))),
        (Network::Same, ..) => {
            let backend = backend.name();
            let text = format!(
                "--network same cannot be used here: the backend {backend} does not connect the \
                 {hosts} hosts of these ranks"
            );
            Err(Failure::usage(text).with_advice(format!("use {}", nics::one_of("--network"))))
        }
    }
}

/// Opens the group with the fabric inside nodes, the fabric between nodes, and their throttles.
/// `device` is the GPU of this rank. Collective.
pub(super) fn open(
    options: &Options,
    comm: &Comm,
    rank_topology: &RankTopology,
    backend: Backend,
    device: Option<u32>,
) -> Result<Group> {
    let mut group = GroupOptions::default()
        .topology(rank_topology.topology.clone())
        .timeout(options.run.timeout)
        .start_timeout(options.run.timeout)
        .strict(options.strict)
        .beside_compute(options.beside_compute);
    if let Some(kind) = options.engine_kind() {
        group = group.engine(kind);
    }

    let mut open = OpenOptions::default()
        .backend(backend)
        .fabrics(fabric_options(options, rank_topology))
        .group(group);
    if let Some(ordinal) = device {
        open = open.device(ordinal);
    }
    match rank_topology.network_fabric {
        NetworkFabric::None | NetworkFabric::Network(None) => {}
        NetworkFabric::Same => open = open.network(backend),
        NetworkFabric::Network(Some(network)) => open = open.network(network),
    }

    // A throttle slows the engines of one tier down, so each fabric has its own.
    let mut fabrics = open.open_fabrics(comm)?;
    fabrics.local = throttled(fabrics.local, options.node_options.throttle_inside());
    let layer = options.node_options.throttle();
    fabrics.network = fabrics.network.map(|network| throttled(network, layer));
    let group = fabrics.into_group(comm.clone())?;

    if rank_topology.network_fabric == NetworkFabric::Network(None) {
        let network = group.selection().network;
        options.nics.check_fits(network.map(|id| id.to_string()).as_deref())?;
    }
    Ok(group)
}

pub(super) fn fabric_options(options: &Options, rank_topology: &RankTopology) -> FabricOptions {
    let mut fabrics = FabricOptions::default();
    options.nics.apply(&mut fabrics, rank_topology.local_rank, rank_topology.hosts == 1);
    fabrics.host.bind = options.run.bind.of_threads();
    fabrics.cuda.self_copy = options.self_copy;
    fabrics.rocm.self_copy = fabrics.cuda.self_copy;
    fabrics.cuda.reduce_blocks = options.reduce_blocks;
    fabrics.cuda.fused_blocks = options.fused_blocks;
    fabrics
}

pub(super) fn throttled(fabric: DynFabric, layer: Option<ThrottleLayer>) -> DynFabric {
    match layer {
        None => fabric,
        Some(layer) => DynFabric::new(Wrapped::new(fabric, layer)),
    }
}

#[cfg(test)]
mod tests {
    use super::super::options::tests::parse;
    use super::*;

    fn topology_of(line: &str, hosts: &str, backend: Backend) -> Result<RankTopology> {
        let hosts: Vec<String> = hosts.chars().map(String::from).collect();
        RankTopology::of_hosts(&parse(line).unwrap(), &hosts, Rank(1), backend)
    }

    #[test]
    fn ranks_on_several_hosts_have_a_network_between_them() {
        let auto = topology_of("", "aabb", Backend::Host).unwrap();
        let fabric = NetworkFabric::Network(None);
        assert_eq!((auto.network_fabric, auto.hosts, auto.local_rank), (fabric, 2, 1));
        assert_eq!(auto.topology.notation(), "2x2");
        assert_eq!(topology_of("--port 1", "aabb", Backend::Host).unwrap(), auto);
        assert_eq!(
            topology_of("", "aaaa", Backend::Host).unwrap().network_fabric,
            NetworkFabric::None
        );

        for network in Backend::NETWORKS {
            let line = format!("--network {} --device eth0", network.name());
            let named = topology_of(&line, "aabb", Backend::Host).unwrap();
            assert_eq!(named.network_fabric, NetworkFabric::Network(Some(network)));
            let own = topology_of("--device eth0", "abab", network).unwrap();
            assert_eq!((own.network_fabric, own.local_rank), (NetworkFabric::None, 0));
        }
    }

    #[test]
    fn virtual_nodes_have_a_second_fabric_unless_a_network_is_requested() {
        let network_fabric =
            |line: &str, backend| topology_of(line, "aaaa", backend).unwrap().network_fabric;
        assert_eq!(network_fabric("--nodes 2", Backend::Host), NetworkFabric::Same);
        for network in Backend::NETWORKS {
            let line = format!("--nodes 2 --network {}", network.name());
            let fabric = NetworkFabric::Network(Some(network));
            assert_eq!(network_fabric(&line, Backend::Host), fabric);
            let throttled = "--nodes 2 --network-bandwidth 1GB/s";
            assert_eq!(network_fabric(throttled, network), NetworkFabric::Same);
        }
    }

    #[test]
    fn impossible_topologies_are_refused() {
        let refusal = |line, hosts| topology_of(line, hosts, Backend::Host).unwrap_err();
        insta::assert_snapshot!(refusal("--nodes 2", "abab"), @"
        error: --nodes puts rank 0 and rank 1 on one node, but they run on two hosts, which the backend host cannot connect
         help: remove --nodes, or use --backend rdma or --backend ucx
        ");
        insta::assert_snapshot!(refusal("--network same", "aabb"), @"
        error: --network same cannot be used here: the backend host does not connect the 2 hosts of these ranks
         help: use --network rdma or --network ucx
        ");
        insta::assert_snapshot!(refusal("--network rdma", "aaaa"), @"
        error: --network rdma needs more than one node, but all ranks are on one node
         help: add --nodes, or use --backend rdma
        ");
        insta::assert_snapshot!(refusal("--port 1", "aaaa"), @"
        error: --port selects a network device, but these ranks use no network
         help: use --backend rdma, or remove the option
        ");
        insta::assert_snapshot!(refusal("--device eth0", "aaaa"), @"
        error: --device selects a network device, but these ranks use no network
         help: use --backend rdma or --backend ucx, or remove the option
        ");
        insta::assert_snapshot!(refusal("--network ucx --queue-pairs 2", "aabb"), @"
        error: --queue-pairs is an option of rdma, but these ranks use ucx
         help: use --backend rdma, or remove the option
        ");
        insta::assert_snapshot!(refusal("--limit", "aabb"), @"
        error: --limit cannot be used here: it measures bare copies over one fabric, but these ranks use a network between nodes
         help: remove the option, or use --backend rdma or --backend ucx
        ");
    }

    #[test]
    fn nodes_that_do_not_fit_name_the_option() {
        let refusal = |line: &str| parse(line).unwrap().node_options.topology(4).unwrap_err();
        insta::assert_snapshot!(refusal("--nodes 2+1"), @r"
        error: --nodes: 2+1 has 3 ranks on 2 nodes, expected 4 ranks
         help: give the ranks of each node, such as 2+1+3, or change --ranks
        ");
        insta::assert_snapshot!(refusal("--nodes 5"), @"
        error: --nodes: 5 nodes for 4 ranks, expected at most one node for each rank
         help: give the ranks of each node, such as 2+1+3, or change --ranks
        ");
        assert!(parse("--nodes 0").is_err());
        assert!(parse("--network-delay 20us").unwrap_err().contains("--nodes"));
        assert_eq!(parse("").unwrap().node_options.topology(4), Ok(None));
        let topology = parse("--nodes 2").unwrap().node_options.topology(5).unwrap().unwrap();
        assert_eq!(topology.notation(), "3+2");
    }

    #[test]
    fn predictions_include_the_throttle() {
        let known = Links::default();
        let of = |line: &str| {
            let throttle = parse(line).unwrap().node_options.throttle();
            NetworkFabric::Same.links(throttle, known.clone()).network
        };
        assert_eq!(of("--nodes 2"), known.local);
        let throttled = of("--nodes 2 --network-bandwidth 1GB/s --network-delay 20us");
        assert_eq!((throttled.bytes_per_second, throttled.receive_bytes_per_second), (1e9, 1e9));
        let tiers = parse("--nodes 2 --network-bandwidth 1kB/s").unwrap().node_options;
        let nics = NetworkFabric::Network(None).links(tiers.throttle(), known.clone()).network;
        assert_eq!((nics.bytes_per_second, nics.flag_seconds), (1e3, known.network.flag_seconds));
        assert!((throttled.flag_seconds - known.local.flag_seconds - 20e-6).abs() < 1e-12);
    }
}
