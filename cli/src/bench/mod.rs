//! Implements `peerlane bench`, which measures and checks one collective between processes.

use clap::Args;

use crate::allgather;
use crate::error::Result;
use crate::goal::{self, Goal, RootOption};

/// Measure a collective between ranks, and check every byte of its results
///
/// All collectives have the options and the JSON output of `peerlane allgather`. The total size is
/// the size of the largest input or output of a rank.
#[derive(Debug, Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Select the collective
    #[arg(value_parser = goal::parser(Goal::all()))]
    collective: Goal,
    #[command(flatten)]
    root: RootOption,
    #[command(flatten)]
    options: Box<allgather::Options>,
}

impl Options {
    /// Returns the options of `peerlane allgather` for the collective.
    pub(crate) fn of_collective(self) -> Result<allgather::Options> {
        let goal = self.collective.with_root(self.root)?;
        Ok(self.options.with_goal(goal))
    }
}

pub(crate) fn run(options: Options) -> Result<()> {
    allgather::run(&options.of_collective()?)
}
