//! Device memory: the address space of this process, what lies in it, and how it is shared.
//!
//! A device address is the address of the memory in this process, so a command that runs is a
//! plain copy. The table of ranges decides which addresses exist and who may touch them.

use std::collections::BTreeMap;
use std::sync::{Arc, RwLock};
use std::time::{Duration, Instant};

use super::counters::{Counter, NO_DEVICE};
use super::fault::Fault;
use super::session::Session;
use super::settings::Setting;
use super::sync::{Backoff, read, write};

mod backing;
mod range;
pub(crate) mod share;

pub(crate) use backing::Backing;
pub(crate) use range::{Kind, Range};

/// Limits how long freeing memory waits for commands that access it.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Why memory cannot be allocated or mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoMemory {
    Exhausted,
    /// The range does not exist, is incomplete, or holds something else.
    BadRange,
}

/// Holds everything that has a device address in this process.
#[derive(Debug, Default)]
pub(crate) struct AddressSpace {
    ranges: RwLock<BTreeMap<u64, Arc<Range>>>,
    /// Reserved ranges and their lengths.
    reservations: RwLock<BTreeMap<u64, u64>>,
}

impl AddressSpace {
    pub(crate) const fn new() -> Self {
        Self { ranges: RwLock::new(BTreeMap::new()), reservations: RwLock::new(BTreeMap::new()) }
    }

    /// Allocates on a device; [`Kind::Host`] allocates on the host.
    pub(crate) fn allocate(&self, device: u32, bytes: u64, kind: Kind) -> Result<u64, NoMemory> {
        let host = matches!(kind, Kind::Host { .. } | Kind::Signal { .. });
        let device = if host { NO_DEVICE } else { device };
        // Allocates at least a page, so that an access past the end never hits another allocation.
        let mapped = bytes.checked_next_multiple_of(4096).ok_or(NoMemory::Exhausted)?;
        let backing = Arc::new(new_backing(device, mapped, 0)?);
        let base = backing.map(0, mapped, None).ok_or(NoMemory::Exhausted)?;
        self.insert(Range::new(base, bytes, backing, kind));
        Ok(base)
    }

    /// Maps what another process shared, all of it.
    pub(crate) fn import(&self, backing: Backing, kind: Kind) -> Result<u64, NoMemory> {
        let bytes = backing.bytes();
        let base = backing.map(0, bytes, None).ok_or(NoMemory::Exhausted)?;
        self.insert(Range::new(base, bytes, Arc::new(backing), kind));
        Ok(base)
    }

    fn insert(&self, range: Range) {
        write(&self.ranges).insert(range.base, Arc::new(range));
    }

    /// Ends a mapping that is not in the table; the caller says that nobody uses it.
    pub(super) fn unmap_foreign(address: u64, bytes: u64) {
        backing::unmap(address, bytes);
    }

    /// The range that holds this address.
    pub(crate) fn find(&self, address: u64) -> Option<Arc<Range>> {
        let ranges = read(&self.ranges);
        let (_, range) = ranges.range(..=address).next_back()?;
        (address < range.end()).then(|| range.clone())
    }

    /// Returns every range for which `is_it` returns true.
    pub(crate) fn select(&self, is_it: impl Fn(&Range) -> bool) -> Vec<Arc<Range>> {
        read(&self.ranges).values().filter(|range| is_it(range)).cloned().collect()
    }

    /// Removes the range that begins here from the table; it is freed after its last user.
    pub(crate) fn remove(&self, base: u64, is_it: impl Fn(&Range) -> bool) -> Result<(), NoMemory> {
        let mut ranges = write(&self.ranges);
        match ranges.get(&base) {
            Some(range) if is_it(range) => {
                ranges.remove(&base);
                Ok(())
            }
            _ => Err(NoMemory::BadRange),
        }
    }

    /// Holds everything in the span for one command of the session.
    pub(crate) fn pin(
        &self,
        address: u64,
        bytes: u64,
        session: &Session,
    ) -> Result<Vec<Arc<Range>>, Fault> {
        let end = address.checked_add(bytes).ok_or(Fault::IllegalAddress)?;
        let mut pinned: Vec<Arc<Range>> = Vec::with_capacity(1);
        let mut at = address;
        while at < end {
            // A span may go over several pieces that were mapped side by side.
            let range = self.find(at).filter(|range| range.is_reached_by(session));
            let range = range.ok_or(Fault::IllegalAddress)?;
            if !pinned.is_empty() && !matches!(range.kind, Kind::Mapped { .. }) {
                return Err(Fault::IllegalAddress);
            }
            at = range.end();
            pinned.push(range);
        }
        Ok(pinned)
    }

    /// Whether every address of the span exists, whoever may touch it.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            let Some(range) = self.find(at) else { return false };
            at = range.end();
        }
        true
    }

    /// Takes memory of the caller into the table; `None` if the system has too little.
    pub(crate) fn adopt(&self, base: u64, bytes: u64, session: u64) -> Option<()> {
        let nothing = Arc::new(Backing::create(NO_DEVICE, 0, 0)?);
        self.insert(Range::new(base, bytes, nothing, Kind::Registered { session }));
        Some(())
    }

    /// Reserves addresses for blocks.
    pub(crate) fn reserve(&self, bytes: u64, alignment: u64) -> Result<u64, NoMemory> {
        // The kernel aligns to pages only; a larger alignment is cut out of a larger range.
        let align = granularity().max(alignment);
        let whole = bytes.checked_add(align).ok_or(NoMemory::Exhausted)?;
        let start = backing::reserve(whole, None).ok_or(NoMemory::Exhausted)?;
        let base = start.next_multiple_of(align);
        if base > start {
            backing::unmap(start, base - start);
        }
        let behind = start + whole - (base + bytes);
        if behind > 0 {
            backing::unmap(base + bytes, behind);
        }
        write(&self.reservations).insert(base, bytes);
        Counter::LiveReservations.add(NO_DEVICE, 1);
        Ok(base)
    }

    /// Gives reserved addresses back, once nothing is mapped there.
    pub(crate) fn unreserve(&self, base: u64, bytes: u64) -> Result<(), NoMemory> {
        let mut reservations = write(&self.reservations);
        let known = reservations.get(&base) == Some(&bytes);
        if !known || !self.pieces(base, bytes).is_empty() {
            return Err(NoMemory::BadRange);
        }
        reservations.remove(&base);
        backing::unmap(base, bytes);
        Counter::LiveReservations.add(NO_DEVICE, -1);
        Ok(())
    }

    /// Maps all of a block, or a part, into reserved addresses that hold nothing yet.
    pub(crate) fn map(
        &self,
        base: u64,
        bytes: u64,
        offset: u64,
        block: u64,
        backing: Arc<Backing>,
    ) -> Result<(), NoMemory> {
        let end = base.checked_add(bytes).ok_or(NoMemory::BadRange)?;
        let inside = {
            let reservations = read(&self.reservations);
            let found = reservations.range(..=base).next_back();
            found.is_some_and(|(start, length)| end <= start + length)
        };
        let mut ranges = write(&self.ranges);
        let overlaps = ranges.range(..end).next_back().is_some_and(|(_, it)| it.end() > base);
        if !inside || overlaps {
            return Err(NoMemory::BadRange);
        }
        backing.map(offset, bytes, Some(base)).ok_or(NoMemory::Exhausted)?;
        let range = Range::new(base, bytes, backing, Kind::Mapped { block });
        ranges.insert(base, Arc::new(range));
        Ok(())
    }

    /// The pieces that make up the span, none of them in part; empty if there is none or they do
    /// not fill it exactly.
    pub(crate) fn pieces(&self, base: u64, bytes: u64) -> Vec<Arc<Range>> {
        let ranges = read(&self.ranges);
        let end = base.saturating_add(bytes);
        let inside = ranges.range(base..end).map(|(_, range)| range);
        inside.filter(|range| matches!(range.kind, Kind::Mapped { .. })).cloned().collect()
    }

    /// Unmaps whole pieces, after the commands that run on them.
    pub(crate) fn unmap(&self, base: u64, bytes: u64) -> Result<(), NoMemory> {
        let pieces = self.pieces(base, bytes);
        let filled: u64 = pieces.iter().map(|piece| piece.bytes).sum();
        if pieces.is_empty() || filled != bytes {
            return Err(NoMemory::BadRange);
        }
        for piece in pieces {
            self.remove(piece.base, |range| range.id == piece.id)?;
            let (deadline, mut backoff) = (Instant::now() + DRAIN_TIMEOUT, Backoff::default());
            while Arc::strong_count(&piece) > 1 && Instant::now() < deadline {
                backoff.rest();
            }
            backing::reserve(piece.bytes, Some(piece.base)).ok_or(NoMemory::Exhausted)?;
        }
        Ok(())
    }
}

/// The unit of virtual memory management.
pub(crate) fn granularity() -> u64 {
    Setting::GranularityKib.value() << 10
}

/// The memory of one device, and what of it is left to this process.
pub(crate) fn capacity(device: u32) -> (u64, u64) {
    let total = Setting::MemoryMib.value() << 20;
    let used = super::counters::read("live_bytes", Some(device)).unwrap_or(0);
    (total, total.saturating_sub(used.max(0).cast_unsigned()))
}

/// New memory within what the device has.
pub(crate) fn new_backing(device: u32, bytes: u64, handle_kinds: u32) -> Result<Backing, NoMemory> {
    if device != NO_DEVICE && bytes > capacity(device).1 {
        return Err(NoMemory::Exhausted);
    }
    Backing::create(device, bytes, handle_kinds).ok_or(NoMemory::Exhausted)
}
