//! `cargo xtask bench`: measures Peerlane and other libraries, and writes docs/perf.
//!
//! | file | holds |
//! | --- | --- |
//! | `report` | records, pages, tables and goals |
//! | `host` | collectives between processes of one host under several loads, against Open MPI and MPICH |
//! | `experts` | all-to-alls whose starts have counts of their own, against Open MPI |
//! | `cost` | predicted and measured times |
//! | `hierarchical` | the hierarchical all-gather against its phases |
//! | `cuda` | all-gathers between GPUs, against NCCL and bare copies |
//! | `rdma` | RDMA in a virtual machine, against perftest and Open MPI |
//! | `planning` | the time and memory of plans and simulations |

use peerlane_rxe_vm::process::Outcome;

mod cost;
mod cuda;
mod experts;
mod hierarchical;
mod host;
mod planning;
mod rdma;
pub(crate) mod report;

/// A measurement.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Bench {
    /// Measures collectives between processes of this host under several loads, against Open MPI's
    /// and MPICH's.
    Host(host::Options),
    /// Measures all-to-alls whose starts have counts of their own, against Open MPI.
    Experts(experts::Options),
    /// Compares the times that the cost model predicts with measured ones.
    Cost(cost::Options),
    /// Measures the hierarchical all-gather on virtual nodes of this host, against its phases.
    Hierarchical(hierarchical::Options),
    /// Measures the all-gather between GPUs of this host, against NCCL's and bare copies.
    Cuda(cuda::Options),
    /// Measures puts, signals and all-gathers over RDMA in a virtual machine, against perftest and
    /// Open MPI.
    Rdma(rdma::Options),
    /// Measures the planning of one rank and the simulation of all, over the number of ranks.
    Plan,
}

/// Measures, prints a table and writes the record.
pub(crate) fn run(bench: Bench) -> Outcome {
    match bench {
        Bench::Host(options) => host::run(&options),
        Bench::Experts(options) => experts::run(&options),
        Bench::Cost(options) => cost::run(&options),
        Bench::Hierarchical(options) => hierarchical::run(&options),
        Bench::Cuda(options) => cuda::run(&options),
        Bench::Rdma(options) => rdma::run(&options),
        Bench::Plan => planning::run(),
    }
}

/// Returns sizes: the smallest, then each `factor` times the one before, up to the largest.
fn sizes((min, max, factor): (u64, u64, u64)) -> impl Iterator<Item = u64> {
    std::iter::successors(Some(min), move |size| size.checked_mul(factor))
        .take_while(move |size| *size <= max)
}

/// Returns the median: the middle value, or the mean of the two middle ones.
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
    fn sizes_go_up_to_the_largest() {
        assert_eq!(sizes((1024, 16384, 4)).collect::<Vec<_>>(), [1024, 4096, 16384]);
        assert_eq!(sizes((1024, 16383, 4)).collect::<Vec<_>>(), [1024, 4096]);
    }

    #[test]
    fn the_median_is_in_the_middle() {
        assert_eq!(median([3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!(median([7.0]), 7.0);
    }
}
