//! What ranks write into each other's rings: what to do with the bytes of a slot, and with flags.

use peerlane_hal::wire::{Reader, Writer};

/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = 64;

/// One line of a ring. Regions are named by their generation, so that a record for freed memory finds
/// nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Record {
    /// The bytes of a slot belong at `offset` of a region.
    Land { generation: u64, offset: u64, bytes: u64, slot: u64 },
    /// A flag has this value, once everything before is done.
    Signal { generation: u64, word: u64, value: u64 },
    /// The writer wants bytes of a region, as the answers to its get number `get`.
    Ask { generation: u64, offset: u64, bytes: u64, get: u64 },
    /// The bytes of a slot belong `offset` bytes behind the begin of what get number `get` wanted.
    Answer { get: u64, offset: u64, bytes: u64, slot: u64 },
    /// A slot is free again that the reader had nothing to do with.
    Pass,
}

const LAND: u64 = 1;
const SIGNAL: u64 = 2;
const ASK: u64 = 3;
const ANSWER: u64 = 4;
const PASS: u64 = 5;

impl Record {
    pub(super) fn encode(&self) -> [u8; RECORD_BYTES] {
        let fields = match *self {
            Self::Land { generation, offset, bytes, slot } => {
                [LAND, generation, offset, bytes, slot]
            }
            Self::Signal { generation, word, value } => [SIGNAL, generation, word, value, 0],
            Self::Ask { generation, offset, bytes, get } => [ASK, generation, offset, bytes, get],
            Self::Answer { get, offset, bytes, slot } => [ANSWER, get, offset, bytes, slot],
            Self::Pass => [PASS, 0, 0, 0, 0],
        };
        let mut record = [0; RECORD_BYTES];
        let written = fields.iter().fold(Writer::new(), |writer, &field| writer.u64(field));
        let written = written.finish();
        record[..written.len()].copy_from_slice(&written);
        record
    }

    /// Parses what a peer wrote.
    ///
    /// # Errors
    /// The number of its kind, if there is no such kind.
    pub(super) fn decode(record: &[u8; RECORD_BYTES]) -> Result<Self, u64> {
        let mut reader = Reader::new(record);
        let mut field = || reader.u64("field").unwrap_or(0);
        let [kind, a, b, c, d] = [field(), field(), field(), field(), field()];
        Ok(match kind {
            LAND => Self::Land { generation: a, offset: b, bytes: c, slot: d },
            SIGNAL => Self::Signal { generation: a, word: b, value: c },
            ASK => Self::Ask { generation: a, offset: b, bytes: c, get: d },
            ANSWER => Self::Answer { get: a, offset: b, bytes: c, slot: d },
            PASS => Self::Pass,
            other => return Err(other),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_survive_the_wire() {
        for record in [
            Record::Land { generation: 1, offset: u64::MAX, bytes: 3, slot: 4 },
            Record::Signal { generation: 5, word: 6, value: u64::MAX },
            Record::Ask { generation: 7, offset: 8, bytes: 9, get: 10 },
            Record::Answer { get: 11, offset: 12, bytes: 13, slot: 14 },
            Record::Pass,
        ] {
            assert_eq!(Record::decode(&record.encode()), Ok(record));
        }
        assert_eq!(Record::decode(&[0; RECORD_BYTES]), Err(0));
        assert_eq!(Record::decode(&[0xff; RECORD_BYTES]), Err(u64::MAX));
    }
}
