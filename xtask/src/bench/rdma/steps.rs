//! Lists the steps of the measurement and the shell commands that run them in the guest.

use std::time::Duration;

use super::openmpi;
use peerlane_rxe_vm::perftest;
use peerlane_rxe_vm::{Job, Nodes};

/// Two nodes, connected as hosts are.
pub(super) const NODES: Nodes = Nodes::Cable;
/// Ranks of each node.
pub(super) const RANKS: [usize; 2] = [2, 2];
/// Puts: bytes, queue pairs, messages per queue pair, and the maximum number in flight. Each takes about a second,
/// because runs of a third of that differ by 7 % among themselves, on both sides.
pub(super) const PUTS: [(u64, u32, u32, u32); 4] =
    [(64 << 10, 1, 1800, 64), (64 << 10, 4, 450, 16), (1 << 20, 1, 144, 8), (1 << 20, 4, 36, 4)];
/// Messages in both directions at once.
pub(super) const BOTH_BYTES: u64 = 1 << 20;
pub(super) const SIGNAL_BYTES: u64 = 8;
const SIGNALS: u32 = 1000;
/// Turns of puts and signals in a round. They are short, and the guest's scheduling makes one run differ from
/// the next by half, on both sides.
pub(super) const TURNS: u16 = 3;
/// Smallest and largest total of all-gathers, and the factor between them.
pub(super) const TOTALS: (u64, u64, u64) = (64 << 10, 4 << 20, 4);
pub(super) const TOTALS_OF_PEER: (u64, u64, u64) = (256 << 10, 4 << 20, 4);
const ITERATIONS: u32 = 10;
/// The same for the wire that loses packets.
pub(super) const TOTALS_LOSSY: (u64, u64, u64) = (64 << 10, 1 << 20, 16);
/// Algorithms whose bytes are counted on the wire.
pub(super) const COUNTED: [&str; 2] = ["hierarchical", "direct"];
/// The shard whose bytes are counted on the wire, and iterations of the shorter and the longer run.
pub(super) const WIRE_SHARD: u64 = 256 << 10;
pub(super) const WIRE_ITERATIONS: [u32; 2] = [5, 25];
/// Time limit of a job, for an emulated guest on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// The way in which Peerlane's ranks wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// They poll, as perftest does.
    Polls,
    /// They spin for a while and sleep, which is the default.
    Sleeps,
}

impl Wait {
    const BOTH: [Self; 2] = [Self::Polls, Self::Sleeps];

    /// Returns the name in the record.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Polls => "polling",
            Self::Sleeps => "sleeping",
        }
    }

    const fn option(self) -> &'static str {
        match self {
            Self::Polls => "--spin 1s",
            Self::Sleeps => "",
        }
    }
}

/// The measurement of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Versions,
    TheirPut {
        bytes: u64,
        pairs: u32,
    },
    OurPut {
        bytes: u64,
        pairs: u32,
        wait: Wait,
    },
    /// Puts in both directions at once.
    TheirPuts,
    TheirSignal,
    OurSignal(Wait),
    Algorithms,
    Lossy,
    /// The bytes that the interfaces send for an all-gather.
    Sent {
        algorithm: &'static str,
    },
    TheirGathers(Wire),
    OurGathers(Wire),
}

/// Returns the measurements in their order, each with its round. Round 0 is outside of the rounds.
pub(super) fn steps(rounds: u16) -> Vec<(What, u16)> {
    let mut steps = vec![(What::Versions, 0)];
    for round in 1..=rounds {
        for _ in 0..TURNS {
            for (bytes, pairs, ..) in PUTS {
                steps.push((What::TheirPut { bytes, pairs }, round));
                steps.extend(Wait::BOTH.map(|wait| (What::OurPut { bytes, pairs, wait }, round)));
            }
            steps.push((What::TheirSignal, round));
            steps.extend(Wait::BOTH.map(|wait| (What::OurSignal(wait), round)));
        }
        let rest = [
            What::TheirPuts,
            What::Sent { algorithm: COUNTED[0] },
            What::Sent { algorithm: COUNTED[1] },
            What::Algorithms,
        ];
        let gathers = Wire::ALL.map(|wire| [What::TheirGathers(wire), What::OurGathers(wire)]);
        let rest = rest.into_iter().chain(gathers.into_iter().flatten());
        steps.extend(rest.map(|what| (what, round)));
    }
    steps.push((What::Lossy, 0));
    steps
}

/// Returns the job of a measurement.
pub(super) fn job(what: What, round: u16) -> Job {
    let put = |bytes, pairs| {
        let (.., messages, window) = PUTS
            .into_iter()
            .find(|put| (put.0, put.1) == (bytes, pairs))
            .unwrap_or((bytes, pairs, 100, 16));
        (messages, window)
    };
    let all_gather = |(min, max, factor): (u64, u64, u64), rest: &str| {
        let program = format!(
            "peerlane allgather --min-bytes {min} --max-bytes {max} --factor {factor} --warmup 2 {rest}"
        );
        ranks(&RANKS, &program)
    };
    let iterations = format!("--iterations {ITERATIONS}");
    let command = match what {
        What::Versions => {
            "ib_write_bw --version\norterun --version --allow-run-as-root | head -n 1".to_owned()
        }
        What::TheirPut { bytes, pairs } => {
            let (messages, window) = put(bytes, pairs);
            let options = format!("-s {bytes} -q {pairs} -n {messages} -t {window}");
            perftest::pair(NODES, "ib_write_bw", &options).command
        }
        What::OurPut { bytes, pairs, wait } => {
            let (messages, window) = put(bytes, pairs);
            let program = format!(
                "peerlane perf --backend rdma --put --bytes {bytes} --engines {pairs} \
                 --queue-pairs 1 --iterations {messages} --window {window} {}",
                wait.option()
            );
            ranks(&[1, 1], &program)
        }
        What::TheirPuts => {
            let options = format!("-b -s {BOTH_BYTES} -q 4 -n 72 -t 4");
            perftest::pair(NODES, "ib_write_bw", &options).command
        }
        What::TheirSignal => {
            let options = format!("-s {SIGNAL_BYTES} -n {SIGNALS}");
            perftest::pair(NODES, "ib_write_lat", &options).command
        }
        What::OurSignal(wait) => {
            let program = format!(
                "peerlane perf --backend rdma --signal --bytes {SIGNAL_BYTES} --iterations {SIGNALS} {}",
                wait.option()
            );
            ranks(&[1, 1], &program)
        }
        What::Algorithms => {
            all_gather(TOTALS, &format!("--algorithm direct,hierarchical {iterations}"))
        }
        What::Lossy => {
            let few = "--algorithm all --iterations 3";
            shaped(LOSSY, &all_gather(TOTALS_LOSSY, few))
        }
        What::Sent { algorithm } => {
            let total = 4 * WIRE_SHARD;
            let run = |iterations| {
                let rest = format!("--algorithm {algorithm} --iterations {iterations}");
                count() + &all_gather((total, total, 2), &rest)
            };
            WIRE_ITERATIONS.map(run).concat() + &count()
        }
        What::TheirGathers(wire) => {
            let (min, max, factor) = TOTALS_OF_PEER;
            wire.over(&openmpi::line(min, max, factor, ITERATIONS))
        }
        What::OurGathers(wire) => wire.over(&all_gather(TOTALS_OF_PEER, &iterations)),
    };
    let name = if round == 0 { format!("{what:?}") } else { format!("round {round}: {what:?}") };
    Job { name, command, folder: "/".into(), limit: LIMIT }
}

/// Timeout in seconds of a wait inside a run, for an emulated guest on a busy machine.
const TIMEOUT: u32 = 120;

/// Returns shell lines that start `program` as the ranks of all nodes. Rank 0 prints, the others only if it fails.
fn ranks(ranks_of_nodes: &[usize], program: &str) -> String {
    let ranks: usize = ranks_of_nodes.iter().sum();
    let place = |rank: usize, node: usize, local: usize| {
        let local_ranks = ranks_of_nodes[node];
        format!(
            "ip netns exec node{node} env RANK={rank} WORLD_SIZE={ranks} LOCAL_RANK={local} \
             LOCAL_WORLD_SIZE={local_ranks} MASTER_ADDR=10.0.0.1 {program} --device rxe{node} \
             --timeout {TIMEOUT}"
        )
    };
    let places = ranks_of_nodes.iter().enumerate();
    let places = places.flat_map(|(node, count)| (0..*count).map(move |local| (node, local)));
    let mut lines = String::from("rm -f /tmp/rank*\n");
    for (rank, (node, local)) in places.enumerate().skip(1) {
        lines += &format!("{} >/tmp/rank{rank} 2>&1 &\n", place(rank, node, local));
    }
    lines + &format!("{} --json - || {{ cat /tmp/rank*; exit 1; }}\nwait\n", place(0, 0, 0))
}

/// Returns a shell line that prints the bytes that both interfaces have sent, and the retries of both devices.
fn count() -> String {
    let sent = [0, 1].map(|node| {
        format!("$(ip netns exec node{node} cat /sys/class/net/eth0/statistics/tx_bytes)")
    });
    // The counters of devices are visible only outside of the nodes.
    let again = [0, 1].map(|node| {
        format!("$(cat /sys/class/infiniband/rxe{node}/ports/1/hw_counters/completer_retry_err)")
    });
    let (sent, again) = (sent.join(" "), again.join(" "));
    format!("echo sent {sent} {again}\n")
}

/// The queueing discipline that delays and loses packets.
pub(super) const LOSSY: &str = "netem delay 1ms loss 0.5%";
/// The queueing discipline that is slower than the processors of both sides.
pub(super) const SLOW: &str = "tbf rate 80mbit burst 128kb latency 500ms";
/// The kernel's default for the number of TCP segments that it passes on as one.
const SEGMENTS: u32 = 65535;

/// The connection over which Peerlane and Open MPI are measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// TCP passes 64 KiB whole, which no real wire does.
    AsItIs,
    /// TCP sends packets of the MTU size, as soft RoCE does.
    Packets,
    /// The wire is slower than the processors of both sides.
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

    /// Returns shell lines that run `lines` over this wire.
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

/// Returns shell lines that run `lines` with this queueing discipline on both nodes.
pub(super) fn shaped(discipline: &str, lines: &str) -> String {
    let put = both(&format!("tc qdisc replace dev eth0 root {discipline}"));
    during(&put, &both("tc qdisc del dev eth0 root"), lines)
}

/// Returns the line for each node.
fn both(line: &str) -> [String; 2] {
    [0, 1].map(|node| format!("ip netns exec node{node} {line}"))
}

/// Returns shell lines that change the wire, run `lines` and undo the change. A failure ends the job.
fn during(begin: &[String], end: &[String], lines: &str) -> String {
    let begin: String = begin.iter().map(|line| format!("{line} || exit 1\n")).collect();
    format!("trap '{}' EXIT\n{begin}{lines}", end.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sides_take_turns() {
        let steps = steps(2);
        let at = |what| {
            let all = steps.iter().enumerate().filter(move |(_, step)| step.0 == what);
            all.map(|(at, _)| at).collect::<Vec<_>>()
        };
        let followed = |theirs: What, ours: [What; 2]| {
            let theirs = at(theirs);
            assert_eq!(theirs.len(), 2 * usize::from(TURNS));
            for (behind, ours) in (1..).zip(ours) {
                assert_eq!(at(ours), theirs.iter().map(|at| at + behind).collect::<Vec<_>>());
            }
        };
        for (bytes, pairs, ..) in PUTS {
            let ours = Wait::BOTH.map(|wait| What::OurPut { bytes, pairs, wait });
            followed(What::TheirPut { bytes, pairs }, ours);
        }
        followed(What::TheirSignal, Wait::BOTH.map(What::OurSignal));
        let gathers = |step: &(What, u16)| match step.0 {
            What::TheirGathers(wire) => Some((wire, "theirs", step.1)),
            What::OurGathers(wire) => Some((wire, "ours", step.1)),
            _ => None,
        };
        let expected = [1, 2]
            .map(|round| Wire::ALL.map(|wire| [(wire, "theirs", round), (wire, "ours", round)]));
        let expected = expected.as_flattened().as_flattened();
        assert_eq!(steps.iter().filter_map(gathers).collect::<Vec<_>>(), expected);
        assert_eq!(steps.last().unwrap().0, What::Lossy);
    }

    #[test]
    fn lines_are_shell() {
        for (what, round) in steps(1) {
            let job = job(what, round);
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-n", "-c", &job.command]).output().unwrap();
            assert!(output.status.success(), "{}: {:?}", job.name, output.stderr);
        }
    }

    #[test]
    fn ranks_are_on_their_nodes_and_rank_0_speaks() {
        let lines = ranks(&[1, 2], "peerlane allgather");
        let lines: Vec<_> = lines.lines().collect();
        assert_eq!(
            lines[1],
            "ip netns exec node1 env RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 \
             MASTER_ADDR=10.0.0.1 peerlane allgather --device rxe1 --timeout 120 >/tmp/rank1 2>&1 &"
        );
        assert!(lines[2].starts_with("ip netns exec node1 env RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 "));
        assert!(lines[3].ends_with("--json - || { cat /tmp/rank*; exit 1; }"));
        assert_eq!(lines.len(), 5);
    }

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
