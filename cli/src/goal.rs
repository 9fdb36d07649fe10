//! The collective that a command works on, as options.

use clap::Args;
use clap::builder::PossibleValuesParser;
use peerlane::Rank;
use peerlane::collective::Collective;

use crate::error::{Failure, Result};

/// Selects the collective of a plan, a simulation or a prediction.
#[derive(Args, Clone, Debug)]
pub(crate) struct Goal {
    /// Select the collective
    #[arg(long, default_value = Collective::AllGather.name(), value_name = "NAME", value_parser = names())]
    collective: String,
    /// Set the root of a collective that has one, such as the rank that provides the data of a broadcast
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    root: u32,
}

fn names() -> PossibleValuesParser {
    PossibleValuesParser::new(Collective::ALL.iter().map(|one| one.name()))
}

impl Goal {
    /// Returns the collective between `ranks` ranks.
    ///
    /// # Errors
    /// A usage failure if the root is not one of them, or a collective without a root has one.
    pub(crate) fn collective(&self, ranks: usize) -> Result<Collective> {
        let collective = Collective::of_name(&self.collective).expect("clap has checked the name");
        if self.root != 0 && collective.root().is_none() {
            let text = format!(
                "--root is {}, but the collective is an {collective}, which has no root",
                self.root
            );
            return Err(Failure::usage(text)
                .with_advice("remove the option, or use --collective broadcast"));
        }
        check_root(collective.with_root(Rank(self.root)), ranks)
    }
}

/// Returns the collective, whose root is one of `ranks` ranks.
///
/// # Errors
/// A usage failure if the root is not one of them.
pub(crate) fn check_root(collective: Collective, ranks: usize) -> Result<Collective> {
    match collective.root() {
        Some(root) if root.index() >= ranks => {
            let text = format!("--root is {root}, expected a rank below {ranks}");
            Err(Failure::usage(text))
        }
        _ => Ok(collective),
    }
}

/// Returns the bytes that each rank provides, out of `shard_bytes`: those of the root only in a broadcast.
pub(crate) fn provided(collective: Collective, mut shard_bytes: Vec<u64>) -> Vec<u64> {
    for (rank, bytes) in shard_bytes.iter_mut().enumerate() {
        if !collective.is_provider(Rank::at(rank)) {
            *bytes = 0;
        }
    }
    shard_bytes
}
