//! `cargo xtask bench rdma`: measures RDMA in the virtual machine of `cargo xtask test rdma`, all in one boot, with
//! the sides in turns.
//!
//! The wire is a cable between two network namespaces with soft RoCE, and the guest's processors handle every
//! packet. So only ratios within a boot count, never the figures themselves.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::median;
use super::report::{self, Machine};
use crate::workspace;
use peerlane_rxe_vm::process::Outcome;
use peerlane_rxe_vm::{self as vm, Job, Nodes, Programs, Vm};

mod openmpi;
mod page;
mod steps;

use steps::{NODES, WIRE_ITERATIONS, steps};

/// Options of `cargo xtask bench rdma`.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Number of measurements of everything, in turns.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=20))]
    rounds: u16,
}

/// Measures everything and writes docs/perf/rdma.
pub(super) fn run(options: &Options) -> Outcome {
    if let Some(reason) = vm::unavailable() {
        return Err(reason.into());
    }
    let metadata = workspace::members()?;
    let (root, target) = (metadata.workspace_root.as_std_path(), &metadata.target_directory);
    let machine = Machine::ask()?;
    let vm = Vm::obtain(target.as_std_path(), NODES, false)?;
    if vm.nodes() == Nodes::Loopback {
        let reason = "the kernel has no RDMA device in a namespace, so it cannot be two nodes";
        return Err(reason.into());
    }
    let program = workspace::build_program(target.as_std_path(), true)?;
    let mut built = Programs { commands: vec![program], ..Programs::default() };
    openmpi::add(root, vm.folder(), target.join("peers").as_std_path(), &mut built)?;

    let steps = steps(options.rounds);
    let jobs: Vec<Job> = steps.iter().map(|step| step.job.clone()).collect();
    let load = std::fs::read_to_string("/proc/loadavg")?;
    let booted = vm.boot(&jobs, &built)?;
    let mut record = Record {
        machine,
        emulator: vm.emulator().to_owned(),
        kernel: vm.kernel().to_owned(),
        load: load.split(' ').take(3).collect::<Vec<_>>().join(", "),
        rounds: options.rounds,
        ..Record::default()
    };
    for (step, ended) in steps.iter().zip(&booted.console.ended) {
        if ended.is_well() {
            let entered = (step.enter)(&mut record, &ended.printed);
            entered.map_err(|error| format!("{}: {error}", ended.name))?;
        }
    }
    booted.console.verdict(booted.end, jobs.len())?;
    report::save("rdma", &record, &record.page(), record.goals())
}

/// The figure of puts in both directions.
const BOTH: &str = "puts in both directions, ib_write_bw, GB/s";
/// The figure of the times that the two devices began to send again.
const RETRIES: &str = "retries of both devices";

/// The figures of one boot.
#[derive(Debug, Default, Serialize)]
struct Record {
    machine: Machine,
    /// The version of QEMU.
    emulator: String,
    /// The guest's kernel.
    kernel: String,
    /// Load averages of 1, 5 and 15 minutes before the boot.
    load: String,
    /// The versions of perftest and Open MPI.
    versions: Vec<String>,
    rounds: u16,
    /// The algorithm that Peerlane chose for an all-gather.
    choices: BTreeMap<String, String>,
    /// One value per turn.
    figures: BTreeMap<String, Vec<f64>>,
}

/// Names the rate of puts by one side.
fn put(bytes: u64, queue_pairs: u32, side: &str) -> String {
    format!("put of {bytes} B over {queue_pairs} queue pairs, {side}, GB/s")
}

/// Names the one-way time of a put of 8 bytes and a signal by one side.
fn signal(side: &str) -> String {
    format!("put of 8 B and signal, {side}, µs")
}

/// Names the time of an all-gather over a wire by one side or algorithm.
fn gather(wire: &str, total_bytes: u64, side: &str) -> String {
    format!("all-gather of {total_bytes} B, {wire}, {side}, µs")
}

/// Names the bytes that a node sends for one all-gather, with headers, acknowledgements and retries.
fn sent(algorithm: &str, node: usize) -> String {
    format!("sent by node {node}, {algorithm}, B")
}

impl Record {
    /// Enters the bytes that both nodes sent for an all-gather: the difference of a longer and a shorter run.
    fn enter_sent(&mut self, printed: &[String], algorithm: &str) -> Outcome {
        let [first, second, third]: [[u64; 4]; 3] =
            counts(printed)?.try_into().map_err(|_| "expected three counts")?;
        for node in 0..2 {
            let shorter = second[node].saturating_sub(first[node]);
            let longer = third[node].saturating_sub(second[node]);
            let iterations = f64::from(WIRE_ITERATIONS[1] - WIRE_ITERATIONS[0]);
            self.add(sent(algorithm, node), longer.saturating_sub(shorter) as f64 / iterations);
        }
        let retries = (third[2] + third[3]).saturating_sub(first[2] + first[3]);
        self.add(RETRIES.to_owned(), retries as f64);
        Ok(())
    }

    /// Enters the rows of all-gathers, by side or else by algorithm.
    fn enter_gathers(&mut self, printed: &[String], wire: &str, side: Option<&str>) -> Outcome {
        for row in rows(printed)? {
            let total = row["total_bytes"].as_u64().ok_or("the row has no total_bytes")?;
            let algorithm = row["algorithm"].as_str().unwrap_or_default();
            let name = gather(wire, total, side.unwrap_or(algorithm));
            if side.is_some() && !algorithm.is_empty() {
                self.choices.insert(name.clone(), algorithm.to_owned());
            }
            self.add(name, number(&row, "median_us")?);
        }
        Ok(())
    }

    fn add(&mut self, name: String, value: f64) {
        self.figures.entry(name).or_default().push(value);
    }

    /// Returns the values of a figure.
    fn values(&self, name: &str) -> &[f64] {
        self.figures.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the median of a figure, or NaN if it was not measured.
    fn median(&self, name: &str) -> f64 {
        let values = self.values(name);
        if values.is_empty() { f64::NAN } else { median(values.iter().copied()) }
    }

    /// Returns the smallest value of a figure, or NaN if it was not measured.
    fn least(&self, name: &str) -> f64 {
        self.values(name).iter().copied().fold(f64::NAN, f64::min)
    }

    /// Returns the ratio of the largest and the smallest value of a figure.
    fn spread(&self, name: &str) -> f64 {
        self.values(name).iter().copied().fold(f64::NAN, f64::max) / self.least(name)
    }

    /// Returns the algorithms that were measured over a wire, sorted.
    fn algorithms_over(&self, wire: &str, total_bytes: u64) -> Vec<&str> {
        let begin = gather(wire, total_bytes, "");
        let begin = begin.trim_end_matches(", µs");
        let names = self.figures.keys().filter_map(|name| name.strip_prefix(begin));
        names.filter_map(|name| name.strip_suffix(", µs")).collect()
    }
}

/// Reads the rows of JSON that Peerlane and the program over Open MPI print, each of which must be checked.
fn rows(printed: &[String]) -> Outcome<Vec<Value>> {
    // A message of Open MPI may end in a zero byte, with which the next line then begins.
    let lines = printed.iter().map(|line| line.trim_start_matches(char::is_control));
    let lines = lines.filter(|line| line.starts_with('{'));
    let rows = lines.map(serde_json::from_str).collect::<Result<Vec<Value>, _>>()?;
    if rows.is_empty() || !rows.iter().all(|row| row["checked"] == true) {
        return Err(format!("expected checked rows of JSON:\n{}", printed.join("\n")).into());
    }
    Ok(rows)
}

/// Returns a number of a row.
fn number(row: &Value, field: &str) -> Outcome<f64> {
    row[field].as_f64().ok_or_else(|| format!("the row has no {field}: {row}").into())
}

/// Reads a column of perftest's row of this size.
fn perftest(printed: &[String], bytes: u64, column: usize) -> Outcome<f64> {
    let size = bytes.to_string();
    let words = printed.iter().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let row = words.into_iter().find(|words| words.first() == Some(&size.as_str()));
    let figure = row.as_ref().and_then(|words| words.get(column)?.parse().ok());
    let printed = || printed.join("\n");
    figure.ok_or_else(|| format!("perftest printed no row of {bytes} bytes:\n{}", printed()).into())
}

/// Reads the lines that count: the bytes that each node had sent, and the retries of each device.
fn counts(printed: &[String]) -> Outcome<Vec<[u64; 4]>> {
    let counts = printed.iter().filter_map(|line| line.strip_prefix("sent "));
    let counts = counts.map(|line| {
        let numbers: Vec<u64> =
            line.split_whitespace().filter_map(|word| word.parse().ok()).collect();
        <[u64; 4]>::try_from(numbers).map_err(|_| format!("expected four numbers: {line}").into())
    });
    counts.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    #[test]
    fn tables_of_perftest_are_read() {
        let rates = lines(
            " #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]\n \
             65536      500              75.50              62.50              0.001000\n",
        );
        assert_eq!(perftest(&rates, 65536, 3).unwrap(), 62.5);
        assert!(perftest(&rates, 8, 3).is_err());
        let times = lines(
            " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]\n \
             8       1000          50.71          4000.10      67.25              70.00\n",
        );
        assert_eq!(perftest(&times, 8, 4).unwrap(), 67.25);
        assert!(perftest(&lines("nothing"), 8, 4).is_err());
    }

    #[test]
    fn rows_must_be_checked() {
        let good = r#"{"total_bytes":8,"median_us":2.5,"checked":true,"algorithm":"direct"}"#;
        assert_eq!(rows(&lines(good)).unwrap()[0]["algorithm"], "direct");
        assert!(rows(&lines(&good.replace("true", "false"))).is_err());
        assert!(rows(&lines("nothing")).is_err());
        assert_eq!(rows(&lines(&format!("a warning\n\0{good}"))).unwrap().len(), 1);
    }

    #[test]
    fn printed_figures_are_entered() {
        let mut record = Record::default();
        let counts = lines("sent 0 0 1 0\nx\nsent 100 100 1 0\nsent 1200 1300 2 2");
        record.enter_sent(&counts, "direct").unwrap();
        assert_eq!([0, 1].map(|node| record.median(&sent("direct", node))), [50.0, 55.0]);
        assert_eq!(record.values(RETRIES), [3.0]);
        assert!(record.enter_sent(&counts[1..], "direct").is_err());
        assert!(record.enter_sent(&lines("sent 10"), "direct").is_err());
        let row = r#"{"total_bytes":8,"median_us":2.5,"checked":true,"algorithm":"ring"}"#;
        record.enter_gathers(&lines(row), "cable", None).unwrap();
        assert_eq!(record.algorithms_over("cable", 8), ["ring"]);
        assert_eq!(record.median(&gather("cable", 8, "ring")), 2.5);
        record.enter_gathers(&lines(row), "slow", Some("Peerlane")).unwrap();
        assert_eq!(record.choices[&gather("slow", 8, "Peerlane")], "ring");
        assert!(record.median("nothing").is_nan());
    }
}
