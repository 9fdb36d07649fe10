//! Implements `peerlane explain`, which prints the chosen algorithm, its predicted time and the
//! reasons.

use std::path::PathBuf;

use clap::Args;
use peerlane::topology::Topology;
use peerlane_planning::cost::{self, Links, Question, Variant};
use peerlane_planning::plan::FlagOrder;
use peerlane_planning::schedule::Shape;

use crate::calibration::{self, of_engine};
use crate::error::{Failure, Result};
use crate::options::{AlgorithmChoice, PlanOptions, block_bytes};
use crate::report::{pretty_json, print};
use crate::units::Size;

/// Explain the choice of an algorithm for an operation, with the predicted times
///
/// Nothing is executed. Without --calibration, the links are those of H200 GPUs with NVLink inside
/// a node and 400 Gb/s RDMA between nodes.
#[derive(Args, Clone, Debug)]
#[command(mut_arg("flags", |arg| arg.help(
    "Set the order of signals: prompt (one after each put), batched (all together) or network-first \
     (as batched, and what comes from other nodes is awaited first) [default: batched, or prompt with a calibration of the backend host]"
)))]
pub(crate) struct Options {
    /// Set the nodes, given as 2x4 (2 nodes of 4 ranks), 3+1+2 (ranks of each node) or 0,0,1,1
    /// (node of each rank)
    #[arg(long, default_value = "1x4", value_name = "NODES", value_parser = parse_topology)]
    nodes: Topology,
    /// Set the length of each rank's block in bytes, either one size for all, such as 1M, or one
    /// for each rank, such as 1M,2M
    #[arg(long, default_value = "1M", value_name = "SIZE[,SIZE,...]", value_delimiter = ',')]
    block_bytes: Vec<Size>,
    /// Select the algorithm, either auto (the lowest predicted time), direct, pull, ring,
    /// double-ring, hierarchical, hierarchical-ring, recursive-doubling, scatter-all-gather or
    /// get-ring
    #[arg(long, default_value = "auto", value_name = "NAME")]
    algorithm: AlgorithmChoice,
    #[command(flatten)]
    plan: PlanOptions,
    /// Predict times with the link speeds in FILE, which `peerlane calibrate --out` wrote [default:
    /// those of H200 GPUs with NVLink and 400 Gb/s RDMA]
    #[arg(long, value_name = "FILE")]
    calibration: Option<PathBuf>,
    /// Compare only engines of this kind, among those of the calibration [default: all]
    #[arg(long, value_name = "KIND", requires = "calibration")]
    engine: Option<String>,
}

fn parse_topology(text: &str) -> std::result::Result<Topology, String> {
    text.parse().map_err(|error: peerlane::Error| error.to_string())
}

pub(crate) fn run(options: &Options) -> Result<()> {
    let usage = |error: peerlane::Error| Failure::usage(error.to_string());
    let topology = &options.nodes;
    let goal = options.plan.goal.goal(topology.ranks(), options.plan.in_place)?;
    let block_bytes = block_bytes("--block-bytes", &options.block_bytes, topology.ranks())?;
    let forms = goal.forms(options.plan.in_place).into_iter().map(|goal| {
        let layout = goal.layout(std::slice::from_ref(&block_bytes), 1)?;
        Ok((goal, layout.average_blocks()))
    });
    let forms: Vec<_> = forms.collect::<std::result::Result<_, _>>().map_err(usage)?;

    // Batches pay off where several signals cost about as much as one, unlike on the host backend.
    let (links, flags) = match &options.calibration {
        None => (vec![Links::default()], FlagOrder::Batched),
        Some(path) => {
            let calibration = calibration::load(path, None)?;
            let host = calibration.key.backend == "host";
            let flags = if host { FlagOrder::Prompt } else { FlagOrder::Batched };
            (of_engine(&calibration, options.engine.as_deref())?, flags)
        }
    };

    let shape = options.plan.shape(goal, flags, topology.nodes() > 1);
    let variants = links.iter().flat_map(|links| {
        forms.iter().map(move |(goal, block_bytes)| Variant {
            engine: &links.engine,
            form: goal.form,
            transfer: None,
            question: Question {
                topology,
                block_bytes,
                shape: Shape { collective: goal.collective, ..shape },
                links,
                measured: options.calibration.is_some(),
                algorithm: options.algorithm.0,
                chunks: options.plan.chunks,
                refused: &[],
            },
        })
    });

    let choice = cost::choose_among(&variants.collect::<Vec<_>>(), &[]).map_err(usage)?;
    print(&if options.plan.json { pretty_json(&choice)? } else { choice.explain() })
}
