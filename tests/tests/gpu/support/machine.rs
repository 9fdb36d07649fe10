//! Configures the machine of the simulated driver.

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

/// Machines on which the engine goes other ways, by calls that differ between vendors.
pub(crate) const OF_EACH_VENDOR: &[Machine] = &[
    // Everything through memory of the host.
    Machine::With("P2P", "off"),
    Machine::With("PEER_WRITES", "drop"),
    Machine::With("COPY_ENGINES", "1"),
];

/// Machines that show the same with any vendor.
pub(crate) const OF_ONE_VENDOR: &[Machine] = &[
    // Some of it through memory of the host, between two islands.
    Machine::With("P2P_ISLAND", "2"),
    // Puts that are on their way for long, and end in any order.
    Machine::With("PEER_JITTER_US", "2000"),
];

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
