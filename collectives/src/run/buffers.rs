//! Finds the registered memory and the offset of every buffer and flag that an operation uses.
//!
//! A bound step names bytes by rank, buffer and offset. [`OperationBuffers`] maps these names to the regions of one fabric. Two
//! fabrics over the same bytes share no type: each has its own registrations and imports, and only the names are common.
//!
//! [`DoubleBuffering`] gives consecutive starts different outputs and flags. With two outputs, start `e` uses the output and
//! the set of flags number `e mod 2`. It writes to the output of the start before the last one, which every rank that has
//! entered the last start no longer uses, so no `ready` is needed.
//!
//! A graph replays constants, so a captured start has no epoch: it signals 1, waits for 1 and resets to 0. It has a set of
//! flags of its own, after the others.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use peerlane_hal::{At, DynImport, DynRegion, Flag, Rank, Region, Role};
use serde::{Deserialize, Serialize};

use crate::plan::Tier;

const OUTPUT_ALIGN_BYTES: u64 = 4096;
const CAPTURED_VALUE: u64 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum BufferId {
    /// An operation in place has no input buffer.
    Input(u32),
    Output(u32),
    Flags,
    /// Flags between the local fabric and the network are in host memory that both fabrics have registered.
    CrossTierFlags,
}

impl BufferId {
    pub(crate) const INPUT: Self = Self::Input(0);
    pub(crate) const OUTPUT: Self = Self::Output(0);

    pub(crate) fn is_output(self) -> bool {
        matches!(self, Self::Output(_))
    }

    pub(crate) fn role(self) -> Role {
        match self {
            Self::Input(_) | Self::Output(_) => Role::Data,
            Self::Flags | Self::CrossTierFlags => Role::Flags,
        }
    }
}

impl fmt::Display for BufferId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Input(0) => f.write_str("the input"),
            Self::Output(0) => f.write_str("the output"),
            Self::Input(number) => write!(f, "input {number}"),
            Self::Output(number) => write!(f, "output {number}"),
            Self::Flags => f.write_str("flags"),
            Self::CrossTierFlags => f.write_str("flags between tiers"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferOffset {
    pub(crate) buffer: BufferId,
    pub(crate) offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlagAddress {
    pub(crate) crosses_tiers: bool,
    pub(crate) word: u64,
    /// The number of operation starts between a flag's signal and the wait for it; 0 for a signal.
    pub(crate) lag: u32,
}

impl FlagAddress {
    pub(crate) fn signalled_in(self, start: Start) -> Start {
        match start {
            Start::Eager(epoch) => Start::Eager(epoch.saturating_sub(self.lag.into())),
            Start::Captured => Start::Captured,
        }
    }

    pub(crate) fn buffer(self) -> BufferId {
        if self.crosses_tiers { BufferId::CrossTierFlags } else { BufferId::Flags }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Eager(u64),
    Captured,
}

impl Start {
    pub(crate) fn value(self) -> u64 {
        match self {
            Self::Eager(epoch) => epoch,
            Self::Captured => CAPTURED_VALUE,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoubleBuffering {
    outputs: u64,
    output_stride_bytes: u64,
    flag_sets: u64,
    flag_stride_words: u64,
}

impl DoubleBuffering {
    pub(crate) fn new(
        outputs: u32,
        output_bytes: u64,
        flag_words: u64,
        capturable: bool,
    ) -> Option<Self> {
        let outputs = u64::from(outputs.max(1));
        let stride = match outputs {
            1 => output_bytes,
            _ => output_bytes.checked_next_multiple_of(OUTPUT_ALIGN_BYTES)?,
        };
        stride.checked_mul(outputs)?;
        let flag_sets = outputs + u64::from(capturable);
        flag_words.checked_mul(flag_sets)?.checked_mul(size_of::<u64>() as u64)?;
        Some(Self {
            outputs,
            output_stride_bytes: stride,
            flag_sets,
            flag_stride_words: flag_words,
        })
    }

    pub(crate) fn output_bytes(&self) -> u64 {
        self.outputs * self.output_stride_bytes
    }

    pub(crate) fn buffer_bytes(&self, bytes: u64) -> u64 {
        (self.outputs - 1).saturating_mul(self.output_stride_bytes).saturating_add(bytes)
    }

    pub(crate) fn flag_bytes(&self) -> u64 {
        self.flag_sets * self.flag_stride_words * size_of::<u64>() as u64
    }

    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        match start {
            Start::Eager(epoch) => epoch % self.outputs * self.output_stride_bytes,
            Start::Captured => 0,
        }
    }

    pub(crate) fn offset(&self, address: BufferOffset, start: Start) -> u64 {
        match address.buffer {
            BufferId::Output(_) => self.output_offset(start) + address.offset,
            BufferId::Input(_) | BufferId::Flags | BufferId::CrossTierFlags => address.offset,
        }
    }

    pub(crate) fn flag_word(&self, word: u64, start: Start) -> u64 {
        let set = match start {
            Start::Eager(epoch) => epoch % self.outputs,
            Start::Captured => self.outputs,
        };
        set * self.flag_stride_words + word
    }
}

#[derive(Clone, Default)]
pub(crate) struct RankRegions {
    local: Option<DynRegion>,
    /// The imported regions by rank, which include an import of this rank itself.
    peers: Vec<Option<DynImport>>,
}

impl RankRegions {
    pub(crate) fn new(local: DynRegion) -> Self {
        Self { local: Some(local), peers: Vec::new() }
    }

    pub(crate) fn local(&self) -> &DynRegion {
        self.local.as_ref().expect("a buffer is allocated or registered before it is used")
    }

    pub(crate) fn set_peer(&mut self, peer: Rank, region: DynImport) {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(region);
    }

    pub(crate) fn has(&self, peer: Rank) -> bool {
        self.peers.get(peer.index()).is_some_and(Option::is_some)
    }

    fn peer(&self, rank: Rank) -> &DynImport {
        self.peers[rank.index()].as_ref().expect("the regions that steps name have been imported")
    }
}

pub(crate) struct OperationBuffers {
    pub(crate) inputs: Vec<RankRegions>,
    pub(crate) outputs: Vec<RankRegions>,
    pub(crate) flags: RankRegions,
    pub(crate) cross_tier_flags: Option<RankRegions>,
    pub(crate) buffering: DoubleBuffering,
    /// Memory that another fabric allocated must stay registered until all other fields are dropped.
    pub(crate) _keep: Vec<DynRegion>,
}

impl OperationBuffers {
    fn regions(&self, buffer: BufferId) -> &RankRegions {
        match buffer {
            BufferId::Input(number) => &self.inputs[number as usize],
            BufferId::Output(number) => &self.outputs[number as usize],
            BufferId::Flags => &self.flags,
            BufferId::CrossTierFlags => {
                self.cross_tier_flags.as_ref().expect("lanes of two tiers have flags between them")
            }
        }
    }

    pub(crate) fn local(&self, address: BufferOffset, start: Start) -> At<'_, DynRegion> {
        let region = self.regions(address.buffer).local();
        At { region, offset: self.buffering.offset(address, start) }
    }

    pub(crate) fn remote(
        &self,
        peer: Rank,
        address: BufferOffset,
        start: Start,
    ) -> At<'_, DynImport> {
        let region = self.regions(address.buffer).peer(peer);
        At { region, offset: self.buffering.offset(address, start) }
    }

    pub(crate) fn local_flag(&self, address: FlagAddress, start: Start) -> Flag<'_, DynRegion> {
        let region = self.regions(address.buffer()).local();
        let start = address.signalled_in(start);
        Flag { region, word: self.buffering.flag_word(address.word, start) }
    }

    pub(crate) fn remote_flag(
        &self,
        peer: Rank,
        address: FlagAddress,
        start: Start,
    ) -> Flag<'_, DynImport> {
        let region = self.regions(address.buffer()).peer(peer);
        Flag { region, word: self.buffering.flag_word(address.word, start) }
    }

    pub(crate) fn region(&self, buffer: BufferId) -> &DynRegion {
        self.regions(buffer).local()
    }

    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        self.buffering.output_offset(start)
    }

    pub(crate) fn flag(&self, address: FlagAddress, start: Start) -> Option<&AtomicU64> {
        let start = address.signalled_in(start);
        let word = usize::try_from(self.buffering.flag_word(address.word, start)).ok()?;
        self.region(address.buffer()).flags()?.get(word)
    }

    /// A read is slow if the host cannot read the flag directly.
    pub(crate) fn flag_value(&self, address: FlagAddress, start: Start) -> Option<u64> {
        let word = self.buffering.flag_word(address.word, address.signalled_in(start));
        self.region(address.buffer()).flag_value(word)
    }
}

#[derive(Clone)]
pub(crate) struct TierBuffers {
    pub(crate) local: Arc<OperationBuffers>,
    pub(crate) network: Option<Arc<OperationBuffers>>,
}

impl TierBuffers {
    pub(crate) fn of(&self, tier: Tier) -> Option<&OperationBuffers> {
        match tier {
            Tier::Local => Some(&self.local),
            Tier::Network => self.network.as_deref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Start::{Captured, Eager};
    use super::*;

    #[test]
    fn one_output_is_always_the_same() {
        let buffering = DoubleBuffering::new(1, 1001, 24, false).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (1001, 192));
        for epoch in 0..4 {
            let start = Eager(epoch);
            assert_eq!((buffering.output_offset(start), buffering.flag_word(5, start)), (0, 5));
        }
    }

    #[test]
    fn two_outputs_alternate_and_do_not_overlap() {
        let buffering = DoubleBuffering::new(2, 5000, 24, false).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (16384, 384));
        assert_eq!(
            (buffering.buffer_bytes(5000), buffering.buffer_bytes(u64::MAX)),
            (13192, u64::MAX)
        );
        let of =
            |epoch| (buffering.output_offset(Eager(epoch)), buffering.flag_word(5, Eager(epoch)));
        assert_eq!([of(1), of(2), of(3)], [(8192, 29), (0, 5), (8192, 29)]);
    }

    #[test]
    fn captured_starts_have_flags_of_their_own_and_the_same_output() {
        let buffering = DoubleBuffering::new(1, 1001, 24, true).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (1001, 384));
        assert_eq!((buffering.output_offset(Captured), buffering.flag_word(5, Captured)), (0, 29));
        assert_eq!((buffering.flag_word(5, Eager(7)), Captured.value()), (5, 1));
    }

    #[test]
    fn sizes_that_overflow_are_none() {
        assert_eq!(DoubleBuffering::new(2, u64::MAX, 8, false), None);
        assert_eq!(DoubleBuffering::new(2, u64::MAX / 2, 8, false), None);
        assert_eq!(DoubleBuffering::new(2, 8, u64::MAX / 8, false), None);
        assert_eq!(DoubleBuffering::new(1, 8, u64::MAX / 8, true), None);
    }
}
