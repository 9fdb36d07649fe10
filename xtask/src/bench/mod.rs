//! `cargo xtask bench`: measurements against peers, written to docs/perf as data and as a table.

use peerlane_rxe_vm::process::Outcome;

mod cost;
mod cuda;
mod facts;
mod goals;
mod hierarchical;
mod host;
mod openmpi;
mod plan;
mod program;
mod rdma;
mod record;

/// What is measured.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// The all-gather between processes of this host, against Open MPI's.
    Host(host::Options),
    /// What the model of costs predicts, against what is measured.
    Cost(cost::Options),
    /// The hierarchical all-gather on virtual nodes of this host, against its phases alone and in turn.
    Hierarchical(hierarchical::Options),
    /// The all-gather between GPUs of this host, against NCCL's and bare copies.
    Cuda(cuda::Options),
    /// Puts, signals and all-gathers over RDMA in a virtual machine, against perftest and Open MPI.
    Rdma(rdma::Options),
    /// Planning for one rank, and simulating all, over their number.
    Plan,
}

/// Measures, prints a table and writes the record.
pub(crate) fn run(bench: Bench) -> Outcome {
    match bench {
        Bench::Host(options) => host::run(&options),
        Bench::Cost(options) => cost::run(&options),
        Bench::Hierarchical(options) => hierarchical::run(&options),
        Bench::Cuda(options) => cuda::run(&options),
        Bench::Rdma(options) => rdma::run(&options),
        Bench::Plan => plan::run(),
    }
}

/// One size, as a measured program reports it.
#[derive(Clone, Debug, serde::Deserialize)]
struct Sample {
    total_bytes: u64,
    shard_bytes: u64,
    median_us: f64,
    p99_us: f64,
    checked: bool,
    #[serde(default)]
    algorithm: String,
    #[serde(default)]
    engine: String,
    /// What as many bare copies took, done at once.
    #[serde(default)]
    limit_us: Option<f64>,
}

impl Sample {
    /// Takes the one sample that a program printed among other lines.
    fn parse(printed: &str, total_bytes: u64) -> Outcome<Self> {
        let lines = printed.lines().filter(|line| line.starts_with('{'));
        let samples = lines.map(serde_json::from_str).collect::<Result<Vec<Self>, _>>()?;
        let [sample] = samples.as_slice() else {
            return Err(
                format!("wanted one line of JSON, saw {}:\n{printed}", samples.len()).into()
            );
        };
        if sample.total_bytes != total_bytes || !sample.checked {
            return Err(format!("wanted {total_bytes} checked bytes, saw {sample:?}").into());
        }
        Ok(sample.clone())
    }
}

/// The middle of the values, the mean of the two middle ones if their number is even.
fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    let last = sorted.len() - 1;
    f64::midpoint(sorted[last / 2], sorted[last.div_ceil(2)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([7.0]), 7.0);
    }

    #[test]
    fn a_sample_is_found_among_other_lines() {
        let line = r#"{"total_bytes":8,"shard_bytes":4,"median_us":1.5,"p99_us":2,"checked":true}"#;
        let sample = Sample::parse(&format!("progress\n{line}\n"), 8).unwrap();
        assert_eq!((sample.shard_bytes, sample.median_us, sample.limit_us), (4, 1.5, None));
        assert!(Sample::parse(line, 16).is_err());
        assert!(Sample::parse("nothing", 8).is_err());
    }
}
