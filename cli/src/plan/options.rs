//! The command line of `peerlane plan`.

use std::path::PathBuf;

use clap::Args;
use peerlane::Rank;
use peerlane::plan::{Algorithm, FlagOrder};
use peerlane::topology::Topology;

use crate::allgather::{AlgorithmChoice, parse_algorithm, parse_ranks};
use crate::error::{Failure, Result};
use crate::goal::Goal;
use crate::nodes::Nodes;
use crate::size::Size;

/// More cells than that are no plan that somebody reads; checking them takes minutes.
const CELLS_MAX: u64 = 1 << 20;

/// Show the plan of each rank, a line a step, with the verdict of the verifier.
///
/// The verifier proves for all ranks together that every byte arrives exactly once and is not read
/// before, that nothing deadlocks, and that a second start cannot pass on flags of the first.
/// Nothing runs. Lines that begin with # are no part of a plan; what is printed can be edited and
/// checked with --check.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(super) goal: Goal,
    /// Ranks, all on one node unless --nodes says otherwise [default: 4]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    pub(super) ranks: Option<usize>,
    /// The nodes: 2x4 for 2 nodes of 4 ranks, 3+1+2 for the ranks of each node, 0,0,1,1 for the node of
    /// each rank, or 2 for so many nodes
    #[arg(long, value_name = "NODES")]
    pub(super) nodes: Option<Nodes>,
    /// Other nodes are reached over a network, by lanes of their own; else one fabric reaches all ranks
    #[arg(long)]
    pub(super) tiers: bool,
    /// auto, or an algorithm by its name: direct, pull, ring, double-ring, hierarchical,
    /// hierarchical-ring
    #[arg(long, default_value = "auto", value_name = "NAME", value_parser = parse_algorithm)]
    pub(super) algorithm: AlgorithmChoice,
    /// Parts of each shard
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) parts: u32,
    /// Each rank's shard lies in its place of the output already
    #[arg(long)]
    pub(super) in_place: bool,
    /// Outputs that starts use in turn; with two there is no ready
    #[arg(long, default_value_t = 1)]
    pub(super) outputs: u32,
    /// prompt: signal right behind each put; batched: flags side by side, for engines that do many
    /// at the price of one
    #[arg(long, default_value = "prompt", value_name = "ORDER", value_parser = parse_flags)]
    pub(super) flags: FlagOrder,
    /// The size of every shard, or one size for each rank; shows where each cell lies
    #[arg(long, value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    pub(super) shard_bytes: Vec<Size>,
    /// The rank whose plan is shown, or all. The verdict is on all, unless they are too many to verify
    #[arg(long, default_value = "all", value_name = "RANK")]
    pub(super) rank: String,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
    /// Read the plans of all ranks from a file, as text or JSON, and print only the verdict
    #[arg(long, value_name = "FILE")]
    #[arg(conflicts_with_all = [
        "collective", "root", "ranks", "nodes", "tiers", "algorithm", "parts", "in_place", "outputs", "flags", "shard_bytes", "rank",
        "json",
    ])]
    pub(super) check: Option<PathBuf>,
}

fn parse_flags(name: &str) -> std::result::Result<FlagOrder, String> {
    name.parse().map_err(|error: peerlane::Error| error.to_string())
}

impl Options {
    /// Ranks unless told otherwise.
    const RANKS_DEFAULT: usize = 4;

    /// The topology that is asked for.
    ///
    /// # Errors
    /// If the nodes do not fit the ranks.
    pub(super) fn topology(&self) -> Result<Topology> {
        let written = self.nodes.as_ref().and_then(Nodes::ranks);
        let ranks = self.ranks.or(written).unwrap_or(Self::RANKS_DEFAULT);
        let topology = match &self.nodes {
            None => Topology::flat(ranks).map_err(|error| error.to_string()),
            Some(nodes) => nodes.topology(ranks).map_err(|text| format!("--nodes: {text}")),
        };
        topology.map_err(Failure::usage)
    }

    /// Why the plans of all ranks are not made, if so: they are too large to verify.
    ///
    /// # Errors
    /// If the plan of one rank is too large as well.
    pub(super) fn excess(&self, topology: &Topology) -> Result<Option<String>> {
        let (ranks, parts) = (topology.ranks() as u64, u64::from(self.parts));
        let plural = |count: u64| if count == 1 { "" } else { "s" };
        let who = format!("{ranks} rank{} with {parts} part{}", plural(ranks), plural(parts));
        let cells = ranks.saturating_mul(parts);
        if cells > CELLS_MAX {
            let text =
                format!("{who} are {cells} cells, more than the {CELLS_MAX} that are printed");
            return Err(Failure::usage(text).with_advice("lower --ranks, --nodes or --parts"));
        }
        let puts = cells.saturating_mul(ranks);
        let text = format!("{who} put {puts} cells, more than the {CELLS_MAX} that are verified");
        Ok((puts > CELLS_MAX).then_some(text))
    }

    /// The algorithm that is asked for.
    pub(super) fn algorithm(&self) -> Algorithm {
        match self.algorithm {
            AlgorithmChoice::Auto => Algorithm::Direct,
            AlgorithmChoice::Named(algorithm) => algorithm,
        }
    }

    /// The bytes of each rank's shard, where sizes are given.
    ///
    /// # Errors
    /// If there are neither one nor `ranks` of them.
    pub(super) fn shard_bytes(&self, ranks: usize) -> Result<Option<Vec<u64>>> {
        match self.shard_bytes.as_slice() {
            [] => Ok(None),
            [Size(all)] => Ok(Some(vec![*all; ranks])),
            each if each.len() == ranks => Ok(Some(each.iter().map(|size| size.0).collect())),
            each => Err(Failure::usage(format!(
                "--shard-bytes has {} sizes for {ranks} ranks",
                each.len()
            ))
            .with_advice("give one size for all ranks, or one for each")),
        }
    }

    /// The rank whose plan is shown; `None` for all.
    ///
    /// # Errors
    /// If there is no such rank.
    pub(super) fn shown_rank(&self, ranks: usize) -> Result<Option<Rank>> {
        if self.rank == "all" {
            return Ok(None);
        }
        match self.rank.parse::<usize>() {
            Ok(rank) if rank < ranks => Ok(Some(Rank::at(rank))),
            _ => Err(Failure::usage(format!("--rank {} is no rank of {ranks}", self.rank))
                .with_advice(format!("give 0 to {}, or all", ranks - 1))),
        }
    }
}
