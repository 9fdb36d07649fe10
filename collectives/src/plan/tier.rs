//! The fabric of a lane.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Selects one of a group's fabrics.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// The fabric that the group was opened with: it reaches every rank if there is no other fabric, or else the ranks of the
    /// own node.
    #[default]
    Local,
    /// The fabric between nodes.
    Network,
}

impl Tier {
    /// Both tiers.
    pub const ALL: &'static [Self] = &[Self::Local, Self::Network];

    /// Returns the name in texts and reports.
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
