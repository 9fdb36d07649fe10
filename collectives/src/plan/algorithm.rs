//! The names of the algorithms.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// How an all-gather moves its cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank puts its shard to every peer.
    Direct,
    /// Every rank gets the shard of every peer.
    Pull,
    /// Every rank passes what arrives on to the next rank.
    Ring,
    /// Two rings, each of which takes every shard half of the way round.
    DoubleRing,
    /// Every shard goes to one rank of each other node, which spreads it there.
    Hierarchical,
    /// The same, with shards passed on from node to node.
    HierarchicalRing,
}

impl Algorithm {
    /// Every algorithm.
    pub const ALL: &'static [Self] = &[
        Self::Direct,
        Self::Pull,
        Self::Ring,
        Self::DoubleRing,
        Self::Hierarchical,
        Self::HierarchicalRing,
    ];

    /// The name in texts, options and reports.
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
            let text = format!("algorithm {name:?} is unknown, expected {}", known());
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

/// The names of all algorithms, for error texts.
pub(super) fn known() -> String {
    let names: Vec<_> = Algorithm::ALL.iter().map(|algorithm| algorithm.name()).collect();
    let (last, others) = names.split_last().expect("there is an algorithm");
    format!("{} or {last}", others.join(", "))
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
    }

    #[test]
    fn an_unknown_name_is_an_error() {
        let error = "spiral".parse::<Algorithm>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_snapshot!(error, @r#"algorithm "spiral" is unknown, expected direct, pull, ring, double-ring, hierarchical or hierarchical-ring"#);
    }
}
