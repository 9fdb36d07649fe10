//! Implements `peerlane bench`, which measures and checks one collective between processes, alone
//! or beside matrix products.

use clap::{Args, Subcommand};

use crate::allgather;
use crate::error::{Failure, Result};
use crate::goal::{self, Goal, RootOption};

mod matmul;

/// Measure a collective between ranks, and check every byte of its results
///
/// All collectives have the options and the JSON output of `peerlane allgather`. The total size is
/// the size of the largest input or output of a rank.
///
/// The commands measure a collective together with matrix products, and have options of their own.
#[derive(Debug, Args)]
#[group(skip)]
#[command(subcommand_negates_reqs = true, args_conflicts_with_subcommands = true)]
#[command(disable_help_subcommand = true)]
pub(crate) struct Options {
    #[command(subcommand)]
    beside: Option<BesideProducts>,
    /// Select the collective
    #[arg(value_parser = goal::parser(Goal::all()), required = true)]
    collective: Option<Goal>,
    #[command(flatten)]
    root: RootOption,
    #[command(flatten)]
    options: Box<allgather::Options>,
}

/// A collective that is measured together with matrix products.
#[derive(Debug, Subcommand)]
enum BesideProducts {
    /// Measure how much of an all-gather hides behind the products of the gathered rows
    ///
    /// Each rank has a part of the rows of A and its own columns of B. The product of all rows with
    /// B is timed alone; after an all-gather of A on the same stream; and by blocks, where the rows
    /// of each rank are multiplied when they have arrived, on one stream or several by turns. The
    /// elements are bf16, and cuBLAS multiplies (backend cuda only).
    ///
    /// A time is that of one call of many in a row on one stream; the longest time of all ranks
    /// counts, and the median over the rounds is printed. Before, the product by blocks is compared
    /// with that of the same blocks after an all-gather, bit by bit.
    AllGatherMatmul(Box<matmul::Options>),
    /// Measure how much of a reduce-scatter hides behind the products that it adds
    ///
    /// Each rank multiplies its own columns of A with its own rows of B, and the products of all
    /// ranks are added, so that each rank gets a part of the rows. The product is timed alone;
    /// before a reduce-scatter on the same stream; and by blocks, where the rows for each rank
    /// depart when they are multiplied, on one stream or several by turns. The elements are bf16,
    /// and cuBLAS multiplies (backend cuda only).
    ///
    /// A time is that of one call of many in a row on one stream; the longest time of all ranks
    /// counts, and the median over the rounds is printed. Before, the sum by blocks is compared
    /// with that of a start after the products of the same blocks, bit by bit.
    MatmulReduceScatter(Box<matmul::Options>),
}

impl Options {
    /// Returns the options of `peerlane allgather` for the collective.
    pub(crate) fn of_collective(self) -> Result<allgather::Options> {
        let named = self.collective.ok_or_else(|| Failure::usage("no collective is named"))?;
        let goal = named.with_root(self.root)?;
        Ok(self.options.with_goal(goal))
    }
}

pub(crate) fn run(options: Options) -> Result<()> {
    match options.beside {
        None => allgather::run(&options.of_collective()?),
        Some(BesideProducts::AllGatherMatmul(options)) => {
            matmul::run(matmul::Work::AllGatherMatmul, &options)
        }
        Some(BesideProducts::MatmulReduceScatter(options)) => {
            matmul::run(matmul::Work::MatmulReduceScatter, &options)
        }
    }
}
