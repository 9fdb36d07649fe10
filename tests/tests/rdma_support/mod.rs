//! Finds the nodes of a machine that simulates several: network namespaces, each with an RDMA
//! device.

#![allow(dead_code, reason = "each test program uses a part")]

use std::process::Command;

use peerlane_collectives::error::Error;
use peerlane_tests::processes::Child;
use peerlane_tests::{Failure, Outcome, pattern};

/// The namespaces, by name, with commas in between; device `i` is that of namespace `i`.
const NAMESPACES: &str = "PEERLANE_TEST_RDMA_NAMESPACES";
const DEVICES: &str = "PEERLANE_TEST_RDMA_DEVICES";
/// At which the nodes reach whoever started them.
const PARENT: &str = "10.0.0.254";

/// A node.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    namespace: String,
    device: String,
}

/// The nodes that there are.
pub(crate) fn nodes() -> Vec<Node> {
    let names = |variable| {
        let names = std::env::var(variable).unwrap_or_default();
        names.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect::<Vec<_>>()
    };
    let named = names(NAMESPACES).into_iter().zip(names(DEVICES));
    named.map(|(namespace, device)| Node { namespace, device }).collect()
}

/// Why a test that wants so many nodes is skipped, if it is.
pub(crate) fn reason_to_skip(wanted: usize) -> Option<String> {
    let seen = nodes().len();
    (seen < wanted).then(|| {
        format!(
            "{wanted} network namespaces with RDMA devices are needed ({NAMESPACES}), {seen} are \
             there; run `cargo xtask test rdma`"
        )
    })
}

/// Where ranks on any node find a hub of this process.
pub(crate) fn hub_address() -> String {
    format!("{PARENT}:0")
}

/// Starts this program as a rank on a node, with these values.
pub(crate) fn start(node: &Node, values: &[(&str, String)]) -> Outcome<Child> {
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

/// What `rank` contributes in `round`.
pub(crate) fn block(rank: usize, round: u64, bytes: usize) -> Vec<u8> {
    pattern((rank as u64 + 1) << 32 | round, bytes as u64)
}

/// An error where none was due.
pub(crate) fn unexpected(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}
