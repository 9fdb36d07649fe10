//! `cargo xtask bench hierarchical`: what the hierarchical plan hides, on virtual nodes of this host.
//!
//! 8 ranks as 2 nodes of 4. Both fabrics are throttled to far less than what this machine copies, so
//! that the schedule sets the pace and not the cores that ranks share. In place, so that there is no
//! copy of the own shard, which is in no phase.
//!
//! - Between nodes alone: the two ranks of a rail exchange a shard, all four rails at once.
//! - Inside the node alone: the four ranks of a node gather blocks of two shards: a rank's own and the
//!   one that it got from the other node.
//! - Two phases: the one, then the other, in each start.
//! - One chunk: the hierarchical plan in one chunk, which spreads the own shard beside the network and
//!   waits with the rest until a whole shard has arrived.
//!
//! All take turns start by start, in one process and on one output a rank: `cli/examples/two_phases.rs`.

use std::fmt::Write;
use std::path::Path;

use super::facts::Facts;
use super::record::size;
use crate::workspace;
use peerlane_rxe_vm::process::{self, Outcome, cargo};

/// The goals: time over that of the longer phase alone, and how much faster than two phases where
/// both take about as long.
const OVER_LONGER: f64 = 1.1;
const FASTER: f64 = 1.3;
/// Phases that differ by less take about as long.
const ALIKE: f64 = 1.1;

/// What is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The shard of a rank.
    #[arg(long, default_value_t = 4 << 20)]
    shard_bytes: u64,
    /// Chunks of a shard.
    #[arg(long, default_value_t = 8)]
    chunks: u32,
    /// What a rank sends between nodes, in 10^6 bytes a second, case by case.
    #[arg(long, value_delimiter = ',', default_values_t = [25, 12, 50])]
    network_mbs: Vec<u64>,
    /// What a rank sends inside its node, in 10^6 bytes a second.
    #[arg(long, default_value_t = 150)]
    local_mbs: u64,
    /// How often everything is measured, in turns.
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..))]
    iterations: u32,
}

/// One network.
#[derive(Debug, serde::Serialize)]
struct Case {
    network_mbs: u64,
    #[serde(flatten)]
    times: Times,
}

/// Medians of the iterations, as the example prints them.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Times {
    between_us: f64,
    inside_us: f64,
    two_phases_us: f64,
    one_chunk_us: f64,
    hierarchical_us: f64,
}

#[derive(Debug, serde::Serialize)]
struct Record {
    facts: Facts,
    iterations: u32,
    shard_bytes: u64,
    chunks: u32,
    local_mbs: u64,
    cases: Vec<Case>,
}

/// Measures everything, then writes docs/perf/hierarchical-host; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    let metadata = workspace::members()?;
    let root = metadata.workspace_root.as_std_path();
    let facts = Facts::collect()?;
    let cases = options.network_mbs.iter().map(|rate| options.case(*rate));
    let record = Record {
        facts,
        iterations: options.iterations,
        shard_bytes: options.shard_bytes,
        chunks: options.chunks,
        local_mbs: options.local_mbs,
        cases: cases.collect::<Outcome<_>>()?,
    };
    record.save(&root.join("docs/perf"))?;
    println!("\nwritten: docs/perf/hierarchical-host.json, docs/perf/hierarchical-host.md");
    let missed: Vec<_> =
        record.cases.iter().filter_map(|case| case.verdict(options.chunks).err()).collect();
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}

impl Options {
    /// Runs the example, in which all ways take turns.
    fn case(&self, network_mbs: u64) -> Outcome<Case> {
        eprintln!("{network_mbs} MB/s: {} iterations", self.iterations);
        let mut program = cargo(["run", "--quiet", "--release", "--package", "peerlane-cli"]);
        program.args(["--example", "two_phases", "--"]).args([
            format!("--shard-bytes={}", self.shard_bytes),
            format!("--chunks={}", self.chunks),
            format!("--network-bytes-per-second={network_mbs}e6"),
            format!("--local-bytes-per-second={}e6", self.local_mbs),
            format!("--iterations={}", self.iterations),
        ]);
        let times = serde_json::from_str(&process::output(&mut program)?)?;
        Ok(Case { network_mbs, times })
    }
}

impl Case {
    fn longer_us(&self) -> f64 {
        self.times.between_us.max(self.times.inside_us)
    }

    /// What it takes to spread one chunk of a shard in the node, by the time of two shards.
    fn chunk_us(&self, chunks: u32) -> f64 {
        self.times.inside_us / 2.0 / f64::from(chunks)
    }

    fn times_faster(&self) -> f64 {
        self.times.two_phases_us / self.times.hierarchical_us
    }

    fn are_alike(&self) -> bool {
        self.longer_us() <= ALIKE * self.times.between_us.min(self.times.inside_us)
    }

    fn verdict(&self, chunks: u32) -> Result<(), String> {
        let rate = self.network_mbs;
        let most = OVER_LONGER * self.longer_us() + self.chunk_us(chunks);
        if self.times.hierarchical_us > most {
            let (seen, most) = (self.times.hierarchical_us / 1e3, most / 1e3);
            return Err(format!("{rate} MB/s: {seen:.1} ms, wanted at most {most:.1} ms"));
        }
        let faster = self.times_faster();
        if self.are_alike() && faster < FASTER {
            return Err(format!("{rate} MB/s: {faster:.2} × faster, wanted {FASTER}"));
        }
        Ok(())
    }

    fn line(&self, chunks: u32) -> String {
        let milliseconds = |time: f64| format!("{:.1}", time / 1e3);
        let Times { between_us, inside_us, two_phases_us, one_chunk_us, hierarchical_us } =
            self.times;
        let over = (hierarchical_us - self.chunk_us(chunks)) / self.longer_us();
        let verdict = match (self.verdict(chunks), self.are_alike()) {
            (Err(missed), _) => format!("**missed**: {missed}"),
            (Ok(()), true) => {
                format!("≤ {OVER_LONGER} × the longer + a chunk; ≥ {FASTER} × faster")
            }
            (Ok(()), false) => format!("≤ {OVER_LONGER} × the longer + a chunk"),
        };
        format!(
            "| {} | {} | {} | {} | {:.2} | {} | {:.2} | {} | {:.2} | {verdict} |",
            self.network_mbs,
            milliseconds(between_us),
            milliseconds(inside_us),
            milliseconds(hierarchical_us),
            over,
            milliseconds(two_phases_us),
            self.times_faster(),
            milliseconds(one_chunk_us),
            one_chunk_us / hierarchical_us,
        )
    }
}

const HEAD: &str = "\
| network, MB/s | between nodes alone, ms | inside alone, ms | hierarchical, ms | less a chunk, over the longer | two phases, ms | times faster | in one chunk, ms | times faster | goal |
| --: | --: | --: | --: | --: | --: | --: | --: | --: | --- |";

impl Record {
    fn save(&self, folder: &Path) -> Outcome {
        std::fs::create_dir_all(folder)?;
        let json = serde_json::to_string_pretty(self)? + "\n";
        std::fs::write(folder.join("hierarchical-host.json"), json)?;
        std::fs::write(folder.join("hierarchical-host.md"), self.page()?)?;
        Ok(())
    }

    fn page(&self) -> Result<String, std::fmt::Error> {
        let Facts { command, date, peerlane, rustc, kernel, cpu, cores, .. } = &self.facts;
        let mut page = String::new();
        writeln!(page, "# The hierarchical all-gather on virtual nodes of one host\n")?;
        writeln!(page, "Written by `{command}` on {date}; do not edit.\n")?;
        writeln!(page, "- Peerlane {peerlane}, {rustc}")?;
        writeln!(page, "- {cores} cores of {cpu}, {kernel}")?;
        writeln!(
            page,
            "- 8 ranks as 2 nodes of 4, shards of {} in {} chunks, in place. A rank sends {} MB/s inside \
             its node at most: both fabrics are throttled to far less than this machine copies, so that \
             the schedule sets the pace.",
            size(self.shard_bytes),
            self.chunks,
            self.local_mbs
        )?;
        writeln!(
            page,
            "- A time is the median of {} iterations, of the slowest rank of each. All take turns start by \
             start, in one process and on the same memory. Between nodes alone: the two ranks of a rail. \
             Inside alone: the ranks of a node, shards of twice the size. Two phases: the one, then the \
             other, in each start. In one chunk: the same plan, which then spreads what arrives only when \
             all of it is there. A chunk is what it takes to spread one inside the node.\n",
            self.iterations
        )?;
        writeln!(page, "{HEAD}")?;
        self.cases.iter().try_for_each(|case| writeln!(page, "{}", case.line(self.chunks)))?;
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(hierarchical_us: f64) -> Case {
        let [between_us, inside_us, two_phases_us, one_chunk_us] = [100e3, 96e3, 196e3, 150e3];
        let times = Times { between_us, inside_us, two_phases_us, one_chunk_us, hierarchical_us };
        Case { network_mbs: 25, times }
    }

    #[test]
    fn a_case_must_hide_the_shorter_phase() {
        assert_eq!(case(115e3).verdict(8), Ok(()));
        let missed = "25 MB/s: 117.0 ms, wanted at most 116.0 ms";
        assert_eq!(case(117e3).verdict(8), Err(missed.into()));
    }

    #[test]
    fn phases_that_are_alike_must_be_overlapped() {
        let mut unlike = case(105e3);
        unlike.times.inside_us = 60e3;
        assert!(!unlike.are_alike() && unlike.verdict(8).is_ok());
        let slow = case(155e3).verdict(1);
        assert_eq!(slow, Err("25 MB/s: 1.26 × faster, wanted 1.3".into()));
    }
}
