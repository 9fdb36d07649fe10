//! `cargo xtask bench rdma`: RDMA in the virtual machine of `cargo xtask test rdma`, all in one boot, the
//! sides in turns.
//!
//! The wire is soft RoCE between two network namespaces, and every packet costs the guest's processors:
//! what counts are ratios within the boot, never the figures themselves.

use std::collections::BTreeMap;
use std::time::Duration;

use super::facts::Machine;
use super::program::Peerlane;
use crate::process::Outcome;
use crate::test::rdma::guest::{Job, Nodes};
use crate::test::rdma::perftest;
use crate::test::rdma::programs::Built;
use crate::test::rdma::vm::{self, Vm};
use crate::workspace;

mod goals;
mod lines;
mod openmpi;
mod page;
mod record;
mod sample;

use record::{Algorithms, Gathers, Put, Record, Wire};

/// What is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often everything is measured, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
}

/// Nodes, and ranks of each where there are more than one.
const NODES: u32 = 2;
const RANKS: [usize; 2] = [2, 2];
/// Messages of a put: bytes, queue pairs, messages of each, and most under way.
const PUTS: [(u64, u32, u32, u32); 4] =
    [(64 << 10, 1, 600, 64), (64 << 10, 4, 150, 16), (1 << 20, 1, 48, 8), (1 << 20, 4, 12, 4)];
const SIGNAL_BYTES: u64 = 8;
const SIGNALS: u32 = 1000;
/// Turns of puts and signals in a round: they are short, and what processors a guest gives to a run makes
/// it differ by half from the next one, on both sides.
const TURNS: u16 = 3;
/// Totals of all-gathers.
const TOTALS: (u64, u64, u64) = (64 << 10, 4 << 20, 4);
const TOTALS_OF_PEER: (u64, u64, u64) = (256 << 10, 4 << 20, 4);
const ITERATIONS: u32 = 10;
/// To each peer, against Open MPI: with one, one processor makes all packets to it. Over the slow wire,
/// which loses packets, one: with two, soft RoCE ends with "remote invalid request" when it sends again.
const fn queue_pairs_of_gathers(shaped: bool) -> u32 {
    if shaped { 1 } else { 2 }
}
/// What a plain stream carries.
const STREAM_MIB: u32 = 64;
/// The shard whose bytes are counted on the wire, and iterations of the shorter and the longer run.
const WIRE_SHARD: u64 = 256 << 10;
const WIRE_ITERATIONS: [u32; 2] = [5, 25];
/// What a job may take: emulated, perhaps on a busy machine.
const LIMIT: Duration = Duration::from_secs(600);

/// What a rank of ours does that waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wait {
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
enum What {
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
    TheirSignal,
    OurSignal(Wait),
    /// A plain stream between the nodes.
    Stream,
    Algorithms,
    Lossy,
    Wire {
        algorithm: &'static str,
    },
    TheirGathers {
        shaped: bool,
    },
    OurGathers {
        shaped: bool,
    },
}

/// Measures everything, then writes docs/perf/rdma; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    if let Some(reason) = vm::lacks() {
        return Err(reason.into());
    }
    let metadata = workspace::members()?;
    let (root, target) = (metadata.workspace_root.as_std_path(), &metadata.target_directory);
    let machine = Machine::ask()?;
    let vm = Vm::obtain(target.as_std_path(), NODES, false)?;
    if vm.nodes() == Nodes::Loopback {
        return Err(
            "two nodes are measured, and this kernel has no RDMA device in a namespace".into()
        );
    }
    let peerlane = Peerlane::build(target.as_std_path())?;
    let mut built = Built { commands: vec![peerlane.file().to_owned()], ..Built::default() };
    openmpi::add(root, vm.folder(), target.join("peers").as_std_path(), &mut built)?;

    let steps = steps(options.rounds);
    let jobs: Vec<Job> = steps.iter().map(|(what, round)| job(*what, *round, vm.nodes())).collect();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let booted = vm.boot(&jobs, &built)?;
    let mut record = Record::new(machine, vm.kernel(), options.rounds);
    record.load = load.split(' ').take(3).collect::<Vec<_>>().join(", ");
    for ((what, _), ended) in steps.iter().zip(&booted.console.ended) {
        if ended.is_well() {
            note(&mut record, *what, &ended.printed)
                .map_err(|error| format!("{}: {error}", ended.name))?;
        }
    }
    booted.console.verdict(booted.end, jobs.len())?;
    record.save(&root.join("docs/perf"))?;
    println!("\nwritten: docs/perf/rdma.json, docs/perf/rdma.md");
    let missed = record.missed();
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}

/// What is measured, in this order, and in which round.
fn steps(rounds: u16) -> Vec<(What, u16)> {
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
            What::Stream,
            What::Wire { algorithm: "hierarchical" },
            What::Wire { algorithm: "direct" },
            What::Algorithms,
            What::TheirGathers { shaped: false },
            What::OurGathers { shaped: false },
            What::TheirGathers { shaped: true },
            What::OurGathers { shaped: true },
        ];
        steps.extend(rest.map(|what| (what, round)));
    }
    steps.push((What::Lossy, 0));
    steps
}

fn job(what: What, round: u16, nodes: Nodes) -> Job {
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
            perftest::pair(nodes, "ib_write_bw", &options).command
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
        What::TheirSignal => {
            let options = format!("-s {SIGNAL_BYTES} -n {SIGNALS}");
            perftest::pair(nodes, "ib_write_lat", &options).command
        }
        What::OurSignal(wait) => {
            let program = format!(
                "peerlane perf --backend rdma --signal --bytes {SIGNAL_BYTES} --iterations {SIGNALS} {}",
                wait.option()
            );
            lines::ranks(&[1, 1], &program)
        }
        What::Stream => lines::stream(STREAM_MIB),
        What::Algorithms => {
            all_gather(TOTALS, &format!("--algorithm direct,hierarchical {iterations}"))
        }
        What::Lossy => {
            let few = "--algorithm all --iterations 3";
            lines::over(lines::LOSSY, &all_gather((64 << 10, 1 << 20, 16), few))
        }
        What::Wire { algorithm } => {
            let total = 4 * WIRE_SHARD;
            let run = |iterations| {
                let rest = format!("--algorithm {algorithm} --iterations {iterations}");
                lines::count() + &all_gather((total, total, 2), &rest)
            };
            WIRE_ITERATIONS.map(run).concat() + &lines::count()
        }
        What::TheirGathers { shaped } => {
            let (min, max, factor) = TOTALS_OF_PEER;
            over_shaped(shaped, &openmpi::line(min, max, factor, ITERATIONS))
        }
        What::OurGathers { shaped } => {
            let rest = format!("--queue-pairs {} {iterations}", queue_pairs_of_gathers(shaped));
            over_shaped(shaped, &all_gather(TOTALS_OF_PEER, &rest))
        }
    };
    let name = if round == 0 { format!("{what:?}") } else { format!("round {round}: {what:?}") };
    Job { name, command, folder: "/".into(), limit: LIMIT }
}

fn over_shaped(shaped: bool, lines: &str) -> String {
    if shaped { lines::over(lines::SHAPED, lines) } else { lines.to_owned() }
}

/// Enters what a job printed.
fn note(record: &mut Record, what: What, printed: &[String]) -> Outcome {
    match what {
        What::Versions => {
            let lines = printed.iter().map(|line| line.trim()).filter(|line| !line.is_empty());
            record.versions = lines.map(str::to_owned).collect();
        }
        What::TheirPut { bytes, pairs } => {
            let rate = sample::perftest_gbs(printed, bytes)?;
            put_of(record, bytes, pairs).theirs_gbs.push(rate);
        }
        What::OurPut { bytes, pairs, wait } => {
            let rate = sample::perf(printed)?.gbs.ok_or("a put has a rate")?;
            let put = put_of(record, bytes, pairs);
            let rates = match wait {
                Wait::Polls => &mut put.ours_gbs,
                Wait::Sleeps => &mut put.sleeping_gbs,
            };
            rates.push(rate);
        }
        What::TheirSignal => {
            record.signal.theirs_us.push(sample::perftest_us(printed, SIGNAL_BYTES)?);
        }
        What::OurSignal(wait) => {
            let time = sample::perf(printed)?.median_us.ok_or("a signal has a time")?;
            let times = match wait {
                Wait::Polls => &mut record.signal.ours_us,
                Wait::Sleeps => &mut record.signal.sleeping_us,
            };
            times.push(time);
        }
        What::Stream => record.stream_gbs.push(sample::stream_gbs(printed, STREAM_MIB)?),
        What::Algorithms => algorithms(&mut record.algorithms, printed)?,
        What::Lossy => algorithms(&mut record.lossy, printed)?,
        What::Wire { algorithm } => {
            let counts = sample::counts(printed)?;
            let [first, second, third] = counts.try_into().map_err(|_| "wanted three counts")?;
            let seen = [0, 1].map(|node: usize| {
                let shorter = second[node].saturating_sub(first[node]);
                let longer = third[node].saturating_sub(second[node]);
                let more = f64::from(WIRE_ITERATIONS[1] - WIRE_ITERATIONS[0]);
                longer.saturating_sub(shorter) as f64 / more
            });
            let again = (third[2] + third[3]).saturating_sub(first[2] + first[3]);
            wire_of(record, algorithm).enter(seen, again);
        }
        What::TheirGathers { shaped } => {
            for row in sample::gathers(printed)? {
                gathers_of(record, row.total_bytes, shaped).theirs_us.push(row.median_us);
            }
        }
        What::OurGathers { shaped } => {
            for row in sample::gathers(printed)? {
                let gathers = gathers_of(record, row.total_bytes, shaped);
                gathers.ours_us.push(row.median_us);
                gathers.algorithm = row.algorithm;
            }
        }
    }
    Ok(())
}

fn wire_of<'a>(record: &'a mut Record, algorithm: &str) -> &'a mut Wire {
    let wires = &mut record.wire;
    let at = wires.iter().position(|wire| wire.algorithm == algorithm).unwrap_or_else(|| {
        wires.push(Wire::new(algorithm, RANKS, WIRE_SHARD));
        wires.len() - 1
    });
    &mut wires[at]
}

fn put_of(record: &mut Record, bytes: u64, queue_pairs: u32) -> &mut Put {
    let puts = &mut record.puts;
    let at = puts.iter().position(|put| (put.bytes, put.queue_pairs) == (bytes, queue_pairs));
    let at = at.unwrap_or_else(|| {
        puts.push(Put { bytes, queue_pairs, ..Put::default() });
        puts.len() - 1
    });
    &mut puts[at]
}

fn gathers_of(record: &mut Record, total_bytes: u64, shaped: bool) -> &mut Gathers {
    let all = &mut record.gathers;
    let at = all.iter().position(|one| (one.total_bytes, one.shaped) == (total_bytes, shaped));
    let at = at.unwrap_or_else(|| {
        all.push(Gathers { total_bytes, shaped, ..Gathers::default() });
        all.len() - 1
    });
    &mut all[at]
}

fn algorithms(all: &mut Vec<Algorithms>, printed: &[String]) -> Outcome {
    for row in sample::gathers(printed)? {
        let at = all.iter().position(|one| one.total_bytes == row.total_bytes);
        let at = at.unwrap_or_else(|| {
            all.push(Algorithms { total_bytes: row.total_bytes, times_us: BTreeMap::new() });
            all.len() - 1
        });
        all[at].times_us.entry(row.algorithm).or_default().push(row.median_us);
    }
    Ok(())
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
        assert_eq!(steps.last().unwrap().0, What::Lossy);
    }

    #[test]
    fn lines_are_shell() {
        for (what, round) in steps(1) {
            let job = job(what, round, Nodes::Namespaces(NODES));
            let mut shell = std::process::Command::new("sh");
            let output = shell.args(["-n", "-c", &job.command]).output().unwrap();
            assert!(output.status.success(), "{}: {:?}", job.name, output.stderr);
        }
    }

    #[test]
    fn what_is_printed_is_entered() {
        let mut record = Record::new(Machine::default(), "7.0", 1);
        let printed = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let put = What::OurPut { bytes: 8, pairs: 1, wait: Wait::Polls };
        note(&mut record, put, &printed(r#"{"gbs":2.5,"checked":true}"#)).unwrap();
        assert_eq!(record.puts[0].ours_gbs, [2.5]);
        let counts = "sent 0 0 1 0\nsent 100 100 1 0\nsent 1200 1300 2 2";
        note(&mut record, What::Wire { algorithm: "direct" }, &printed(counts)).unwrap();
        assert_eq!(
            (&record.wire[0].rounds_bytes[..], record.wire[0].again),
            (&[[50.0, 55.0]][..], 3)
        );
        let row = r#"{"total_bytes":8,"median_us":2.5,"checked":true,"algorithm":"ring"}"#;
        note(&mut record, What::Algorithms, &printed(row)).unwrap();
        assert_eq!(record.algorithms[0].times_us["ring"], [2.5]);
        note(&mut record, What::OurGathers { shaped: true }, &printed(row)).unwrap();
        assert_eq!(
            (record.gathers[0].shaped, record.gathers[0].algorithm.as_str()),
            (true, "ring")
        );
        assert!(note(&mut record, What::TheirSignal, &printed("nothing")).is_err());
    }
}
