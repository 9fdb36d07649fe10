//! Orders the flags that messages announce.
//!
//! The signals of one engine arrive in order on the first of its queue pairs to this rank, the *primary* one. Data that was put
//! before may have gone over other queue pairs. So a signal names them, and on each of them a *companion* follows the data: an
//! empty write with an immediate value. A flag is stored when its companions have arrived, and never before the flags that were
//! signalled earlier.

use std::collections::{HashMap, VecDeque};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The size of a message in bytes.
pub(crate) const MESSAGE_BYTES: usize = 32;
/// The number of flags per primary queue pair that can have a short number.
pub(crate) const NUMBERS_MAX: u32 = 1 << 14;
/// The largest increase of a flag that an immediate value can hold.
pub(crate) const STEP_MAX: u64 = 0xff;
/// The largest number of queue pairs of one engine to one peer: the primary one, and one bit for each of the others.
pub(crate) const STRANDS_MAX: usize = 8;

const STEP_BITS: u32 = 8;
const NUMBER_BITS: u32 = 14;
const COMPANION: u32 = 1 << 31;

/// The message of a signal: a flag and its new value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) generation: u64,
    pub(crate) word: u64,
    pub(crate) value: u64,
    /// The short number that the flag gets, if it is below [`NUMBERS_MAX`].
    pub(crate) number: u32,
    /// The queue pairs whose companion messages must arrive first: bit `i` for queue pair `i + 1`.
    pub(crate) companions: u32,
}

impl Message {
    pub(crate) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.number.to_le_bytes());
        bytes[28..].copy_from_slice(&self.companions.to_le_bytes());
        bytes
    }

    pub(super) fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        // Two halves of one word.
        let (number, companions) = (word(24) as u32, (word(24) >> 32) as u32);
        Self { generation: word(0), word: word(8), value: word(16), number, companions }
    }
}

/// The decoded immediate value of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Immediate {
    /// The flag with a short number has increased by `step`.
    Step { number: u32, step: u64, companions: u32 },
    /// All data that was put on this queue pair has arrived.
    Companion,
}

impl Immediate {
    /// Returns the value in wire format.
    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Step { number, step, companions } => {
                let step = (step & STEP_MAX) as u32;
                (companions << (NUMBER_BITS + STEP_BITS) | number << STEP_BITS | step).to_be()
            }
            Self::Companion => COMPANION.to_be(),
        }
    }

    fn decode(immediate: u32) -> Self {
        let immediate = u32::from_be(immediate);
        if immediate & COMPANION != 0 {
            return Self::Companion;
        }
        Self::Step {
            number: immediate >> STEP_BITS & (NUMBERS_MAX - 1),
            step: u64::from(immediate) & STEP_MAX,
            companions: immediate >> (NUMBER_BITS + STEP_BITS),
        }
    }
}

/// Identifies a queue pair of this rank by the index of its NIC and its number there.
pub(crate) type PairId = (usize, u32);

/// The role of a queue pair in the group of queue pairs of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strand {
    /// The primary queue pair; `None` if this is the primary one.
    pub(crate) lead: Option<u32>,
    /// The index among the queue pairs of its engine; 0 is the primary one.
    pub(crate) index: u8,
}

/// The state of everything that arrives at a rank.
#[derive(Debug, Default)]
pub(super) struct Streams {
    flags: HashMap<u64, Words>,
    /// The streams by the number of the primary queue pair, which is always on the first NIC.
    streams: HashMap<u32, Stream>,
    /// The queue pairs that are not primary.
    others: HashMap<PairId, (u32, usize)>,
}

/// The signals of one engine of a peer.
#[derive(Debug, Default)]
struct Stream {
    /// The flags by short number, with the value of the last signal, stored or held.
    known: Vec<Message>,
    /// The companion messages that have arrived and that no signal has used, by queue pair.
    companions: [u32; STRANDS_MAX - 1],
    /// The signals that wait for companion messages, and the signals behind them.
    held: VecDeque<Message>,
}

/// The flags of a registration of this rank.
#[derive(Clone, Copy, Debug)]
struct Words {
    base: NonNull<AtomicU64>,
    count: u64,
}

// SAFETY: the words are those of a registration, which may be used from any thread.
unsafe impl Send for Words {}

impl Streams {
    /// Flags that may be announced from now on.
    ///
    /// # Safety
    /// They stay allocated until [`forget`](Self::forget).
    pub(super) unsafe fn enter(&mut self, generation: u64, base: NonNull<AtomicU64>, count: u64) {
        self.flags.insert(generation, Words { base, count });
    }

    pub(super) fn forget(&mut self, generation: u64) {
        self.flags.remove(&generation);
    }

    /// Adds a queue pair on which messages can arrive.
    pub(super) fn open(&mut self, pair: PairId, strand: Strand) {
        match strand.lead {
            Some(lead) => {
                self.others.insert(pair, (lead, usize::from(strand.index)));
            }
            None => {
                self.streams.insert(pair.1, Stream::default());
            }
        }
    }

    pub(super) fn close(&mut self, pair: PairId) {
        if self.others.remove(&pair).is_none() && pair.0 == 0 {
            self.streams.remove(&pair.1);
        }
    }

    /// Processes a message on a primary queue pair, and returns whether a flag was stored.
    pub(super) fn message(&mut self, pair: PairId, message: Message) -> bool {
        let Some(stream) = self.streams.get_mut(&pair.1).filter(|_| pair.0 == 0) else {
            return false;
        };
        stream.learn(message);
        stream.held.push_back(message);
        self.settle(pair.1)
    }

    /// Processes the immediate value of a write, and returns whether a flag was stored.
    pub(super) fn immediate(&mut self, pair: PairId, immediate: u32) -> bool {
        match Immediate::decode(immediate) {
            Immediate::Companion => {
                let Some(&(lead, index)) = self.others.get(&pair) else { return false };
                let Some(stream) = self.streams.get_mut(&lead) else { return false };
                let Some(count) = stream.companions.get_mut(index.wrapping_sub(1)) else {
                    return false;
                };
                *count += 1;
                self.settle(lead)
            }
            Immediate::Step { number, step, companions } => {
                let stream = self.streams.get_mut(&pair.1).filter(|_| pair.0 == 0);
                let Some(stream) = stream else { return false };
                let Some(known) = stream.known.get_mut(number as usize) else { return false };
                known.value = known.value.wrapping_add(step);
                let message = Message { companions, ..*known };
                stream.held.push_back(message);
                self.settle(pair.1)
            }
        }
    }

    /// Stores the flags whose companion messages have arrived.
    fn settle(&mut self, lead: u32) -> bool {
        let Self { flags, streams, .. } = self;
        let Some(stream) = streams.get_mut(&lead) else { return false };
        let mut stored = false;
        while let Some(message) = stream.next() {
            stored |= store(flags, message);
        }
        stored
    }
}

impl Stream {
    fn learn(&mut self, message: Message) {
        if message.number >= NUMBERS_MAX {
            return;
        }
        let index = message.number as usize;
        if self.known.len() <= index {
            self.known.resize(index + 1, Message::default());
        }
        self.known[index] = message;
    }

    /// Returns the next signal if its companion messages have arrived.
    fn next(&mut self) -> Option<Message> {
        let message = *self.held.front()?;
        let wanted = |at: &usize| message.companions >> at & 1 == 1;
        if (0..self.companions.len()).filter(wanted).any(|at| self.companions[at] == 0) {
            return None;
        }
        (0..self.companions.len()).filter(wanted).for_each(|at| self.companions[at] -= 1);
        self.held.pop_front()
    }
}

fn store(flags: &HashMap<u64, Words>, message: Message) -> bool {
    let words = flags.get(&message.generation);
    let Some(words) = words.filter(|words| message.word < words.count) else { return false };
    // In bounds, so it fits.
    let at = message.word as usize;
    // SAFETY: inside the region, which `enter`'s caller keeps until it is taken out of the table;
    // everybody touches flags as atomics.
    let flag = unsafe { &*words.base.as_ptr().wrapping_add(at) };
    flag.store(message.value, Ordering::Release);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAD: PairId = (0, 17);
    const FLAG: Message = Message { generation: 5, word: 3, value: 11, number: 2, companions: 0 };

    fn streams(flags: &[AtomicU64]) -> Streams {
        let mut streams = Streams::default();
        // SAFETY: the flags outlive the test's use.
        unsafe { streams.enter(5, NonNull::from(&flags[0]), flags.len() as u64) };
        streams.open(LEAD, Strand { lead: None, index: 0 });
        streams
    }

    fn four() -> Vec<AtomicU64> {
        (0..4).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn messages_and_immediates_survive_the_wire() {
        let message =
            Message { generation: 7, word: 1 << 40, value: u64::MAX, number: 99, companions: 0x7f };
        assert_eq!(Message::decode(&message.encode()), message);
        let step =
            Immediate::Step { number: NUMBERS_MAX - 1, step: STEP_MAX, companions: 0b101_0101 };
        for immediate in [step, Immediate::Companion] {
            assert_eq!(Immediate::decode(immediate.encode()), immediate);
        }
    }

    #[test]
    fn flags_are_stored_by_registration_and_word_and_nowhere_else() {
        let flags = four();
        let mut streams = streams(&flags);
        assert!(streams.message(LEAD, FLAG));
        assert_eq!(flags[3].load(Ordering::Relaxed), 11);
        for wrong in [
            Message { word: 4, ..FLAG },
            Message { word: u64::MAX, ..FLAG },
            Message { generation: 6, ..FLAG },
        ] {
            assert!(!streams.message(LEAD, Message { number: u32::MAX, ..wrong }));
        }
        let step = |number| Immediate::Step { number, step: 2, companions: 0 }.encode();
        assert!(streams.immediate(LEAD, step(2)));
        assert_eq!(flags[3].load(Ordering::Relaxed), 13);
        assert!(!streams.immediate(LEAD, step(3)), "nobody knows number 3");
        assert!(!streams.immediate((0, 18), step(2)), "no queue pair of a stream");
        assert!(!streams.immediate((0, 18), Immediate::Companion.encode()));
        streams.forget(5);
        assert!(!streams.immediate(LEAD, step(2)));
    }

    #[test]
    fn a_signal_waits_for_its_companions_and_holds_those_behind_it() {
        let flags = four();
        let mut streams = streams(&flags);
        let others = [(1, 17), (0, 18)];
        for (other, index) in others.into_iter().zip(1..) {
            streams.open(other, Strand { lead: Some(LEAD.1), index });
        }
        let value = |word: usize| flags[word].load(Ordering::Relaxed);
        let companion = Immediate::Companion.encode();
        // One is early, and belongs to the first signal that wants it.
        assert!(!streams.immediate(others[1], companion));
        assert!(!streams.message(LEAD, Message { companions: 0b11, ..FLAG }));
        assert!(!streams.message(LEAD, Message { word: 1, value: 4, number: 3, ..FLAG }));
        let step = Immediate::Step { number: 2, step: 1, companions: 0b10 }.encode();
        assert!(!streams.immediate(LEAD, step));
        assert_eq!((value(1), value(3)), (0, 0));
        assert!(streams.immediate(others[0], companion));
        assert_eq!((value(1), value(3)), (4, 11));
        assert!(streams.immediate(others[1], companion));
        assert_eq!(value(3), 12);
        streams.close(others[0]);
        assert!(!streams.immediate(others[0], companion));
        streams.close(LEAD);
        assert!(!streams.immediate(LEAD, step));
    }
}
