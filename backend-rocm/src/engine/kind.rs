//! Which of ROCm's two ways to copy an engine takes.
//!
//! What streams can, SDMA engines cannot: queue waits, take the caller's stream, go into a graph. What
//! is gained by choosing engines one by one is the rate of a link with several, and copies that take no
//! compute unit whatever HIP thinks best. So streams are the rule wherever the device waits for words.
//! An operation that needs no streams gets SDMA engines where that is predicted to be faster: where its
//! longest copy gains more by all engines of a link than it costs that the host drives them. All ranks
//! predict from the same figures, because both kinds order their flags in other ways.

use std::time::Duration;

use peerlane_hal::EngineRequirements;
use peerlane_toolkit::peers::Purpose;
use peerlane_toolkit::streams;

use crate::device::Context;

/// What an engine is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Streams where the device waits for words on them, so that nobody has to drive the queue and it
    /// goes into graphs; else SDMA engines. Those too for what asks for no streams
    /// ([`EngineRequirements`](peerlane_hal::EngineRequirements)) and is predicted to be faster so.
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

    /// The same, of an engine for this purpose.
    pub(super) fn chosen(self, context: &Context, purpose: &Purpose) -> Self {
        let pays = |requirements: EngineRequirements| {
            !requirements.streams && gains(requirements, purpose.striped_rate)
        };
        match self.decided(context) {
            Self::Streams if self == Self::Auto && pays(purpose.requirements) => Self::Sdma,
            kind => kind,
        }
    }
}

/// What one SDMA engine moves, and so a copy of a stream: about what one XGMI link of an MI250X or
/// MI300X carries, 50 GB/s by AMD's figures. Not measured here.
const ENGINE_RATE: u64 = 50_000_000_000;
/// What it costs a start that the host drives it: two naps of [`NAP_MAX`](super::sdma), one for the
/// flags of the peers that are ready and one for those that have arrived.
const DRIVING: Duration = Duration::from_micros(100);

/// What so many engines move over a link of this rate, which is unknown for some; bytes per second.
pub(super) fn rate_over(engines: usize, link: Option<f64>) -> u64 {
    let link = link.map_or(0, |rate| rate as u64);
    link.min(ENGINE_RATE.saturating_mul(engines as u64))
}

/// Whether the longest copy gains more by several engines than driving them costs.
fn gains(requirements: EngineRequirements, striped_rate: u64) -> bool {
    let time = |rate| u128::from(requirements.copy_bytes_max) * 1_000_000_000 / u128::from(rate);
    striped_rate > ENGINE_RATE && time(ENGINE_RATE) - time(striped_rate) > DRIVING.as_nanos()
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    #[test]
    fn several_engines_pay_from_the_size_on_that_pays_for_the_host() {
        let pays = |copy_bytes_max, rate| {
            gains(EngineRequirements { streams: false, copy_bytes_max }, rate)
        };
        // Half of the time at 50 GB/s is saved, and 100 µs are 5 MB there.
        assert!(!pays(10_000_000, 100 * GB));
        assert!(pays(10_000_100, 100 * GB));
        // One third.
        assert!(!pays(15_000_000, 75 * GB) && pays(15_000_200, 75 * GB));
        assert!(!pays(u64::MAX, 50 * GB), "one engine fills the link");
        assert!(!pays(u64::MAX, 0), "nobody knows the rate");
    }

    #[test]
    fn a_link_bounds_its_engines() {
        assert_eq!(rate_over(2, Some(200e9)), 100 * GB);
        assert_eq!(rate_over(4, Some(64e9)), 64 * GB);
        assert_eq!(rate_over(4, None), 0);
        assert_eq!(rate_over(0, Some(64e9)), 0, "the runtime chooses one for each copy");
    }
}
