//! Defines the choices of a plan, which are its algorithm, the order of its flags and the tiers of its lanes.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The algorithm by which a collective moves its data, one for each [schedule](crate::schedule).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank puts its blocks to every peer.
    Direct,
    /// Every rank gets the blocks of every peer.
    Pull,
    /// Every rank forwards what it receives to the next rank.
    Ring,
    /// Two rings in opposite directions, each of which forwards every block half of the way.
    DoubleRing,
    /// Every block goes to one rank of each other node, which distributes it inside its node.
    Hierarchical,
    /// Every block is forwarded from node to node, and distributed inside each node.
    HierarchicalRing,
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
    ];

    /// Returns the name of the algorithm in texts, options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Pull => "pull",
            Self::Ring => "ring",
            Self::DoubleRing => "double-ring",
            Self::Hierarchical => "hierarchical",
            Self::HierarchicalRing => "hierarchical-ring",
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
            let text = format!("unknown algorithm {name:?}, expected {}", known());
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// Returns the names of all algorithms, for error texts.
pub(super) fn known() -> String {
    let names: Vec<_> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
    let (last, others) = names.split_last().expect("there is an algorithm");
    format!("{} or {last}", others.join(", "))
}

/// The order of signals, waits and copies in a lane.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FlagOrder {
    /// Each put waits only for its peer, and the signal that announces it comes right after it.
    #[default]
    Prompt,
    /// Signals and waits are adjacent, for engines that process [several at the cost of one](peerlane_hal::Caps).
    ///
    /// The first put then waits for all peers, so a late rank delays all puts. Arrivals are announced together unless the data
    /// is forwarded, so several chunks gain nothing there; forwarded chunks are announced at once.
    Batched,
}

impl FlagOrder {
    /// Both orders of flags, prompt and batched.
    pub const ALL: &'static [Self] = &[Self::Prompt, Self::Batched];

    /// Returns the name of the flag order in texts, options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prompt => "prompt",
            Self::Batched => "batched",
        }
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
            let text = format!("unknown flag order {name:?}, expected prompt or batched");
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// The tier of a lane, which selects one of the group's fabrics.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The fabric that connects the ranks inside a node. If the group has no other fabric, it reaches every rank.
    #[default]
    Local,
    /// The fabric that connects the ranks of different nodes.
    Network,
}

impl Tier {
    /// Both tiers, local and network.
    pub const ALL: &'static [Self] = &[Self::Local, Self::Network];

    /// Returns the name of the tier in texts and reports.
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
        assert_snapshot!(error, @r#"unknown algorithm "spiral", expected direct, pull, ring, double-ring, hierarchical or hierarchical-ring"#);
        let error = "late".parse::<FlagOrder>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_snapshot!(error, @r#"unknown flag order "late", expected prompt or batched"#);
    }
}
