//! Finds the nodes of a machine that simulates several: network namespaces, each with an RDMA
//! device.

use std::process::Command;

use peerlane_conformance::{Failure, Outcome};

use super::Child;

/// The namespaces, by name, with commas in between; device `i` is that of namespace `i`.
const NAMESPACES: &str = "PEERLANE_TEST_RDMA_NAMESPACES";
const DEVICES: &str = "PEERLANE_TEST_RDMA_DEVICES";
/// The address of the process that starts the ranks, on the network of the nodes.
const PARENT: &str = "10.0.0.254";

/// A network namespace with an RDMA device.
#[derive(Clone, Debug)]
pub struct Node {
    namespace: String,
    device: String,
}

/// Returns the nodes that there are.
pub fn nodes() -> Vec<Node> {
    let names = |variable| {
        let names = std::env::var(variable).unwrap_or_default();
        names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let named = names(NAMESPACES).into_iter().zip(names(DEVICES));
    named.map(|(namespace, device)| Node { namespace, device }).collect()
}

/// Returns why a test that wants so many nodes is skipped, if it is.
pub fn reason_to_skip(wanted: usize) -> Option<String> {
    let seen = nodes().len();
    (seen < wanted).then(|| {
        format!(
            "{wanted} network namespaces with RDMA devices are needed ({NAMESPACES}), {seen} are \
             there; run `cargo xtask test rdma`"
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
    for (name, value) in values {
        command.env(format!("PEERLANE_TEST_{name}"), value);
    }
    Child::spawn("rank", command)
}
