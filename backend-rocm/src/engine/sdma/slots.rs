//! Completion signals, and when one may be used again.
//!
//! Each copy has a signal of its own, which it takes from 1 to 0: where a GPU has no atomic operations
//! over PCI Express, the runtime reads the signal when it takes the copy and lets the engine store
//! what it read less 1, so two copies on one signal would never get it to 0. A copy that depends on a
//! signal looks for the 0 when its engine gets there, so a signal is not armed again before whatever
//! was to look at it has run.

use super::hardware::Copy;

/// What belongs to a copy on its way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) copy: Copy,
    /// The number of the item that it is a piece of, in the chain of `copy.peer`.
    pub(super) item: u64,
    /// Which load it is part of.
    pub(super) load: usize,
}

#[derive(Debug, Default)]
struct Slot {
    held: Option<Held>,
    /// The slots that it looks at.
    after: Vec<usize>,
    /// Copies on their way that look at this one.
    awaited_by: usize,
}

/// The slots of one queue.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<usize>,
}

impl Slots {
    pub(super) fn new(count: usize) -> Self {
        let slots = (0..count).map(|_| Slot::default()).collect();
        Self { slots, free: (0..count).rev().collect() }
    }

    /// A slot that nothing looks at; [`start`](Self::start) takes it.
    pub(super) fn vacant(&self) -> Option<usize> {
        self.free.last().copied()
    }

    /// The vacant slot now belongs to a copy that looks at `after`, all of them on their way.
    pub(super) fn start(&mut self, slot: usize, held: Held, after: &[usize]) {
        debug_assert_eq!(self.free.last(), Some(&slot));
        self.free.pop();
        for before in after {
            self.slots[*before].awaited_by += 1;
        }
        self.slots[slot].held = Some(held);
        self.slots[slot].after.extend_from_slice(after);
    }

    /// The copy on its way in this slot.
    pub(super) fn held(&self, slot: usize) -> &Held {
        self.slots[slot].held.as_ref().expect("a slot on its way holds a copy")
    }

    /// The copy of this slot has run.
    pub(super) fn finish(&mut self, slot: usize) -> Held {
        while let Some(before) = self.slots[slot].after.pop() {
            self.slots[before].awaited_by -= 1;
            self.vacate(before);
        }
        let held = self.slots[slot].held.take().expect("a slot on its way holds a copy");
        self.vacate(slot);
        held
    }

    fn vacate(&mut self, slot: usize) {
        let Slot { held, awaited_by, .. } = &self.slots[slot];
        if held.is_none() && *awaited_by == 0 {
            self.free.push(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hardware::{Direction, Span};
    use super::*;

    fn held() -> Held {
        let span = Span { dst: 0, src: 8, bytes: 8 };
        let copy = Copy { peer: 0, direction: Direction::Put, on: None, span };
        Held { copy, item: 0, load: 0 }
    }

    #[test]
    fn a_signal_is_not_used_again_while_a_copy_looks_at_it() {
        let mut slots = Slots::new(3);
        let first = slots.vacant().unwrap();
        slots.start(first, held(), &[]);
        let second = slots.vacant().unwrap();
        slots.start(second, held(), &[first]);
        slots.finish(first);
        let third = slots.vacant().unwrap();
        assert_ne!(third, first, "the second copy may not have looked yet");
        slots.start(third, held(), &[]);
        assert_eq!(slots.vacant(), None);
        slots.finish(second);
        assert_eq!(slots.free.len(), 2);
        slots.finish(third);
        assert_eq!(slots.free.len(), 3);
    }
}
