//! Writes the script that sets up the guest's nodes and runs the jobs.
//!
//! Node `N` is the network namespace `nodeN` with the address `10.0.0.(N+1)` and the device `rxeN`, whose GID with
//! index 1 follows from that address. Jobs run as root outside of the nodes, where every device can be opened;
//! `ip netns exec nodeN …` starts a program on a node. With a bridge, jobs have the address `10.0.0.254`, from which
//! every node is reachable. `PEERLANE_TEST_RDMA_DEVICES` and `PEERLANE_TEST_RDMA_NAMESPACES` list devices and
//! namespaces; the latter is unset if there is only one device.

use std::fmt::Write;
use std::time::Duration;

use crate::console::MARK;

/// MTU between nodes in bytes; RDMA packets of 4096 bytes fit.
const WIRE_MTU: u32 = 4200;
/// Directory of busybox's programs, the last one in the path.
pub(crate) const APPLETS: &str = "/applets";
/// Directory of the kernel modules.
pub(crate) const MODULES: &str = "/modules";

/// A shell command with a time limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Job {
    /// Name in the summary.
    pub name: String,
    /// The command.
    pub command: String,
    /// Working directory, an absolute path.
    pub folder: String,
    /// Time limit.
    pub limit: Duration,
}

/// The nodes that the guest simulates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nodes {
    /// That many network namespaces on one bridge, each with its own device.
    Namespaces(u32),
    /// Two namespaces joined by one veth pair, which costs less processor time per packet than a bridge.
    Cable,
    /// One device that sends to itself, for kernels without devices in namespaces.
    Loopback,
}

impl Nodes {
    /// Returns the names of the devices, as the tests read them from the environment.
    pub fn devices(self) -> Vec<String> {
        (0..self.count()).map(|node| format!("rxe{node}")).collect()
    }

    /// Returns the names of the namespaces.
    pub fn namespaces(self) -> Vec<String> {
        match self {
            Self::Loopback => Vec::new(),
            _ => (0..self.count()).map(|node| format!("node{node}")).collect(),
        }
    }

    /// Returns the number of devices.
    fn count(self) -> u32 {
        match self {
            Self::Namespaces(count) => count,
            Self::Cable => 2,
            Self::Loopback => 1,
        }
    }

    fn set_up(self) -> String {
        let mut script = String::new();
        let namespaces = self.namespaces();
        if !namespaces.is_empty() {
            script += "rdma system set netns shared\n";
        }
        for node in &namespaces {
            let _ = write!(script, "need ip netns add {node}\nneed ip -n {node} link set lo up\n");
        }
        script += &self.wire();
        for (at, (node, device)) in namespaces.iter().zip(&self.devices()).enumerate() {
            let _ = write!(
                script,
                "need ip -n {node} address add 10.0.0.{host}/24 dev eth0\n\
                 need ip -n {node} link set eth0 up\n\
                 need ip netns exec {node} rdma link add {device} type rxe netdev eth0\n",
                host = at + 1,
            );
        }
        for device in self.devices() {
            let _ = writeln!(script, "active {device}");
        }
        script
    }

    /// Returns the commands that connect the interfaces `eth0`.
    fn wire(self) -> String {
        let veth = format!("mtu {WIRE_MTU} type veth peer name");
        match self {
            Self::Namespaces(_) => {
                let mut script = format!(
                    "need ip link add br0 mtu {WIRE_MTU} type bridge\n\
                     need ip address add 10.0.0.254/24 dev br0\nneed ip link set br0 up\n"
                );
                for (at, node) in self.namespaces().iter().enumerate() {
                    let _ = write!(
                        script,
                        "need ip link add port{at} {veth} eth0 mtu {WIRE_MTU} netns {node}\n\
                         need ip link set port{at} master br0 up\n"
                    );
                }
                script
            }
            Self::Cable => format!(
                "need ip link add eth0 mtu {WIRE_MTU} netns node0 type veth \
                 peer name eth0 mtu {WIRE_MTU} netns node1\n"
            ),
            Self::Loopback => format!(
                "need ip link add eth0 {veth} eth1 mtu {WIRE_MTU}\n\
                 need ip address add 10.0.0.1/24 dev eth0\n\
                 need ip link set eth0 up\nneed ip link set eth1 up\n\
                 need rdma link add rxe0 type rxe netdev eth0\n"
            ),
        }
    }
}

/// Returns the script of the guest's first process.
pub(crate) fn script(nodes: Nodes, modules: &[String], jobs: &[Job]) -> String {
    let mut script = format!("{}{FUNCTIONS}", START.replace("APPLETS", APPLETS));
    let _ = writeln!(script, "export PEERLANE_TEST_RDMA_DEVICES={}", nodes.devices().join(","));
    if nodes != Nodes::Loopback {
        let nodes = nodes.namespaces().join(",");
        let _ = writeln!(script, "export PEERLANE_TEST_RDMA_NAMESPACES={nodes}");
    }
    for module in modules {
        let _ = writeln!(script, "need insmod {MODULES}/{module}.ko");
    }
    script += &nodes.set_up();
    script += "say ready\n";
    for job in jobs {
        let Job { name, command, folder, limit } = job;
        let (name, command, folder) = (quoted(name), quoted(command), quoted(folder));
        let _ = writeln!(script, "job {name} {} {folder} {command}", limit.as_secs());
    }
    script += "say done\nreboot -f\n";
    script.replace("MARK", MARK)
}

/// Returns the text as one quoted shell word.
pub fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

const START: &str = r"#!/bin/sh
/bin/busybox mkdir -p APPLETS /proc /sys /dev /run /tmp
/bin/busybox --install -s APPLETS
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:APPLETS
export HOME=/tmp RUST_BACKTRACE=1 TERM=dumb NO_COLOR=1
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
mkdir -p /dev/shm /dev/pts
mount -t tmpfs shm /dev/shm
mount -t tmpfs run /run
ip link set lo up
";

/// Shell functions: `need` stops the guest if a set-up step fails; a job runs in its own session, and all its
/// processes end with it.
const FUNCTIONS: &str = r#"
say() { echo; echo "MARK $*"; }
now() { cut -d ' ' -f 1 /proc/uptime; }
need() { "$@" || { say failed "$*"; reboot -f; }; }
active() {
    port=/sys/class/infiniband/$1/ports/1
    tries=0
    until grep -q ACTIVE $port/state && grep -q '[1-9a-f]' $port/gids/1; do
        tries=$((tries + 1))
        [ $tries -lt 200 ] || { say failed "$1 is not active with a GID after 20 s"; reboot -f; }
        sleep 0.1
    done
} 2>/dev/null
job() {
    say start "$2" "$1"
    rm -f /run/late
    begun=$(now)
    cd "$3"
    setsid /bin/sh -c "$4" </dev/null &
    child=$!
    { sleep "$2"; : >/run/late; kill -KILL -$child; } 2>/dev/null &
    wait $child
    status=$?
    if [ -e /run/late ]; then status=late; fi
    kill -KILL -1
    say end "$status" "$begun" "$(now)" "$1"
} 2>&1
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_a_namespace_with_its_device() {
        let jobs = [Job {
            name: "a test".into(),
            command: "/bin/test 'x y'".into(),
            folder: "/tmp".into(),
            limit: Duration::from_secs(30),
        }];
        let script = script(Nodes::Namespaces(2), &["ib_core".into(), "rdma_rxe".into()], &jobs);
        for wanted in [
            "need insmod /modules/ib_core.ko\nneed insmod /modules/rdma_rxe.ko\n",
            "export PEERLANE_TEST_RDMA_DEVICES=rxe0,rxe1\n",
            "export PEERLANE_TEST_RDMA_NAMESPACES=node0,node1\n",
            "need ip -n node1 address add 10.0.0.2/24 dev eth0\n",
            "need ip netns exec node1 rdma link add rxe1 type rxe netdev eth0\n",
            "active rxe1\nsay ready\n",
            "job 'a test' 30 '/tmp' '/bin/test '\\''x y'\\'''\nsay done\n",
        ] {
            assert!(script.contains(wanted), "{wanted} is not in\n{script}");
        }
        assert!(!script.contains("MARK "), "{script}");
    }

    #[test]
    fn a_cable_is_one_pair_of_interfaces_without_a_bridge() {
        assert_eq!(Nodes::Cable.devices(), ["rxe0", "rxe1"]);
        let script = script(Nodes::Cable, &[], &[]);
        for wanted in [
            "export PEERLANE_TEST_RDMA_NAMESPACES=node0,node1\n",
            "need ip link add eth0 mtu 4200 netns node0 type veth peer name eth0 mtu 4200 netns node1\n",
            "need ip -n node1 address add 10.0.0.2/24 dev eth0\n",
            "need ip netns exec node1 rdma link add rxe1 type rxe netdev eth0\n",
        ] {
            assert!(script.contains(wanted), "{wanted} is not in\n{script}");
        }
        let of_bridge = ["br0", "port0", "10.0.0.254"];
        assert!(!of_bridge.iter().any(|word| script.contains(word)), "{script}");
    }

    #[test]
    fn without_namespaces_one_device_sends_to_itself() {
        let script = script(Nodes::Loopback, &[], &[]);
        assert!(script.contains("export PEERLANE_TEST_RDMA_DEVICES=rxe0\n"), "{script}");
        assert!(!script.contains("netns"), "{script}");
    }

    #[test]
    fn the_shell_accepts_the_script() {
        for nodes in [Nodes::Namespaces(3), Nodes::Cable, Nodes::Loopback] {
            let script = script(nodes, &["a".into()], &[]);
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-n", "-c", &script]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
