//! The collective that a command works on, as options.

use clap::{Args, ValueEnum};
use peerlane::Rank;
use peerlane::collective::Collective;

use crate::error::{Failure, Result};

/// Selects the collective of a plan, a simulation or a prediction.
#[derive(Args, Clone, Debug)]
pub(crate) struct Goal {
    /// Select the collective
    #[arg(long, value_enum, default_value_t = Name::AllGather, value_name = "NAME")]
    collective: Name,
    /// Set the rank that provides the data of a broadcast, such as 2
    #[arg(long, default_value_t = 0, value_name = "RANK")]
    root: u32,
}

/// The name of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Name {
    AllGather,
    Broadcast,
    AllToAll,
}

impl Goal {
    /// Returns the collective between `ranks` ranks.
    ///
    /// # Errors
    /// A usage failure if the root is not one of them, or a collective without a root has one.
    pub(crate) fn collective(&self, ranks: usize) -> Result<Collective> {
        let collective = match self.collective {
            Name::Broadcast => return broadcast(self.root, ranks),
            Name::AllGather => Collective::AllGather,
            Name::AllToAll => Collective::AllToAll,
        };
        if self.root != 0 {
            let text = format!(
                "--root is {}, but the collective is an {collective}, which has no root",
                self.root
            );
            return Err(Failure::usage(text)
                .with_advice("remove the option, or use --collective broadcast"));
        }
        Ok(collective)
    }
}

/// Returns the broadcast from `root` between `ranks` ranks.
///
/// # Errors
/// A usage failure if the root is not one of them.
pub(crate) fn broadcast(root: u32, ranks: usize) -> Result<Collective> {
    if root as usize >= ranks {
        let text = format!("--root is {root}, expected a rank below {ranks}");
        return Err(Failure::usage(text));
    }
    Ok(Collective::Broadcast { root: Rank(root) })
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
