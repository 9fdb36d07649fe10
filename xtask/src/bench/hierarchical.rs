//! `cargo xtask bench hierarchical`: what the hierarchical plan hides, on virtual nodes of this host.
//!
//! 8 ranks as 2 nodes of 4. Both fabrics are throttled to far less than what this machine copies, so
//! that the schedule sets the pace and not the cores that ranks share. In place, so that there is no
//! copy of the own shard, which is in no phase.
//!
//! - Between nodes alone: two ranks on two nodes exchange a shard; each of the four pairs of the
//!   whole has a wire of its own.
//! - Inside the node alone: four ranks of one node gather shards of twice the size: a rank's own and
//!   the one that it got from the other node.
//! - Two phases: the sum of both, which is the least that two all-gathers one after the other take.
//! - One part: the hierarchical plan in one part, which spreads the own shard beside the network and
//!   waits with the rest until a whole shard has arrived.

use std::fmt::Write;
use std::path::Path;

use super::facts::Facts;
use super::program::Peerlane;
use super::record::size;
use super::{Sample, median};
use crate::process::Outcome;
use crate::workspace;

/// The goals: time over that of the longer phase alone, and how much faster than two phases where
/// both take about as long.
const OVER_LONGER: f64 = 1.1;
const FASTER: f64 = 1.3;
/// Phases that differ by less take about as long.
const ALIKE: f64 = 1.1;

/// Ranks of a node; there are two.
const NODE_RANKS: u64 = 4;

/// What is measured.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The shard of a rank.
    #[arg(long, default_value_t = 4 << 20)]
    shard_bytes: u64,
    /// Parts of a shard.
    #[arg(long, default_value_t = 8)]
    parts: u32,
    /// What a rank sends between nodes, in 10^6 bytes a second, case by case.
    #[arg(long, value_delimiter = ',', default_values_t = [25, 12, 50])]
    network_mbs: Vec<u64>,
    /// What a rank sends inside its node, in 10^6 bytes a second.
    #[arg(long, default_value_t = 150)]
    local_mbs: u64,
    /// How often everything is measured, in turns.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// Iterations of a round.
    #[arg(long, default_value_t = 5)]
    iterations: u32,
}

/// One network.
#[derive(Debug, serde::Serialize)]
struct Case {
    network_mbs: u64,
    between_us: f64,
    inside_us: f64,
    one_part_us: f64,
    hierarchical_us: f64,
}

#[derive(Debug, serde::Serialize)]
struct Record {
    facts: Facts,
    rounds: u16,
    shard_bytes: u64,
    parts: u32,
    local_mbs: u64,
    cases: Vec<Case>,
}

/// Measures everything, then writes docs/perf/hierarchical-host; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    let metadata = workspace::members()?;
    let (root, target) = (metadata.workspace_root.as_std_path(), &metadata.target_directory);
    let facts = Facts::collect()?;
    let peerlane = Peerlane::build(target.as_std_path())?;
    let cases = options.network_mbs.iter().map(|rate| options.case(&peerlane, *rate));
    let record = Record {
        facts,
        rounds: options.rounds,
        shard_bytes: options.shard_bytes,
        parts: options.parts,
        local_mbs: options.local_mbs,
        cases: cases.collect::<Outcome<_>>()?,
    };
    record.save(&root.join("docs/perf"))?;
    println!("\nwritten: docs/perf/hierarchical-host.json, docs/perf/hierarchical-host.md");
    let missed: Vec<_> =
        record.cases.iter().filter_map(|case| case.verdict(options.parts).err()).collect();
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}

impl Options {
    fn case(&self, peerlane: &Peerlane, network_mbs: u64) -> Outcome<Case> {
        let shard = self.shard_bytes;
        let network = format!("--network-bandwidth={network_mbs}MB/s");
        let parts = format!("--parts={}", self.parts);
        let measure = |total, words: &[&str]| self.measure(peerlane, total, words);
        let mut times: [Vec<f64>; 4] = Default::default();
        for round in 0..self.rounds {
            eprintln!("{network_mbs} MB/s: round {} of {}", round + 1, self.rounds);
            let whole = 2 * NODE_RANKS * shard;
            let hierarchical = ["--nodes=2x4", &network, "--algorithm=hierarchical"];
            let [one, all] =
                ["--parts=1", &parts].map(|parts| [&hierarchical[..], &[parts]].concat());
            let round = [
                measure(2 * shard, &["--nodes=2x1", &network, "--algorithm=direct"])?,
                measure(2 * NODE_RANKS * shard, &["--ranks=4", "--algorithm=direct"])?,
                measure(whole, &one)?,
                measure(whole, &all)?,
            ];
            times.iter_mut().zip(round).for_each(|(times, time)| times.push(time));
        }
        let [between_us, inside_us, one_part_us, hierarchical_us] = times.map(median);
        Ok(Case { network_mbs, between_us, inside_us, one_part_us, hierarchical_us })
    }

    fn measure(&self, peerlane: &Peerlane, total: u64, words: &[&str]) -> Outcome<f64> {
        let (total_text, iterations) = (total.to_string(), self.iterations.to_string());
        let local = format!("--local-bandwidth={}MB/s", self.local_mbs);
        let fixed = ["--backend=host", "--in-place", "--warmup=1", &local];
        let sizes = ["--min-bytes", &total_text, "--max-bytes", &total_text];
        let sizes = sizes.into_iter().chain(["--iterations", &iterations]);
        let printed = peerlane.all_gather(words.iter().copied().chain(fixed).chain(sizes))?;
        Ok(Sample::parse(&printed, total)?.median_us)
    }
}

impl Case {
    fn longer_us(&self) -> f64 {
        self.between_us.max(self.inside_us)
    }

    /// What it takes to spread one part of a shard in the node, by the time of two shards.
    fn part_us(&self, parts: u32) -> f64 {
        self.inside_us / 2.0 / f64::from(parts)
    }

    fn two_phases_us(&self) -> f64 {
        self.between_us + self.inside_us
    }

    fn are_alike(&self) -> bool {
        self.longer_us() <= ALIKE * self.between_us.min(self.inside_us)
    }

    fn verdict(&self, parts: u32) -> Result<(), String> {
        let rate = self.network_mbs;
        let most = OVER_LONGER * self.longer_us() + self.part_us(parts);
        if self.hierarchical_us > most {
            let (seen, most) = (self.hierarchical_us / 1e3, most / 1e3);
            return Err(format!("{rate} MB/s: {seen:.1} ms, wanted at most {most:.1} ms"));
        }
        let faster = self.two_phases_us() / self.hierarchical_us;
        if self.are_alike() && faster < FASTER {
            return Err(format!("{rate} MB/s: {faster:.2} × faster, wanted {FASTER}"));
        }
        Ok(())
    }

    fn line(&self, parts: u32) -> String {
        let milliseconds = |time: f64| format!("{:.1}", time / 1e3);
        let over = (self.hierarchical_us - self.part_us(parts)) / self.longer_us();
        let verdict = match (self.verdict(parts), self.are_alike()) {
            (Err(missed), _) => format!("**missed**: {missed}"),
            (Ok(()), true) => format!("≤ {OVER_LONGER} × the longer + a part; ≥ {FASTER} × faster"),
            (Ok(()), false) => format!("≤ {OVER_LONGER} × the longer + a part"),
        };
        format!(
            "| {} | {} | {} | {} | {:.2} | {} | {:.2} | {} | {:.2} | {verdict} |",
            self.network_mbs,
            milliseconds(self.between_us),
            milliseconds(self.inside_us),
            milliseconds(self.hierarchical_us),
            over,
            milliseconds(self.two_phases_us()),
            self.two_phases_us() / self.hierarchical_us,
            milliseconds(self.one_part_us),
            self.one_part_us / self.hierarchical_us,
        )
    }
}

const HEAD: &str = "\
| network, MB/s | between nodes alone, ms | inside alone, ms | hierarchical, ms | less a part, over the longer | two phases, ms | times faster | in one part, ms | times faster | goal |
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
            "- 8 ranks as 2 nodes of 4, shards of {} in {} parts, in place. A rank sends {} MB/s inside \
             its node at most: both fabrics are throttled to far less than this machine copies, so that \
             the schedule sets the pace.",
            size(self.shard_bytes),
            self.parts,
            self.local_mbs
        )?;
        writeln!(
            page,
            "- A time is the median of the iterations, then of {} rounds in which all take turns. Between \
             nodes alone: 2 ranks on 2 nodes. Inside alone: 4 ranks of one node, shards of twice the size. \
             Two phases: the sum of both, the least that one after the other takes. In one part: the same \
             plan, which then spreads what arrives only when all of it is there. A part is what it takes \
             to spread one inside the node.\n",
            self.rounds
        )?;
        writeln!(page, "{HEAD}")?;
        self.cases.iter().try_for_each(|case| writeln!(page, "{}", case.line(self.parts)))?;
        Ok(page)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(hierarchical_us: f64) -> Case {
        let (between_us, inside_us, one_part_us) = (100e3, 96e3, 150e3);
        Case { network_mbs: 25, between_us, inside_us, one_part_us, hierarchical_us }
    }

    #[test]
    fn a_case_must_hide_the_shorter_phase() {
        assert_eq!(case(115e3).verdict(8), Ok(()));
        let missed = "25 MB/s: 117.0 ms, wanted at most 116.0 ms";
        assert_eq!(case(117e3).verdict(8), Err(missed.into()));
    }

    #[test]
    fn phases_that_are_alike_must_be_overlapped() {
        let alike = Case { inside_us: 60e3, ..case(105e3) };
        assert!(!alike.are_alike() && alike.verdict(8).is_ok());
        let slow = case(155e3).verdict(1);
        assert_eq!(slow, Err("25 MB/s: 1.26 × faster, wanted 1.3".into()));
    }
}
