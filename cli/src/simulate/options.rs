//! Defines the command line of `peerlane simulate`.

use std::path::PathBuf;

use clap::Args;
use peerlane::Rank;
use peerlane::topology::Topology;
use peerlane_planning::cost::{Calibration, Link, Links};

use crate::calibration::of_engine;
use crate::error::{Failure, Result};
use crate::options::{AlgorithmList, Nodes, PlanOptions, parse_ranks};
use crate::printable::file_name;
use crate::report::OutputFile;
use crate::text_file;
use crate::units::{Delay, Rate, Size};

/// Simulate a collective on modelled links to find its duration and its critical path
///
/// The plans of all ranks are executed step by step on modelled links; no ranks and no devices are
/// needed and no byte moves. By default the links are those of H200 GPUs with NVLink inside a node
/// and 400 Gb/s RDMA between nodes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// Set the nodes, given as 2 (number of nodes), 2x4 (2 nodes of 4 ranks), 3+1+2 (ranks of each
    /// node) or 0,0,1,1 (node of each rank)
    #[arg(long, default_value = "2", value_name = "NODES")]
    nodes: Nodes,
    /// Set the number of ranks of each node, if --nodes is a number [default: 8]
    #[arg(long, value_name = "N", value_parser = parse_ranks)]
    ranks_per_node: Option<usize>,
    /// Set the length of each rank's block in bytes, either one size for all, such as 1M, or one
    /// for each rank, such as 1M,2M
    #[arg(long, default_value = "1M", value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    pub(super) block_bytes: Vec<Size>,
    /// Select the algorithms, either auto (the lowest predicted time), all, or a list of direct,
    /// pull, ring, double-ring, hierarchical, hierarchical-ring, recursive-doubling,
    /// scatter-all-gather and get-ring, such as direct,ring
    #[arg(long, default_value = "auto", value_name = "NAME,…")]
    pub(super) algorithm: AlgorithmList,
    #[command(flatten)]
    pub(super) plan: PlanOptions,
    /// Connect all ranks with one fabric [default: a second fabric, the network, connects nodes]
    #[arg(long)]
    pub(super) one_fabric: bool,
    #[command(flatten)]
    pub(super) links: LinkOptions,
    /// Delay the start of a rank, such as 3:250us for rank 3; can be repeated
    #[arg(long, value_name = "RANK:TIME", value_parser = parse_delay)]
    delay: Vec<(usize, Delay)>,
    /// Set the number of ranks, from rank 0, that the files of --svg and --trace show
    #[arg(long, default_value_t = 8, value_name = "N")]
    show: usize,
    /// Print this number of steps of the critical path, also with --json; 0 prints none
    #[arg(long, default_value_t = 12, value_name = "N")]
    pub(super) path: usize,
    /// Draw the lanes of the fastest algorithm over time, and the use of the links, into FILE.svg
    #[arg(long, value_name = "FILE.svg", value_parser = OutputFile::parser("--svg", "svg"))]
    pub(super) svg: Option<OutputFile>,
    /// Plot the bandwidth of the fastest algorithm, and its duration by cause on the critical path,
    /// by size up to the given one, into FILE.svg
    #[arg(long, value_name = "FILE.svg", value_parser = OutputFile::parser("--plot", "svg"))]
    pub(super) plot: Option<OutputFile>,
    /// Write the steps of the fastest algorithm to FILE.json, as trace events for Perfetto and
    /// Chrome
    #[arg(long, value_name = "FILE.json", value_parser = OutputFile::parser("--trace", "json"))]
    pub(super) trace: Option<OutputFile>,
}

/// The maximum number of ranks, to catch typing errors.
const RANKS_MAX: usize = 1 << 20;

fn parse_delay(text: &str) -> std::result::Result<(usize, Delay), String> {
    let delay = text.split_once(':').and_then(|(rank, delay)| {
        let delay = delay.parse().ok()?;
        Some((rank.parse().ok()?, delay))
    });
    delay.ok_or_else(|| "expected a rank and a time of at most 10s, such as 3:250us".to_owned())
}

impl Options {
    pub(super) fn topology(&self) -> Result<Topology> {
        let ranks = match (&self.nodes, self.ranks_per_node) {
            (Nodes::Count(nodes), each) => nodes.saturating_mul(each.unwrap_or(8)),
            (Nodes::Each(topology), None) => return Ok(topology.clone()),
            (Nodes::Each(topology), Some(each)) => {
                let nodes = topology.notation();
                let text = format!(
                    "--ranks-per-node cannot be used with --nodes {nodes}, which already gives the \
                     ranks of each node"
                );
                let advice =
                    format!("remove --ranks-per-node {each}, or give --nodes a number of nodes");
                return Err(Failure::usage(text).with_advice(advice));
            }
        };

        if ranks > RANKS_MAX {
            let text = format!(
                "--nodes and --ranks-per-node make {ranks} ranks, expected at most {RANKS_MAX}"
            );
            return Err(Failure::usage(text));
        }

        self.nodes.topology(ranks).map_err(|text| Failure::usage(format!("--nodes: {text}")))
    }

    /// Returns the start delay of each rank in picoseconds; later ranks have none.
    pub(super) fn delays(&self, ranks: usize) -> Result<Vec<u64>> {
        let mut delays = Vec::new();
        for &(rank, delay) in &self.delay {
            if rank >= ranks {
                let text = format!(
                    "--delay {rank}:{delay} names rank {rank}, expected a rank below {ranks}, the \
                     number of ranks"
                );
                return Err(Failure::usage(text)
                    .with_advice(format!("give a rank from 0 to {}", ranks - 1)));
            }

            // Delays may be given in any order of ranks.
            delays.resize(delays.len().max(rank + 1), 0);
            delays[rank] = delay.0.as_nanos() as u64 * 1000;
        }
        Ok(delays)
    }

    /// Returns the ranks whose steps are recorded for the files of `--svg` and `--trace`.
    pub(super) fn shown(&self, ranks: usize) -> Vec<Rank> {
        let is_recorded = self.svg.is_some() || self.trace.is_some();
        Rank::all(if is_recorded { self.show.min(ranks) } else { 0 }).collect()
    }
}

/// The options that change the rates and latencies of the modelled links.
#[derive(Args, Clone, Debug)]
pub(crate) struct LinkOptions {
    /// Read the links from FILE, which `peerlane calibrate --out` wrote, or which has its field
    /// `links` as JSON
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Simulate engines of this kind, among those of the calibration [default: the first one]
    #[arg(long, value_name = "KIND", requires = "calibration")]
    engine: Option<String>,
    /// Set the rate at which one rank sends and receives inside its node, such as 400GB/s
    #[arg(long, value_name = "RATE")]
    local_bandwidth: Option<Rate>,
    /// Set the rate at which one rank sends and receives between nodes, such as 48GB/s
    #[arg(long, value_name = "RATE")]
    network_bandwidth: Option<Rate>,
    /// Set the latency of a flag inside a node, such as 2us
    #[arg(long, value_name = "TIME")]
    local_latency: Option<Delay>,
    /// Set the latency of a flag between nodes, such as 5us
    #[arg(long, value_name = "TIME")]
    network_latency: Option<Delay>,
    /// Set the number of NICs of each node, which its ranks share [default: one for each rank]
    #[arg(long, value_name = "N")]
    nics: Option<u32>,
    /// Set the rate of a NIC in each direction, such as 48GB/s [default: the rate of one rank]
    #[arg(long, value_name = "RATE")]
    nic_bandwidth: Option<Rate>,
}

impl LinkOptions {
    pub(super) fn links(&self) -> Result<Links> {
        let mut links = self.file()?;

        for (bandwidth, latency, link) in [
            (self.local_bandwidth, self.local_latency, &mut links.local),
            (self.network_bandwidth, self.network_latency, &mut links.network),
        ] {
            if let Some(Rate(rate)) = bandwidth {
                set_rate(link, rate);
            }
            if let Some(Delay(latency)) = latency {
                link.flag_seconds = latency.as_secs_f64();
            }
        }

        links.node.nics = self.nics.or(links.node.nics);
        let nic = self.nic_bandwidth.map(|Rate(rate)| rate);
        // Shared NICs without a rate would not limit anything.
        let shared = self.nics.map(|_| links.network.engine_bytes_per_second);
        links.node.nic_bytes_per_second = nic.or(links.node.nic_bytes_per_second).or(shared);

        links.check().map_err(|error| Failure::usage(format!("links: {error}")))?;
        Ok(links)
    }

    fn file(&self) -> Result<Links> {
        let Some(path) = &self.calibration else { return Ok(Links::default()) };
        let what = file_name(path);
        let text = text_file::read(path)?;

        // A file that is no calibration holds the links alone.
        if let Ok(links) = serde_json::from_str::<Links>(&text) {
            return Ok(links);
        }

        let calibration: Calibration = serde_json::from_str(&text).map_err(|error| {
            Failure::usage(format!("{what} is not a file of links: {error}")).with_advice(
                "give a file that `peerlane calibrate --out` wrote, or one of its fields `links`",
            )
        })?;
        let mut links = of_engine(&calibration, self.engine.as_deref())?;
        Ok(links.swap_remove(0))
    }
}

/// Sets the same rate for one copy, one engine and one rank.
fn set_rate(link: &mut Link, bytes_per_second: f64) {
    link.bytes_per_second = bytes_per_second;
    link.engine_bytes_per_second = bytes_per_second;
    link.send_bytes_per_second = bytes_per_second;
    link.receive_bytes_per_second = bytes_per_second;
}
