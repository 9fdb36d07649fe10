//! Remembers which bytes of the window copies in flight use, so that the host does not overwrite
//! them.

use std::collections::VecDeque;
use std::ops::Range;

use peerlane_hal::{Command, Direction, Rows};

/// The number of copies that are remembered without an allocation, as many as a queue has marks.
const CAPACITY: usize = 64;

/// Lists the bytes of this rank's window that copies of one queue may still read or write, oldest
/// copy first.
#[derive(Debug)]
pub(super) struct BytesInFlight {
    copies: VecDeque<CopyInFlight>,
}

#[derive(Clone, Debug)]
struct CopyInFlight {
    /// The number of the mark of the queue after which the copy is complete.
    number: u64,
    bytes: Range<u64>,
}

impl Default for BytesInFlight {
    fn default() -> Self {
        Self { copies: VecDeque::with_capacity(CAPACITY) }
    }
}

impl BytesInFlight {
    /// Adds the copies among commands, which are complete when the queue has done `number`. Those
    /// up to `done` are forgotten.
    #[inline]
    pub(super) fn add(&mut self, commands: &[Command], number: u64, done: u64) {
        while self.copies.front().is_some_and(|oldest| oldest.number <= done) {
            self.copies.pop_front();
        }

        for command in commands {
            if let Some(bytes) = local_bytes(command) {
                self.copies.push_back(CopyInFlight { number, bytes });
            }
        }
    }

    /// Returns the number after which no copy uses any of these bytes, or `None` if none does.
    pub(super) fn last_use(&self, bytes: &Range<u64>) -> Option<u64> {
        if bytes.is_empty() {
            return None;
        }
        let uses =
            |copy: &&CopyInFlight| copy.bytes.start < bytes.end && bytes.start < copy.bytes.end;
        self.copies.iter().rev().find(uses).map(|copy| copy.number)
    }
}

/// Returns the bytes of this rank's window that a command reads or writes, with the gaps between
/// its rows.
fn local_bytes(command: &Command) -> Option<Range<u64>> {
    let Command::Copy { direction, local, bytes, rows, .. } = command else { return None };
    let Rows { count, dst_pitch, src_pitch } = *rows;
    let pitch = match direction {
        Direction::Put => src_pitch,
        Direction::Get => dst_pitch,
    };

    let begin = local.offset;
    let end = begin + bytes + count.saturating_sub(1) * pitch;
    (*bytes > 0).then_some(begin..end)
}

#[cfg(test)]
mod tests {
    use peerlane_hal::{Rank, RegionOffset};

    use super::*;

    fn put(offset: u64, bytes: u64, rows: Rows) -> Command {
        let place = |offset| RegionOffset { region: 0, offset };
        let (local, remote) = (place(offset), place(0));
        Command::Copy { direction: Direction::Put, peer: Rank(1), remote, local, bytes, rows }
    }

    #[test]
    fn the_last_copy_that_uses_a_byte_is_found_until_it_is_done() {
        let mut in_flight = BytesInFlight::default();
        in_flight.add(&[put(0, 8, Rows::ONE), put(100, 8, Rows::ONE)], 2, 0);
        in_flight.add(&[put(4, 8, Rows::ONE), put(50, 0, Rows::ONE)], 4, 0);
        let rows = Rows { count: 3, dst_pitch: 10, src_pitch: 20 };
        in_flight.add(&[put(200, 5, rows)], 5, 0);

        assert_eq!(in_flight.last_use(&(0..4)), Some(2));
        assert_eq!(in_flight.last_use(&(4..5)), Some(4));
        assert_eq!(in_flight.last_use(&(12..100)), None);
        assert_eq!(in_flight.last_use(&(244..245)), Some(5));
        assert_eq!(in_flight.last_use(&(245..300)), None);
        assert_eq!(in_flight.last_use(&(3..3)), None);

        in_flight.add(&[], 5, 4);
        assert_eq!(in_flight.last_use(&(0..200)), None);
        assert_eq!(in_flight.last_use(&(200..201)), Some(5));
    }
}
