//! Finds the registered memory and the offset of every buffer and flag that an operation uses.
//!
//! A bound step names bytes by rank, buffer and offset. [`OperationBuffers`] maps these names to
//! the regions of one fabric. Two fabrics over the same bytes share no type: each has its own
//! registrations and imports, and only the names are common.
//!
//! [`DoubleBuffering`] gives consecutive starts different outputs and flags. With two outputs,
//! start `e` uses the output and the set of flags number `e mod 2`. It writes to the output of the
//! start before the last one, which every rank that has entered the last start no longer uses, so
//! no `ready` is needed.
//!
//! A graph replays constants, so a captured start has no epoch: it signals 1, waits for 1 and
//! resets to 0. Captured starts have flags of their own. If they alternate outputs too, the start
//! of index `i` in a graph uses the output and the set of flags number `i mod 2`.
//!
//! Fused starts have numbers, also those of graphs, so they need no other flags there.
//!
//! Flags may have been used by an earlier operation and keep its last values.
//! [`OperationBuffers::flag_value_in`] continues from the epoch base, which is at least as large as
//! any of them.
//!
//! If each start of an operation has its own lengths and places, the low bits of a signal are a
//! [`Digest`] of them. The value that a wait compares has zeros there, so that any digest passes,
//! and the host compares the digests.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::{
    At, DynImport, DynRegion, Flag, FlagValues, Rank, Region, RegionFlag, RegionOffset, Regions,
    StartValues,
};
use serde::{Deserialize, Serialize};

use crate::plan::Tier;

const OUTPUT_ALIGN_BYTES: u64 = 4096;
const CAPTURED_VALUE: u64 = 1;
pub(crate) const WORD_BYTES: u64 = size_of::<u64>() as u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub(crate) enum BufferId {
    /// An operation in place has no input buffer.
    Input(u32),
    Output(u32),
    /// Holds the contributions of all ranks to the block that a rank reduces.
    Inbox,
}

/// The number in commands of the region of the flags between ranks of one fabric.
pub(crate) const FLAGS: u32 = 0;
/// The number in commands of the region of the flags between lanes of two fabrics.
pub(crate) const CROSS_TIER_FLAGS: u32 = 1;
/// The number in commands of the region of the inbox. Outputs and inputs follow by turns.
pub(crate) const INBOX: u32 = 2;

impl BufferId {
    pub(crate) const INPUT: Self = Self::Input(0);
    pub(crate) const OUTPUT: Self = Self::Output(0);

    /// Returns the number of the buffer's region in commands.
    pub(crate) const fn region(self) -> u32 {
        match self {
            Self::Inbox => INBOX,
            Self::Output(number) => INBOX + 1 + 2 * number,
            Self::Input(number) => INBOX + 2 + 2 * number,
        }
    }

    /// Returns the buffer whose region has this number in commands, or `None` for flags.
    pub(crate) const fn of_region(number: u32) -> Option<Self> {
        match number {
            FLAGS | CROSS_TIER_FLAGS => None,
            INBOX => Some(Self::Inbox),
            _ if (number - INBOX) % 2 == 1 => Some(Self::Output((number - INBOX) / 2)),
            _ => Some(Self::Input((number - INBOX) / 2 - 1)),
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
            Self::Inbox => f.write_str("the inbox"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    Eager(u64),
    /// The start has this index among the starts of the operation in one graph.
    Captured(u64),
}

impl Start {
    /// Returns the start in which a flag with this lag, which this start awaits, is signalled.
    pub(crate) fn before(self, lag: u32) -> Self {
        match self {
            Self::Eager(epoch) => Self::Eager(epoch.saturating_sub(lag.into())),
            Self::Captured(index) => Self::Captured(index.saturating_sub(lag.into())),
        }
    }

    pub(crate) fn is_captured(self) -> bool {
        matches!(self, Self::Captured(_))
    }
}

/// How many outputs the starts of an operation use in turn, each with a set of flags.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OutputCounts {
    pub(crate) eager: u32,
    /// 0 if no start can be captured.
    pub(crate) captured: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DoubleBuffering {
    counts: OutputCounts,
    /// Whether starts are fused: then all take turns with two sets of flags and inboxes.
    is_fused: bool,
    output_stride_bytes: u64,
    inbox_stride_bytes: u64,
    flag_stride_words: u64,
}

impl DoubleBuffering {
    /// Returns `None` if the sizes overflow.
    pub(crate) fn new(counts: OutputCounts, output_bytes: u64, flag_words: u64) -> Option<Self> {
        let OutputCounts { eager, captured } = counts;
        let counts = OutputCounts { eager: eager.clamp(1, 2), captured: captured.min(2) };
        let mut buffering = Self {
            counts,
            is_fused: false,
            output_stride_bytes: output_bytes,
            inbox_stride_bytes: 0,
            flag_stride_words: flag_words,
        };

        let outputs = u64::from(buffering.outputs());
        if outputs > 1 {
            let stride = output_bytes.checked_next_multiple_of(OUTPUT_ALIGN_BYTES)?;
            buffering.output_stride_bytes = stride;
        }

        // The methods multiply again without checks, so the products must fit.
        buffering.output_stride_bytes.checked_mul(outputs)?;
        flag_words.checked_mul(outputs)?.checked_mul(WORD_BYTES)?;
        Some(buffering)
    }

    /// Has fused starts use the buffers: they take turns with two sets of flags and inboxes, also
    /// those of graphs, however many outputs there are.
    pub(crate) fn fused(self) -> Self {
        Self { is_fused: true, ..self }
    }

    /// Returns the number of outputs that the operation has.
    pub(crate) fn outputs(&self) -> u32 {
        self.counts.eager.max(self.counts.captured)
    }

    /// Returns the number of inboxes, and of sets of flags of eager starts.
    fn sets(&self) -> u32 {
        if self.is_fused { 2 } else { self.outputs() }
    }

    /// Adds an inbox of this size to each output, or returns `None` if the sizes overflow.
    pub(crate) fn with_inbox(self, bytes: u64) -> Option<Self> {
        let stride = bytes.checked_next_multiple_of(OUTPUT_ALIGN_BYTES)?;
        stride.checked_mul(self.sets().into())?;
        Some(Self { inbox_stride_bytes: stride, ..self })
    }

    pub(crate) fn inbox_bytes(&self, bytes: u64) -> u64 {
        u64::from(self.sets() - 1).saturating_mul(self.inbox_stride_bytes).saturating_add(bytes)
    }

    pub(crate) fn output_bytes(&self) -> u64 {
        u64::from(self.outputs()) * self.output_stride_bytes
    }

    pub(crate) fn buffer_bytes(&self, bytes: u64) -> u64 {
        u64::from(self.outputs() - 1).saturating_mul(self.output_stride_bytes).saturating_add(bytes)
    }

    pub(crate) fn flag_bytes(&self) -> u64 {
        let sets = if self.is_fused { 2 } else { self.counts.eager };
        u64::from(sets) * self.flag_stride_words * WORD_BYTES
    }

    /// Returns the bytes of the flags of captured starts, or `None` if no start can be captured.
    pub(crate) fn captured_flag_bytes(&self) -> Option<u64> {
        let sets = u64::from(self.counts.captured);
        // Fused starts of graphs have the flags of the others.
        (sets > 0 && !self.is_fused).then_some(sets * self.flag_stride_words * WORD_BYTES)
    }

    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        self.output(start) * self.output_stride_bytes
    }

    /// Returns what the starts that use the flags number `set` add to the offsets in each region,
    /// by its number, for an operation with this number of output buffers.
    fn offsets(&self, set: u64, outputs: usize) -> Box<[u64]> {
        // Fused starts can take turns with flags and inboxes, and have one output.
        let output = if self.is_fused { set & (u64::from(self.counts.eager) - 1) } else { set };
        let last = BufferId::Output(Rank::at(outputs).0).region();
        let offset = |number| match BufferId::of_region(number) {
            Some(BufferId::Output(_)) => output * self.output_stride_bytes,
            Some(BufferId::Inbox) => set * self.inbox_stride_bytes,
            Some(BufferId::Input(_)) | None => 0,
        };
        (0..last).map(offset).collect()
    }

    /// Returns the number of the set of flags that a start uses.
    fn set(&self, start: Start) -> u64 {
        match start {
            Start::Eager(number) if self.is_fused => number & 1,
            _ => self.output(start),
        }
    }

    /// Returns the number of the output that a start uses, which is that of its flags unless starts
    /// are fused.
    fn output(&self, start: Start) -> u64 {
        // At most two outputs, so this is the remainder without a division.
        match start {
            Start::Eager(epoch) => epoch & (u64::from(self.counts.eager) - 1),
            Start::Captured(index) => index & u64::from(self.counts.captured.saturating_sub(1)),
        }
    }

    pub(crate) fn flag_word(&self, word: u64, start: Start) -> u64 {
        self.set(start) * self.flag_stride_words + word
    }
}

/// A part of a region, which begins at a byte offset.
#[derive(Clone)]
struct Part<R> {
    region: R,
    offset: u64,
}

impl<R: Clone> Part<R> {
    fn after(&self, bytes: u64) -> Self {
        Self { region: self.region.clone(), offset: self.offset + bytes }
    }
}

/// A buffer on every rank: a part of a region of this rank, and parts of regions that this rank has
/// imported.
#[derive(Clone, Default)]
pub(crate) struct RankRegions {
    local: Option<Part<DynRegion>>,
    bytes: u64,
    /// The imported regions by rank, which include an import of this rank itself.
    peers: Vec<Option<Part<DynImport>>>,
}

impl RankRegions {
    pub(crate) fn new(local: DynRegion) -> Self {
        let bytes = local.bytes();
        Self { local: Some(Part { region: local, offset: 0 }), bytes, peers: Vec::new() }
    }

    /// Returns the same bytes of the buffer on every rank as a buffer of their own.
    pub(crate) fn part(&self, offset: u64, bytes: u64) -> Self {
        let local = self.local.as_ref().map(|part| part.after(offset));
        let peers = self.peers.iter().map(|part| part.as_ref().map(|part| part.after(offset)));
        Self { local, bytes, peers: peers.collect() }
    }

    /// Returns the buffer for a subgroup: rank i of the subgroup is `ranks[i]` of this group.
    pub(crate) fn regroup(&self, ranks: &[Rank]) -> Self {
        let peers = ranks.iter().map(|rank| self.peers.get(rank.index()).cloned().flatten());
        Self { peers: peers.collect(), ..self.clone() }
    }

    pub(crate) fn local(&self) -> &DynRegion {
        &self.local_part().region
    }

    /// Returns the memory of this rank: its region, and the range of bytes in it.
    pub(crate) fn memory(&self) -> (&DynRegion, Range<u64>) {
        let part = self.local_part();
        (&part.region, part.offset..part.offset + self.bytes)
    }

    fn local_part(&self) -> &Part<DynRegion> {
        self.local.as_ref().expect("a buffer is allocated or registered before it is used")
    }

    pub(crate) fn set_local(&mut self, other: &Self) {
        (self.local, self.bytes) = (other.local.clone(), other.bytes);
    }

    pub(crate) fn import(&mut self, peer: Rank, region: DynImport) {
        self.set_part(peer, Part { region, offset: 0 });
    }

    /// Takes over the part of `peer` from a buffer that has been imported before.
    pub(crate) fn set_peer(&mut self, peer: Rank, other: &Self) {
        if let Some(Some(part)) = other.peers.get(peer.index()) {
            self.set_part(peer, part.clone());
        }
    }

    fn set_part(&mut self, peer: Rank, part: Part<DynImport>) {
        if self.peers.len() <= peer.index() {
            self.peers.resize_with(peer.index() + 1, || None);
        }
        self.peers[peer.index()] = Some(part);
    }

    pub(crate) fn has(&self, peer: Rank) -> bool {
        self.peers.get(peer.index()).is_some_and(Option::is_some)
    }

    pub(crate) fn local_at(&self, offset: u64) -> At<'_, DynRegion> {
        let part = self.local_part();
        At { region: &part.region, offset: part.offset + offset }
    }

    /// Returns a place in the buffer of a peer, if this rank has imported it.
    pub(crate) fn peer_at(&self, peer: Rank, offset: u64) -> Option<At<'_, DynImport>> {
        let part = self.peers.get(peer.index())?.as_ref()?;
        Some(At { region: &part.region, offset: part.offset + offset })
    }

    /// Returns a flag of this rank. The buffer must begin at an aligned word.
    pub(crate) fn local_flag(&self, word: u64) -> Flag<'_, DynRegion> {
        let At { region, offset } = self.local_at(word * WORD_BYTES);
        Flag { region, word: offset / WORD_BYTES }
    }

    /// Adds the memory of all ranks to `regions`, with this number in commands.
    fn add_to_regions(&self, number: u32, regions: &mut Regions) {
        if let Some(Part { region, offset }) = &self.local {
            regions.set_local(number, region.clone(), *offset);
        }
        for (peer, part) in Rank::all(self.peers.len()).zip(&self.peers) {
            if let Some(Part { region, offset }) = part {
                regions.set_remote(number, peer, region.clone(), *offset);
            }
        }
    }
}

/// The flags of an operation on one fabric.
#[derive(Clone)]
pub(crate) struct FlagRegions {
    pub(crate) eager: RankRegions,
    pub(crate) captured: Option<RankRegions>,
}

impl FlagRegions {
    fn of_start(&self, start: Start) -> &RankRegions {
        match start {
            Start::Eager(_) => &self.eager,
            Start::Captured(_) => self.captured.as_ref().expect("a captured start has flags"),
        }
    }
}

/// The largest number of low bits of a flag that hold a digest. With it, flags can count 2³⁹
/// starts, and two digests of different starts are equal once in 16 million.
const DIGEST_BITS_MAX: u32 = 24;

/// Returns the number of low bits of a flag that hold a digest, if a flag should grow by at most
/// `growth_max` from a start to the next one. It grows by less than two starts.
pub(crate) fn digest_bits(growth_max: u64) -> u32 {
    let starts = growth_max.saturating_add(1) / 2;
    starts.max(1).ilog2().min(DIGEST_BITS_MAX)
}

/// Tells starts apart whose lengths or places differ between ranks.
#[derive(Debug)]
pub(crate) struct Digest {
    bits: u32,
    /// The hash of what this rank and each other rank know of a start, by rank. There is one hash
    /// for all if ranks know the same.
    hashes: Box<[AtomicU64]>,
}

impl Digest {
    /// Creates a digest of `bits` bits. `pairs` is the number of ranks if each pair of ranks has
    /// lengths of its own.
    pub(crate) fn new(bits: u32, pairs: Option<usize>) -> Self {
        let hashes = (0..pairs.unwrap_or(1)).map(|_| AtomicU64::default()).collect();
        Self { bits, hashes }
    }

    /// Sets the lengths and places of the next starts, as a hash for each rank.
    pub(crate) fn set(&self, hash_of: impl Fn(Rank) -> u64) {
        for (rank, hash) in Rank::all(self.hashes.len()).zip(&self.hashes) {
            hash.store(hash_of(rank), Ordering::Relaxed);
        }
    }

    /// Returns the low bits of flags that this rank and `peer` signal to each other in a start.
    ///
    /// They depend on the start, so that two hashes that give the same bits once will soon differ.
    fn signal_bits(&self, epoch: u64, peer: Rank) -> u64 {
        // Without hashes for pairs, all ranks have the first one.
        let hash = self.hashes.get(peer.index()).unwrap_or(&self.hashes[0]);

        // The high bits of a product depend on all bits of the number, so the digest is there.
        let mixed = hash.load(Ordering::Relaxed) ^ epoch.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = mixed.wrapping_mul(0xd6e8_feb8_6659_fd93);

        // The shift for no bits is as wide as the word, which `checked_shr` refuses.
        mixed.checked_shr(u64::BITS - self.bits).unwrap_or(0)
    }
}

/// What a flag of this rank says about the start that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FlagState {
    Waiting,
    Signalled,
    /// The flag has been signalled by a start with other lengths or places.
    Differs,
}

pub(crate) struct OperationBuffers {
    pub(crate) inputs: Vec<RankRegions>,
    pub(crate) outputs: Vec<RankRegions>,
    /// It is empty unless the operation is a reduction.
    pub(crate) inbox: RankRegions,
    pub(crate) flags: FlagRegions,
    pub(crate) cross_tier_flags: Option<FlagRegions>,
    pub(crate) buffering: DoubleBuffering,
    /// The largest value that a flag of eager starts can have before the first start, equal on all
    /// ranks.
    pub(crate) epoch_base: u64,
    /// `None` if all starts are alike.
    pub(crate) digest: Option<Digest>,
    /// Memory that another fabric allocated must stay registered until all other fields are
    /// dropped.
    pub(crate) _keep: Vec<DynRegion>,
}

impl OperationBuffers {
    fn data(&self, buffer: BufferId) -> &RankRegions {
        match buffer {
            BufferId::Input(number) => &self.inputs[number as usize],
            BufferId::Output(number) => &self.outputs[number as usize],
            BufferId::Inbox => &self.inbox,
        }
    }

    /// Returns the regions that the commands of starts name by number, with the flags of eager or
    /// of captured starts.
    pub(crate) fn regions(&self, captured: bool) -> Regions {
        let mut regions = Regions::default();

        let of_start = |flags: &FlagRegions| match captured {
            true => flags.captured.clone(),
            false => Some(flags.eager.clone()),
        };
        let flags =
            [(FLAGS, Some(&self.flags)), (CROSS_TIER_FLAGS, self.cross_tier_flags.as_ref())];
        for (number, flags) in flags {
            flags
                .and_then(of_start)
                .into_iter()
                .for_each(|flags| flags.add_to_regions(number, &mut regions));
        }

        self.inbox.add_to_regions(INBOX, &mut regions);
        for (number, input) in (0..).zip(&self.inputs) {
            input.add_to_regions(BufferId::Input(number).region(), &mut regions);
        }
        for (number, output) in (0..).zip(&self.outputs) {
            output.add_to_regions(BufferId::Output(number).region(), &mut regions);
        }
        regions
    }

    /// Returns what starts add to the offsets in each region by its number, for each of the outputs
    /// that starts use in turn.
    pub(crate) fn offsets(&self) -> Vec<Box<[u64]>> {
        let outputs = self.outputs.len();
        (0..self.buffering.sets()).map(|set| self.buffering.offsets(set.into(), outputs)).collect()
    }

    /// Returns what even and odd fused starts add to the offsets in each region, if they use this
    /// output.
    pub(crate) fn offsets_with_output(&self, output: u32) -> Vec<Box<[u64]>> {
        let mut offsets = self.offsets();
        let begin = u64::from(output) * self.buffering.output_stride_bytes;
        for of_set in &mut offsets {
            for (number, offset) in (0..).zip(of_set.iter_mut()) {
                if let Some(BufferId::Output(_)) = BufferId::of_region(number) {
                    *offset = begin;
                }
            }
        }
        offsets
    }

    /// Returns what a start adds to the numbers of its commands. `offsets` are those of
    /// [`offsets`](Self::offsets), and `tags` is only used until the values are dropped.
    pub(crate) fn start_values<'v>(
        &self,
        start: Start,
        offsets: &'v [Box<[u64]>],
        tags: &'v mut Vec<u64>,
    ) -> StartValues<'v> {
        tags.clear();
        if let (Some(digest), Start::Eager(epoch)) = (&self.digest, start) {
            let ranks = Rank::all(digest.hashes.len());
            tags.extend(ranks.map(|rank| digest.signal_bits(epoch, rank)));
        }

        let flags = [0, 1].map(|lag| {
            let signalled_in = start.before(lag);
            let word = self.buffering.flag_word(0, signalled_in);
            FlagValues { word, value: self.flag_value_in(signalled_in) }
        });
        let offsets = &offsets[self.buffering.set(start) as usize];
        StartValues { offsets, flags, tags, reset: start.is_captured() }
    }

    /// Returns the inputs, the outputs and the inbox that this rank has.
    pub(crate) fn data_buffers(&self) -> impl Iterator<Item = &RankRegions> {
        let buffers = self.inputs.iter().chain(&self.outputs).chain([&self.inbox]);
        buffers.filter(|buffer| buffer.local.is_some())
    }

    pub(crate) fn flags(&self, crosses_tiers: bool) -> &FlagRegions {
        if crosses_tiers {
            return self
                .cross_tier_flags
                .as_ref()
                .expect("lanes of two tiers have flags between them");
        }
        &self.flags
    }

    /// Returns the address of a place in memory of the host, in a start.
    pub(crate) fn address(&self, place: RegionOffset, offsets: &[u64]) -> *mut u8 {
        let buffer = BufferId::of_region(place.region).expect("only data is added");
        let added = offsets.get(place.region as usize).copied().unwrap_or(0);
        let At { region, offset } = self.data(buffer).local_at(place.offset + added);
        // The layout places it inside of the region.
        region.base().as_ptr().wrapping_add(offset as usize)
    }

    /// Returns a flag of this rank that a start awaits.
    pub(crate) fn local_flag(&self, flag: RegionFlag, start: Start) -> Flag<'_, DynRegion> {
        let start = start.before(flag.lag);
        let word = self.buffering.flag_word(flag.word, start);
        self.flags(flag.region == CROSS_TIER_FLAGS).of_start(start).local_flag(word)
    }

    /// Returns the digest of a start that all ranks know alike; 0 in a graph.
    pub(crate) fn digest_of(&self, start: Start) -> u64 {
        match (&self.digest, start) {
            (Some(digest), Start::Eager(epoch)) => digest.signal_bits(epoch, Rank(0)),
            _ => 0,
        }
    }

    pub(crate) fn digest_bits(&self) -> u32 {
        self.digest.as_ref().map_or(0, |digest| digest.bits)
    }

    /// Returns the least value that flags have when they are signalled in `start`, or 0 for the
    /// start before the first.
    pub(crate) fn flag_value_in(&self, start: Start) -> u64 {
        match start {
            Start::Eager(0) => 0,
            Start::Eager(epoch) => self.epoch_base + (epoch << self.digest_bits()),
            Start::Captured(_) => CAPTURED_VALUE,
        }
    }

    /// Returns the value that this rank and `peer` write to signal each other in `start`.
    pub(crate) fn signal_value(&self, start: Start, peer: Rank) -> u64 {
        let digest = match (&self.digest, start) {
            (Some(digest), Start::Eager(epoch)) => digest.signal_bits(epoch, peer),
            _ => 0,
        };
        self.flag_value_in(start) + digest
    }

    /// Returns what the value of a flag that `peer` signals says about `start`.
    pub(crate) fn flag_state(&self, value: u64, start: Start, peer: Rank) -> FlagState {
        let least = self.flag_value_in(start);
        // The value of a later start does not show the digest of this one.
        let of_start = value.wrapping_sub(least) >> self.digest_bits() == 0;

        match self.digest {
            _ if value < least => FlagState::Waiting,
            Some(_)
                if of_start && !start.is_captured() && value != self.signal_value(start, peer) =>
            {
                FlagState::Differs
            }
            _ => FlagState::Signalled,
        }
    }

    /// Returns by how much the flags of `starts` starts exceed the epoch base at most.
    pub(crate) fn values_of(&self, starts: u64) -> u64 {
        ((starts + 1) << self.digest_bits()) - 1
    }

    /// Returns the start in which a flag with this value was signalled, or 0 if this operation has
    /// not signalled it.
    pub(crate) fn epoch_of_value(&self, value: u64) -> u64 {
        value.saturating_sub(self.epoch_base) >> self.digest_bits()
    }

    /// Returns the memory of a buffer of this rank: the region, and the range of bytes in it.
    pub(crate) fn memory(&self, buffer: BufferId) -> (&DynRegion, Range<u64>) {
        self.data(buffer).memory()
    }

    pub(crate) fn output_offset(&self, start: Start) -> u64 {
        self.buffering.output_offset(start)
    }

    pub(crate) fn flag(&self, flag: RegionFlag, start: Start) -> Option<&AtomicU64> {
        let Flag { region, word } = self.local_flag(flag, start);
        region.flags()?.get(usize::try_from(word).ok()?)
    }

    /// Reads adjacent flags from a flag of this rank, by one copy if the host cannot read them
    /// directly.
    pub(crate) fn flag_values(
        &self,
        first: RegionFlag,
        start: Start,
        values: &mut [[u8; 8]],
    ) -> bool {
        let Flag { region, word } = self.local_flag(first, start);
        region.flag_values(word, values)
    }

    /// Reads a flag of this rank, which is slow if the host cannot read it directly.
    pub(crate) fn flag_value(&self, flag: RegionFlag, start: Start) -> Option<u64> {
        let Flag { region, word } = self.local_flag(flag, start);
        region.flag_value(word)
    }
}

#[derive(Clone)]
pub(crate) struct TierBuffers {
    pub(crate) local: Arc<OperationBuffers>,
    pub(crate) network: Option<Arc<OperationBuffers>>,
}

impl TierBuffers {
    pub(crate) fn on_tier(&self, tier: Tier) -> Option<&Arc<OperationBuffers>> {
        match tier {
            Tier::Local => Some(&self.local),
            Tier::Network => self.network.as_ref(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Start::{Captured, Eager};
    use super::*;

    fn buffering(eager: u32, captured: u32, bytes: u64, words: u64) -> Option<DoubleBuffering> {
        DoubleBuffering::new(OutputCounts { eager, captured }, bytes, words)
    }

    #[test]
    fn one_output_is_always_the_same() {
        let buffering = buffering(1, 0, 1001, 24).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (1001, 192));
        for epoch in 0..4 {
            let start = Eager(epoch);
            assert_eq!((buffering.output_offset(start), buffering.flag_word(5, start)), (0, 5));
        }
    }

    #[test]
    fn two_outputs_alternate_and_do_not_overlap() {
        let buffering = buffering(2, 0, 5000, 24).unwrap();
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
        let buffering = buffering(1, 1, 1001, 24).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (1001, 192));
        assert_eq!(buffering.captured_flag_bytes(), Some(192));
        for index in 0..3 {
            let start = Captured(index);
            assert_eq!((buffering.output_offset(start), buffering.flag_word(5, start)), (0, 5));
        }
        assert_eq!(buffering.flag_word(5, Eager(7)), 5);
    }

    #[test]
    fn captured_starts_alternate_where_eager_ones_do_not() {
        let buffering = buffering(1, 2, 5000, 24).unwrap();
        assert_eq!((buffering.output_bytes(), buffering.flag_bytes()), (16384, 192));
        assert_eq!(buffering.captured_flag_bytes(), Some(384));
        let at = |start| (buffering.output_offset(start), buffering.flag_word(5, start));
        let captured = [0, 1, 2].map(|index| at(Captured(index)));
        assert_eq!(captured, [(0, 5), (8192, 29), (0, 5)]);
        assert_eq!([at(Eager(1)), at(Eager(2))], [(0, 5), (0, 5)]);
    }

    #[test]
    fn sizes_that_overflow_are_none() {
        assert_eq!(buffering(2, 0, u64::MAX, 8), None);
        assert_eq!(buffering(2, 0, u64::MAX / 2, 8), None);
        assert_eq!(buffering(2, 0, 8, u64::MAX / 8), None);
        assert_eq!(buffering(1, 1, 8, u64::MAX / 4), None);
        assert_eq!(buffering(1, 2, u64::MAX / 2, 8), None);
    }

    #[test]
    fn a_digest_has_as_many_bits_as_the_growth_of_flags_allows() {
        assert_eq!([u64::MAX, 255, 254, 3, 1, 0].map(digest_bits), [24, 7, 6, 1, 0, 0]);
        let of_pairs = Digest::new(7, Some(3));
        of_pairs.set(|rank| u64::from(rank.0));
        let of_all = Digest::new(0, None);
        of_all.set(|_| 77);
        for epoch in 1..50 {
            let digests = [0, 1, 2].map(|rank| of_pairs.signal_bits(epoch, Rank(rank)));
            assert!(digests.iter().all(|digest| *digest < 128), "{digests:?}");
            assert_eq!(of_all.signal_bits(epoch, Rank(5)), 0);
        }
        let differs =
            |epoch| of_pairs.signal_bits(epoch, Rank(0)) != of_pairs.signal_bits(epoch, Rank(1));
        assert!((1..4).any(differs), "equal digests differ in other starts");
    }
}
