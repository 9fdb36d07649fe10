//! Lists the steps of the measurement and the shell commands that run them in the guest.

use std::time::Duration;

use super::{BOTH, Record, number, openmpi, put, rows, signal};
use peerlane_rxe_vm::process::Outcome;
use peerlane_rxe_vm::{Job, Nodes, perftest};

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
/// The block whose bytes are counted on the wire, and iterations of the shorter and the longer run.
pub(super) const WIRE_BLOCK: u64 = 256 << 10;
pub(super) const WIRE_ITERATIONS: [u32; 2] = [5, 25];
/// Time limit of a job, for an emulated guest on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// How Peerlane's ranks wait: the name in the record, and the option.
pub(super) const WAITS: [(&str, &str); 2] = [("polling", "--spin 1s"), ("sleeping", "")];

/// A function that enters the figures in the lines of an output.
type Enter = dyn Fn(&mut Record, &[String]) -> Outcome;

/// A measurement.
pub(super) struct Step {
    pub(super) job: Job,
    pub(super) enter: Box<Enter>,
}

impl Step {
    fn new(
        name: String,
        command: String,
        enter: impl Fn(&mut Record, &[String]) -> Outcome + 'static,
    ) -> Self {
        let job = Job { name, command, folder: "/".into(), limit: LIMIT };
        Self { job, enter: Box::new(enter) }
    }

    /// Creates a step whose output has one figure.
    fn figure(
        name: String,
        command: String,
        read: impl Fn(&[String]) -> Outcome<f64> + 'static,
    ) -> Self {
        Self::new(name.clone(), command, move |record, printed| {
            record.add(name.clone(), read(printed)?);
            Ok(())
        })
    }
}

/// Returns the measurements in their order.
pub(super) fn steps(rounds: u16) -> Vec<Step> {
    let versions = "ib_write_bw --version\norterun --version --allow-run-as-root | head -n 1";
    let mut steps = vec![Step::new("versions".into(), versions.into(), |record, printed| {
        let lines = printed.iter().map(|line| line.trim()).filter(|line| !line.is_empty());
        record.versions = lines.map(str::to_owned).collect();
        Ok(())
    })];
    for number in 1..=rounds {
        for mut step in round() {
            step.job.name = format!("round {number}: {}", step.job.name);
            steps.push(step);
        }
    }
    let lossy = all_gather(TOTALS_LOSSY, "--algorithm all --iterations 3");
    steps.push(all_gathers(Wire::Lossy.name(), None, Wire::Lossy.over(&lossy)));
    steps
}

/// Returns the measurements of a round.
fn round() -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..TURNS {
        for (bytes, pairs, messages, window) in PUTS {
            let options = format!("-s {bytes} -q {pairs} -n {messages} -t {window}");
            steps.push(write_bw(put(bytes, pairs, "ib_write_bw"), bytes, &options));
            for (side, option) in WAITS {
                let options = format!(
                    "--put --bytes {bytes} --engines {pairs} --queue-pairs 1 --iterations {messages} \
                     --window {window} {option}"
                );
                steps.push(perf(put(bytes, pairs, side), "gbs", &options));
            }
        }
        let options = format!("-s {SIGNAL_BYTES} -n {SIGNALS}");
        let theirs = perftest::pair(NODES, "ib_write_lat", &options).command;
        // The typical time, which is the median.
        let read = |printed: &[String]| super::perftest(printed, SIGNAL_BYTES, 4);
        steps.push(Step::figure(signal("ib_write_lat"), theirs, read));
        for (side, option) in WAITS {
            let options =
                format!("--signal --bytes {SIGNAL_BYTES} --iterations {SIGNALS} {option}");
            steps.push(perf(signal(side), "median_us", &options));
        }
    }
    let options = format!("-b -s {BOTH_BYTES} -q 4 -n 72 -t 4");
    steps.push(write_bw(BOTH.to_owned(), BOTH_BYTES, &options));
    for algorithm in COUNTED {
        let total = 4 * WIRE_BLOCK;
        let run = |iterations| {
            let rest = format!("--algorithm {algorithm} --iterations {iterations}");
            count() + &all_gather((total, total, 2), &rest)
        };
        let command = WIRE_ITERATIONS.map(run).concat() + &count();
        let name = format!("bytes sent, {algorithm}");
        let enter = |record: &mut Record, printed: &[String]| record.enter_sent(printed, algorithm);
        steps.push(Step::new(name, command, enter));
    }
    let iterations = format!("--iterations {ITERATIONS}");
    let options = format!("--algorithm direct,hierarchical {iterations}");
    steps.push(all_gathers("cable", None, all_gather(TOTALS, &options)));
    for wire in Wire::COMPARED {
        let (min, max, factor) = TOTALS_OF_PEER;
        let theirs = openmpi::line(min, max, factor, ITERATIONS);
        let ours = all_gather(TOTALS_OF_PEER, &iterations);
        for (side, line) in [("Open MPI", theirs), ("Peerlane", ours)] {
            steps.push(all_gathers(wire.name(), Some(side), wire.over(&line)));
        }
    }
    steps
}

/// Measures a rate with ib_write_bw.
fn write_bw(name: String, bytes: u64, options: &str) -> Step {
    let command = perftest::pair(NODES, "ib_write_bw", options).command;
    // The average rate, in MiB per second.
    let mib = f64::from(1 << 20);
    Step::figure(name, command, move |printed| Ok(super::perftest(printed, bytes, 3)? * mib / 1e9))
}

/// Measures the figure of this field with `peerlane perf`.
fn perf(name: String, field: &'static str, options: &str) -> Step {
    let program = format!("peerlane perf --backend rdma {options}");
    Step::figure(name, ranks(&[1, 1], &program), |printed| match rows(printed)?.as_slice() {
        [row] => number(row, field),
        _ => Err("expected one row of JSON".into()),
    })
}

/// Measures times of all-gathers over a wire, by side or else by algorithm.
fn all_gathers(wire: &'static str, side: Option<&'static str>, command: String) -> Step {
    let name = format!("all-gathers, {wire}, {}", side.unwrap_or("all algorithms"));
    Step::new(name, command, move |record, printed| record.enter_gathers(printed, wire, side))
}

/// Returns shell lines that run all-gathers of totals from `min` to `max`.
fn all_gather((min, max, factor): (u64, u64, u64), options: &str) -> String {
    let program = format!(
        "peerlane allgather --min-bytes {min} --max-bytes {max} --factor {factor} --warmup 2 {options}"
    );
    ranks(&RANKS, &program)
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
    // The hub listens on all addresses of its node only with a secret.
    let secret = "export PEERLANE_SECRET=$(cat /proc/sys/kernel/random/uuid)";
    let mut lines = format!("rm -f /tmp/rank*\n{secret}\n");
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

/// A state of the cable between the nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wire {
    /// TCP passes 64 KiB whole, which no real wire does.
    AsItIs,
    /// TCP sends packets of the MTU size, as soft RoCE does.
    Packets,
    /// The wire is slower than the processors of both sides.
    Slow,
    /// The wire delays and loses packets.
    Lossy,
}

impl Wire {
    /// The wires over which Peerlane and Open MPI are measured.
    pub(super) const COMPARED: [Self; 3] = [Self::AsItIs, Self::Packets, Self::Slow];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::AsItIs => "as it is",
            Self::Packets => "packets of the MTU",
            Self::Slow => "slow",
            Self::Lossy => "lossy",
        }
    }

    /// Returns shell lines that change the wire, run `lines` and undo the change. A failure ends the job.
    pub(super) fn over(self, lines: &str) -> String {
        let segments = |count| format!("ip link set dev eth0 gso_max_segs {count}");
        let shaped = |discipline| {
            let put = format!("tc qdisc replace dev eth0 root {discipline}");
            (put, "tc qdisc del dev eth0 root".to_owned())
        };
        let (begin, end) = match self {
            Self::AsItIs => return lines.to_owned(),
            Self::Packets => (segments(1), segments(SEGMENTS)),
            Self::Slow => shaped(SLOW),
            Self::Lossy => shaped(LOSSY),
        };
        let [begin, end] =
            [begin, end].map(|line| [0, 1].map(|node| format!("ip netns exec node{node} {line}")));
        let begin = begin.map(|line| format!("{line} || exit 1\n")).concat();
        format!("trap '{}' EXIT\n{begin}{lines}", end.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sides_take_turns() {
        let steps = round();
        let names: Vec<&str> = steps.iter().map(|step| step.job.name.as_str()).collect();
        let (turns, rest) = names.split_at(3 * usize::from(TURNS) * (PUTS.len() + 1));
        for turn in turns.chunks(3) {
            let by = |side| turn[0].replace("ib_write_bw", side).replace("ib_write_lat", side);
            assert_eq!(turn[1..], WAITS.map(|(side, _)| by(side)));
            assert_ne!(turn[0], turn[1]);
        }
        let expected = Wire::COMPARED.map(|wire| {
            ["Open MPI", "Peerlane"].map(|side| format!("all-gathers, {}, {side}", wire.name()))
        });
        assert_eq!(rest[rest.len() - 6..], *expected.as_flattened());
    }

    #[test]
    fn a_step_enters_the_one_figure_that_it_reads() {
        let mut record = Record::default();
        let mut enter = |step: Step, lines: &[&str]| {
            (step.enter)(&mut record, &lines.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>())
        };
        let row = "65536      500              75.50              62.50              0.001000";
        enter(write_bw("theirs".to_owned(), 65536, ""), &["#bytes", row]).unwrap();
        let row = r#"{"gbs":2.5,"checked":true}"#;
        enter(perf("ours".to_owned(), "gbs", ""), &[row]).unwrap();
        enter(perf("two rows".to_owned(), "gbs", ""), &[row, row]).unwrap_err();
        assert!((record.median("theirs") - 0.065_536).abs() < 1e-9);
        assert_eq!(record.values("ours"), [2.5]);
    }

    #[test]
    fn lines_are_shell() {
        for Step { job, .. } in steps(1) {
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
            lines[2],
            "ip netns exec node1 env RANK=1 WORLD_SIZE=3 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 \
             MASTER_ADDR=10.0.0.1 peerlane allgather --device rxe1 --timeout 120 >/tmp/rank1 2>&1 &"
        );
        assert!(lines[3].starts_with("ip netns exec node1 env RANK=2 WORLD_SIZE=3 LOCAL_RANK=1 "));
        assert!(lines[4].ends_with("--json - || { cat /tmp/rank*; exit 1; }"));
        assert_eq!(lines.len(), 6);
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
}
