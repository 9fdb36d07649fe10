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

/// A machine on which vendors differ, because each registers memory of the host in its own way.
pub(crate) const STAGED: &[Machine] = &[Machine::With("P2P", "off")];

/// Machines of any vendor on which the engine goes other ways.
pub(crate) const MACHINES: &[Machine] = &[
    // Everything through memory of the host; and some of it, between two islands.
    Machine::With("P2P", "off"),
    Machine::With("P2P_ISLAND", "2"),
    // Puts that are on their way for long, and end in any order.
    Machine::With("PEER_JITTER_US", "2000"),
    Machine::With("PEER_WRITES", "drop"),
    Machine::With("COPY_ENGINES", "1"),
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
