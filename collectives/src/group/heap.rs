//! Allocates memory at equal offsets on every rank, from segments whose remote keys are exchanged once.
//!
//! No message says where a block is: all ranks allocate in the same order with the same allocator. Only the time at
//! which handles are dropped differs between ranks. A dropped allocation is therefore only noted. The next
//! [agreement](Heap::free_dropped) tells it to all ranks, and what every rank has dropped becomes free, in one order.
//!
//! Flags keep the values of their last operation. The next one continues from the [epoch base](Heap::epoch_base), which
//! no flag exceeds. Flags of captured starts are zero after each replay, so they have pools of their own.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use peerlane_hal::{Deadline, Fabric, PeerMemory, Region, Role};

use crate::error::Error;
use crate::group::agreement::Offer;
use crate::group::runtime::Runtime;
use crate::group::segment::{Fabrics, Segment, exchange};
use crate::plan::Tier;

/// The size of the first segment of data, unless an operation needs a larger one.
const DATA_BYTES: u64 = 2 << 20;
/// The sizes of the blocks that a group takes from the heap of the group that it was split from.
const SUBGROUP_DATA_BYTES: u64 = 64 << 10;
const SUBGROUP_FLAG_BYTES: u64 = 16 << 10;
/// The size of the first segment of flags of each kind, unless an operation needs a larger one.
const FLAG_BYTES: u64 = 64 << 10;
/// A pool doubles when it is full, by segments of at most this size; larger blocks get segments of their own size.
const GROWTH_BYTES_MAX: u64 = 64 << 20;
/// Blocks of at least this size begin at a multiple of it.
const PAGE_BYTES: u64 = 4096;
/// Smaller blocks begin at a multiple of two cache lines, so that ranks do not write to one line for different blocks.
const ALIGN_BYTES: u64 = 128;

/// The kind of memory that a block needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::group) enum Pool {
    Data,
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

/// A block that an operation needs, in bytes.
pub(in crate::group) type Demand = (Pool, u64);

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
    bytes: u64,
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

    fn add(&mut self, segment: Segment, bytes: u64) {
        self.free.insert((self.segments.len(), 0), bytes);
        self.segments.push(segment);
        self.bytes += bytes;
    }
}

fn padded(bytes: u64) -> u64 {
    bytes.max(1).checked_next_multiple_of(ALIGN_BYTES).unwrap_or(u64::MAX / 2)
}

/// An allocation that this rank has dropped: its number, and the last epoch that its flags were signalled in.
pub(in crate::group) type Dropped = (u64, u64);

/// Memory of every rank, from which operations get flags, inputs and outputs.
#[derive(Default)]
pub(in crate::group) struct Heap {
    spaces: BTreeMap<Pool, Space>,
    allocations: BTreeMap<u64, Live>,
    next: u64,
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
    extents: Vec<(Pool, Extent)>,
    dropped_by: usize,
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
    /// Notes by how much the flags of the operation exceed their epoch base, from which their next user continues.
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

    /// Returns the blocks that the heap of a subgroup begins with: one of data, and flags of each kind that this heap has.
    pub(in crate::group) fn subgroup_demands(&self) -> Vec<Demand> {
        let flags = self.spaces.keys().filter(|pool| **pool != Pool::Data);
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
        }
        heap
    }

    pub(in crate::group) fn has_flags(&self) -> bool {
        self.spaces.iter().any(|(pool, space)| *pool != Pool::Data && !space.segments.is_empty())
    }

    /// Returns the largest value that a free flag can have.
    pub(in crate::group) fn epoch_base(&self) -> u64 {
        self.epoch_base
    }

    /// Returns the allocations that this rank has dropped, for the next [`free_dropped`](Self::free_dropped).
    pub(in crate::group) fn dropped(&self) -> Vec<Dropped> {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Frees what all ranks have dropped. Every rank passes the same lists, in rank order; `own` is the length of
    /// this rank's list.
    pub(in crate::group) fn free_dropped(&mut self, lists: &[Vec<Dropped>], own: usize) {
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).drain(..own);
        for &(number, epoch) in lists.iter().flatten() {
            self.epoch_base = self.epoch_base.max(epoch);
            let Some(live) = self.allocations.get_mut(&number) else { continue };
            live.dropped_by += 1;
            if live.dropped_by == lists.len() {
                for (pool, extent) in
                    self.allocations.remove(&number).into_iter().flat_map(|live| live.extents)
                {
                    self.spaces.entry(pool).or_default().give_back(extent);
                }
            }
        }
    }

    /// Allocates the blocks of an operation, or returns the demands that do not fit. All ranks call it alike.
    pub(in crate::group) fn allocate(
        &mut self,
        demands: &[Demand],
    ) -> Result<(Allocation, Vec<Segment>), Vec<Demand>> {
        let mut extents = Vec::with_capacity(demands.len());
        let mut missing = Vec::new();
        for &(pool, bytes) in demands {
            match self.spaces.entry(pool).or_default().take(bytes) {
                Some(extent) => extents.push((pool, extent)),
                None => missing.push((pool, bytes)),
            }
        }
        if !missing.is_empty() {
            for (pool, extent) in extents {
                self.spaces.entry(pool).or_default().give_back(extent);
            }
            return Err(missing);
        }
        let parts = demands.iter().zip(&extents).map(|(&(_, bytes), (pool, extent))| {
            self.spaces[pool].segments[extent.segment].part(extent.offset, bytes)
        });
        let parts = parts.collect();
        let number = self.next;
        self.next += 1;
        self.allocations.insert(number, Live { extents, dropped_by: 0 });
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
                // Flags of more ranks need more memory, and more operations follow the first.
                Pool::Flags { .. } => FLAG_BYTES.max(size.saturating_mul(4)),
            };
            let least = match self.spaces.get(pool).map_or(0, |space| space.bytes) {
                0 => first,
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

    /// Returns the error of a segment that this rank cannot allocate, with what the heap is used for.
    fn full(&self, pool: Pool, bytes: u64, error: &Error) -> Error {
        let total: u64 = self.spaces.values().map(|space| space.bytes).sum();
        let extents = self.allocations.values().flat_map(|live| &live.extents);
        let used: u64 = extents.map(|(_, extent)| extent.bytes).sum();
        let what = if pool == Pool::Data { "data" } else { "flags" };
        let text = format!(
            "cannot add {bytes} bytes for {what} to the heap, which has {total} bytes, {used} of them in \
             use by {} operations{}: {error}",
            self.allocations.len(),
            if used > 0 { "; drop those that are no longer used, on every rank" } else { "" }
        );
        Error::new(error.kind(), text).with_source(error.clone())
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
            if *pool == Pool::Data {
                continue;
            }
            for segment in &space.segments {
                let Some(regions) = segment.of(Tier::Local) else { continue };
                // SAFETY: the segment has flags of the heap, to which no peer writes any more, as the caller guarantees.
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
        let free = heap.spaces.values().flat_map(|space| space.free.values()).sum::<u64>();
        heap.spaces.values().map(|space| space.bytes).sum::<u64>() - free
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
        let (first, _) = heap.allocate(&demands).unwrap();
        let (mut second, _) = heap.allocate(&demands).unwrap();
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
        let missing = heap.allocate(&demands).err().unwrap();
        assert_eq!(missing, demands[1..]);
        assert_eq!(filled(&heap), 0);
        assert!(heap.dropped().is_empty());
    }
}
