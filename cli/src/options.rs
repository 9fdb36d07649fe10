//! Defines the option groups and value parsers that several commands share.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use peerlane::collective::Collective;
use peerlane::topology::Topology;
use peerlane_planning::plan::{Algorithm, FlagOrder};
use peerlane_planning::schedule::{self, Shape};

use crate::error::{Failure, Result};
use crate::goal::{Goal, GoalOptions};
use crate::ranks::affinity::Bind;
use crate::units::Size;

type Parsed<T> = std::result::Result<T, String>;

/// The options of the commands that run ranks, `allgather` and `perf`.
#[derive(Args, Clone, Debug)]
pub(crate) struct RunOptions {
    /// Set how each spawned rank is bound to cores; ignored under a launcher
    #[arg(long, value_enum, default_value_t = Bind::Core, value_name = "HOW")]
    pub(crate) bind: Bind,
    /// Set the longest wait for a peer, in seconds, such as 30 or 0.5
    #[arg(long, default_value = "30", value_name = "SECONDS", value_parser = parse_timeout)]
    pub(crate) timeout: Duration,
    /// Set the seed of the random test data, such as 7 [default: a random number, which is printed
    /// if a check fails]
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    /// Write each result to FILE as one line of JSON; FILE - writes to stdout, and the tables to
    /// stderr
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,
    /// Set the id of the process that spawned this rank; set by this program for its own ranks
    #[arg(long, hide = true, value_name = "PID")]
    pub(crate) spawned_by: Option<u32>,
}

/// The options for total sizes of `allgather` and `calibrate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct SweepOptions {
    /// Set the smallest total size in bytes, such as 4096, 4K or 1.5M; the suffixes K, M and G (or
    /// KiB, MiB and GiB) are powers of 1024
    #[arg(long, short = 'b', default_value = "1K", value_name = "SIZE", value_parser = parse_size_above_0)]
    pub(crate) min_bytes: Size,
    /// Set the largest total size in bytes, such as 256M
    #[arg(long, short = 'e', default_value = "64M", value_name = "SIZE")]
    pub(crate) max_bytes: Size,
    /// Multiply the total size by this factor from one size to the next, at least 2
    #[arg(long, short, default_value_t = 4, value_parser = clap::value_parser!(u64).range(2..))]
    pub(crate) factor: u64,
}

/// The options of `plan`, `simulate` and `explain`, which only compute plans.
#[derive(Args, Clone, Debug)]
pub(crate) struct PlanOptions {
    #[command(flatten)]
    pub(crate) goal: GoalOptions,
    /// Set the number of chunks of each block, such as 4 [default: the number with the lowest
    /// predicted time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) chunks: Option<u32>,
    /// Gather in place, so that the input of a rank is its block of the output
    #[arg(long)]
    pub(crate) in_place: bool,
    /// Set the number of output buffers to 1, or to 2 for double buffering, which saves the flags
    /// that tell peers that a buffer is free
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) outputs: u32,
    /// Set the number of inboxes of a reduction to 1, or to 2, which saves the flags that tell
    /// peers that an inbox is free, while every start writes to the same output
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=2))]
    pub(crate) inboxes: u32,
    /// Set when a rank signals its peers, either prompt (after each put), batched (once after all
    /// puts), or network-first (as batched, and what comes from other nodes is awaited first)
    /// [default: prompt]
    #[arg(long, value_name = "ORDER", value_parser = parse_flags)]
    pub(crate) flags: Option<FlagOrder>,
    /// Print the result as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

impl PlanOptions {
    /// Returns the shape of a plan with one chunk, with `flags` as the default order of signals.
    pub(crate) fn shape(&self, goal: Goal, flags: FlagOrder, tiers: bool) -> Shape {
        Shape {
            collective: goal.collective,
            chunks: 1,
            in_place: self.in_place,
            outputs: self.outputs,
            inboxes: self.inboxes,
            flags: self.flags.unwrap_or(flags),
            tiers,
        }
    }
}

/// An algorithm on the command line; `None` is `auto`, the choice of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AlgorithmChoice(pub(crate) Option<Algorithm>);

/// A list of algorithms on the command line, for commands that compare them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AlgorithmList {
    Listed(Vec<AlgorithmChoice>),
    All,
}

impl AlgorithmList {
    /// Returns the algorithms for a collective on a topology; `None` leaves the choice to the cost
    /// model.
    ///
    /// All algorithms are those that also fit if a network connects the nodes.
    pub(crate) fn fitting(
        &self,
        topology: &Topology,
        collective: Collective,
    ) -> Vec<Option<Algorithm>> {
        let shape = Shape { collective, tiers: topology.nodes() > 1, ..Shape::default() };
        match self {
            Self::Listed(choices) => choices.iter().map(|choice| choice.0).collect(),
            Self::All => schedule::fitting(topology, shape).map(Some).collect(),
        }
    }
}

impl FromStr for AlgorithmChoice {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        match text {
            "auto" => Ok(Self(None)),
            _ => text.parse().map(|named| Self(Some(named))).map_err(|_| unknown_algorithm("auto")),
        }
    }
}

impl FromStr for AlgorithmList {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        if text == "all" {
            return Ok(Self::All);
        }
        let listed = text.split(',').map(str::parse).collect::<Parsed<_>>();
        listed.map(Self::Listed).map_err(|_| unknown_algorithm("auto, all"))
    }
}

impl fmt::Display for AlgorithmList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Listed(choices) = self else { return f.write_str("all") };
        let names = choices.iter().map(|choice| choice.0.map_or("auto", Algorithm::name));
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

/// The number of nodes, or the node of every rank, as on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Nodes {
    /// A number of nodes, such as `2`, over which the ranks are spread evenly.
    Count(usize),
    /// A topology that names the node of every rank, such as `2x4`, `3+1+2` or `0,0,1,1`.
    Each(Topology),
}

impl FromStr for Nodes {
    type Err = String;

    fn from_str(text: &str) -> Parsed<Self> {
        match text.parse::<usize>() {
            Ok(0) => Err("the number of nodes is 0, expected at least 1".to_owned()),
            Ok(nodes) => Ok(Self::Count(nodes)),
            Err(_) => text
                .parse()
                .map(Self::Each)
                .map_err(|error: peerlane::Error| format!("{error}; or a number of nodes")),
        }
    }
}

impl Nodes {
    /// Returns the topology of `ranks` ranks on these nodes.
    pub(crate) fn topology(&self, ranks: usize) -> Parsed<Topology> {
        let nodes = match self {
            Self::Each(topology) if topology.ranks() == ranks => return Ok(topology.clone()),
            Self::Each(topology) => {
                return Err(format!(
                    "{} has {topology}, expected {ranks} ranks",
                    topology.notation()
                ));
            }
            &Self::Count(nodes) => nodes,
        };
        if nodes > ranks {
            return Err(format!(
                "{nodes} nodes for {ranks} ranks, expected at most one node for each rank"
            ));
        }
        // Node n begins at rank ⌈n · ranks / nodes⌉; sizes differ by one at most.
        let node = |rank: usize| rank as u64 * nodes as u64 / ranks as u64;
        let node_of_rank = (0..ranks).map(|rank| u32::try_from(node(rank)).unwrap_or(u32::MAX));
        Topology::of_nodes(&node_of_rank.collect::<Vec<_>>()).map_err(|error| error.to_string())
    }

    /// Returns the number of ranks if the nodes determine it, and `None` otherwise.
    pub(crate) fn ranks(&self) -> Option<usize> {
        match self {
            Self::Count(_) => None,
            Self::Each(topology) => Some(topology.ranks()),
        }
    }
}

/// Returns the bytes of every rank's block, from one size for all ranks or one size for each.
pub(crate) fn block_bytes(option: &str, sizes: &[Size], ranks: usize) -> Result<Vec<u64>> {
    match sizes {
        [Size(all)] => Ok(vec![*all; ranks]),
        each if each.len() == ranks => Ok(each.iter().map(|size| size.0).collect()),
        each => Err(Failure::usage(format!(
            "{option} has {} sizes, expected 1 or {ranks}, one for each rank",
            each.len()
        ))
        .with_advice("give one size for all ranks, or one size for each rank")),
    }
}

pub(crate) fn parse_ranks(text: &str) -> Parsed<usize> {
    match text.parse() {
        Ok(ranks @ 1..=4096) => Ok(ranks),
        _ => Err("expected a number of ranks from 1 to 4096".to_owned()),
    }
}

/// The first number of seconds that a duration cannot hold, 2^64.
const TIMEOUT_SECONDS_END: f64 = 18_446_744_073_709_551_616.0;

pub(crate) fn parse_timeout(text: &str) -> Parsed<Duration> {
    let expected = || "expected a number of seconds above 0, such as 30 or 0.5".to_owned();
    let seconds: f64 = text.parse().map_err(|_| expected())?;
    if seconds >= TIMEOUT_SECONDS_END {
        return Err("expected less than 2^64 seconds, such as 30 or 0.5".to_owned());
    }
    let timeout = Duration::try_from_secs_f64(seconds).map_err(|_| expected())?;
    if timeout.is_zero() { Err(expected()) } else { Ok(timeout) }
}

/// Returns the error text for an unknown algorithm; `others` are further words that the option
/// accepts.
pub(crate) fn unknown_algorithm(others: &str) -> String {
    let names: Vec<_> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
    format!("unknown algorithm; expected {others} or {}", names.join(", "))
}

pub(crate) fn first_given<const N: usize>(
    options: [(&'static str, bool); N],
) -> Option<&'static str> {
    options.into_iter().find(|(_, is_given)| *is_given).map(|(name, _)| name)
}

/// Rejects an option if the backend lacks what it needs, such as GPUs.
pub(crate) fn check_needs(
    option: Option<&str>,
    needed: &str,
    backend: &str,
    advice: &str,
) -> Result<()> {
    let Some(option) = option else { return Ok(()) };
    let text = format!("{option} needs {needed}, but the backend is {backend}");
    Err(Failure::usage(text).with_advice(advice))
}

/// Returns a parser that accepts only the names of the given values.
pub(crate) fn one_of<T: Clone + Send + Sync + 'static>(
    values: impl IntoIterator<Item = T>,
    name: fn(&T) -> &'static str,
) -> impl TypedValueParser<Value = T> {
    let values: Vec<T> = values.into_iter().collect();
    let names: Vec<_> = values.iter().map(name).collect();
    PossibleValuesParser::new(names).map(move |given| {
        let found = values.iter().find(|value| name(value) == given);
        found.expect("the parser accepts only these names").clone()
    })
}

pub(crate) fn parse_size_above_0(text: &str) -> Parsed<Size> {
    match text.parse()? {
        Size(0) => Err("expected at least 1 byte".to_owned()),
        size => Ok(size),
    }
}

fn parse_flags(name: &str) -> Parsed<FlagOrder> {
    name.parse().map_err(|error: peerlane::Error| error.to_string())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn notation(text: &str, ranks: usize) -> Parsed<String> {
        Ok(text.parse::<Nodes>()?.topology(ranks)?.notation())
    }

    #[test]
    fn a_number_of_nodes_shares_the_ranks() {
        let of = |text, ranks| notation(text, ranks).unwrap();
        assert_snapshot!(of("1", 4), @"1x4");
        assert_snapshot!(of("2", 5), @"3+2");
        assert_snapshot!(of("3", 8), @"3+3+2");
        assert_snapshot!(of("4", 4), @"4x1");
        assert_snapshot!(of("3+1", 4), @"3+1");
    }

    #[test]
    fn nodes_that_do_not_fit_are_refused_with_a_reason() {
        let fault = |text, ranks| notation(text, ranks).unwrap_err();
        assert_snapshot!(fault("0", 4), @"the number of nodes is 0, expected at least 1");
        assert_snapshot!(fault("3", 2), @"3 nodes for 2 ranks, expected at most one node for each rank");
        assert_snapshot!(fault("3+1", 5), @"3+1 has 4 ranks on 2 nodes, expected 5 ranks");
        assert_snapshot!(fault("2y4", 8), @r#"invalid topology "2y4": "2y4" is not a number; expected a form such as 2x4 (2 nodes of 4 ranks), 3+1+2 (ranks of each node) or 0,1,0 (node of each rank); or a number of nodes"#);
    }
}
