//! The command line of `peerlane simulate`.

use std::path::PathBuf;

use clap::Args;
use peerlane::collective::Collective;
use peerlane::plan::{Algorithm, FlagOrder};
use peerlane::topology::Topology;
use peerlane::{Rank, schedule};

use crate::allgather::{AlgorithmChoice, parse_algorithm, parse_ranks};
use crate::error::{Failure, Result};
use crate::goal::Goal;
use crate::nodes::Nodes;
use crate::size::Size;

/// Simulate an all-gather on ranks that need not be there: when it ends, and why not sooner.
///
/// The plans of all ranks run, step by step, over links that are figures. Without others the links
/// are those of H200 GPUs over NVLink inside a node and 400 Gb/s RDMA between nodes. No byte moves.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(super) goal: Goal,
    /// Nodes: a number of them, or 3+1+2 for the ranks of each node, 2x4, or the node of each rank
    #[arg(long, default_value = "2", value_name = "NODES")]
    nodes: Nodes,
    /// Ranks of each node, where --nodes is a number [default: 8]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    ranks_per_node: Option<usize>,
    /// The shard of every rank, or one size for each rank
    #[arg(long, default_value = "1M", value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    shard: Vec<Size>,
    /// auto for the one that is predicted to be fastest, all, or an algorithm by its name
    #[arg(long, default_value = "auto", value_name = "NAME", value_parser = parse_wanted)]
    algorithm: Wanted,
    /// Parts of each shard [default: what is predicted to be fastest for each algorithm]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(super) parts: Option<u32>,
    /// Each rank's shard lies in its place of the output already
    #[arg(long)]
    pub(super) in_place: bool,
    /// Outputs that starts use in turn; with two there is no ready
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(super) outputs: u32,
    /// prompt: signal right behind each put; batched: flags side by side
    #[arg(long, default_value = "prompt", value_name = "ORDER", value_parser = parse_flags)]
    pub(super) flags: FlagOrder,
    /// One fabric reaches all ranks; else other nodes are reached over a network
    #[arg(long)]
    pub(super) one_fabric: bool,
    #[command(flatten)]
    pub(super) links: super::links::Figures,
    /// A rank that starts late, and by how many microseconds; may be given more than once
    #[arg(long, value_name = "RANK:µs", value_parser = parse_delay)]
    delay: Vec<(usize, f64)>,
    /// How many ranks, from 0, --svg and --trace show
    #[arg(long, default_value_t = 8, value_name = "N")]
    show: usize,
    /// How many steps of the critical path are printed, 0 for none; JSON has as many
    #[arg(long, default_value_t = 12, value_name = "N")]
    pub(super) path: usize,
    /// Draw the lanes over time, and how much of the links is used, of the fastest
    #[arg(long, value_name = "FILE.svg")]
    pub(super) svg: Option<PathBuf>,
    /// Write the steps of the fastest as trace events, which Perfetto and Chrome open
    #[arg(long, value_name = "FILE.json")]
    pub(super) trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(super) json: bool,
}

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wanted {
    /// What the cost model takes.
    Auto,
    /// Everything.
    All,
    /// This one.
    Named(Algorithm),
}

fn parse_wanted(name: &str) -> std::result::Result<Wanted, String> {
    if name == "all" {
        return Ok(Wanted::All);
    }
    parse_algorithm(name).map(|choice| match choice {
        AlgorithmChoice::Auto => Wanted::Auto,
        AlgorithmChoice::Named(algorithm) => Wanted::Named(algorithm),
    })
}

fn parse_flags(name: &str) -> std::result::Result<FlagOrder, String> {
    name.parse().map_err(|error: peerlane::Error| error.to_string())
}

/// More ranks than that are a slip of the pen.
const RANKS_MAX: usize = 1 << 20;
/// The longest delay, so that times fit: an hour.
const DELAY_MAX_US: f64 = 3.6e9;

fn parse_delay(text: &str) -> std::result::Result<(usize, f64), String> {
    let delay = text.split_once(':').and_then(|(rank, delay)| {
        let delay: f64 = delay.parse().ok()?;
        let possible = (0.0..=DELAY_MAX_US).contains(&delay);
        Some((rank.parse().ok()?, delay)).filter(|_| possible)
    });
    delay.ok_or_else(|| "wanted a rank and microseconds, such as 3:250".to_owned())
}

impl Options {
    /// Where the ranks are.
    ///
    /// # Errors
    /// If --nodes and --ranks-per-node do not fit together.
    pub(super) fn topology(&self) -> Result<Topology> {
        let ranks = match (&self.nodes, self.ranks_per_node) {
            (Nodes::Count(nodes), each) => nodes.saturating_mul(each.unwrap_or(8)),
            (Nodes::Each(topology), None) => return Ok(topology.clone()),
            (Nodes::Each(topology), Some(each)) => {
                let nodes = topology.notation();
                let text = format!("--nodes {nodes} says how many ranks each node has");
                let advice = format!("leave out --ranks-per-node {each}, or give --nodes a number");
                return Err(Failure::usage(text).with_advice(advice));
            }
        };
        if ranks > RANKS_MAX {
            let text =
                format!("--nodes and --ranks-per-node make {ranks} ranks, more than {RANKS_MAX}");
            return Err(Failure::usage(text));
        }
        self.nodes.topology(ranks).map_err(|text| Failure::usage(format!("--nodes: {text}")))
    }

    /// The bytes of each rank's shard.
    ///
    /// # Errors
    /// If there are neither one nor `ranks` of them.
    pub(super) fn shard_bytes(&self, ranks: usize) -> Result<Vec<u64>> {
        match self.shard.as_slice() {
            [Size(all)] => Ok(vec![*all; ranks]),
            each if each.len() == ranks => Ok(each.iter().map(|size| size.0).collect()),
            each => {
                let text = format!("--shard has {} sizes for {ranks} ranks", each.len());
                let advice = "give one size for all ranks, or one for each";
                Err(Failure::usage(text).with_advice(advice))
            }
        }
    }

    /// What is simulated; `None` is what the cost model takes.
    pub(super) fn algorithms(&self, collective: Collective) -> Vec<Option<Algorithm>> {
        match self.algorithm {
            Wanted::Auto => vec![None],
            Wanted::All => schedule::algorithms(collective).map(Some).collect(),
            Wanted::Named(algorithm) => vec![Some(algorithm)],
        }
    }

    /// How much later than the others each rank starts, in picoseconds.
    ///
    /// # Errors
    /// If there is no such rank.
    pub(super) fn delays(&self, ranks: usize) -> Result<Vec<u64>> {
        let mut delays = Vec::new();
        for &(rank, microseconds) in &self.delay {
            if rank >= ranks {
                let text = format!("--delay {rank}:{microseconds} is of no rank of {ranks}");
                return Err(Failure::usage(text).with_advice(format!("give 0 to {}", ranks - 1)));
            }
            delays.resize(delays.len().max(rank + 1), 0);
            delays[rank] = (microseconds * 1e6).round() as u64;
        }
        Ok(delays)
    }

    /// The ranks whose steps are recorded.
    pub(super) fn shown(&self, ranks: usize) -> Vec<Rank> {
        let wanted = self.svg.is_some() || self.trace.is_some();
        Rank::all(if wanted { self.show.min(ranks) } else { 0 }).collect()
    }
}
