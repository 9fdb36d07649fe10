//! The work for one peer, in the order in which it was submitted.
//!
//! Copies to and from a peer may run at once unless they touch the same bytes; then the later one
//! depends on the earlier. A flag in memory of a device is a copy that depends on everything before
//! it; a flag in memory that the host maps is stored by the host, once everything before it is
//! complete.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use peerlane_hal::Ticket;

use super::hardware::{Direction, Span};
use super::placement::SdmaId;

/// Where a flag lies.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FlagPlace {
    /// In memory that this process maps.
    Host(NonNull<AtomicU64>),
    /// At an address of the device.
    Device(u64),
}

// SAFETY: the pointer names a word that `submit`'s contract keeps until the op is complete, from
// whatever thread drives the engine.
unsafe impl Send for FlagPlace {}

impl FlagPlace {
    /// # Safety
    /// The word is alive.
    unsafe fn store(place: NonNull<AtomicU64>, value: u64) {
        // SAFETY: the caller's; words of a region of flags are aligned and touched as atomics.
        unsafe { place.as_ref() }.store(value, Ordering::Release);
    }
}

/// Checked work for one peer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Copy { direction: Direction, span: Span },
    Signal { flag: FlagPlace, value: u64 },
}

/// Work in the queue.
#[derive(Debug)]
pub(super) struct Item {
    ticket: Ticket,
    /// Its place among all of the engine.
    pub(super) order: u64,
    pub(super) work: Work,
    /// The length of its pieces, once it has begun.
    pub(super) piece_bytes: u64,
    /// Bytes that were given to engines.
    pub(super) given: u64,
    /// Pieces on their way, by engine.
    pub(super) held: [u8; SdmaId::COUNT],
    on_their_way: u32,
}

impl Item {
    fn bytes(&self) -> u64 {
        match self.work {
            Work::Copy { span, .. } => span.bytes,
            Work::Signal { flag: FlagPlace::Device(_), .. } => WORD_BYTES,
            Work::Signal { flag: FlagPlace::Host(_), .. } => 0,
        }
    }

    pub(super) fn left(&self) -> u64 {
        self.bytes() - self.given
    }

    /// Whether the host is to store it.
    fn is_store(&self) -> bool {
        matches!(self.work, Work::Signal { flag: FlagPlace::Host(_), .. })
    }

    fn is_complete(&self) -> bool {
        self.left() == 0 && self.on_their_way == 0
    }
}

pub(super) const WORD_BYTES: u64 = size_of::<u64>() as u64;

/// The items of one peer that are not complete.
#[derive(Debug, Default)]
pub(super) struct Chain {
    items: VecDeque<Item>,
    /// The number of the first of them.
    first: u64,
    /// How many of them have nothing more to give to engines.
    given: usize,
    /// Those among them that the host is to store.
    stores: usize,
    /// The slots of its pieces on their way.
    pub(super) on_their_way: Vec<usize>,
}

impl Chain {
    pub(super) fn push(&mut self, ticket: Ticket, order: u64, work: Work) {
        let held = [0; SdmaId::COUNT];
        let item = Item { ticket, order, work, piece_bytes: 0, given: 0, held, on_their_way: 0 };
        self.items.push_back(item);
    }

    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    /// The place of the oldest item among all of the engine.
    pub(super) fn first_order(&self) -> Option<u64> {
        self.items.front().map(|item| item.order)
    }

    /// The next item that is to give something to engines, and its number.
    pub(super) fn next(&mut self) -> Option<(u64, &mut Item)> {
        while let Some(item) = self.items.get(self.given) {
            if item.left() > 0 {
                break;
            }
            self.stores += usize::from(item.is_store());
            self.given += 1;
        }
        let number = self.first + self.given as u64;
        Some((number, self.items.get_mut(self.given)?))
    }

    /// Whether the host has flags to store before what comes [next](Self::next).
    pub(super) fn has_stores(&self) -> bool {
        self.stores > 0
    }

    /// A piece of an item has gone to the engine with this index.
    pub(super) fn started(&mut self, number: u64, engine: usize, bytes: u64, slot: usize) {
        let item = self.item(number);
        item.given += bytes;
        item.held[engine] += 1;
        item.on_their_way += 1;
        self.on_their_way.push(slot);
    }

    /// A piece of an item is complete.
    pub(super) fn finished(&mut self, number: u64, engine: usize) {
        let item = self.item(number);
        item.held[engine] -= 1;
        item.on_their_way -= 1;
    }

    fn item(&mut self, number: u64) -> &mut Item {
        let index = number.checked_sub(self.first).and_then(|index| usize::try_from(index).ok());
        let item = index.and_then(|index| self.items.get_mut(index));
        item.expect("an item stays until its pieces are complete")
    }

    /// Takes off what is complete and stores flags that are next, those submitted before `bound`. How
    /// many items are over.
    pub(super) fn settle(&mut self, bound: u64, mut finish: impl FnMut(Ticket)) -> usize {
        let mut over = 0;
        while let Some(item) = self.items.front().filter(|item| item.is_complete()) {
            if let Work::Signal { flag: FlagPlace::Host(place), value } = item.work {
                if item.order >= bound {
                    break;
                }
                // SAFETY: `submit`'s contract: the region lives until the ticket completes.
                unsafe { FlagPlace::store(place, value) };
            }
            // The cursor may not have come here yet.
            if self.given > 0 {
                self.given -= 1;
                self.stores -= usize::from(item.is_store());
            }
            finish(item.ticket);
            self.items.pop_front();
            self.first += 1;
            over += 1;
        }
        over
    }

    /// Drops what engines have not begun; what they have begun goes on.
    pub(super) fn drop_pending(&mut self) {
        while self.items.back().is_some_and(|item| item.on_their_way == 0) {
            self.items.pop_back();
        }
        // Flags are not stored any more, and half a copy stays half.
        for item in &mut self.items {
            item.given = item.bytes();
            if item.is_store() {
                item.work = NOTHING;
            }
        }
        self.given = self.items.len();
        self.stores = 0;
    }
}

/// A copy of no bytes.
const NOTHING: Work =
    Work::Copy { direction: Direction::Put, span: Span { dst: 0, src: 0, bytes: 0 } };
