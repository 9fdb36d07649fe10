//! `peerlane bench`: measures and checks one collective between real processes.

use clap::{Args, Subcommand};
use peerlane::Rank;
use peerlane::collective::Collective;

use crate::allgather;
use crate::error::Result;

/// Measure a collective between ranks, and check every byte of its results
///
/// All collectives have the options and the JSON output of `peerlane allgather`. The total size is
/// the size of the output of one rank.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(subcommand)]
    collective: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Measure an all-gather: every rank gets the shard of every rank; same as `peerlane allgather`
    AllGather(Box<allgather::Options>),
    /// Measure a broadcast: every rank gets the data of the root
    Broadcast(Box<Broadcast>),
    /// Measure an all-to-all: every rank gets a different block from every rank
    AllToAll(Box<allgather::Options>),
}

#[derive(Args, Debug)]
struct Broadcast {
    /// Set the rank that provides the data, such as 2
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    root: u32,
    #[command(flatten)]
    options: allgather::Options,
}

/// Measures the collective.
///
/// # Errors
/// Whatever ends the run.
pub(crate) fn run(options: Options) -> Result<()> {
    let options = match options.collective {
        Bench::AllGather(options) => *options,
        Bench::Broadcast(broadcast) => {
            let Broadcast { root, options } = *broadcast;
            options.of(Collective::Broadcast { root: Rank(root) })
        }
        Bench::AllToAll(options) => options.of(Collective::AllToAll),
    };
    allgather::run(&options)
}
