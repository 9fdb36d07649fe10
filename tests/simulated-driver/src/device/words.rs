//! Implements the memory operations of a queue: writing a word, and waiting for one.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use super::counters::Counter;
use super::fault::Fault;
use super::memory::{AddressSpace, Range};
use super::session::Session;
use super::settings::Setting;
use super::sync::Backoff;

/// Size of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Width {
    Four,
    Eight,
}

/// Condition of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Compare {
    /// The signed difference is not negative, so the order is cyclic.
    AtLeast,
    Equal,
    /// A common bit.
    And,
    /// A bit that neither has.
    Nor,
}

/// One memory operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Word {
    pub(crate) address: u64,
    pub(crate) value: u64,
    pub(crate) width: Width,
    /// The bits that a wait compares.
    pub(crate) mask: u64,
    /// The condition of a wait; `None` for a write.
    pub(crate) wait: Option<Compare>,
}

impl Width {
    pub(crate) fn bytes(self) -> u64 {
        match self {
            Self::Four => 4,
            Self::Eight => 8,
        }
    }
}

impl Compare {
    pub(crate) const fn passes(self, width: Width, seen: u64, value: u64) -> bool {
        match (self, width) {
            (Self::AtLeast, Width::Eight) => seen.wrapping_sub(value).cast_signed() >= 0,
            (Self::AtLeast, Width::Four) => {
                (seen as u32).wrapping_sub(value as u32).cast_signed() >= 0
            }
            (Self::Equal, _) => seen == value,
            (Self::And, _) => seen & value != 0,
            (Self::Nor, Width::Eight) => !(seen | value) != 0,
            (Self::Nor, Width::Four) => !(seen as u32 | value as u32) != 0,
        }
    }
}

const _: () = {
    let four = u32::MAX as u64;
    // 2 comes after the largest word, and the largest word before 2.
    assert!(Compare::AtLeast.passes(Width::Eight, 2, u64::MAX));
    assert!(!Compare::AtLeast.passes(Width::Eight, u64::MAX, 2));
    assert!(Compare::AtLeast.passes(Width::Eight, 1 << 63, 1));
    assert!(!Compare::AtLeast.passes(Width::Eight, (1 << 63) + 1, 1));
    assert!(Compare::AtLeast.passes(Width::Four, 1, four));
    assert!(!Compare::AtLeast.passes(Width::Four, four, 1));
    assert!(Compare::Equal.passes(Width::Eight, 7, 7));
    assert!(!Compare::Equal.passes(Width::Eight, 8, 7));
    assert!(Compare::And.passes(Width::Eight, 6, 2) && !Compare::And.passes(Width::Eight, 4, 2));
    assert!(Compare::Nor.passes(Width::Eight, 1, 2));
    assert!(!Compare::Nor.passes(Width::Eight, u64::MAX, 0));
    assert!(!Compare::Nor.passes(Width::Four, four, 0));
};

impl Word {
    /// Runs the operation. A wait ends early if the session breaks.
    pub(crate) fn run(self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let Some(compare) = self.wait else { return self.write(session, memory) };
        let mut backoff = Backoff::default();
        let mut has_blocked = false;
        loop {
            // Looked up each time, because memory may be freed during a wait.
            let range = self.pin(session, memory)?;
            let seen = load(&range, self) & self.mask;
            if compare.passes(self.width, seen, self.value) {
                fence(Ordering::Acquire);
                return Ok(());
            }
            if let Some(fault) = session.fault() {
                return Err(fault);
            }

            if !has_blocked {
                has_blocked = true;
                Counter::BlockedWaits.add(session.device(), 1);
            }
            backoff.rest();
        }
    }

    fn write(self, session: &Session, memory: &AddressSpace) -> Result<(), Fault> {
        let range = self.pin(session, memory)?;
        if Setting::PeerWrites.is("drop") && range.is_foreign_to(session) {
            return Ok(());
        }
        store(&range, self);
        Ok(())
    }

    fn pin(self, session: &Session, memory: &AddressSpace) -> Result<Arc<Range>, Fault> {
        let range = memory.find(self.address).ok_or(Fault::IllegalAddress)?;
        let inside = self.address + self.width.bytes() <= range.end();
        let aligned = self.address.is_multiple_of(self.width.bytes());
        (inside && aligned && range.is_reached_by(session))
            .then_some(range)
            .ok_or(Fault::IllegalAddress)
    }
}

/// Loads the word; `_held` keeps it mapped.
fn load(_held: &Range, word: Word) -> u64 {
    match word.width {
        Width::Four => {
            // SAFETY: `Word::pin` has found the aligned word inside a mapped range, which the
            // caller holds.
            let place = unsafe { AtomicU32::from_ptr(word.address as *mut u32) };
            u64::from(place.load(Ordering::Acquire))
        }
        Width::Eight => {
            // SAFETY: as above.
            let place = unsafe { AtomicU64::from_ptr(word.address as *mut u64) };
            place.load(Ordering::Acquire)
        }
    }
}

/// Writes the word after all earlier writes of this thread.
fn store(_held: &Range, word: Word) {
    fence(Ordering::SeqCst);
    match word.width {
        Width::Four => {
            // SAFETY: as in `load`.
            let place = unsafe { AtomicU32::from_ptr(word.address as *mut u32) };
            place.store(word.value as u32, Ordering::SeqCst);
        }
        Width::Eight => {
            // SAFETY: as in `load`.
            let place = unsafe { AtomicU64::from_ptr(word.address as *mut u64) };
            place.store(word.value, Ordering::SeqCst);
        }
    }
}
