//! Finds the nodes of a machine that simulates several: network namespaces, each with a device of
//! a network.

use std::process::Command;

use peerlane_conformance::{Failure, Outcome};
use peerlane_hal::{DynFabric, Rank};

use super::{Child, Parent};

/// A network backend, and the variables that name its nodes.
struct Network {
    name: &'static str,
    /// The namespaces, by name, with commas in between; device `i` is that of namespace `i`.
    namespaces: &'static str,
    devices: &'static str,
    open: fn(String, Rank, usize) -> Outcome<DynFabric>,
}

/// The networks, of which the first that has nodes is tested.
const NETWORKS: [Network; 2] = [
    Network {
        name: "rdma",
        namespaces: "PEERLANE_TEST_RDMA_NAMESPACES",
        devices: "PEERLANE_TEST_RDMA_DEVICES",
        open: |device, rank, ranks| {
            let device = peerlane_rdma::DeviceChoice::Name(device);
            // The thread of soft RoCE that answers may get no processor for longer than a NIC needs.
            let timeout_exponent = 17;
            let options = peerlane_rdma::Options { device, timeout_exponent, ..Default::default() };
            Ok(DynFabric::new(peerlane_rdma::Fabric::open_with(rank, ranks, options)?))
        },
    },
    Network {
        name: "ucx",
        namespaces: "PEERLANE_TEST_UCX_NAMESPACES",
        devices: "PEERLANE_TEST_UCX_DEVICES",
        open: |device, rank, ranks| {
            let mut options = peerlane_ucx::Options::default();
            options.devices.push(device);
            Ok(DynFabric::new(peerlane_ucx::Fabric::open_with(rank, ranks, options)?))
        },
    },
];
/// The address of the process that starts the ranks, on the network of the nodes.
const PARENT: &str = "10.0.0.254";

/// A network namespace with a device of a network.
#[derive(Clone, Debug)]
pub struct Node {
    /// The name of the network backend.
    pub network: &'static str,
    /// The name of the namespace.
    pub namespace: String,
    device: String,
}

/// Returns the nodes that there are.
pub fn nodes() -> Vec<Node> {
    let names = |variable| {
        let names = std::env::var(variable).unwrap_or_default();
        names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let of_network = |network: &Network| {
        let named = names(network.namespaces).into_iter().zip(names(network.devices));
        let network = network.name;
        named.map(|(namespace, device)| Node { network, namespace, device }).collect::<Vec<_>>()
    };
    NETWORKS.iter().map(of_network).find(|nodes| !nodes.is_empty()).unwrap_or_default()
}

/// Opens the network of a rank that was [started](start) on a node, on the device of the node.
///
/// # Errors
/// If the network cannot be opened.
pub fn open_network(parent: &Parent, rank: Rank, ranks: usize) -> Outcome<DynFabric> {
    let name: String = parent.value("NETWORK")?;
    let network = NETWORKS.iter().find(|network| network.name == name);
    let network = network.ok_or_else(|| Failure::new(format!("there is no network {name:?}")))?;
    (network.open)(parent.value("DEVICE")?, rank, ranks)
}

/// Returns why a test that wants so many nodes is skipped, if it is.
pub fn reason_to_skip(wanted: usize) -> Option<String> {
    let seen = nodes().len();
    (seen < wanted).then(|| {
        format!(
            "{wanted} network namespaces with devices of a network are needed, {seen} are there; \
             run `cargo xtask test rdma` or `cargo xtask test ucx`"
        )
    })
}

/// Returns the address at which ranks on any node find a hub of this process.
pub fn hub_address() -> String {
    format!("{PARENT}:0")
}

/// Starts this program as a rank on a node, with these values.
///
/// # Errors
/// If it cannot be started.
pub fn start(node: &Node, values: &[(&str, String)]) -> Outcome<Child> {
    let program = std::env::current_exe();
    let program = program.map_err(|error| {
        Failure::new(format!("cannot find the file of the test program: {error}"))
    })?;
    let mut command = Command::new("ip");
    command.args(["netns", "exec", &node.namespace]).arg(program);
    command.env("PEERLANE_TEST_ROLE", "rank").env("PEERLANE_TEST_DEVICE", &node.device);
    command.env("PEERLANE_TEST_NETWORK", node.network);
    for (name, value) in values {
        command.env(format!("PEERLANE_TEST_{name}"), value);
    }
    Child::spawn("rank", command)
}
