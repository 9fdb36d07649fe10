//! Defines the messages, the inbox layout and the address that ranks of a staged fabric exchange.

use peerlane_hal::wire::{Reader, Writer, checksum};
use peerlane_hal::{BackendId, Rank};

use crate::error::Error;

pub(crate) const MESSAGE_BYTES: usize = 64;

/// A message to a peer, which names a region by its generation so that a message for freed memory has no
/// effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Message {
    /// Tells the peer to copy the bytes of a staging slot to `offset` of a memory region.
    Copy { generation: u64, offset: u64, bytes: u64, slot: u64 },
    /// Stores a flag of the receiving rank once everything before the message is complete.
    Signal { generation: u64, word: u64, value: u64 },
    /// Requests bytes of a memory region; `get` is the number of the get in the reply.
    GetRequest { generation: u64, offset: u64, bytes: u64, get: u64 },
    /// Tells the peer to copy the bytes of a staging slot to the destination of get number `get`.
    GetReply { get: u64, offset: u64, bytes: u64, slot: u64 },
    /// Frees a staging slot of the sender, whose bytes went directly to their destination.
    FreeSlot,
}

const COPY: u64 = 1;
const SIGNAL: u64 = 2;
const GET_REQUEST: u64 = 3;
const GET_REPLY: u64 = 4;
const FREE_SLOT: u64 = 5;

impl Message {
    pub(crate) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let fields = match *self {
            Self::Copy { generation, offset, bytes, slot } => {
                [COPY, generation, offset, bytes, slot]
            }
            Self::Signal { generation, word, value } => [SIGNAL, generation, word, value, 0],
            Self::GetRequest { generation, offset, bytes, get } => {
                [GET_REQUEST, generation, offset, bytes, get]
            }
            Self::GetReply { get, offset, bytes, slot } => [GET_REPLY, get, offset, bytes, slot],
            Self::FreeSlot => [FREE_SLOT, 0, 0, 0, 0],
        };
        let mut message = [0; MESSAGE_BYTES];
        let written = fields.iter().fold(Writer::new(), |writer, &field| writer.u64(field));
        let written = written.finish();
        message[..written.len()].copy_from_slice(&written);
        message
    }

    /// Decodes a message, or returns the number of its kind as an error if the kind is unknown.
    pub(crate) fn decode(message: &[u8; MESSAGE_BYTES]) -> Result<Self, u64> {
        let mut reader = Reader::new(message);
        let mut field = || reader.u64("field").unwrap_or(0);
        let [kind, a, b, c, d] = [field(), field(), field(), field(), field()];
        Ok(match kind {
            COPY => Self::Copy { generation: a, offset: b, bytes: c, slot: d },
            SIGNAL => Self::Signal { generation: a, word: b, value: c },
            GET_REQUEST => Self::GetRequest { generation: a, offset: b, bytes: c, get: d },
            GET_REPLY => Self::GetReply { get: a, offset: b, bytes: c, slot: d },
            FREE_SLOT => Self::FreeSlot,
            other => return Err(other),
        })
    }
}

/// The maximum number of messages to one peer that the peer has not processed yet.
pub(crate) const RING_MESSAGES: u64 = 256;
/// The number of staging slots for each peer, enough to keep both copy directions and the network busy at the
/// same time.
pub(crate) const SLOTS: u64 = 8;
/// The largest staging slot in bytes; a larger one would delay the start of the network transfer.
const SLOT_BYTES_MAX: u64 = 256 << 10;
const SLOT_BYTES_MIN: u64 = 16 << 10;
/// The maximum size of all staging slots together in bytes, unless slots of the minimum size need more.
const BYTES: u64 = 64 << 20;
const MESSAGE: u64 = MESSAGE_BYTES as u64;

/// Divides a rank's receive memory into staging slots and a ring of messages for every peer.
///
/// All ranks have the same layout, so no message has to carry an offset in an inbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InboxLayout {
    ranks: u64,
    pub(crate) slot_bytes: u64,
}

impl InboxLayout {
    pub(crate) fn new(ranks: usize) -> Self {
        let ranks = ranks.max(1) as u64;
        let slot_bytes = BYTES / (ranks * SLOTS);
        // A power of two, so that slots keep any alignment.
        let slot_bytes = 1 << slot_bytes.max(1).ilog2();
        Self { ranks, slot_bytes: slot_bytes.clamp(SLOT_BYTES_MIN, SLOT_BYTES_MAX) }
    }

    pub(crate) fn bytes(self) -> u64 {
        self.slots_bytes() + self.ranks * RING_MESSAGES * MESSAGE
    }

    fn slots_bytes(self) -> u64 {
        self.ranks * SLOTS * self.slot_bytes
    }

    pub(crate) fn slot_offset(self, peer: usize, slot: u64) -> u64 {
        (peer as u64 * SLOTS + slot) * self.slot_bytes
    }

    /// Returns the offset of message `number`; message numbers start at 0 and never wrap.
    pub(crate) fn message_offset(self, peer: usize, number: u64) -> u64 {
        self.slots_bytes() + (peer as u64 * RING_MESSAGES + number % RING_MESSAGES) * MESSAGE
    }

    pub(crate) fn flag_bytes(self) -> u64 {
        self.ranks * 2 * size_of::<u64>() as u64
    }

    /// Returns the index of the flag that counts the messages that `peer` has written.
    pub(crate) fn written_flag(peer: usize) -> u64 {
        peer as u64 * 2
    }

    /// Returns the index of the flag that counts the messages of this rank that `peer` has processed.
    pub(crate) fn credit_flag(peer: usize) -> u64 {
        peer as u64 * 2 + 1
    }
}

const MAGIC: [u8; 4] = *b"PLRA";
const VERSION: u16 = 1;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) rank: Rank,
    pub(crate) slot_bytes: u64,
    /// Whether memory of this rank's device is copied through host memory.
    pub(crate) staged: bool,
    pub(crate) network: Vec<u8>,
    pub(crate) inbox: Vec<u8>,
    pub(crate) flags: Vec<u8>,
}

impl Address {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let head = Writer::new()
            .bytes(&MAGIC)
            .u16(VERSION)
            .u16(BackendId::STAGED.0)
            .u32(self.rank.0)
            .u32(self.staged.into())
            .u64(self.slot_bytes);
        let fields = [&self.network, &self.inbox, &self.flags];
        let bytes = fields
            .into_iter()
            .fold(head, |it, field| it.u64(field.len() as u64).bytes(field))
            .finish();
        let sum = checksum(&bytes);
        Writer::new().bytes(&bytes).u64(sum).finish()
    }

    pub(crate) fn decode(peer: Rank, bytes: &[u8]) -> Result<Self, Error> {
        let malformed =
            |what: String| Error::of_peer(peer, format_args!("has an invalid address: {what}"));
        let short = |error| malformed(format!("the address is truncated: {error}"));
        let mut reader = Reader::new(bytes);
        let magic: [u8; 4] = reader.array("magic").map_err(short)?;
        if magic != MAGIC {
            return Err(malformed(format!(
                "the address starts with the bytes {magic:02x?}, expected {MAGIC:02x?}"
            )));
        }
        let version = reader.u16("version").map_err(short)?;
        let backend = BackendId(reader.u16("backend").map_err(short)?);
        if (version, backend) != (VERSION, BackendId::STAGED) {
            return Err(malformed(format!(
                "the address has version {version} of the backend {backend}, expected version \
                 {VERSION} of {}; run the same Peerlane and backend on all ranks",
                BackendId::STAGED
            )));
        }
        let rank = Rank(reader.u32("rank").map_err(short)?);
        let staged = reader.u32("staged").map_err(short)? != 0;
        let slot_bytes = reader.u64("slot bytes").map_err(short)?;
        let mut variable = |field| -> Result<Vec<u8>, Error> {
            let length = reader.u64(field).map_err(short)?;
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            reader.bytes(field, length).map(<[u8]>::to_vec).map_err(short)
        };
        let (network, inbox) = (variable("address of the network")?, variable("key of the inbox")?);
        let flags = variable("key of the flags")?;
        let summed = &bytes[..bytes.len() - reader.rest().len()];
        let sum = reader.u64("checksum").map_err(short)?;
        if sum != checksum(summed) || !reader.rest().is_empty() {
            return Err(malformed(
                "the address has a wrong checksum, or bytes after its last field".to_owned(),
            ));
        }
        if rank != peer {
            return Err(malformed(format!(
                "the address belongs to rank {rank}, expected rank {peer}"
            )));
        }
        Ok(Self { rank, slot_bytes, staged, network, inbox, flags })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        for message in [
            Message::Copy { generation: 1, offset: u64::MAX, bytes: 3, slot: 4 },
            Message::Signal { generation: 5, word: 6, value: u64::MAX },
            Message::GetRequest { generation: 7, offset: 8, bytes: 9, get: 10 },
            Message::GetReply { get: 11, offset: 12, bytes: 13, slot: 14 },
            Message::FreeSlot,
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
        assert_eq!(Message::decode(&[0; MESSAGE_BYTES]), Err(0));
        assert_eq!(Message::decode(&[0xff; MESSAGE_BYTES]), Err(u64::MAX));
    }

    #[test]
    fn slots_and_messages_do_not_overlap() {
        for ranks in [1, 2, 3, 9] {
            let layout = InboxLayout::new(ranks);
            let mut spans = Vec::new();
            for peer in 0..ranks {
                let slots =
                    (0..SLOTS).map(|slot| (layout.slot_offset(peer, slot), layout.slot_bytes));
                spans.extend(slots);
                spans.extend(
                    (0..RING_MESSAGES).map(|number| (layout.message_offset(peer, number), MESSAGE)),
                );
            }
            spans.sort_unstable();
            let mut end = 0;
            for (begin, bytes) in spans {
                assert_eq!(begin, end);
                end += bytes;
            }
            assert_eq!(end, layout.bytes());
            assert_eq!(layout.message_offset(0, 3), layout.message_offset(0, RING_MESSAGES + 3));
        }
    }

    #[test]
    fn many_ranks_have_small_slots() {
        let bytes = [2, 32, 33, 64, 512, 100_000].map(|ranks| InboxLayout::new(ranks).slot_bytes);
        assert_eq!(bytes, [256 << 10, 256 << 10, 128 << 10, 128 << 10, 16 << 10, 16 << 10]);
    }

    #[test]
    fn an_address_survives_encoding_and_nothing_else_does() {
        let address = Address {
            rank: Rank(3),
            slot_bytes: 4096,
            staged: true,
            network: b"network".to_vec(),
            inbox: Vec::new(),
            flags: b"flags".to_vec(),
        };
        let whole = address.encode();
        assert_eq!(Address::decode(Rank(3), &whole).unwrap(), address);
        for length in 0..whole.len() {
            Address::decode(Rank(3), &whole[..length]).unwrap_err();
        }
        for byte in 0..whole.len() {
            let mut flipped = whole.clone();
            flipped[byte] ^= 0x41;
            Address::decode(Rank(3), &flipped).unwrap_err();
        }
        Address::decode(Rank(3), &[&whole[..], &[0]].concat()).unwrap_err();
        let text = Address::decode(Rank(2), &whole).unwrap_err().to_string();
        assert_eq!(
            text,
            "rank 2 has an invalid address: the address belongs to rank 3, expected rank 2"
        );
    }
}
