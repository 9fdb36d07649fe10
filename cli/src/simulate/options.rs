//! The command line of `peerlane simulate`.
//!
//! The links of a simulation: those that are known, those of a file, and single figures.

use std::path::PathBuf;

use clap::Args;
use peerlane::Rank;
use peerlane::cost::{Calibration, Link, Links};
use peerlane::plan::Algorithm;
use peerlane::topology::Topology;

use crate::error::{Failure, Result};
use crate::options::{
    AlgorithmChoice, Nodes, PlanOptions, parse_algorithm, parse_ranks, shard_bytes,
};
use crate::units::Size;

/// Simulate an all-gather on ranks that need not be there: when it ends, and why not sooner.
///
/// The plans of all ranks run, step by step, over links that are figures. Without others the links
/// are those of H200 GPUs over NVLink inside a node and 400 Gb/s RDMA between nodes. No byte moves.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
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
    algorithm: AlgorithmArg,
    #[command(flatten)]
    pub(super) plan: PlanOptions,
    /// One fabric reaches all ranks; else other nodes are reached over a network
    #[arg(long)]
    pub(super) one_fabric: bool,
    #[command(flatten)]
    pub(super) links: LinkOptions,
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
enum AlgorithmArg {
    /// What the cost model takes.
    Auto,
    /// Everything.
    All,
    /// This one.
    Named(Algorithm),
}

fn parse_wanted(name: &str) -> std::result::Result<AlgorithmArg, String> {
    if name == "all" {
        return Ok(AlgorithmArg::All);
    }
    parse_algorithm(name).map(|choice| match choice {
        AlgorithmChoice::Auto => AlgorithmArg::Auto,
        AlgorithmChoice::Named(algorithm) => AlgorithmArg::Named(algorithm),
    })
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
        shard_bytes("--shard", &self.shard, ranks)
    }

    /// What is simulated; `None` is what the cost model takes.
    pub(super) fn algorithms(&self) -> Vec<Option<Algorithm>> {
        match self.algorithm {
            AlgorithmArg::Auto => vec![None],
            AlgorithmArg::All => Algorithm::ALL.iter().copied().map(Some).collect(),
            AlgorithmArg::Named(algorithm) => vec![Some(algorithm)],
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

/// LinkOptions of links.
#[derive(Args, Clone, Debug)]
pub(crate) struct LinkOptions {
    /// Links as JSON, or what `peerlane calibrate` has written
    #[arg(long, value_name = "FILE")]
    links: Option<PathBuf>,
    /// What one rank sends, and receives, inside its node, in GB/s (10^9 bytes a second)
    #[arg(long, value_name = "GB/s")]
    local_gbs: Option<f64>,
    /// The same between nodes
    #[arg(long, value_name = "GB/s")]
    network_gbs: Option<f64>,
    /// How long a flag takes inside a node, in microseconds
    #[arg(long, value_name = "µs")]
    local_us: Option<f64>,
    /// The same between nodes
    #[arg(long, value_name = "µs")]
    network_us: Option<f64>,
    /// Network cards of a node, which its ranks share [default: one for each rank]
    #[arg(long, value_name = "N")]
    nics: Option<u32>,
    /// What a network card carries in each direction, in GB/s [default: as much as its ranks send]
    #[arg(long, value_name = "GB/s")]
    nic_gbs: Option<f64>,
}

impl LinkOptions {
    /// The links that are asked for.
    ///
    /// # Errors
    /// If the file cannot be read, or a figure is impossible.
    pub(super) fn links(&self) -> Result<Links> {
        let mut links = self.file()?.unwrap_or_default();
        let giga = 1e9;
        for (gigabytes, microseconds, link) in [
            (self.local_gbs, self.local_us, &mut links.local),
            (self.network_gbs, self.network_us, &mut links.network),
        ] {
            if let Some(gigabytes) = gigabytes {
                set_rate(link, gigabytes * giga);
            }
            if let Some(microseconds) = microseconds {
                link.flag_seconds = microseconds / 1e6;
            }
        }
        links.node.nics = self.nics.or(links.node.nics);
        let nic = self.nic_gbs.map(|gigabytes| gigabytes * giga);
        // NicOptions that are shared without a limit would be no limit.
        let shared = self.nics.map(|_| links.network.engine_bytes_per_second);
        links.node.nic_bytes_per_second = nic.or(links.node.nic_bytes_per_second).or(shared);
        links.check().map_err(|error| Failure::usage(format!("links: {error}")))?;
        Ok(links)
    }

    fn file(&self) -> Result<Option<Links>> {
        let Some(path) = &self.links else { return Ok(None) };
        let what = path.display();
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::io(format_args!("cannot read {what}"), &error))?;
        if let Ok(calibration) = serde_json::from_str::<Calibration>(&text) {
            return Ok(Some(calibration.links));
        }
        serde_json::from_str(&text).map(Some).map_err(|error| {
            Failure::usage(format!("{what} holds no links: {error}"))
                .with_advice("take what `peerlane calibrate` writes, or its field links")
        })
    }
}

/// One flow, an engine and a rank carry the same.
fn set_rate(link: &mut Link, bytes_per_second: f64) {
    link.bytes_per_second = bytes_per_second;
    link.engine_bytes_per_second = bytes_per_second;
    link.send_bytes_per_second = bytes_per_second;
    link.receive_bytes_per_second = bytes_per_second;
}
