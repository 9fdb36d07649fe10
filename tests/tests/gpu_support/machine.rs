//! What the machine of the simulated driver is like.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Machine {
    Whole,
    /// With another value of a setting.
    With(&'static str, &'static str),
    /// Without an entry point.
    Without(&'static str),
    /// With another release of the vendor's runtime.
    Release(&'static str),
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => Ok(()),
            Self::With(setting, value) => write!(f, "::with_{setting}_{value}"),
            Self::Without(symbol) => write!(f, "::without_{symbol}"),
            Self::Release(release) => write!(f, "::of_{release}"),
        }
    }
}
