//! `cargo xtask bench rdma`: RDMA in the virtual machine of `cargo xtask test rdma`, all in one boot, the
//! sides in turns.
//!
//! The wire is a cable between two network namespaces with soft RoCE, and every packet costs the guest's
//! processors: what counts are ratios within the boot, never the figures themselves.

use std::collections::BTreeMap;

use super::facts::Machine;
use super::program::Peerlane;
use crate::workspace;
use peerlane_rxe_vm::Programs;
use peerlane_rxe_vm::process::Outcome;
use peerlane_rxe_vm::{self as vm, Vm};
use peerlane_rxe_vm::{Job, Nodes};

mod goals;
mod lines;
mod openmpi;
mod page;
mod record;
mod sample;
mod steps;
mod wire;

use record::{Algorithms, Gathers, Put, Record, Sent};
use steps::{
    BOTH_BYTES, NODES, RANKS, SIGNAL_BYTES, WIRE_ITERATIONS, WIRE_SHARD, Wait, What, job, steps,
};
use wire::Wire;

/// What is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// How often everything is measured, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
}

/// Measures everything, then writes docs/perf/rdma; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    if let Some(reason) = vm::unavailable() {
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
    let mut built = Programs { commands: vec![peerlane.file().to_owned()], ..Programs::default() };
    openmpi::add(root, vm.folder(), target.join("peers").as_std_path(), &mut built)?;

    let steps = steps(options.rounds);
    let jobs: Vec<Job> = steps.iter().map(|(what, round)| job(*what, *round)).collect();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let booted = vm.boot(&jobs, &built)?;
    let mut record = Record::new(machine, vm.emulator(), vm.kernel(), options.rounds);
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
        What::TheirPuts => {
            record.both_gbs.push(sample::perftest_gbs(printed, BOTH_BYTES)?);
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
        What::Algorithms => algorithms(&mut record.algorithms, printed)?,
        What::Lossy => algorithms(&mut record.lossy, printed)?,
        What::Sent { algorithm } => {
            let counts = sample::counts(printed)?;
            let [first, second, third] = counts.try_into().map_err(|_| "wanted three counts")?;
            let seen = [0, 1].map(|node: usize| {
                let shorter = second[node].saturating_sub(first[node]);
                let longer = third[node].saturating_sub(second[node]);
                let more = f64::from(WIRE_ITERATIONS[1] - WIRE_ITERATIONS[0]);
                longer.saturating_sub(shorter) as f64 / more
            });
            let again = (third[2] + third[3]).saturating_sub(first[2] + first[3]);
            sent_of(record, algorithm).enter(seen, again);
        }
        What::TheirGathers(wire) => {
            for row in sample::gathers(printed)? {
                gathers_of(record, row.total_bytes, wire).theirs_us.push(row.median_us);
            }
        }
        What::OurGathers(wire) => {
            for row in sample::gathers(printed)? {
                let gathers = gathers_of(record, row.total_bytes, wire);
                gathers.ours_us.push(row.median_us);
                gathers.algorithm = row.algorithm;
            }
        }
    }
    Ok(())
}

fn sent_of<'a>(record: &'a mut Record, algorithm: &str) -> &'a mut Sent {
    let all = &mut record.sent;
    let at = all.iter().position(|sent| sent.algorithm == algorithm).unwrap_or_else(|| {
        all.push(Sent::new(algorithm, RANKS, WIRE_SHARD));
        all.len() - 1
    });
    &mut all[at]
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

fn gathers_of(record: &mut Record, total_bytes: u64, wire: Wire) -> &mut Gathers {
    let all = &mut record.gathers;
    let at = all.iter().position(|one| (one.total_bytes, one.wire) == (total_bytes, wire));
    let at = at.unwrap_or_else(|| {
        all.push(Gathers::new(total_bytes, wire));
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
    fn what_is_printed_is_entered() {
        let mut record = Record::new(Machine::default(), "10.0.2", "7.0", 1);
        let printed = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let put = What::OurPut { bytes: 8, pairs: 1, wait: Wait::Polls };
        note(&mut record, put, &printed(r#"{"gbs":2.5,"checked":true}"#)).unwrap();
        assert_eq!(record.puts[0].ours_gbs, [2.5]);
        let counts = "sent 0 0 1 0\nsent 100 100 1 0\nsent 1200 1300 2 2";
        note(&mut record, What::Sent { algorithm: "direct" }, &printed(counts)).unwrap();
        assert_eq!(
            (&record.sent[0].rounds_bytes[..], record.sent[0].again),
            (&[[50.0, 55.0]][..], 3)
        );
        let row = r#"{"total_bytes":8,"median_us":2.5,"checked":true,"algorithm":"ring"}"#;
        note(&mut record, What::Algorithms, &printed(row)).unwrap();
        assert_eq!(record.algorithms[0].times_us["ring"], [2.5]);
        note(&mut record, What::OurGathers(Wire::Slow), &printed(row)).unwrap();
        assert_eq!(
            (record.gathers[0].wire, record.gathers[0].algorithm.as_str()),
            (Wire::Slow, "ring")
        );
        assert!(note(&mut record, What::TheirSignal, &printed("nothing")).is_err());
    }
}
