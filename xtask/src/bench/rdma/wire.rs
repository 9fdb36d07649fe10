//! The wire between the nodes: what it lets pass, and for how long it stays so.

use serde::Serialize;

/// What the netem of both nodes does to every packet.
pub(super) const LOSSY: &str = "netem delay 1ms loss 0.5%";
/// A wire that neither side's processor can outpace.
pub(super) const SLOW: &str = "tbf rate 80mbit burst 128kb latency 500ms";
/// How many segments of TCP the kernel passes on as one, unless told otherwise.
const SEGMENTS: u32 = 65535;

/// What Peerlane and Open MPI are measured over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Wire {
    /// TCP passes 64 KiB whole, as no wire would.
    AsItIs,
    /// TCP sends packets of the MTU, as soft RoCE does.
    Packets,
    /// Slower than either side's processor.
    Slow,
}

impl Wire {
    pub(super) const ALL: [Self; 3] = [Self::AsItIs, Self::Packets, Self::Slow];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::AsItIs => "as it is",
            Self::Packets => "packets of the MTU",
            Self::Slow => "slow",
        }
    }

    /// Does something over it.
    pub(super) fn over(self, lines: &str) -> String {
        match self {
            Self::AsItIs => lines.to_owned(),
            Self::Packets => {
                let set = |segments| both(&format!("ip link set dev eth0 gso_max_segs {segments}"));
                during(&set(1), &set(SEGMENTS), lines)
            }
            Self::Slow => shaped(SLOW, lines),
        }
    }
}

/// Does something while the interfaces of both nodes have this discipline.
pub(super) fn shaped(discipline: &str, lines: &str) -> String {
    let put = both(&format!("tc qdisc replace dev eth0 root {discipline}"));
    during(&put, &both("tc qdisc del dev eth0 root"), lines)
}

/// A line on each node.
fn both(line: &str) -> [String; 2] {
    [0, 1].map(|node| format!("ip netns exec node{node} {line}"))
}

/// What fails ends the job, and what follows it must find the wire as it was.
fn during(begin: &[String], end: &[String], lines: &str) -> String {
    let begin: String = begin.iter().map(|line| format!("{line} || exit 1\n")).collect();
    format!("trap '{}' EXIT\n{begin}{lines}", end.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_is_afterwards_as_it_was() {
        assert_eq!(Wire::AsItIs.over("true\n"), "true\n");
        let lines = Wire::Packets.over("true\n");
        assert_eq!(
            lines.lines().collect::<Vec<_>>(),
            [
                "trap 'ip netns exec node0 ip link set dev eth0 gso_max_segs 65535; \
                 ip netns exec node1 ip link set dev eth0 gso_max_segs 65535' EXIT",
                "ip netns exec node0 ip link set dev eth0 gso_max_segs 1 || exit 1",
                "ip netns exec node1 ip link set dev eth0 gso_max_segs 1 || exit 1",
                "true",
            ]
        );
        let lines = Wire::Slow.over("true\n");
        assert!(lines.starts_with("trap 'ip netns exec node0 tc qdisc del dev eth0 root; "));
        assert!(lines.contains("\nip netns exec node1 tc qdisc replace dev eth0 root tbf rate "));
    }

    #[test]
    fn the_shell_accepts_every_line() {
        let all = Wire::ALL.map(|wire| wire.over("true\n"));
        for lines in all.into_iter().chain([shaped(LOSSY, "true\n")]) {
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-n", "-c", &lines]).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}
