//! What is measured, in which order, and by which command of the guest.

use std::time::Duration;

use super::wire::{self, Wire};
use super::{lines, openmpi};
use peerlane_rxe_vm::perftest;
use peerlane_rxe_vm::{Job, Nodes};

/// Two, joined as hosts are, and the ranks of each where there are more than one.
pub(super) const NODES: Nodes = Nodes::Cable;
pub(super) const RANKS: [usize; 2] = [2, 2];
/// Messages of a put: bytes, queue pairs, messages of each, and most under way. About a second each: runs
/// of a third of that differ by 7 % among themselves, on both sides.
const PUTS: [(u64, u32, u32, u32); 4] =
    [(64 << 10, 1, 1800, 64), (64 << 10, 4, 450, 16), (1 << 20, 1, 144, 8), (1 << 20, 4, 36, 4)];
/// Messages in both directions at once.
pub(super) const BOTH_BYTES: u64 = 1 << 20;
pub(super) const SIGNAL_BYTES: u64 = 8;
const SIGNALS: u32 = 1000;
/// Turns of puts and signals in a round: they are short, and what processors a guest gives to a run makes
/// it differ by half from the next one, on both sides.
pub(super) const TURNS: u16 = 3;
/// Totals of all-gathers.
const TOTALS: (u64, u64, u64) = (64 << 10, 4 << 20, 4);
pub(super) const TOTALS_OF_PEER: (u64, u64, u64) = (256 << 10, 4 << 20, 4);
const ITERATIONS: u32 = 10;
/// The shard whose bytes are counted on the wire, and iterations of the shorter and the longer run.
pub(super) const WIRE_SHARD: u64 = 256 << 10;
pub(super) const WIRE_ITERATIONS: [u32; 2] = [5, 25];
/// What a job may take: emulated, perhaps on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// What a rank of ours does that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wait {
    /// It polls, as perftest does.
    Polls,
    /// It looks for a while and sleeps: the default.
    Sleeps,
}

impl Wait {
    const BOTH: [Self; 2] = [Self::Polls, Self::Sleeps];

    const fn option(self) -> &'static str {
        match self {
            Self::Polls => "--spin 1s",
            Self::Sleeps => "",
        }
    }
}

/// What a job measures.
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
    /// What the interfaces send for an all-gather.
    Sent {
        algorithm: &'static str,
    },
    TheirGathers(Wire),
    OurGathers(Wire),
}

/// What is measured, in this order, and in which round.
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
            What::Sent { algorithm: "hierarchical" },
            What::Sent { algorithm: "direct" },
            What::Algorithms,
        ];
        let gathers = Wire::ALL.map(|wire| [What::TheirGathers(wire), What::OurGathers(wire)]);
        let rest = rest.into_iter().chain(gathers.into_iter().flatten());
        steps.extend(rest.map(|what| (what, round)));
    }
    steps.push((What::Lossy, 0));
    steps
}

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
        lines::ranks(&RANKS, &program)
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
            lines::ranks(&[1, 1], &program)
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
            lines::ranks(&[1, 1], &program)
        }
        What::Algorithms => {
            all_gather(TOTALS, &format!("--algorithm direct,hierarchical {iterations}"))
        }
        What::Lossy => {
            let few = "--algorithm all --iterations 3";
            wire::shaped(wire::LOSSY, &all_gather((64 << 10, 1 << 20, 16), few))
        }
        What::Sent { algorithm } => {
            let total = 4 * WIRE_SHARD;
            let run = |iterations| {
                let rest = format!("--algorithm {algorithm} --iterations {iterations}");
                lines::count() + &all_gather((total, total, 2), &rest)
            };
            WIRE_ITERATIONS.map(run).concat() + &lines::count()
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
        let wanted = [1, 2]
            .map(|round| Wire::ALL.map(|wire| [(wire, "theirs", round), (wire, "ours", round)]));
        let wanted = wanted.as_flattened().as_flattened();
        assert_eq!(steps.iter().filter_map(gathers).collect::<Vec<_>>(), wanted);
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
}
