//! Keeps the stores of a block until they reach memory, in any order.

use super::access::Held;
use crate::device::jitter::Draws;

/// With more stores than this, some are delivered at once.
const STORES_MAX: usize = 4096;

/// A store that the block has made.
#[derive(Debug)]
enum Store {
    /// An aligned word, stored whole.
    Word {
        address: u64,
        value: u64,
    },
    /// Up to 8 bytes of data.
    Short {
        address: u64,
        value: [u8; 8],
        bytes: u8,
    },
    Piece {
        address: u64,
        bytes: Box<[u8]>,
    },
}

impl Store {
    fn deliver(&self, held: &Held) {
        match self {
            Self::Word { address, value } => held.store(*address, *value),
            Self::Short { address, value, bytes } => {
                held.write(*address, &value[..usize::from(*bytes)]);
            }
            Self::Piece { address, bytes } => held.write(*address, bytes),
        }
    }

    /// Returns whether it is the second half of a word of a slot.
    fn is_second_half(&self) -> bool {
        matches!(self, Self::Word { address, .. } if address % 16 == 8)
    }
}

/// The stores of a block that are not visible to others.
#[derive(Debug, Default)]
pub(super) struct Stores {
    waiting: Vec<Store>,
}

impl Stores {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(super) fn push_word(&mut self, address: u64, value: u64) {
        self.waiting.push(Store::Word { address, value });
    }

    /// Stores up to 8 bytes of a word.
    pub(super) fn push_data(&mut self, address: u64, word: u64, bytes: u64) {
        let (value, bytes) = (word.to_le_bytes(), bytes as u8);
        self.waiting.push(Store::Short { address, value, bytes });
    }

    pub(super) fn push_piece(&mut self, address: u64, bytes: &[u8]) {
        self.waiting.push(Store::Piece { address, bytes: bytes.into() });
    }

    /// Delivers up to `count` stores, in random order. Returns whether there were any.
    pub(super) fn deliver_some(&mut self, held: &Held, count: usize, draws: &mut Draws) -> bool {
        let count = count.max(self.waiting.len().saturating_sub(STORES_MAX));
        let count = count.min(self.waiting.len());
        for _ in 0..count {
            let index = draws.below(self.waiting.len() as u64) as usize;
            self.waiting.swap_remove(index).deliver(held);
        }
        count > 0
    }

    /// Delivers all stores but the second halves of words of slots.
    pub(super) fn deliver_first_halves(&mut self, held: &Held) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|store| {
            let stays = store.is_second_half();
            if !stays {
                store.deliver(held);
            }
            stays
        });
        self.waiting.len() < before
    }

    pub(super) fn deliver_all(&mut self, held: &Held, draws: &mut Draws) {
        self.deliver_some(held, usize::MAX, draws);
    }
}
