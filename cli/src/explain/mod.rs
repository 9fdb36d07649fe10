//! `peerlane explain`: which algorithm would run, how long it is predicted to take, and why.

use std::io::{self, Write};
use std::path::PathBuf;

use clap::Args;
use peerlane::cost::{self, Links, Question};
use peerlane::plan::FlagOrder;
use peerlane::schedule::Shape;
use peerlane::topology::Topology;

use crate::allgather::{AlgorithmChoice, parse_algorithm};
use crate::calibrate;
use crate::error::{Failure, Result};
use crate::goal::{Goal, provided};
use crate::size::Size;

/// Say which algorithm would run, how long it is predicted to take, and why.
///
/// Nothing runs. Without a calibration the links are those of H200 GPUs over NVLink inside a node and
/// 400 Gb/s RDMA between nodes.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    goal: Goal,
    /// Ranks of each node: 2x4 for two nodes of four, or 3+1+2
    #[arg(long, default_value = "1x4", value_name = "NODES", value_parser = parse_topology)]
    nodes: Topology,
    /// The shard of every rank, or one size for each rank
    #[arg(long, default_value = "1M", value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    shard_bytes: Vec<Size>,
    /// auto, or an algorithm by its name
    #[arg(long, default_value = "auto", value_name = "NAME", value_parser = parse_algorithm)]
    algorithm: AlgorithmChoice,
    /// Parts of each shard [default: chosen]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    parts: Option<u32>,
    /// Each rank's shard lies in its place of the output already
    #[arg(long)]
    in_place: bool,
    /// Outputs that starts use in turn
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    outputs: u32,
    /// prompt or batched [default: batched, or prompt for a calibration of the host backend]
    #[arg(long, value_name = "ORDER", value_parser = parse_flags)]
    flags: Option<FlagOrder>,
    /// What `peerlane calibrate` has written
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

fn parse_topology(text: &str) -> std::result::Result<Topology, String> {
    text.parse().map_err(|error: peerlane::Error| error.to_string())
}

fn parse_flags(name: &str) -> std::result::Result<FlagOrder, String> {
    name.parse().map_err(|error: peerlane::Error| error.to_string())
}

/// Chooses and prints.
///
/// # Errors
/// If the options do not fit together, or nothing can be printed.
pub(crate) fn run(options: &Options) -> Result<()> {
    let topology = &options.nodes;
    let collective = options.goal.collective(topology.ranks())?;
    let shard_bytes = provided(collective, options.shard_bytes(topology.ranks())?);
    let (links, flags) = match &options.calibration {
        None => (Links::default(), FlagOrder::Batched),
        Some(path) => {
            let calibration = calibrate::load(path, None)?;
            let host = calibration.key.backend == "host";
            let flags = if host { FlagOrder::Prompt } else { FlagOrder::Batched };
            (calibration.links, flags)
        }
    };
    let shape = Shape {
        collective,
        parts: 1,
        in_place: options.in_place,
        outputs: options.outputs,
        flags: options.flags.unwrap_or(flags),
        tiers: topology.nodes() > 1,
    };
    let algorithm = match options.algorithm {
        AlgorithmChoice::Auto => None,
        AlgorithmChoice::Named(algorithm) => Some(algorithm),
    };
    let question = Question {
        topology,
        shard_bytes: &shard_bytes,
        shape,
        links: &links,
        measured: options.calibration.is_some(),
        algorithm,
        parts: options.parts,
        refused: &[],
    };
    let choice = cost::choose(&question).map_err(|error| Failure::usage(error.to_string()))?;
    let text = if options.json {
        serde_json::to_string_pretty(&choice).map_err(|error| Failure::failed(error.to_string()))?
            + "\n"
    } else {
        choice.explain()
    };
    io::stdout()
        .write_all(text.as_bytes())
        .map_err(|error| Failure::io("cannot print the choice", &error))
}

impl Options {
    fn shard_bytes(&self, ranks: usize) -> Result<Vec<u64>> {
        match self.shard_bytes.as_slice() {
            [Size(all)] => Ok(vec![*all; ranks]),
            each if each.len() == ranks => Ok(each.iter().map(|size| size.0).collect()),
            each => Err(Failure::usage(format!(
                "--shard-bytes has {} sizes for {ranks} ranks",
                each.len()
            ))
            .with_advice("give one size for all ranks, or one for each")),
        }
    }
}
