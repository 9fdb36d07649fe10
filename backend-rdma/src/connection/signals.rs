//! Encodes flag signals as RDMA messages, and stores the flags of arriving signals in order.
//!
//! The signals of one engine arrive in order on the first of its queue pairs to this rank, the *primary* one.
//! Data that was put before may have gone over other queue pairs. So a signal names them, and on each of them
//! a *marker* follows the data: an empty write with an immediate value. A flag is stored when its markers
//! have arrived, and never before the flags that were signalled earlier.
//!
//! The first signal of a flag is a message, which names the flag by registration and word and gives it a
//! short id. Later values that are only a little larger are sent as the immediate value of a write.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::nic::MESSAGE_BYTES;

/// The maximum number of flags with an id of 14 bits, which fits the immediate value of an RDMA write.
const FLAG_IDS_MAX: u32 = 1 << 14;
/// The largest increment of a flag that fits the immediate value of an RDMA write, inclusive.
pub(crate) const INCREMENT_MAX: u64 = 0xff;
/// The maximum number of queue pairs of one engine to one peer, because a mask of 7 bits has a bit for each
/// but the primary one.
pub(crate) const RAILS_MAX: usize = 8;

const INCREMENT_BITS: u32 = 8;
const FLAG_ID_BITS: u32 = 14;
const MARKER: u32 = 1 << 31;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Message {
    pub(crate) generation: u64,
    pub(crate) word: u64,
    pub(crate) value: u64,
    /// The id that immediate values use for the flag; [`FLAG_IDS_MAX`] and larger values mean that the flag
    /// has no id.
    pub(crate) id: u32,
    /// A bit mask in which bit `i` requires that data on queue pair `i + 1` arrives before the flag is stored.
    pub(crate) markers: u32,
}

impl Message {
    pub(crate) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.id.to_le_bytes());
        bytes[28..].copy_from_slice(&self.markers.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        // The id and the markers are the two halves of one word.
        let (id, markers) = (word(24) as u32, (word(24) >> 32) as u32);
        Self { generation: word(0), word: word(8), value: word(16), id, markers }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Immediate {
    /// A signal that increases the flag with this id by `increment`.
    Increment { id: u32, increment: u64, markers: u32 },
    /// An empty RDMA write that proves that all earlier data on its queue pair has arrived.
    Marker,
}

impl Immediate {
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Increment { id, increment, markers } => {
                let increment = (increment & INCREMENT_MAX) as u32;
                (markers << (FLAG_ID_BITS + INCREMENT_BITS) | id << INCREMENT_BITS | increment)
                    .to_be()
            }
            Self::Marker => MARKER.to_be(),
        }
    }

    fn decode(immediate: u32) -> Self {
        let immediate = u32::from_be(immediate);
        if immediate & MARKER != 0 {
            return Self::Marker;
        }
        Self::Increment {
            id: immediate >> INCREMENT_BITS & (FLAG_IDS_MAX - 1),
            increment: u64::from(immediate) & INCREMENT_MAX,
            markers: immediate >> (FLAG_ID_BITS + INCREMENT_BITS),
        }
    }
}

/// Identifies a queue pair of this rank by the index of its NIC and its queue pair number there.
pub(crate) type QpId = (usize, u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QpRole {
    /// The number of the queue pair that carries the engine's signals; `None` if it is this queue pair.
    pub(crate) primary: Option<u32>,
    pub(crate) index: u8,
}

#[derive(Debug, Default)]
pub(super) struct SignalStreams {
    flags: HashMap<u64, FlagArray>,
    /// The signals of each engine by queue pair number; no NIC index is needed, because signals always use
    /// the first NIC.
    streams: HashMap<u32, SignalStream>,
    others: HashMap<QpId, (u32, usize)>,
}

#[derive(Debug, Default)]
struct SignalStream {
    known: Vec<Message>,
    markers: [u32; RAILS_MAX - 1],
    /// Signals that wait for data on other queue pairs, and later signals, which must not overtake them.
    held: VecDeque<Message>,
}

#[derive(Clone, Copy, Debug)]
struct FlagArray {
    base: NonNull<AtomicU64>,
    count: u64,
}

// SAFETY: the flags belong to a registration, which may be used from any thread.
unsafe impl Send for FlagArray {}

impl SignalStreams {
    /// Registers the flags of a region, so that arriving signals can store them.
    ///
    /// # Safety
    /// They must stay allocated until [`remove_flags`](Self::remove_flags).
    pub(super) unsafe fn add_flags(
        &mut self,
        generation: u64,
        base: NonNull<AtomicU64>,
        count: u64,
    ) {
        self.flags.insert(generation, FlagArray { base, count });
    }

    /// Removes the flags of a region, after which signals to these flags are ignored.
    pub(super) fn remove_flags(&mut self, generation: u64) {
        self.flags.remove(&generation);
    }

    pub(super) fn open(&mut self, qp: QpId, role: QpRole) {
        match role.primary {
            Some(primary) => {
                self.others.insert(qp, (primary, usize::from(role.index)));
            }
            None => {
                self.streams.insert(qp.1, SignalStream::default());
            }
        }
    }

    pub(super) fn close(&mut self, qp: QpId) {
        if self.others.remove(&qp).is_none() && qp.0 == 0 {
            self.streams.remove(&qp.1);
        }
    }

    pub(super) fn message(&mut self, qp: QpId, message: Message) -> bool {
        let Some(stream) = self.streams.get_mut(&qp.1).filter(|_| qp.0 == 0) else {
            return false;
        };
        stream.set_flag(message);
        stream.held.push_back(message);
        self.store_ready(qp.1)
    }

    pub(super) fn immediate(&mut self, qp: QpId, immediate: u32) -> bool {
        match Immediate::decode(immediate) {
            Immediate::Marker => {
                let Some(&(primary, index)) = self.others.get(&qp) else { return false };
                let Some(stream) = self.streams.get_mut(&primary) else { return false };
                let Some(count) = stream.markers.get_mut(index.wrapping_sub(1)) else {
                    return false;
                };
                *count += 1;
                self.store_ready(primary)
            }
            Immediate::Increment { id, increment, markers } => {
                let stream = self.streams.get_mut(&qp.1).filter(|_| qp.0 == 0);
                let Some(stream) = stream else { return false };
                let Some(known) = stream.known.get_mut(id as usize) else { return false };
                known.value = known.value.wrapping_add(increment);
                let message = Message { markers, ..*known };
                stream.held.push_back(message);
                self.store_ready(qp.1)
            }
        }
    }

    fn store_ready(&mut self, primary: u32) -> bool {
        let Self { flags, streams, .. } = self;
        let Some(stream) = streams.get_mut(&primary) else { return false };
        let mut stored = false;
        while let Some(message) = stream.next() {
            stored |= store(flags, message);
        }
        stored
    }
}

impl SignalStream {
    fn set_flag(&mut self, message: Message) {
        if message.id >= FLAG_IDS_MAX {
            return;
        }
        let index = message.id as usize;
        if self.known.len() <= index {
            self.known.resize(index + 1, Message::default());
        }
        self.known[index] = message;
    }

    fn next(&mut self) -> Option<Message> {
        let message = *self.held.front()?;
        let needed = |at: &usize| message.markers >> at & 1 == 1;
        if (0..self.markers.len()).filter(needed).any(|at| self.markers[at] == 0) {
            return None;
        }
        (0..self.markers.len()).filter(needed).for_each(|at| self.markers[at] -= 1);
        self.held.pop_front()
    }
}

/// Stores the value of a signal in its flag, or returns false if the flag's region no longer exists.
fn store(flags: &HashMap<u64, FlagArray>, message: Message) -> bool {
    let words = flags.get(&message.generation);
    let Some(words) = words.filter(|words| message.word < words.count) else { return false };
    // The word is in bounds, so it fits.
    let at = message.word as usize;
    // SAFETY: the word was checked to lie inside the flags. The caller of `add_flags` keeps them allocated
    // until they are removed from the table, and all accesses to flags are atomic.
    let flag = unsafe { &*words.base.as_ptr().wrapping_add(at) };
    flag.store(message.value, Ordering::Release);
    true
}

#[derive(Debug, Default)]
pub(crate) struct FlagIds(HashMap<FlagWord, (u32, u64)>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FlagWord {
    pub(crate) generation: u64,
    pub(crate) word: u64,
}

impl FlagIds {
    /// Returns the immediate value that signals a flag, or `None` if the peer knows no id for the flag or the
    /// increment does not fit.
    pub(crate) fn immediate(&mut self, flag: FlagWord, value: u64, markers: u32) -> Option<u32> {
        let (id, last) = self.0.get_mut(&flag)?;
        let increment = value.checked_sub(*last)?;
        if !(1..=INCREMENT_MAX).contains(&increment) {
            return None;
        }
        *last = value;
        Some(Immediate::Increment { id: *id, increment, markers }.encode())
    }

    pub(crate) fn message(
        &mut self,
        flag: FlagWord,
        value: u64,
        markers: u32,
    ) -> [u8; MESSAGE_BYTES] {
        let FlagWord { generation, word } = flag;
        let fresh = self.0.len() as u32;
        let id = match self.0.get_mut(&flag) {
            Some((id, last)) => {
                *last = value;
                *id
            }
            None if fresh < FLAG_IDS_MAX => {
                self.0.insert(flag, (fresh, value));
                fresh
            }
            None => u32::MAX,
        };
        Message { generation, word, value, id, markers }.encode()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PRIMARY: QpId = (0, 17);
    const FLAG: Message = Message { generation: 5, word: 3, value: 11, id: 2, markers: 0 };

    fn streams(flags: &[AtomicU64]) -> SignalStreams {
        let mut streams = SignalStreams::default();
        // SAFETY: the flags outlive the test's use.
        unsafe { streams.add_flags(5, NonNull::from(&flags[0]), flags.len() as u64) };
        streams.open(PRIMARY, QpRole { primary: None, index: 0 });
        streams
    }

    fn four() -> Vec<AtomicU64> {
        (0..4).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn messages_and_immediates_survive_the_wire() {
        let message =
            Message { generation: 7, word: 1 << 40, value: u64::MAX, id: 99, markers: 0x7f };
        assert_eq!(Message::decode(&message.encode()), message);
        let increment = Immediate::Increment {
            id: FLAG_IDS_MAX - 1,
            increment: INCREMENT_MAX,
            markers: 0b101_0101,
        };
        for immediate in [increment, Immediate::Marker] {
            assert_eq!(Immediate::decode(immediate.encode()), immediate);
        }
    }

    #[test]
    fn flags_are_stored_by_registration_and_word_and_nowhere_else() {
        let flags = four();
        let mut streams = streams(&flags);
        assert!(streams.message(PRIMARY, FLAG));
        assert_eq!(flags[3].load(Ordering::Relaxed), 11);
        for wrong in [
            Message { word: 4, ..FLAG },
            Message { word: u64::MAX, ..FLAG },
            Message { generation: 6, ..FLAG },
        ] {
            assert!(!streams.message(PRIMARY, Message { id: u32::MAX, ..wrong }));
        }
        let increment = |id| Immediate::Increment { id, increment: 2, markers: 0 }.encode();
        assert!(streams.immediate(PRIMARY, increment(2)));
        assert_eq!(flags[3].load(Ordering::Relaxed), 13);
        assert!(!streams.immediate(PRIMARY, increment(3)), "id 3 is unknown");
        assert!(!streams.immediate((0, 18), increment(2)), "the queue pair has no stream");
        assert!(!streams.immediate((0, 18), Immediate::Marker.encode()));
        streams.remove_flags(5);
        assert!(!streams.immediate(PRIMARY, increment(2)));
    }

    #[test]
    fn a_signal_waits_for_its_markers_and_holds_those_behind_it() {
        let flags = four();
        let mut streams = streams(&flags);
        let others = [(1, 17), (0, 18)];
        for (other, index) in others.into_iter().zip(1..) {
            streams.open(other, QpRole { primary: Some(PRIMARY.1), index });
        }
        let value = |word: usize| flags[word].load(Ordering::Relaxed);
        let marker = Immediate::Marker.encode();
        // A marker that arrives early counts for the first signal that names it.
        assert!(!streams.immediate(others[1], marker));
        assert!(!streams.message(PRIMARY, Message { markers: 0b11, ..FLAG }));
        assert!(!streams.message(PRIMARY, Message { word: 1, value: 4, id: 3, ..FLAG }));
        let increment = Immediate::Increment { id: 2, increment: 1, markers: 0b10 }.encode();
        assert!(!streams.immediate(PRIMARY, increment));
        assert_eq!((value(1), value(3)), (0, 0));
        assert!(streams.immediate(others[0], marker));
        assert_eq!((value(1), value(3)), (4, 11));
        assert!(streams.immediate(others[1], marker));
        assert_eq!(value(3), 12);
        streams.close(others[0]);
        assert!(!streams.immediate(others[0], marker));
        streams.close(PRIMARY);
        assert!(!streams.immediate(PRIMARY, increment));
    }

    #[test]
    fn only_a_small_increment_of_a_known_flag_fits_an_immediate() {
        let mut ids = FlagIds::default();
        let flag = |word| FlagWord { generation: 3, word };
        assert_eq!(ids.immediate(flag(0), 1, 0), None, "the flag is not known yet");
        ids.message(flag(0), 1, 0);
        let expected =
            |id, increment| Some(Immediate::Increment { id, increment, markers: 5 }.encode());
        let largest = 1 + INCREMENT_MAX;
        assert_eq!(ids.immediate(flag(0), largest, 5), expected(0, INCREMENT_MAX));
        assert_eq!(ids.immediate(flag(0), 2 * largest, 5), None, "the increment is large");
        assert_eq!(ids.immediate(flag(0), largest, 5), None, "there is no increment");
        ids.message(flag(1), 7, 0);
        assert_eq!(ids.immediate(flag(1), 8, 5), expected(1, 1));
    }
}
