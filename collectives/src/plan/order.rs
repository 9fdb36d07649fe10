//! The order of flags and copies in a plan.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// The order of signals, waits and copies in a lane.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FlagOrder {
    /// Each put waits only for its own peer and is announced right after it.
    #[default]
    Prompt,
    /// Flags are adjacent, for engines that process [many at the price of one](peerlane_hal::Caps).
    ///
    /// The first put then waits for all peers, so a late rank delays all puts. Arrivals are announced together unless the data
    /// is forwarded, so blocks of several chunks gain nothing there; forwarded chunks are announced at once.
    Batched,
}

impl FlagOrder {
    /// Both orders.
    pub const ALL: &'static [Self] = &[Self::Prompt, Self::Batched];

    /// Returns the name in texts, options and reports.
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
            let text = format!("flag order {name:?} is unknown, expected prompt or batched");
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn names_parse() {
        for &order in FlagOrder::ALL {
            assert_eq!(order.to_string().parse::<FlagOrder>().unwrap(), order);
        }
        let error = "late".parse::<FlagOrder>().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_snapshot!(error, @r#"flag order "late" is unknown, expected prompt or batched"#);
    }
}
