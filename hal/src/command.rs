//! Defines commands, which are ops that name their regions by number and are bound once.
//!
//! An operation runs the same ops in every start, with other offsets, flags and values. Its
//! commands stay as they are: the regions that they name are [bound](crate::DynEngine::bind) to an
//! engine once, and [`StartValues`] say what differs from start to start.

use crate::engine::Rows;
use crate::memory::{DynImport, DynRegion};
use crate::rank::Rank;
use crate::reduction::Reduction;

/// A byte position in a region, which is named by its number in the [`Regions`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionOffset {
    /// The number of the region.
    pub region: u32,
    /// The offset from the beginning of the bound bytes of the region.
    pub offset: u64,
}

impl RegionOffset {
    /// Returns whether `next` is the place behind `bytes` bytes at this place.
    pub fn is_followed_by(self, bytes: u64, next: Self) -> bool {
        self.region == next.region && self.offset.checked_add(bytes) == Some(next.offset)
    }
}

/// A flag, which is named by the number of its region and its word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionFlag {
    /// The number of the region.
    pub region: u32,
    /// The offset in 64-bit words from the beginning of the bound bytes of the region.
    pub word: u64,
    /// The other rank of the pair: the one that is signalled, or the one whose signal is awaited.
    pub peer: Rank,
    /// The number of starts from the signal of the flag to the wait for it, 0 or 1.
    pub lag: u32,
}

/// The rank that makes a copy: the one that has the bytes, or the one that receives them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From this rank to the peer.
    Put,
    /// From the peer to this rank.
    Get,
}

/// An [op](crate::Op) that names its regions by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Copies rows between this rank and a peer. A command of no bytes is passed over.
    Copy {
        /// Whether this rank puts or gets.
        direction: Direction,
        /// The rank whose memory is the other end of the copy.
        peer: Rank,
        /// The place of the first row in the memory of the peer.
        remote: RegionOffset,
        /// The place of the first row in the memory of this rank.
        local: RegionOffset,
        /// The number of bytes of a row.
        bytes: u64,
        /// The number of rows and their pitches.
        rows: Rows,
    },
    /// Combines memory of this rank, as [`Op::Reduce`](crate::Op::Reduce). A command of no bytes is
    /// passed over.
    Reduce {
        /// The place of the result.
        dst: RegionOffset,
        /// The number of the first source in [`Commands::sources`].
        first: u32,
        /// The number of sources, which follow the first one.
        count: u32,
        /// The number of bytes of the result and of each source.
        bytes: u64,
        /// The operator and the type of the elements.
        reduction: Reduction,
    },
    /// Stores the value of the start in a flag of a peer.
    Signal {
        /// The flag, in memory of its peer.
        flag: RegionFlag,
    },
    /// Waits until a flag of this rank has the value of the start.
    Wait {
        /// The flag, in memory of this rank.
        flag: RegionFlag,
    },
}

impl Command {
    /// Returns the number of bytes that the command copies, or that it writes as the result of a
    /// reduction.
    pub fn bytes(&self) -> u64 {
        match *self {
            Self::Copy { bytes, rows, .. } => bytes * rows.count,
            Self::Reduce { bytes, .. } => bytes,
            Self::Signal { .. } | Self::Wait { .. } => 0,
        }
    }

    /// Returns whether the command is a copy or a reduction of no bytes.
    pub fn is_empty(&self) -> bool {
        matches!(self, Self::Copy { bytes: 0, .. } | Self::Reduce { bytes: 0, .. })
    }
}

/// Commands that are submitted as one slice.
#[derive(Clone, Copy, Debug)]
pub struct Commands<'a> {
    /// The commands in the order in which they take effect.
    pub commands: &'a [Command],
    /// The sources of the reductions among them, and of others.
    pub sources: &'a [RegionOffset],
}

/// What a start adds to the numbers of its commands.
#[derive(Clone, Copy, Debug)]
pub struct StartValues<'a> {
    /// The number of bytes that is added to the offset of a place, by the number of its region. A
    /// region without a number here adds none.
    pub offsets: &'a [u64],
    /// The values of flags that are signalled in this start, and of those that were signalled in
    /// the start before.
    pub flags: [FlagValues; 2],
    /// What is added to the value of a signal, by the rank that is signalled. One number is for all
    /// ranks, and no number adds nothing.
    pub tags: &'a [u64],
    /// Whether a wait sets its flag to 0.
    pub reset: bool,
}

/// The flags of one start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlagValues {
    /// The number that is added to the word of a flag.
    pub word: u64,
    /// The value that a signal stores, without its tag, and that ends a wait.
    pub value: u64,
}

impl StartValues<'_> {
    pub(crate) fn offset(&self, place: RegionOffset) -> u64 {
        // A sum that overflows is out of range of any region, which the engine then refuses.
        let added = self.offsets.get(place.region as usize).copied().unwrap_or(0);
        place.offset.saturating_add(added)
    }

    /// Returns the flags of the start in which a flag with this lag is signalled.
    pub(crate) fn flags(&self, lag: u32) -> FlagValues {
        self.flags[lag.min(1) as usize]
    }

    pub(crate) fn tag(&self, peer: Rank) -> u64 {
        let index = if self.tags.len() == 1 { 0 } else { peer.index() };
        self.tags.get(index).copied().unwrap_or(0)
    }
}

/// The [ops](crate::FusedOps) of the starts of an operation, as commands.
#[derive(Debug)]
pub struct FusedCommands<'a> {
    /// The commands of a start, in the order in which they take effect.
    pub commands: Commands<'a>,
    /// What even starts and odd starts add to the numbers of the commands.
    pub starts: [StartValues<'a>; 2],
    /// The memory of this rank into which peers put tagged data, and its length in bytes, or `None`
    /// if data is not tagged.
    pub slots: Option<(RegionOffset, u64)>,
    /// The region and the first of two adjacent words in flags of this rank, in which the device
    /// counts the starts.
    pub counter: (u32, u64),
    /// The number of blocks of threads, equal on all ranks.
    pub blocks: u32,
    /// The largest value that a flag can have before the first start, equal on all ranks.
    pub base: u64,
    /// The number of low bits that hold a digest in the values of signals.
    pub digest_bits: u32,
}

/// Regions by number, each with the offset of the first byte that commands can name.
pub(crate) type Numbered<M> = Vec<Option<(M, u64)>>;

/// The regions that commands name by number, before they are [bound](crate::DynEngine::bind) to an
/// engine.
#[derive(Clone, Debug, Default)]
pub struct Regions {
    pub(crate) locals: Numbered<DynRegion>,
    /// The imported regions by number, and those with one number by rank.
    pub(crate) remotes: Vec<Numbered<DynImport>>,
}

impl Regions {
    /// Sets the number of a region of this rank. Commands see its bytes from `offset` on, which is
    /// a multiple of 8 for flags.
    pub fn set_local(&mut self, number: u32, region: DynRegion, offset: u64) {
        set(&mut self.locals, number as usize, (region, offset));
    }

    /// Sets the number of a region that was imported from `peer`. Regions of several peers can have
    /// one number.
    pub fn set_remote(&mut self, number: u32, peer: Rank, import: DynImport, offset: u64) {
        let number = number as usize;
        if self.remotes.len() <= number {
            self.remotes.resize_with(number + 1, Vec::new);
        }
        set(&mut self.remotes[number], peer.index(), (import, offset));
    }
}

/// Sets an entry of a list, which grows if it is too short.
fn set<M>(list: &mut Numbered<M>, index: usize, value: (M, u64)) {
    if list.len() <= index {
        list.resize_with(index + 1, || None);
    }
    list[index] = Some(value);
}
