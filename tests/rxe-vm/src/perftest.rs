//! Creates jobs that run perftest programs between the guest's first two nodes.

use std::time::Duration;

use crate::guest::{Job, Nodes};

/// Port of a perftest server, and its entry in the kernel's list of listening sockets.
const PORT: u16 = 18517;
const LISTENS: &str = ":4855 0+:0000 0A";
const LIMIT: Duration = Duration::from_secs(60);
/// Index of the RoCE v2 GID that follows from the IPv4 address; index 0 is link-local.
const GID_INDEX: u32 = 1;

/// Returns jobs that list the devices and measure one latency, which shows that the nodes are connected.
pub fn smoke(nodes: Nodes) -> Vec<Job> {
    let devices = Job {
        name: "devices".into(),
        command: "ibv_devinfo -v | grep -E 'hca_id|state|active_mtu|GID\\['".into(),
        folder: "/".into(),
        limit: LIMIT,
    };
    vec![devices, pair(nodes, "ib_write_lat", "-s 8 -n 1000")]
}

/// Returns the perftest measurements that Peerlane's figures are compared with.
pub fn measurements(nodes: Nodes) -> Vec<Job> {
    let mut jobs = vec![pair(nodes, "ib_read_lat", "-s 8 -n 1000")];
    for (bytes, messages, depth) in [(65536, 1000, 128), (1 << 20, 100, 16)] {
        for pairs in [1, 4] {
            let options = format!("-s {bytes} -q {pairs} -n {messages} -t {depth}");
            jobs.push(pair(nodes, "ib_write_bw", &options));
        }
    }
    jobs
}

/// Returns a job that runs a server on the first node and its client on the second.
pub fn pair(nodes: Nodes, program: &str, options: &str) -> Job {
    let devices = nodes.devices();
    let inside = |node: usize| {
        let names = nodes.namespaces();
        names.get(node).map(|name| format!("ip netns exec {name} ")).unwrap_or_default()
    };
    let server = &devices[0];
    let client = devices.get(1).unwrap_or(server);
    let call = format!("{program} -F -x {GID_INDEX} -p {PORT} {options}");
    Job {
        name: format!("{program} {options}"),
        command: format!(
            "{server_in}{call} -d {server} >/tmp/server 2>&1 &\n\
             until {server_in}grep -qE '{LISTENS}' /proc/net/tcp /proc/net/tcp6; do sleep 0.05; done\n\
             {client_in}{call} -d {client} 10.0.0.1 || {{ cat /tmp/server; exit 1; }}\n\
             wait",
            server_in = inside(0),
            client_in = inside(1),
        ),
        folder: "/".into(),
        limit: LIMIT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_and_client_are_on_two_nodes() {
        let job = pair(Nodes::Namespaces(3), "ib_write_lat", "-s 8");
        assert!(job.command.starts_with("ip netns exec node0 ib_write_lat -F -x 1 "));
        assert!(job.command.contains(
            "\nip netns exec node1 ib_write_lat -F -x 1 -p 18517 -s 8 -d rxe1 10.0.0.1 "
        ));
        let alone = pair(Nodes::Loopback, "ib_write_lat", "-s 8");
        assert!(alone.command.contains("\nib_write_lat -F -x 1 -p 18517 -s 8 -d rxe0 10.0.0.1 "));
        assert!(LISTENS.starts_with(&format!(":{PORT:04X} ")));
    }
}
