//! `peerlane plan`: prints the plan of each rank of an all-gather and the verdict of the verifier.

use std::path::PathBuf;

use clap::Args;
use peerlane::Algorithm;
use peerlane::Rank;
use peerlane::topology::Topology;

use crate::error::{Failure, Result};
use crate::options::{
    AlgorithmChoice, Nodes, PlanOptions, parse_algorithm, parse_ranks, shard_bytes,
};
use crate::report::print;
use crate::units::Size;

mod document;

use document::Document;

/// Creates plans, or reads them from a file, and prints them with the verdict.
///
/// # Errors
/// If the options contradict each other, the plans have a fault, or stdout cannot be written.
pub(crate) fn run(options: &Options) -> Result<()> {
    if let Some(path) = &options.check {
        return print(&document::check(path)?);
    }
    let document = Document::make(options)?;
    let text = if options.plan.json { document.json()? } else { document.text() };
    print(&text)
}

/// Largest number of cells that are printed or verified. Verifying more takes minutes.
const CELLS_MAX: u64 = 1 << 20;

/// Show the plan of each rank, one step per line, with the verdict of the verifier
///
/// The verifier checks all ranks together: every byte arrives exactly once and is not read before,
/// no rank deadlocks, and a second start cannot pass on flags of the first. Nothing is executed.
/// Lines that begin with # are not part of a plan. The output can be edited and verified again with
/// --check.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("chunks", |arg| arg.help("Chunks of each shard [default: 1]")))]
pub(crate) struct Options {
    /// Number of ranks, all on one node without --nodes [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    pub(super) ranks: Option<usize>,
    /// Nodes: 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 for the node of
    /// each rank, or 2 for a number of nodes
    #[arg(long, value_name = "NODES")]
    pub(super) nodes: Option<Nodes>,
    /// Reach other nodes over a network with separate lanes [default: one fabric reaches all ranks]
    #[arg(long)]
    pub(super) tiers: bool,
    /// auto (direct), or direct, pull, ring, double-ring, hierarchical, hierarchical-ring
    #[arg(long, default_value = "auto", value_name = "NAME", value_parser = parse_algorithm)]
    pub(super) algorithm: AlgorithmChoice,
    #[command(flatten)]
    pub(super) plan: PlanOptions,
    /// Shard of every rank in bytes, or one size for each rank; prints the offset of each cell
    #[arg(long, value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    pub(super) shard_bytes: Vec<Size>,
    /// Rank whose plan is printed, or all; the verdict covers all ranks unless there are too many
    /// to verify
    #[arg(long, default_value = "all", value_name = "RANK")]
    pub(super) rank: String,
    /// Read the plans of all ranks from FILE, as text or JSON, and print only the verdict
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = [
        "collective", "root", "ranks", "nodes", "tiers", "algorithm", "chunks", "in_place", "outputs", "flags", "shard_bytes", "rank",
        "json",
    ])]
    pub(super) check: Option<PathBuf>,
}

impl Options {
    /// Number of ranks without `--ranks` and `--nodes`.
    const RANKS_DEFAULT: usize = 4;

    /// Returns the topology of the options.
    ///
    /// # Errors
    /// If the nodes do not fit the number of ranks.
    pub(super) fn topology(&self) -> Result<Topology> {
        let written = self.nodes.as_ref().and_then(Nodes::ranks);
        let ranks = self.ranks.or(written).unwrap_or(Self::RANKS_DEFAULT);
        let topology = match &self.nodes {
            None => Topology::flat(ranks).map_err(|error| error.to_string()),
            Some(nodes) => nodes.topology(ranks).map_err(|text| format!("--nodes: {text}")),
        };
        topology.map_err(Failure::usage)
    }

    /// Returns a text if the plans of all ranks are too large to verify.
    ///
    /// # Errors
    /// If the plan of one rank is too large as well.
    pub(super) fn size_limit(&self, topology: &Topology) -> Result<Option<String>> {
        let (ranks, chunks) = (topology.ranks() as u64, u64::from(self.chunks()));
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let who = format!("{ranks} rank{} with {chunks} chunk{}", plural(ranks), plural(chunks));
        let cells = ranks.saturating_mul(chunks);
        if cells > CELLS_MAX {
            let text = format!("{who} have {cells} cells, at most {CELLS_MAX} are printed");
            return Err(Failure::usage(text).with_advice("lower --ranks, --nodes or --chunks"));
        }
        let puts = cells.saturating_mul(ranks);
        let text = format!("{who} put {puts} cells, at most {CELLS_MAX} are verified");
        Ok((puts > CELLS_MAX).then_some(text))
    }

    /// Returns the number of chunks of a shard.
    pub(super) fn chunks(&self) -> u32 {
        self.plan.chunks.unwrap_or(1)
    }

    /// Returns the algorithm; `auto` is direct, because nothing is predicted here.
    pub(super) fn algorithm(&self) -> Algorithm {
        self.algorithm.named().unwrap_or(Algorithm::Direct)
    }

    /// Returns the shard of each rank in bytes; `None` without sizes.
    ///
    /// # Errors
    /// If the number of sizes is neither 1 nor `ranks`.
    pub(super) fn shard_bytes(&self, ranks: usize) -> Result<Option<Vec<u64>>> {
        let given = !self.shard_bytes.is_empty();
        given.then(|| shard_bytes("--shard-bytes", &self.shard_bytes, ranks)).transpose()
    }

    /// Returns the rank whose plan is printed; `None` for all.
    ///
    /// # Errors
    /// If there is no such rank.
    pub(super) fn printed_rank(&self, ranks: usize) -> Result<Option<Rank>> {
        if self.rank == "all" {
            return Ok(None);
        }
        match self.rank.parse::<usize>() {
            Ok(rank) if rank < ranks => Ok(Some(Rank::at(rank))),
            _ => Err(Failure::usage(format!(
                "--rank {} does not exist among {ranks} ranks",
                self.rank
            ))
            .with_advice(format!("expected 0 to {}, or all", ranks - 1))),
        }
    }
}
