//! Where a plan has its flags.

use std::fmt;
use std::str::FromStr;

use peerlane_hal::ErrorKind;
use serde::{Deserialize, Serialize};

use crate::error::Error;

/// Where the signals and waits of a lane stand among its puts.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum FlagOrder {
    /// Each as early or late as it can be: a put waits for its own peer only, and is announced right
    /// behind.
    #[default]
    Prompt,
    /// Side by side, for engines that do [many at the price of one](peerlane_hal::Caps). The first put
    /// waits for all peers then: a rank that is late holds up all pushes. Arrivals are announced
    /// together where nobody passes them on, so there shards of several parts gain nothing; what is
    /// passed on is announced at once.
    Batched,
}

impl FlagOrder {
    /// Both.
    pub const ALL: &'static [Self] = &[Self::Prompt, Self::Batched];

    /// The name in texts, options and reports.
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
