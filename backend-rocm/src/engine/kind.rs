//! Which of ROCm's two ways to copy an engine takes.
//!
//! What streams can, SDMA engines cannot: queue waits, take the caller's stream, go into a graph. What
//! is gained by choosing engines one by one is the rate of a link with several, and copies that take no
//! compute unit whatever HIP thinks best. So streams are the rule wherever the device waits for words,
//! and who knows better says so. The kind is chosen for a fabric and not for an operation, because it
//! decides where flags lie, and these are allocated before there is an engine.

use peerlane_hal::mechanics::device::Fault;
use peerlane_hal::mechanics::streams;

use crate::device::Context;
use crate::error::Error;

/// What an engine is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Streams where the device waits for words on them, so that nobody has to drive the queue and it
    /// goes into graphs; else SDMA engines.
    #[default]
    Auto,
    /// Streams of HIP, which choose the engines themselves.
    Streams,
    /// SDMA engines of the HSA runtime, chosen one by one; the rank drives the queue.
    Sdma,
}

impl EngineKind {
    /// A short name for reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Streams => "streams",
            Self::Sdma => "sdma",
        }
    }

    /// The kind that an engine on this device is of; never [`Auto`](Self::Auto).
    pub(crate) fn decided(self, context: &Context) -> Self {
        match self {
            Self::Auto if streams::probe_waits(context).is_err() => Self::Sdma,
            Self::Auto => Self::Streams,
            kind => kind,
        }
    }
}

#[cold]
pub(super) fn no_streams() -> Error {
    Error::Fault(Fault::Argument(
        "an engine over SDMA engines takes no streams of the caller; wanted EngineKind::Streams"
            .to_owned(),
    ))
}
