//! Defines the algorithms of collectives, such as ring, the orders of their flags, and the fabrics
//! that they use.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::error::{Error, quoted};

/// Selects the algorithm of a collective operation, which decides how its data moves between ranks.
///
/// There is one algorithm for each [schedule](crate::schedule).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(not(peerlane_workspace), non_exhaustive)]
pub enum Algorithm {
    /// Every rank puts its blocks to every peer.
    Direct,
    /// Every rank gets the blocks of every peer.
    Pull,
    /// Every rank forwards what it receives to the next rank.
    Ring,
    /// Two rings in opposite directions, each of which forwards every block half of the way.
    DoubleRing,
    /// Every block is sent to one rank of each other node, and this rank distributes the block
    /// inside its node.
    Hierarchical,
    /// Every block is forwarded from node to node, and distributed inside each node.
    HierarchicalRing,
    /// Every rank exchanges all that it has with a rank twice as far away in each round.
    RecursiveDoubling,
    /// The root puts a part of its block to each other rank, and these exchange their parts.
    ScatterAllGather,
    /// Every rank gets the block of the previous rank, and what that rank has received.
    GetRing,
}

impl Algorithm {
    /// All algorithms, ordered from the simplest to the most complex.
    pub const ALL: &'static [Self] = &[
        Self::Direct,
        Self::Pull,
        Self::Ring,
        Self::DoubleRing,
        Self::Hierarchical,
        Self::HierarchicalRing,
        Self::RecursiveDoubling,
        Self::ScatterAllGather,
        Self::GetRing,
    ];

    /// Returns the name of the algorithm, such as `ring`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Pull => "pull",
            Self::Ring => "ring",
            Self::DoubleRing => "double-ring",
            Self::Hierarchical => "hierarchical",
            Self::HierarchicalRing => "hierarchical-ring",
            Self::RecursiveDoubling => "recursive-doubling",
            Self::ScatterAllGather => "scatter-all-gather",
            Self::GetRing => "get-ring",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().copied().find(|algorithm| algorithm.name() == name);
        found.ok_or_else(|| {
            let text = format!("unknown algorithm {}, expected {}", quoted(name), known());
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// Returns the names of all algorithms as text such as `direct, pull or ring`, for errors.
pub(super) fn known() -> String {
    let names: Vec<_> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
    let (last, others) = names.split_last().expect("there is an algorithm");
    format!("{} or {last}", others.join(", "))
}

/// Selects the order in which an engine executes signals, waits and copies.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FlagOrder {
    /// Each copy waits only for its own peer, and a signal right after the copy announces it to
    /// that peer.
    #[default]
    Prompt,
    /// Signals and waits are grouped together instead of placed next to each copy.
    ///
    /// This suits engines that process [several signals or waits at the cost of
    /// one](peerlane_hal::Caps).
    ///
    /// The first put waits for all peers, so a late rank delays all puts. Arrivals are announced
    /// together unless the data is forwarded, so several chunks gain nothing there; forwarded
    /// chunks are announced at once.
    Batched,
    /// Flags are batched, and a lane that distributes what enters its node waits for all of it
    /// before it makes its own copies.
    ///
    /// This suits engines that make all copies of a start by one launch, which would keep compute
    /// units during a wait between them.
    NetworkFirst,
    /// As [`Prompt`](Self::Prompt), and each put to a peer of the same node is followed by the wait
    /// for what arrives at the same time, so that a rank learns of each chunk when it arrives.
    ///
    /// This suits callers that use what has arrived before the rest does. A rank puts to the next
    /// peer when it has what comes in the same turn, so that a late rank delays puts to others.
    Interleaved,
}

impl FlagOrder {
    /// All orders of signals, waits and copies.
    pub const ALL: &'static [Self] =
        &[Self::Prompt, Self::Batched, Self::NetworkFirst, Self::Interleaved];

    /// Returns the name of the flag order, such as `prompt`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Batched => "batched",
            Self::NetworkFirst => "network-first",
            Self::Interleaved => "interleaved",
        }
    }

    /// Returns whether signals and waits are grouped together.
    pub const fn is_batched(self) -> bool {
        matches!(self, Self::Batched | Self::NetworkFirst)
    }
}

impl fmt::Display for FlagOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for FlagOrder {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.iter().copied().find(|order| order.name() == name);
        found.ok_or_else(|| {
            let text = format!(
                "unknown flag order {}, expected prompt, batched, network-first or interleaved",
                quoted(name)
            );
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// Selects the fabric inside a node or the network between nodes.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The fabric that connects the ranks inside a node.
    ///
    /// If the group has no other fabric, it reaches every rank.
    #[default]
    Local,
    /// The fabric that connects the ranks of different nodes.
    Network,
}

impl Tier {
    /// All tiers, which are the local fabric and the network.
    pub const ALL: &'static [Self] = &[Self::Local, Self::Network];

    /// Returns the name of the tier, such as `network`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Network => "network",
        }
    }
}

impl fmt::Display for Tier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn names_parse() {
        for &algorithm in Algorithm::ALL {
            assert_eq!(algorithm.to_string().parse::<Algorithm>().unwrap(), algorithm);
        }
        for &order in FlagOrder::ALL {
            assert_eq!(order.to_string().parse::<FlagOrder>().unwrap(), order);
        }
    }

    #[test]
    fn an_unknown_name_is_an_error() {
        let error = "spiral".parse::<Algorithm>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_snapshot!(error, @r#"unknown algorithm "spiral", expected direct, pull, ring, double-ring, hierarchical, hierarchical-ring, recursive-doubling, scatter-all-gather or get-ring"#);
        let error = "late".parse::<FlagOrder>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_snapshot!(error, @r#"unknown flag order "late", expected prompt, batched, network-first or interleaved"#);
    }
}
