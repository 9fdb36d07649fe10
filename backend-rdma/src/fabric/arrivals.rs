//! What peers send: messages that announce the value of a flag.
//!
//! A flag may not simply be written by the card, because not every card says that a write's bytes come
//! in order. So a signal is a message behind the bytes, on the same queue pair; its completion here
//! proves that they have come, and only then this rank stores the flag itself.
//!
//! A message names its flag by registration and word, so that one to freed memory finds nothing. It
//! also gives the flag a short number, which is known to this queue pair from then on: the next value,
//! if it is a little larger, comes as the immediate of a write, in one request with the last bytes.

use std::collections::HashMap;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ibverbs_sys::{ibv_recv_wr, ibv_sge, ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::mechanics::mapping::Mapping;

use super::alarm::Alarm;
use crate::error::Error;
use crate::memory::Registration;
use crate::sys::{Cq, Domain, Mr, Srq};

/// Bytes of a message.
pub(crate) const MESSAGE_BYTES: usize = 32;
/// Flags of one queue pair that have short numbers, exclusive.
pub(crate) const NUMBERS_MAX: u32 = 1 << 14;
/// The largest step that an immediate announces, inclusive.
pub(crate) const STEP_MAX: u64 = 0xff;
/// Completions taken at once.
const BATCH: usize = 32;

/// A value for a flag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) generation: u64,
    pub(crate) word: u64,
    pub(crate) value: u64,
    /// The flag's short number from now on, if it is below [`NUMBERS_MAX`].
    pub(crate) number: u32,
}

impl Message {
    pub(crate) fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut bytes = [0; MESSAGE_BYTES];
        bytes[..8].copy_from_slice(&self.generation.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.word.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.value.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8; MESSAGE_BYTES]) -> Self {
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let [a, b, c, d] = [bytes[24], bytes[25], bytes[26], bytes[27]];
        let number = u32::from_le_bytes([a, b, c, d]);
        Self { generation: word(0), word: word(8), value: word(16), number }
    }

    /// An immediate, in the order of the wire.
    pub(crate) fn immediate(number: u32, step: u64) -> u32 {
        (number << 8 | (step & STEP_MAX) as u32).to_be()
    }
}

/// The receiving side of a rank.
#[derive(Debug)]
pub(crate) struct Arrivals {
    pub(crate) cq: Arc<Cq>,
    pub(crate) srq: Arc<Srq>,
    slots: Slots,
    state: Mutex<State>,
    /// Who may sleep until a flag changes.
    alarms: Mutex<Vec<Weak<Alarm>>>,
    /// How many do.
    pub(crate) asleep: AtomicUsize,
    /// Peers write flags without a message: nobody may sleep long.
    pub(crate) silent: AtomicBool,
}

/// Where messages land.
#[derive(Debug)]
struct Slots {
    mr: Mr,
    memory: Mapping,
}

#[derive(Debug, Default)]
struct State {
    flags: HashMap<u64, Words>,
    /// By queue pair, then by short number.
    numbered: HashMap<u32, Vec<Message>>,
    batch: Vec<ibv_wc>,
}

// SAFETY: completions hold numbers only.
unsafe impl Send for State {}

/// Flags of this rank.
#[derive(Clone, Copy, Debug)]
struct Words {
    base: NonNull<AtomicU64>,
    count: u64,
}

impl Arrivals {
    pub(super) fn open(domain: &Arc<Domain>, receives: u32, pairs: u32) -> Result<Self, Error> {
        let cq = Arc::new(Cq::create(&domain.context, receives + pairs)?);
        let srq = Arc::new(Srq::create(domain, receives)?);
        let bytes = receives as usize * MESSAGE_BYTES;
        let memory = Mapping::create(bytes as u64).map_err(Error::of_mapping)?;
        // SAFETY: the registration is dropped before the mapping, being the field before it.
        let mr = unsafe { domain.register(memory.base(), bytes) }?;
        let arrivals = Self {
            cq,
            srq,
            slots: Slots { mr, memory },
            state: Mutex::default(),
            alarms: Mutex::default(),
            asleep: AtomicUsize::new(0),
            silent: AtomicBool::new(false),
        };
        for slot in 0..u64::from(receives) {
            arrivals.receive(slot)?;
        }
        Ok(arrivals)
    }

    /// Posts a place for a message.
    fn receive(&self, slot: u64) -> Result<(), Error> {
        let addr = self.slots.memory.base().as_ptr() as u64 + slot * MESSAGE_BYTES as u64;
        let mut place =
            ibv_sge { addr, length: MESSAGE_BYTES as u32, lkey: self.slots.mr.local_key() };
        let mut request =
            ibv_recv_wr { wr_id: slot, sg_list: &mut place, num_sge: 1, ..ibv_recv_wr::default() };
        // SAFETY: the slots live as long as the queue.
        unsafe { self.srq.post(&mut request) }
    }

    /// Flags that may be announced from now on.
    pub(crate) fn enter(&self, generation: u64, registration: &Registration) {
        let (base, count) = (registration.base.cast(), registration.bytes / 8);
        self.state().flags.insert(generation, Words { base, count });
    }

    /// They are about to be freed.
    pub(crate) fn forget(&self, generation: u64) {
        self.state().flags.remove(&generation);
    }

    /// Messages of this queue pair will come no more; what has come is taken.
    pub(super) fn close(&self, pair: u32) {
        // What fails here fails again where somebody hears of it.
        let _ = self.take();
        self.state().numbered.remove(&pair);
    }

    /// Takes all messages that have come; whether there were any.
    pub(crate) fn take(&self) -> Result<bool, Error> {
        let mut state = self.state();
        let mut any = false;
        loop {
            let State { batch, .. } = &mut *state;
            batch.resize(BATCH, ibv_wc::default());
            let taken = self.cq.poll(batch)?;
            for index in 0..taken {
                let completion = state.batch[index];
                any |= self.arrive(&mut state, &completion);
                self.receive_again(&completion)?;
            }
            if taken < BATCH {
                break;
            }
        }
        drop(state);
        if any {
            self.wake();
        }
        Ok(any)
    }

    fn receive_again(&self, completion: &ibv_wc) -> Result<(), Error> {
        // On an error only the number of the request is sure.
        let sent = completion.status == ibv_wc_status::SUCCESS
            && completion.opcode.0 & ibv_wc_opcode::RECV.0 == 0;
        if sent { Ok(()) } else { self.receive(completion.wr_id) }
    }

    /// Whether a flag was stored.
    fn arrive(&self, state: &mut State, completion: &ibv_wc) -> bool {
        if completion.status != ibv_wc_status::SUCCESS {
            return false;
        }
        match completion.opcode {
            ibv_wc_opcode::RECV if completion.byte_len as usize == MESSAGE_BYTES => {
                let message = self.message(completion.wr_id);
                state.learn(completion.qp_num, message);
                state.store(message)
            }
            ibv_wc_opcode::RECV_RDMA_WITH_IMM => {
                let immediate = u32::from_be(completion.imm_data);
                let numbered = state.numbered.get_mut(&completion.qp_num);
                let known = numbered.and_then(|them| them.get_mut((immediate >> 8) as usize));
                let Some(known) = known else { return false };
                known.value = known.value.wrapping_add(u64::from(immediate & 0xff));
                let message = *known;
                state.store(message)
            }
            _ => false,
        }
    }

    fn message(&self, slot: u64) -> Message {
        let at = slot as usize * MESSAGE_BYTES;
        let from = self.slots.memory.base().as_ptr().wrapping_add(at);
        let mut bytes = [0; MESSAGE_BYTES];
        // SAFETY: the slot was posted by `receive`, so it lies inside; its completion was taken, and
        // the card writes there only once it is posted again.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), MESSAGE_BYTES) };
        Message::decode(&bytes)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whole after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody may sleep from now on until a flag of this rank changes.
    pub(crate) fn add(&self, alarm: &Arc<Alarm>) {
        let mut alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|alarm| alarm.strong_count() > 0);
        alarms.push(Arc::downgrade(alarm));
    }

    /// A flag of this rank was stored: wakes whoever sleeps.
    pub(crate) fn wake(&self) {
        // Orders the store before the look for sleepers; they announce themselves before they look.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) == 0 {
            return;
        }
        let alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.iter().filter_map(Weak::upgrade).for_each(|alarm| alarm.ring());
    }

    /// Takes the events that woke a sleeper.
    pub(crate) fn drain_events(&self) {
        let state = self.state();
        self.cq.drain_events();
        drop(state);
    }
}

impl State {
    fn learn(&mut self, pair: u32, message: Message) {
        if message.number >= NUMBERS_MAX {
            return;
        }
        let numbered = self.numbered.entry(pair).or_default();
        let index = message.number as usize;
        if numbered.len() <= index {
            numbered.resize(index + 1, Message::default());
        }
        numbered[index] = message;
    }

    fn store(&self, message: Message) -> bool {
        let words = self.flags.get(&message.generation);
        let Some(words) = words.filter(|words| message.word < words.count) else { return false };
        // In bounds, so it fits.
        let at = message.word as usize;
        // SAFETY: inside the region, which is taken out of the table before it is freed, under the lock
        // that is held; everybody touches flags as atomics.
        let flag = unsafe { &*words.base.as_ptr().wrapping_add(at) };
        flag.store(message.value, Ordering::Release);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_survives_the_wire() {
        let message = Message { generation: 7, word: 1 << 40, value: u64::MAX, number: 99 };
        assert_eq!(Message::decode(&message.encode()), message);
        let immediate = u32::from_be(Message::immediate(NUMBERS_MAX - 1, STEP_MAX));
        assert_eq!((immediate >> 8, immediate & 0xff), (NUMBERS_MAX - 1, 0xff));
    }

    #[test]
    fn flags_are_stored_by_registration_and_word_and_nowhere_else() {
        let flags: Vec<AtomicU64> = (0..4).map(|_| AtomicU64::new(0)).collect();
        let mut state = State::default();
        let base = NonNull::from(&flags[0]);
        state.flags.insert(5, Words { base, count: 4 });
        let message = Message { generation: 5, word: 3, value: 11, number: 2 };
        assert!(state.store(message));
        assert_eq!(flags[3].load(Ordering::Relaxed), 11);
        assert!(!state.store(Message { word: 4, ..message }));
        assert!(!state.store(Message { word: u64::MAX, ..message }));
        assert!(!state.store(Message { generation: 6, ..message }));
        state.learn(1, message);
        state.learn(1, Message { number: u32::MAX, ..message });
        assert_eq!(state.numbered[&1].len(), 3);
    }
}
