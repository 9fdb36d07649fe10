//! The way to reach peers of one host: each other's memory, over XGMI or PCI Express. It is
//! `peerlane_toolkit::peers`; here stands what HIP knows of other devices.

mod way;

use peerlane_toolkit::peers::{self, PeerOptions};

use crate::device::Context;
use crate::engine::{EngineKind, OwnCopy, SignalBy};

/// How a fabric behaves; the defaults are what the backend does best.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Which of the visible devices.
    pub device: u32,
    /// Whether a way that is only second best is refused: memory without a descriptor where the
    /// device says that it has them, and memory of the host between devices that do not reach each
    /// other.
    pub strict: bool,
    /// How signals get to peers; by default, what works.
    pub signal: Option<SignalBy>,
    /// How a rank's own bytes get to their place in its own memory.
    pub own_copy: OwnCopy,
    /// What engines are made of.
    pub engine: EngineKind,
}

impl PeerOptions for Options {
    fn on_device(ordinal: u32) -> Self {
        Self { device: ordinal, ..Self::default() }
    }

    fn is_strict(&self) -> bool {
        self.strict
    }

    fn signal(&self) -> Option<SignalBy> {
        self.signal
    }
}

/// The GPUs of one host, as one rank.
pub type Fabric = peers::Fabric<Context>;
