//! Allocates memory at equal offsets on every rank, from segments whose remote keys are exchanged
//! once.
//!
//! No message says where a block is: all ranks allocate in the same order with the same allocator.
//! Only the time at which handles are dropped differs between ranks. A dropped allocation is
//! therefore only noted. The next [agreement](Heap::free_dropped) tells it to all ranks, and what
//! every rank has dropped becomes free, in one order.
//!
//! Flags keep the values of their last operation. The next one continues from the [epoch
//! base](Heap::epoch_base), which no flag exceeds. Flags of captured starts are zero after each
//! replay, so they have pools of their own.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use peerlane_hal::{Deadline, Fabric, PeerMemory, Rank, Region, Role, Space as MemorySpace};

use crate::error::Error;
use crate::group::agreement::{Offer, decode};
use crate::group::runtime::Runtime;
use crate::group::segment::{Fabrics, Segment, exchange};
use crate::group::stats::{Held, MemoryKind};
use crate::plan::Tier;

/// The size of the first segment of data, unless an operation needs a larger one.
const DATA_BYTES: u64 = 2 << 20;
/// The sizes of the blocks that a group takes from the heap of the group that it was split from.
const SUBGROUP_DATA_BYTES: u64 = 64 << 10;
const SUBGROUP_FLAG_BYTES: u64 = 16 << 10;
/// The size of the first segment of inboxes, unless an operation needs a larger one.
const INBOX_BYTES: u64 = 64 << 10;
/// The size of the first segment of flags of each kind, unless an operation needs a larger one.
const FLAG_BYTES: u64 = 64 << 10;
/// A pool doubles when it is full, by segments of at most this size; larger blocks get segments of
/// their own size.
const GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Blocks of at least this size begin at a multiple of it.
const PAGE_BYTES: u64 = 4096;
/// Smaller blocks begin at a multiple of two cache lines, so that ranks do not write to one line
/// for different blocks.
const ALIGN_BYTES: u64 = 128;

/// The kind of memory that a block needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::group) enum Pool {
    Data,
    /// The contributions to reductions.
    Inbox,
    Flags {
        lanes: FlagLanes,
        /// Whether the host must be able to read the flags.
        polled: bool,
        captured: bool,
    },
}

/// The lanes that signal flags and wait for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::group) enum FlagLanes {
    /// Both lanes are of this tier.
    Of(Tier),
    /// The lanes are of different tiers, and their fabrics have both registered the flags.
    Across,
}

impl Pool {
    fn has_flags(self) -> bool {
        matches!(self, Self::Flags { .. })
    }
}

/// A block that an operation needs, in bytes.
pub(in crate::group) type Demand = (Pool, u64);

/// Bytes of a window that every start of an operation writes on every rank.
///
/// Starts of two operations that write the same byte never overlap on a rank: the table of the
/// window refuses the second start of the host, and the caller orders those on streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::group) struct WrittenBytes {
    pub(in crate::group) window: u64,
    pub(in crate::group) bytes: Range<u64>,
}

impl WrittenBytes {
    /// Returns the bytes that both write, if there are any.
    fn common(&self, other: &Self) -> Option<Self> {
        let bytes = self.bytes.start.max(other.bytes.start)..self.bytes.end.min(other.bytes.end);
        let is_met = self.window == other.window && !bytes.is_empty();
        is_met.then_some(Self { window: self.window, bytes })
    }
}

/// An inbox of operations that all write the same bytes, so that at most one of them has an open
/// start on a rank.
///
/// A rank puts contributions only into the inbox of a rank that has entered the start, because the
/// plans have one output. So contributions to one operation never meet those to another one.
struct SharedInbox {
    extent: Extent,
    written: WrittenBytes,
    users: usize,
}

/// Finds which inboxes of operations that are prepared together have to be new.
#[derive(Default)]
pub(in crate::group) struct NewInboxes(Vec<WrittenBytes>);

impl NewInboxes {
    /// Returns whether a demand needs memory of its own. Demands come with the largest inbox first,
    /// which later ones can share.
    pub(in crate::group) fn needs(
        &mut self,
        (pool, _): Demand,
        written: Option<&WrittenBytes>,
    ) -> bool {
        let Some(written) = written.filter(|_| pool == Pool::Inbox) else { return true };
        let mut known = self.0.iter_mut();
        match known.find_map(|inbox| inbox.common(written).map(|common| (inbox, common))) {
            Some((inbox, common)) => {
                *inbox = common;
                false
            }
            None => {
                self.0.push(written.clone());
                true
            }
        }
    }
}

/// Returns the size of an inbox that operations share, which has room for somewhat larger ones.
///
/// Sizes are powers of two, and a 16th more for the padding between contributions. So operations
/// that are prepared from the smallest to the largest one have inboxes of twice the largest size
/// together.
fn shared_bytes(bytes: u64) -> u64 {
    let power = (bytes - bytes / 17).checked_next_power_of_two();
    power.and_then(|power| power.checked_add(power / 16)).unwrap_or(u64::MAX / 2)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    segment: usize,
    offset: u64,
    bytes: u64,
}

/// The segments of one pool and their free ranges.
#[derive(Default)]
struct Space {
    segments: Vec<Segment>,
    /// The size of each segment; 0 if it was given back.
    segment_bytes: Vec<u64>,
    bytes: u64,
    /// The number of segments at the beginning that belong to the heap of another group.
    foreign: usize,
    /// Free ranges by segment and offset; adjacent ranges of a segment are one.
    free: BTreeMap<(usize, u64), u64>,
}

impl Space {
    fn take(&mut self, bytes: u64) -> Option<Extent> {
        let bytes = padded(bytes);
        let align = if bytes >= PAGE_BYTES { PAGE_BYTES } else { ALIGN_BYTES };
        let fits = |(&(segment, begin), &length): (&(usize, u64), &u64)| {
            let offset = begin.next_multiple_of(align);
            (offset + bytes <= begin + length).then_some((segment, begin, length, offset))
        };
        let (segment, begin, length, offset) = self.free.iter().find_map(fits)?;

        self.free.remove(&(segment, begin));
        let end = offset + bytes;
        // What is left of the free range before and behind the block.
        for (begin, bytes) in [(begin, offset - begin), (end, begin + length - end)] {
            if bytes > 0 {
                self.free.insert((segment, begin), bytes);
            }
        }
        Some(Extent { segment, offset, bytes })
    }

    fn give_back(&mut self, Extent { segment, offset, bytes }: Extent) {
        let (mut begin, mut end) = (offset, offset + bytes);
        let before =
            self.free.range(..(segment, offset)).next_back().map(|(key, len)| (*key, *len));
        if let Some((key, length)) = before
            && key.0 == segment
            && key.1 + length == begin
        {
            self.free.remove(&key);
            begin = key.1;
        }
        if let Some(length) = self.free.remove(&(segment, end)) {
            end += length;
        }
        self.free.insert((segment, begin), end - begin);
    }

    /// Returns the number of bytes of blocks.
    fn used_bytes(&self) -> u64 {
        let free: u64 = self.free.values().sum();
        self.segment_bytes.iter().sum::<u64>() - free
    }

    fn add(&mut self, segment: Segment, bytes: u64) {
        self.free.insert((self.segments.len(), 0), bytes);
        self.segments.push(segment);
        self.segment_bytes.push(bytes);
        self.bytes += bytes;
    }
}

impl Space {
    /// Takes out the segments that hold no block. The numbers of the others stay.
    fn take_unused(&mut self) -> Vec<Segment> {
        let mut unused = Vec::new();
        for index in self.foreign..self.segments.len() {
            let bytes = self.segment_bytes[index];
            if bytes > 0 && self.free.get(&(index, 0)) == Some(&bytes) {
                self.free.remove(&(index, 0));
                self.segment_bytes[index] = 0;
                self.bytes -= bytes;
                unused.push(std::mem::take(&mut self.segments[index]));
            }
        }
        unused
    }
}

fn padded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(ALIGN_BYTES).unwrap_or(u64::MAX / 2)
}

/// An allocation that this rank has dropped: its number, and the last epoch that its flags were
/// signalled in.
pub(in crate::group) type Dropped = (u64, u64);

/// Decodes the lists of dropped allocations that all ranks have offered as their first blob.
pub(in crate::group) fn dropped_lists(offers: &[Offer]) -> Result<Vec<Vec<Dropped>>, Error> {
    let lists = Rank::all(offers.len()).zip(offers);
    lists.map(|(peer, offer)| decode("dropped allocations", offer, peer, 0)).collect()
}

/// Memory of every rank, from which operations get flags, inputs and outputs.
#[derive(Default)]
pub(in crate::group) struct Heap {
    spaces: BTreeMap<Pool, Space>,
    allocations: BTreeMap<u64, Live>,
    next: u64,
    shared: BTreeMap<u64, SharedInbox>,
    next_shared: u64,
    grown: u64,
    epoch_base: u64,
    dropped: Arc<Mutex<Vec<Dropped>>>,
    /// Whether an allocation was leaked, also one of a subgroup.
    has_leaked: Arc<AtomicBool>,
    data_bytes: Option<u64>,
    /// The blocks of the heap of the group that this one was split from.
    reserve: Option<Arc<Mutex<Allocation>>>,
}

/// An allocation that not all ranks have dropped yet.
struct Live {
    blocks: Vec<Block>,
    dropped_by: usize,
}

#[derive(Clone, Copy)]
struct Block {
    pool: Pool,
    extent: Extent,
    /// The number of the inbox, if the block is one that operations share.
    shared: Option<u64>,
}

/// Blocks of an operation, which become free when every rank has dropped them.
pub(in crate::group) struct Allocation {
    number: u64,
    epoch_base: u64,
    /// The largest value of its flags.
    epoch: u64,
    dropped: Arc<Mutex<Vec<Dropped>>>,
    has_leaked: Arc<AtomicBool>,
    /// The blocks of another heap that it may be a part of.
    reserve: Option<Arc<Mutex<Allocation>>>,
}

impl Allocation {
    /// Notes by how much the flags of the operation exceed their epoch base, from which their next
    /// user continues.
    pub(in crate::group) fn set_epochs(&mut self, epochs: u64) {
        self.epoch = self.epoch.max(self.epoch_base + epochs);
    }

    /// Keeps the blocks from being used again, because peers may still write to them.
    pub(in crate::group) fn leak(self) {
        self.has_leaked.store(true, Ordering::Release);
        std::mem::forget(self);
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.push((self.number, self.epoch));
        if let Some(reserve) = &self.reserve {
            let mut reserve = reserve.lock().unwrap_or_else(PoisonError::into_inner);
            reserve.epoch = reserve.epoch.max(self.epoch);
        }
    }
}

impl Heap {
    /// Creates an empty heap; `data_bytes` is the size of its first segment of data.
    pub(in crate::group) fn new(data_bytes: Option<u64>) -> Self {
        Self { data_bytes, ..Self::default() }
    }

    /// Returns the blocks that the heap of a subgroup begins with: one of data, and flags of each
    /// kind that this heap has.
    pub(in crate::group) fn subgroup_demands(&self) -> Vec<Demand> {
        let flags = self.spaces.keys().filter(|pool| pool.has_flags());
        let flags = flags.map(|pool| (*pool, SUBGROUP_FLAG_BYTES));
        [(Pool::Data, SUBGROUP_DATA_BYTES)].into_iter().chain(flags).collect()
    }

    /// Creates the heap of a subgroup over blocks of this heap.
    pub(in crate::group) fn of_subgroup(
        &self,
        data_bytes: Option<u64>,
        blocks: Allocation,
        parts: impl Iterator<Item = (Pool, u64, Segment)>,
    ) -> Self {
        let reserve = Some(Arc::new(Mutex::new(blocks)));
        let (epoch_base, has_leaked) = (self.epoch_base, Arc::clone(&self.has_leaked));
        let mut heap = Self { epoch_base, has_leaked, data_bytes, reserve, ..Self::default() };
        for (pool, bytes, segment) in parts {
            let space = heap.spaces.entry(pool).or_default();
            space.add(segment, bytes);
            // It does not count for the size of the first segment that the heap grows by.
            space.bytes = 0;
            space.foreign = space.segments.len();
        }
        heap
    }

    pub(in crate::group) fn has_flags(&self) -> bool {
        self.spaces.iter().any(|(pool, space)| pool.has_flags() && !space.segments.is_empty())
    }

    /// Returns the largest value that a free flag can have.
    pub(in crate::group) fn epoch_base(&self) -> u64 {
        self.epoch_base
    }

    /// Returns the allocations that this rank has dropped, for the next
    /// [`free_dropped`](Self::free_dropped).
    pub(in crate::group) fn dropped(&self) -> Vec<Dropped> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Frees what all ranks have dropped. Every rank passes the same lists, in rank order; `own` is
    /// the length of this rank's list.
    pub(in crate::group) fn free_dropped(&mut self, lists: &[Vec<Dropped>], own: usize) {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).drain(..own);
        for &(number, epoch) in lists.iter().flatten() {
            self.epoch_base = self.epoch_base.max(epoch);
            let Some(live) = self.allocations.get_mut(&number) else { continue };
            live.dropped_by += 1;
            if live.dropped_by == lists.len()
                && let Some(live) = self.allocations.remove(&number)
            {
                live.blocks.into_iter().for_each(|block| self.free(block));
            }
        }
    }

    /// Frees a block, unless other operations share it.
    fn free(&mut self, Block { pool, extent, shared }: Block) {
        if let Some(number) = shared
            && let Some(inbox) = self.shared.get_mut(&number)
        {
            inbox.users -= 1;
            if inbox.users > 0 {
                return;
            }
            self.shared.remove(&number);
        }

        self.spaces.entry(pool).or_default().give_back(extent);
    }

    /// Takes an inbox that operations share, or returns `None` if a new one does not fit.
    fn share_inbox(&mut self, bytes: u64, written: &WrittenBytes) -> Option<Block> {
        let known = self.shared.iter_mut().filter_map(|(number, inbox)| {
            let common = inbox.written.common(written)?;
            (inbox.extent.bytes >= bytes).then_some((*number, inbox, common))
        });
        let pool = Pool::Inbox;
        if let Some((number, inbox, common)) = known.min_by_key(|(_, inbox, _)| inbox.extent.bytes)
        {
            inbox.users += 1;
            // All users write these bytes, so each excludes the others.
            inbox.written = common;
            return Some(Block { pool, extent: inbox.extent, shared: Some(number) });
        }

        let extent = self.spaces.entry(pool).or_default().take(shared_bytes(bytes))?;
        let number = self.next_shared;
        self.next_shared += 1;
        self.shared.insert(number, SharedInbox { extent, written: written.clone(), users: 1 });
        Some(Block { pool, extent, shared: Some(number) })
    }

    /// Allocates the blocks of an operation, or returns the demands that do not fit. All ranks call
    /// it alike.
    ///
    /// Operations whose bytes `written` meet share their inboxes.
    pub(in crate::group) fn allocate(
        &mut self,
        demands: &[Demand],
        written: Option<&WrittenBytes>,
    ) -> Result<(Allocation, Vec<Segment>), Vec<Demand>> {
        let mut blocks = Vec::with_capacity(demands.len());
        let mut missing = Vec::new();
        for &(pool, bytes) in demands {
            let shared = written.filter(|_| pool == Pool::Inbox);
            let block = match shared {
                Some(written) => self.share_inbox(bytes, written),
                None => {
                    let extent = self.spaces.entry(pool).or_default().take(bytes);
                    extent.map(|extent| Block { pool, extent, shared: None })
                }
            };

            match block {
                Some(block) => blocks.push(block),
                None if shared.is_some() => missing.push((pool, shared_bytes(bytes))),
                None => missing.push((pool, bytes)),
            }
        }

        if !missing.is_empty() {
            blocks.into_iter().for_each(|block| self.free(block));
            return Err(missing);
        }

        let parts = demands.iter().zip(&blocks).map(|(&(_, bytes), block)| {
            let Block { pool, extent, .. } = block;
            self.spaces[pool].segments[extent.segment].part(extent.offset, bytes)
        });
        let parts = parts.collect();

        let number = self.next;
        self.next += 1;
        self.allocations.insert(number, Live { blocks, dropped_by: 0 });
        let (epoch_base, dropped) = (self.epoch_base, Arc::clone(&self.dropped));
        let reserve = self.reserve.clone();
        let has_leaked = Arc::clone(&self.has_leaked);
        let epoch = epoch_base;
        Ok((Allocation { number, epoch_base, epoch, dropped, has_leaked, reserve }, parts))
    }

    /// Grows the heap by segments that have room for `demands`. Collective.
    ///
    /// # Errors
    /// If a rank cannot allocate or import them; the heap stays as it is on every rank.
    pub(in crate::group) fn grow(
        &mut self,
        runtime: &Runtime,
        fabrics: Fabrics<'_>,
        demands: &[Demand],
        deadline: Deadline,
    ) -> Result<(), Error> {
        let mut sizes: BTreeMap<Pool, u64> = BTreeMap::new();
        for &(pool, bytes) in demands {
            let needed = padded(bytes).saturating_add(PAGE_BYTES);
            let size = sizes.entry(pool).or_default();
            *size = size.saturating_add(needed);
        }
        for (pool, size) in &mut sizes {
            let first = match pool {
                Pool::Data => self.data_bytes.unwrap_or(DATA_BYTES),
                Pool::Inbox => INBOX_BYTES,
                // Flags of more ranks need more memory, and more operations follow the first.
                Pool::Flags { .. } => FLAG_BYTES.max(size.saturating_mul(4)),
            };
            let least = match self.spaces.get(pool).map_or(0, |space| space.bytes) {
                0 => first,
                // Sizes of shared inboxes are far apart already.
                total if *pool == Pool::Inbox => (total / 8).min(GROWTH_BYTES_MAX),
                total => total.min(GROWTH_BYTES_MAX),
            };
            let bytes = (*size).max(least);
            *size = bytes.checked_next_multiple_of(PAGE_BYTES).unwrap_or(bytes);
        }
        self.grown += 1;
        let label = format!("heap, growth {}", self.grown);
        let own = sizes.iter().map(|(&pool, &bytes)| {
            segment(fabrics, pool, bytes).map_err(|error| self.full(pool, bytes, &error))
        });
        let own = own.collect::<Result<Vec<_>, Error>>();
        let segments =
            exchange(runtime, fabrics, &label, own.map(|own| (Offer::default(), own)), deadline)?;
        for ((pool, bytes), segment) in sizes.into_iter().zip(segments) {
            self.spaces.entry(pool).or_default().add(segment, bytes);
        }
        Ok(())
    }

    /// Returns the error of a segment that this rank cannot allocate, with what the heap is used
    /// for.
    fn full(&self, pool: Pool, bytes: u64, error: &Error) -> Error {
        let total: u64 = self.spaces.values().map(|space| space.bytes).sum();
        let used: u64 = self.spaces.values().map(Space::used_bytes).sum();
        let what = match pool {
            Pool::Data => "data",
            Pool::Inbox => "inboxes",
            Pool::Flags { .. } => "flags",
        };
        let text = format!(
            "cannot add {bytes} bytes for {what} to the heap, which has {total} bytes, {used} of them in \
             use by {} operations{}: {error}",
            self.allocations.len(),
            if used > 0 { "; drop those that are no longer used, on every rank" } else { "" }
        );
        Error::new(error.kind(), text).with_source(error.clone())
    }

    /// Takes the segments of data and inboxes that nothing uses out of the heap. All ranks call it
    /// alike.
    pub(in crate::group) fn take_unused(&mut self) -> Vec<Segment> {
        let spaces = self.spaces.iter_mut().filter(|(pool, _)| !pool.has_flags());
        spaces.flat_map(|(_, space)| space.take_unused()).collect()
    }

    /// Returns the size of each segment that this heap has allocated.
    pub(in crate::group) fn held(&self) -> Vec<Held> {
        let mut held = Vec::new();
        for (pool, space) in &self.spaces {
            let kind = match pool {
                Pool::Data => MemoryKind::Heap,
                Pool::Inbox => MemoryKind::Inboxes,
                Pool::Flags { .. } => MemoryKind::Flags,
            };

            let own = space.segments.iter().zip(&space.segment_bytes).skip(space.foreign);
            for (segment, &bytes) in own.filter(|(_, bytes)| **bytes > 0) {
                let regions = segment.of(Tier::Local).or(segment.of(Tier::Network));
                let memory = regions.map_or(MemorySpace::Host, |one| one.local().space());
                held.push(Held { kind, space: memory, bytes });
            }
        }
        held
    }

    /// Returns whether an operation or a channel was dropped whose messages may still be in flight.
    pub(in crate::group) fn has_leaked(&self) -> bool {
        self.has_leaked.load(Ordering::Acquire)
    }

    /// Lets the fabrics reuse the memory of flags after the heap is dropped.
    ///
    /// # Safety
    /// No peer writes to flags of the heap any more.
    pub(in crate::group) unsafe fn allow_reuse_of_flags(&self) {
        for (pool, space) in &self.spaces {
            if !pool.has_flags() {
                continue;
            }
            for segment in &space.segments {
                let Some(regions) = segment.of(Tier::Local) else { continue };
                // SAFETY: the segment has flags of the heap, to which no peer writes any more, as
                // the caller guarantees.
                unsafe { regions.local().allow_reuse() };
            }
        }
    }
}

/// Allocates a segment of this rank.
fn segment(fabrics: Fabrics<'_>, pool: Pool, bytes: u64) -> Result<Segment, Error> {
    let Pool::Flags { lanes, polled, .. } = pool else {
        return Segment::allocate(fabrics, bytes, "memory of the heap");
    };

    let (tier, name) = match lanes {
        FlagLanes::Of(tier) => (tier, "flags"),
        FlagLanes::Across => (Tier::Network, "flags between tiers"),
    };
    let memory = fabrics.of(tier)?.memory();
    let region = match polled {
        true => memory.allocate_polled_flags(bytes),
        false => memory.allocate(bytes, Role::Flags),
    };
    let region = region.map_err(|error| Error::of_fabric(format!("allocate {name}"), error))?;

    let mut segment = Segment::new(tier, region);
    if lanes == FlagLanes::Across {
        segment.register(Tier::Local, fabrics, Role::Flags, name)?;
    }
    Ok(segment)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(heap: &Heap) -> u64 {
        heap.spaces.values().map(Space::used_bytes).sum()
    }

    /// Creates a heap with one segment that has no memory, which is enough to allocate offsets.
    fn heap(bytes: u64) -> Heap {
        let mut heap = Heap::new(None);
        heap.spaces.entry(Pool::Data).or_default().add(Segment::default(), bytes);
        heap
    }

    #[test]
    fn blocks_do_not_overlap_and_free_ranges_join() {
        let random = &mut fastrand::Rng::with_seed(32);
        for _ in 0..200 {
            let mut space = Space::default();
            for _ in 0..random.usize(1..4) {
                space.add(Segment::default(), random.u64(1..64) * PAGE_BYTES);
            }
            let mut live: Vec<Extent> = Vec::new();
            for _ in 0..200 {
                if random.bool() {
                    let Some(new) = space.take(random.u64(0..3 * PAGE_BYTES)) else { continue };
                    let apart = |old: &Extent| {
                        old.segment != new.segment
                            || old.offset + old.bytes <= new.offset
                            || new.offset + new.bytes <= old.offset
                    };
                    assert!(live.iter().all(apart), "{new:?} overlaps {live:?}");
                    live.push(new);
                } else if !live.is_empty() {
                    space.give_back(live.swap_remove(random.usize(..live.len())));
                }
            }
            live.drain(..).for_each(|extent| space.give_back(extent));
            assert_eq!(space.free.len(), space.segments.len(), "{:?}", space.free);
        }
    }

    #[test]
    fn an_allocation_is_free_when_every_rank_has_dropped_it() {
        let demands = [(Pool::Data, 1000), (Pool::Data, 1)];
        let mut heap = heap(PAGE_BYTES);
        let (first, _) = heap.allocate(&demands, None).unwrap();
        let (mut second, _) = heap.allocate(&demands, None).unwrap();
        assert_eq!(filled(&heap), 2 * (1024 + 128));
        second.set_epochs(5);
        drop(second);
        let own = heap.dropped();
        assert_eq!(own, [(1, 5)]);
        heap.free_dropped(&[own.clone(), Vec::new()], own.len());
        assert_eq!((filled(&heap), heap.epoch_base()), (2 * (1024 + 128), 5));
        drop(first);
        let own = heap.dropped();
        heap.free_dropped(&[own.clone(), vec![(1, 7)]], own.len());
        assert_eq!((filled(&heap), heap.epoch_base()), (1024 + 128, 7));
        heap.free_dropped(&[Vec::new(), vec![(0, 0)]], 0);
        assert_eq!(filled(&heap), 0);
        assert!(heap.dropped().is_empty());
    }

    #[test]
    fn what_does_not_fit_changes_nothing() {
        let mut heap = heap(PAGE_BYTES);
        let flags = Pool::Flags { lanes: FlagLanes::Across, polled: false, captured: false };
        let demands = [(Pool::Data, 100), (flags, 64), (Pool::Data, u64::MAX)];
        let missing = heap.allocate(&demands, None).err().unwrap();
        assert_eq!(missing, demands[1..]);
        assert_eq!(filled(&heap), 0);
        assert!(heap.dropped().is_empty());
    }

    fn writes(window: u64, bytes: Range<u64>) -> WrittenBytes {
        WrittenBytes { window, bytes }
    }

    #[test]
    fn operations_that_write_a_common_byte_share_an_inbox() {
        let mut heap = Heap::new(None);
        heap.spaces.entry(Pool::Inbox).or_default().add(Segment::default(), 1 << 20);
        let take = |heap: &mut Heap, bytes, written: &WrittenBytes| {
            heap.allocate(&[(Pool::Inbox, bytes)], Some(written)).unwrap().0
        };

        let first = take(&mut heap, 5000, &writes(0, 0..100));
        let size = filled(&heap);
        assert_eq!(size, padded(shared_bytes(5000)));
        let second = take(&mut heap, 3000, &writes(0, 50..200));
        assert_eq!(filled(&heap), size, "both write bytes 50 to 100");

        // It writes bytes that the first one writes, but none that both write.
        let third = take(&mut heap, 3000, &writes(0, 0..50));
        // These have no byte in common with others.
        let others = [writes(0, 200..300), writes(1, 0..100)];
        let others = others.map(|written| take(&mut heap, 3000, &written));
        assert_eq!(filled(&heap), size + 3 * padded(shared_bytes(3000)));

        let free = |heap: &mut Heap, allocation: Allocation| {
            drop(allocation);
            let own = heap.dropped();
            heap.free_dropped(std::slice::from_ref(&own), own.len());
        };
        free(&mut heap, first);
        assert_eq!(filled(&heap), size + 3 * padded(shared_bytes(3000)), "the second one uses it");
        free(&mut heap, second);
        assert_eq!(filled(&heap), 3 * padded(shared_bytes(3000)));
        free(&mut heap, third);
        others.into_iter().for_each(|other| free(&mut heap, other));
        assert_eq!((filled(&heap), heap.shared.len()), (0, 0));
    }

    #[test]
    fn a_longer_inbox_is_another_one_and_what_does_not_fit_changes_nothing() {
        let mut heap = Heap::new(None);
        heap.spaces.entry(Pool::Inbox).or_default().add(Segment::default(), 1 << 20);
        let written = writes(0, 0..8);
        let mut live = Vec::new();
        for bytes in [1 << 10, 1 << 12, 1 << 11, 1 << 18, 1 << 14] {
            live.push(heap.allocate(&[(Pool::Inbox, bytes)], Some(&written)).unwrap());
        }
        let sizes = [1 << 10, 1 << 12, 1 << 18].map(|bytes| padded(shared_bytes(bytes)));
        assert_eq!(filled(&heap), sizes.iter().sum::<u64>());

        let demands = [(Pool::Inbox, 1 << 10), (Pool::Inbox, 1 << 30)];
        let missing = heap.allocate(&demands, Some(&written)).err().unwrap();
        assert_eq!(missing, [(Pool::Inbox, shared_bytes(1 << 30))]);
        assert_eq!(filled(&heap), sizes.iter().sum::<u64>());
        assert_eq!(heap.shared.values().map(|inbox| inbox.users).sum::<usize>(), 5);
    }

    #[test]
    fn sizes_of_shared_inboxes_have_room_for_padding() {
        for power in [1 << 12, 1 << 20, 128 << 20_u64] {
            assert_eq!(shared_bytes(power), power + power / 16);
            assert_eq!(shared_bytes(power + power / 32), power + power / 16);
            assert_eq!(shared_bytes(power + power / 8), 2 * power + power / 8);
        }
        for bytes in (0..5000).chain([1 << 40, u64::MAX / 4]) {
            assert!(shared_bytes(bytes) >= bytes, "{bytes}");
        }
        assert_eq!(shared_bytes(u64::MAX), u64::MAX / 2);
    }

    #[test]
    fn only_segments_without_blocks_are_given_back() {
        let mut heap = heap(PAGE_BYTES);
        let inboxes = heap.spaces.entry(Pool::Inbox).or_default();
        (0..3).for_each(|_| inboxes.add(Segment::default(), PAGE_BYTES));
        let (held, _) = heap.allocate(&[(Pool::Inbox, PAGE_BYTES)], None).unwrap();
        let (last, _) = heap.allocate(&[(Pool::Inbox, PAGE_BYTES)], None).unwrap();
        drop(held);
        let own = heap.dropped();
        heap.free_dropped(std::slice::from_ref(&own), own.len());

        // The block in the second segment stays where it is.
        assert_eq!(heap.take_unused().len(), 3, "that of data, and two of inboxes");
        assert_eq!(filled(&heap), PAGE_BYTES);
        let missing = heap.allocate(&[(Pool::Inbox, 1)], None).err();
        assert_eq!(missing, Some(vec![(Pool::Inbox, 1)]));

        drop(last);
        let own = heap.dropped();
        heap.free_dropped(std::slice::from_ref(&own), own.len());
        assert_eq!((heap.take_unused().len(), filled(&heap)), (1, 0));
        assert_eq!(heap.held(), []);
    }
}
