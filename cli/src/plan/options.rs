//! Defines the command line of `peerlane plan`.

use std::path::PathBuf;

use clap::Args;
use peerlane::Algorithm;
use peerlane::Rank;
use peerlane::topology::Topology;

use crate::error::{Failure, Result};
use crate::options::{AlgorithmChoice, Nodes, PlanOptions, block_bytes, parse_ranks};
use crate::report::OutputFile;
use crate::units::Size;

/// The maximum number of chunks in all plans that are printed or verified, because verifying more
/// takes minutes.
pub(super) const CELLS_MAX: u64 = 1 << 20;

/// The maximum number of copies in plans that are verified. An all-reduce copies each chunk to each
/// rank up to twice.
pub(super) const COPIES_MAX: u64 = 2 * CELLS_MAX;

/// Show the plan of each rank, one step per line, with the result of the verifier
///
/// The verifier checks all ranks together: every byte arrives exactly once and is not read before,
/// no rank deadlocks, and a second start cannot pass on flags of the first. Nothing is executed.
/// Lines that begin with # are not part of a plan. The output can be edited and verified again with
/// --check.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("chunks", |arg| arg.help("Set the number of chunks of each block, such as 4 [default: 1]")))]
pub(crate) struct Options {
    /// Set the number of ranks, which share one node without --nodes [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    pub(super) ranks: Option<usize>,
    /// Set the nodes, given as 2 (number of nodes), 2x4 (2 nodes of 4 ranks), 3+1+2 (ranks of each
    /// node) or 0,0,1,1 (node of each rank) [default: one node]
    #[arg(long, value_name = "NODES")]
    pub(super) nodes: Option<Nodes>,
    /// Plan for two fabrics, a local fabric inside each node, and a network between nodes with its
    /// own lanes [default: one fabric connects all ranks]
    #[arg(long)]
    pub(super) tiers: bool,
    /// Select the algorithm, one of direct, pull, ring, double-ring, hierarchical,
    /// hierarchical-ring, recursive-doubling, scatter-all-gather or get-ring; auto means direct
    #[arg(long, default_value = "auto", value_name = "NAME")]
    pub(super) algorithm: AlgorithmChoice,
    #[command(flatten)]
    pub(super) plan: PlanOptions,
    /// Set the length of each rank's block in bytes, either one size for all ranks, such as 1M, or
    /// one for each rank, such as 1M,2M; this also prints byte offsets
    #[arg(long, value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    pub(super) block_bytes: Vec<Size>,
    /// Draw the copies of all ranks into FILE.svg: ranks are columns, and copies are arrows, in the
    /// order in which flags let them begin
    #[arg(long, value_name = "FILE.svg", conflicts_with = "rank")]
    #[arg(value_parser = OutputFile::parser("--svg", "svg"))]
    pub(super) svg: Option<OutputFile>,
    /// Print the plan of this rank only, such as 0; the plans of all ranks are verified in any
    /// case, unless they are too large
    #[arg(long, default_value = "all", value_name = "RANK")]
    pub(super) rank: String,
    /// Verify the plans of all ranks in FILE, text or JSON as this command prints it, and print
    /// only the result
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = [
        "collective", "root", "ranks", "nodes", "tiers", "algorithm", "chunks", "in_place", "outputs", "inboxes", "flags", "block_bytes", "rank",
        "json", "svg",
    ])]
    pub(super) check: Option<PathBuf>,
}

impl Options {
    /// The number of ranks without `--ranks` and `--nodes`.
    const RANKS_DEFAULT: usize = 4;

    pub(super) fn topology(&self) -> Result<Topology> {
        let written = self.nodes.as_ref().and_then(Nodes::ranks);
        let ranks = self.ranks.or(written).unwrap_or(Self::RANKS_DEFAULT);

        let topology = match &self.nodes {
            None => Topology::flat(ranks).map_err(|error| error.to_string()),
            Some(nodes) => nodes.topology(ranks).map_err(|text| format!("--nodes: {text}")),
        };
        topology.map_err(Failure::usage)
    }

    /// Returns the reason why the plans of all ranks are too large to verify; `None` if they are
    /// not.
    pub(super) fn size_limit(&self, topology: &Topology) -> Result<Option<String>> {
        let (ranks, chunks) = (topology.ranks() as u64, u64::from(self.chunks()));
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let who = format!("{ranks} rank{} with {chunks} chunk{}", plural(ranks), plural(chunks));

        // Even one plan of so many cells is too long to print.
        let cells = ranks.saturating_mul(chunks);
        if cells > CELLS_MAX {
            let text = format!(
                "the plans of {who} have {cells} cells, expected at most {CELLS_MAX} for printing"
            );
            return Err(Failure::usage(text).with_advice("lower --ranks, --nodes or --chunks"));
        }

        // Each cell reaches every rank in the plans of all ranks.
        let puts = cells.saturating_mul(ranks);
        let text = format!(
            "the plans of {who} copy {puts} cells, more than the {CELLS_MAX} that are verified"
        );
        Ok((puts > CELLS_MAX).then_some(text))
    }

    pub(super) fn chunks(&self) -> u32 {
        self.plan.chunks.unwrap_or(1)
    }

    /// Returns the algorithm of the plans; `auto` is direct, because no time is predicted.
    pub(super) fn algorithm(&self) -> Algorithm {
        self.algorithm.0.unwrap_or(Algorithm::Direct)
    }

    /// Returns the bytes of each rank's block; `None` without `--block-bytes`.
    pub(super) fn block_bytes(&self, ranks: usize) -> Result<Option<Vec<u64>>> {
        let given = !self.block_bytes.is_empty();
        given.then(|| block_bytes("--block-bytes", &self.block_bytes, ranks)).transpose()
    }

    /// Returns the rank whose plan is printed; `None` for all ranks.
    pub(super) fn printed_rank(&self, ranks: usize) -> Result<Option<Rank>> {
        if self.rank == "all" {
            return Ok(None);
        }

        match self.rank.parse::<usize>() {
            Ok(rank) if rank < ranks => Ok(Some(Rank::at(rank))),
            _ => Err(Failure::usage(format!(
                "--rank {} does not exist, expected a rank below {ranks}, the number of ranks",
                self.rank
            ))
            .with_advice(format!("give a rank from 0 to {}, or all", ranks - 1))),
        }
    }
}
