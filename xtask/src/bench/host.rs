//! `cargo xtask bench host`: both sides in one run, size by size, in turns.

use super::facts::Facts;
use super::openmpi::{self, OpenMpi};
use super::program::Peerlane;
use super::record::{HEAD, Record, Row, Side};
use super::{Sample, median};
use crate::workspace;
use peerlane_rxe_vm::process::Outcome;

/// What to compare.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// How often each size is measured on each side.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..))]
    rounds: u16,
    /// The smallest total.
    #[arg(long, default_value_t = 1 << 10)]
    min_bytes: u64,
    /// The largest total.
    #[arg(long, default_value_t = 256 << 20)]
    max_bytes: u64,
    /// From one total to the next.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    factor: u64,
}

/// How often an operation is repeated within one run.
#[derive(Clone, Copy, Debug)]
pub(super) struct Repeats {
    pub(super) iterations: u32,
    pub(super) warmup: u32,
}

impl Repeats {
    /// Enough for a steady median, and about a second at most.
    fn for_total(total_bytes: u64) -> Self {
        let iterations = match total_bytes {
            0..=0x1_0000 => 1000,
            0x1_0001..=0x10_0000 => 300,
            0x10_0001..=0x100_0000 => 60,
            _ => 15,
        };
        Self { iterations, warmup: iterations / 5 }
    }
}

/// The two programs that are compared.
struct Sides {
    open_mpi: OpenMpi,
    peerlane: Peerlane,
    cores: usize,
}

/// Measures everything, then writes docs/perf/host-allgather; a missed goal is an error.
pub(super) fn run(options: &Options) -> Outcome {
    let metadata = workspace::members()?;
    let (root, target) = (metadata.workspace_root.as_std_path(), &metadata.target_directory);
    let facts = Facts::collect()?;
    let sides = Sides {
        open_mpi: OpenMpi::build(root, target.join("peers").as_std_path())?,
        peerlane: Peerlane::build(target.as_std_path())?,
        cores: facts.cores,
    };

    println!("{HEAD}");
    let mut record = Record { facts, rounds: options.rounds.into(), rows: Vec::new() };
    for &ranks in &options.ranks {
        for total_bytes in totals(options) {
            let row = sides.compare(ranks, total_bytes, options.rounds)?;
            println!("{}", row.line());
            record.rows.push(row);
        }
    }
    let folder = root.join("docs/perf");
    record.save(&folder, "host-allgather")?;
    println!("\nwritten: docs/perf/host-allgather.json, docs/perf/host-allgather.md");

    let missed = record.rows.iter().filter(|row| row.verdict().is_err()).count();
    match missed {
        0 => Ok(()),
        _ => Err(format!("{missed} of {} sizes miss their goal", record.rows.len()).into()),
    }
}

fn totals(options: &Options) -> impl Iterator<Item = u64> {
    let (factor, max_bytes) = (options.factor, options.max_bytes);
    std::iter::successors(Some(options.min_bytes.max(1)), move |total| total.checked_mul(factor))
        .take_while(move |total| *total <= max_bytes)
}

impl Sides {
    /// One size, in rounds in which each side has its turn.
    fn compare(&self, ranks: usize, total_bytes: u64, rounds: u16) -> Outcome<Row> {
        let repeats = Repeats::for_total(total_bytes);
        let settings: Vec<_> = openmpi::settings(ranks, self.cores).collect();
        let mut theirs = vec![Vec::new(); settings.len()];
        let mut ours = Vec::new();
        for _ in 0..rounds {
            for (samples, setting) in theirs.iter_mut().zip(&settings) {
                samples.push(self.open_mpi.measure(*setting, ranks, total_bytes, repeats)?);
            }
            ours.push(self.peerlane.measure(ranks, total_bytes, repeats)?);
        }

        let theirs = settings.iter().zip(&theirs);
        let open_mpi = theirs
            .map(|(setting, samples)| side(setting.name.to_owned(), samples))
            .min_by(|left, right| left.median_us.total_cmp(&right.median_us))
            .ok_or("Open MPI has no setting for this machine")?;
        let first = &ours[0];
        let limits: Vec<f64> = ours.iter().filter_map(|sample| sample.limit_us).collect();
        Ok(Row {
            ranks,
            total_bytes,
            shard_bytes: first.shard_bytes,
            iterations: repeats.iterations,
            open_mpi,
            peerlane: side(format!("{}, {}", first.algorithm, first.engine), &ours),
            limit_us: (!limits.is_empty()).then(|| median(limits)),
        })
    }
}

fn side(how: String, samples: &[Sample]) -> Side {
    let rounds_us: Vec<f64> = samples.iter().map(|sample| sample.median_us).collect();
    Side {
        how,
        median_us: median(rounds_us.iter().copied()),
        p99_us: median(samples.iter().map(|sample| sample.p99_us)),
        rounds_us,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_go_up_to_the_largest() {
        let mut options =
            Options { ranks: vec![2], rounds: 1, min_bytes: 1024, max_bytes: 16384, factor: 4 };
        assert_eq!(totals(&options).collect::<Vec<_>>(), [1024, 4096, 16384]);
        options.max_bytes = 16383;
        assert_eq!(totals(&options).collect::<Vec<_>>(), [1024, 4096]);
    }

    #[test]
    fn a_side_is_the_median_of_its_rounds() {
        let sample = |median_us| Sample {
            total_bytes: 8,
            shard_bytes: 4,
            median_us,
            p99_us: median_us + 1.0,
            checked: true,
            algorithm: "direct".into(),
            engine: "host".into(),
            limit_us: None,
        };
        let side = side("bound".into(), &[sample(3.0), sample(9.0), sample(2.0)]);
        assert_eq!((side.median_us, side.p99_us), (3.0, 4.0));
        assert_eq!(side.rounds_us, [3.0, 9.0, 2.0]);
    }
}
