//! `cargo xtask bench hierarchical`: measures the hierarchical all-gather on virtual nodes of this host, against
//! its phases alone and one after the other.
//!
//! 8 ranks form 2 nodes of 4. Both fabrics are throttled to far less than the copy rate of this machine, so that
//! the schedule determines the time instead of the cores that ranks share. All runs are in place, because the
//! self copy belongs to no phase.
//!
//! - Between nodes alone: the two ranks of a rail exchange a block, all four rails at once.
//! - Inside the node alone: the four ranks of a node gather two blocks each: a rank's own and the one that it
//!   received from the other node.
//! - Two phases: one after the other, in each start.
//! - One chunk: the hierarchical plan in one chunk, which spreads the own block during the network transfer and
//!   the received block only when all of it has arrived.
//!
//! All take turns start by start, in one process and on one output per rank: `cli/examples/two_phases.rs`.

use serde::{Deserialize, Serialize};

use super::report::{self, Goals, Machine, figure, size};
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The maximum time by that of the longer phase alone, after subtracting the time of one chunk.
const OVER_LONGER: f64 = 1.1;
/// The minimum speed-up over two phases that take about as long as each other.
const FASTER: f64 = 1.3;
/// The maximum ratio of phases that take about as long as each other.
const ALIKE: f64 = 1.1;

/// Options of `cargo xtask bench hierarchical`.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub(crate) struct Options {
    /// The block of a rank.
    #[arg(long, default_value_t = 4 << 20)]
    block_bytes: u64,
    /// Parts of a block.
    #[arg(long, default_value_t = 8)]
    chunks: u32,
    /// Rate of a rank between nodes, in 10^6 bytes a second, case by case.
    #[arg(long, value_delimiter = ',', default_values_t = [25, 12, 50])]
    #[serde(skip)]
    network_mbs: Vec<u64>,
    /// Rate of a rank inside its node, in 10^6 bytes a second.
    #[arg(long, default_value_t = 150)]
    local_mbs: u64,
    /// Number of measurements of everything, in turns.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

/// The result for one network rate: medians of the iterations, as the example prints them.
#[derive(Debug, Serialize, Deserialize)]
struct Case {
    #[serde(default)]
    network_mbs: u64,
    #[serde(default)]
    chunks: u32,
    between_us: f64,
    inside_us: f64,
    two_phases_us: f64,
    one_chunk_us: f64,
    hierarchical_us: f64,
}

#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    #[serde(flatten)]
    options: Options,
    cases: Vec<Case>,
}

/// Measures all cases and writes docs/perf/hierarchical-host.
pub(super) fn run(options: &Options) -> Outcome {
    let cases = options.network_mbs.iter().map(|rate| options.case(*rate));
    let cases = cases.collect::<Outcome<_>>()?;
    let record = Record { machine: Machine::ask()?, options: options.clone(), cases };
    let name = |case: &Case| format!("{} MB/s", case.network_mbs);
    let goals = record.cases.iter().map(|case| (name(case), case.goals()));
    report::save("hierarchical-host", &record, &record.page(), goals)
}

impl Options {
    /// Runs the example, in which all candidates take turns.
    fn case(&self, network_mbs: u64) -> Outcome<Case> {
        eprintln!("{network_mbs} MB/s: {} iterations", self.iterations);
        let mut program = cargo(["run", "--quiet", "--release", "--package", "peerlane-cli"]);
        program.args(["--example", "two_phases", "--"]).args([
            format!("--block-bytes={}", self.block_bytes),
            format!("--chunks={}", self.chunks),
            format!("--network-bytes-per-second={network_mbs}e6"),
            format!("--local-bytes-per-second={}e6", self.local_mbs),
            format!("--iterations={}", self.iterations),
        ]);
        let case: Case = serde_json::from_str(&process::output(&mut program)?)?;
        Ok(Case { network_mbs, chunks: self.chunks, ..case })
    }
}

impl Case {
    fn longer_us(&self) -> f64 {
        self.between_us.max(self.inside_us)
    }

    /// Returns the time without that of spreading one chunk in the node, by the longer phase. Spreading inside
    /// the node moves two blocks.
    fn over_longer(&self) -> f64 {
        let chunk_us = self.inside_us / 2.0 / f64::from(self.chunks);
        (self.hierarchical_us - chunk_us) / self.longer_us()
    }

    fn times_faster(&self) -> f64 {
        self.two_phases_us / self.hierarchical_us
    }

    fn goals(&self) -> Goals {
        let are_alike = self.longer_us() <= ALIKE * self.between_us.min(self.inside_us);
        let faster = Some(self.times_faster()).filter(|_| are_alike);
        Goals::default()
            .at_most("× the longer + a chunk", self.over_longer(), OVER_LONGER)
            .at_least("× faster", faster, FASTER)
    }
}

impl Record {
    fn page(&self) -> String {
        let cases = report::table(
            &self.cases,
            &[
                ("network, MB/s", &|case| case.network_mbs.to_string()),
                ("between nodes alone, ms", &|case| figure(case.between_us / 1e3, 1)),
                ("inside alone, ms", &|case| figure(case.inside_us / 1e3, 1)),
                ("hierarchical, ms", &|case| figure(case.hierarchical_us / 1e3, 1)),
                ("less a chunk, over the longer", &|case| figure(case.over_longer(), 2)),
                ("two phases, ms", &|case| figure(case.two_phases_us / 1e3, 1)),
                ("times faster", &|case| figure(case.times_faster(), 2)),
                ("in one chunk, ms", &|case| figure(case.one_chunk_us / 1e3, 1)),
                ("times faster", &|case| figure(case.one_chunk_us / case.hierarchical_us, 2)),
                ("<goal", &|case| case.goals().cell()),
            ],
        );
        let values = [
            ("head", self.machine.head("The hierarchical all-gather on virtual nodes of one host")),
            ("block", size(self.options.block_bytes)),
            ("chunks", self.options.chunks.to_string()),
            ("local", self.options.local_mbs.to_string()),
            ("iterations", self.options.iterations.to_string()),
            ("cases", cases),
        ];
        report::page(include_str!("pages/hierarchical.md.in"), &values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(hierarchical_us: f64, chunks: u32) -> Case {
        let case = serde_json::json!({
            "chunks": chunks, "between_us": 100e3, "inside_us": 96e3, "two_phases_us": 196e3,
            "one_chunk_us": 150e3, "hierarchical_us": hierarchical_us,
        });
        serde_json::from_value(case).unwrap()
    }

    #[test]
    fn a_case_must_hide_the_shorter_phase() {
        assert_eq!(case(115e3, 8).goals().cell(), "≤ 1.1 × the longer + a chunk, ≥ 1.3 × faster");
        let missed = "**missed**: ≤ 1.1 × the longer + a chunk (found 1.110)";
        assert_eq!(case(117e3, 8).goals().cell(), missed);
    }

    #[test]
    fn phases_that_are_alike_must_be_overlapped() {
        let mut unlike = case(105e3, 8);
        unlike.inside_us = 60e3;
        assert_eq!(unlike.goals().cell(), "≤ 1.1 × the longer + a chunk");
        assert_eq!(case(155e3, 1).goals().cell(), "**missed**: ≥ 1.3 × faster (found 1.265)");
    }
}
