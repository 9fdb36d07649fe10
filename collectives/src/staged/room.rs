//! How the memory is divided that ranks write into each other's: for every peer a ring of records and
//! some slots of bytes.
//!
//! Peers have the same division, so that where a record or a slot is needs no message.

use super::record::RECORD_BYTES;

/// Records that are under way to one peer, inclusive.
pub(super) const RECORDS: u64 = 256;
/// Slots of each peer: enough that the copy from the device, the network and the copy to the device
/// are all busy.
pub(super) const SLOTS: u64 = 8;
/// A larger slot would only begin later to be sent on.
const SLOT_BYTES_MAX: u64 = 256 << 10;
const SLOT_BYTES_MIN: u64 = 16 << 10;
/// For all slots together, as far as the smallest slots allow.
const BYTES: u64 = 64 << 20;
const RECORD: u64 = RECORD_BYTES as u64;

/// The division of the memory of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    ranks: u64,
    pub(super) slot_bytes: u64,
}

impl Room {
    /// For so many ranks, oneself among them.
    pub(super) fn new(ranks: usize) -> Self {
        let ranks = ranks.max(1) as u64;
        let even = BYTES / (ranks * SLOTS);
        // Powers of two, so that slots begin where any alignment is kept.
        let even = 1 << even.max(1).ilog2();
        Self { ranks, slot_bytes: even.clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX) }
    }

    /// All of it; slots come first, so that they are aligned as the memory is.
    pub(super) fn bytes(self) -> u64 {
        self.slots_bytes() + self.ranks * RECORDS * RECORD
    }

    fn slots_bytes(self) -> u64 {
        self.ranks * SLOTS * self.slot_bytes
    }

    /// Where a slot of `peer` begins.
    pub(super) fn slot(self, peer: usize, slot: u64) -> u64 {
        (peer as u64 * SLOTS + slot) * self.slot_bytes
    }

    /// Where the record `number` of `peer` is, counted from 0 without an end.
    pub(super) fn record(self, peer: usize, number: u64) -> u64 {
        self.slots_bytes() + (peer as u64 * RECORDS + number % RECORDS) * RECORD
    }

    /// The bytes of all flags.
    pub(super) fn flag_bytes(self) -> u64 {
        self.ranks * 2 * size_of::<u64>() as u64
    }

    /// The flag that counts the records that `peer` has written here.
    pub(super) fn mail(peer: usize) -> u64 {
        peer as u64 * 2
    }

    /// The flag that counts the records of this rank that `peer` is done with.
    pub(super) fn credit(peer: usize) -> u64 {
        peer as u64 * 2 + 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_and_records_do_not_overlap() {
        for ranks in [1, 2, 3, 9] {
            let room = Room::new(ranks);
            let mut spans = Vec::new();
            for peer in 0..ranks {
                let slots = (0..SLOTS).map(|slot| (room.slot(peer, slot), room.slot_bytes));
                spans.extend(slots);
                spans.extend((0..RECORDS).map(|number| (room.record(peer, number), RECORD)));
            }
            spans.sort_unstable();
            let mut end = 0;
            for (begin, bytes) in spans {
                assert_eq!(begin, end);
                end += bytes;
            }
            assert_eq!(end, room.bytes());
            assert_eq!(room.record(0, 3), room.record(0, RECORDS + 3));
        }
    }

    #[test]
    fn many_ranks_have_small_slots() {
        let bytes = [2, 32, 33, 64, 512, 100_000].map(|ranks| Room::new(ranks).slot_bytes);
        assert_eq!(bytes, [256 << 10, 256 << 10, 128 << 10, 128 << 10, 16 << 10, 16 << 10]);
    }
}
