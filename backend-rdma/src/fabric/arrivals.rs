//! Receives the signals of peers and stores the flags.
//!
//! A peer may not write a flag directly, because not every NIC guarantees that the data of a write arrives in order. A signal is
//! therefore a message behind the data, on the same queue pair. Its completion here proves that the data has arrived, and only then
//! this rank stores the flag.
//!
//! A message names its flag by registration and word, so a message for freed memory finds nothing. It also gives the flag a short
//! number that this queue pair knows from then on: if the next value is only a little larger, it comes as the immediate value of a
//! write, in one request with the last bytes.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::Flush;

use super::alarm::Alarm;
use super::card::Card;
use super::streams::{MESSAGE_BYTES, PairId, Strand, Streams};
use crate::error::Error;
use crate::memory::Registration;

/// The number of completions that one poll takes.
const BATCH: usize = 32;

/// Receives the signals of all peers and stores the flags.
#[derive(Debug)]
pub(crate) struct Arrivals {
    pub(crate) cards: Arc<[Card]>,
    state: Mutex<State>,
    /// The engines whose threads may sleep until a flag changes.
    alarms: Mutex<Vec<Weak<Alarm>>>,
    /// The number of threads that sleep.
    pub(crate) asleep: AtomicUsize,
    /// Whether peers write flags without a message. Then no thread may sleep long.
    pub(crate) silent: AtomicBool,
    /// The flushes that make received data visible to devices.
    flushes: Mutex<Vec<Arc<dyn Flush>>>,
}

#[derive(Debug, Default)]
struct State {
    streams: Streams,
    batch: Vec<ibv_wc>,
}

// SAFETY: completions hold numbers only.
unsafe impl Send for State {}

impl Arrivals {
    pub(super) fn new(cards: Arc<[Card]>) -> Self {
        Self {
            cards,
            state: Mutex::default(),
            alarms: Mutex::default(),
            asleep: AtomicUsize::new(0),
            silent: AtomicBool::new(false),
            flushes: Mutex::default(),
        }
    }

    /// Adds the flags of a registration, which can be signalled from now on.
    pub(crate) fn enter(&self, generation: u64, registration: &Registration) {
        let (base, count) = (registration.base.cast(), registration.bytes / 8);
        // SAFETY: the registration's owner calls `forget` before it lets go of it.
        unsafe { self.state().streams.enter(generation, base, count) };
    }

    /// Removes the flags of a registration that is about to be freed.
    pub(crate) fn forget(&self, generation: u64) {
        self.state().streams.forget(generation);
    }

    /// Adds a flush that runs before every flag is stored.
    pub(crate) fn flush_with(&self, flush: Arc<dyn Flush>) -> Result<(), Error> {
        let mut flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.silent.load(Ordering::SeqCst) {
            return Err(Error::unavailable(
                "peers write flags of this rank without its help already, and memory of its device has \
                 to be flushed before a flag is seen; set `signal` to Message"
                    .to_owned(),
            ));
        }
        if !flushes.iter().any(|known| Arc::ptr_eq(known, &flush)) {
            flushes.push(flush);
        }
        Ok(())
    }

    /// Lets peers write flags directly. Refuses if a flush must run before a flag is visible.
    pub(super) fn allow_writes(&self) -> bool {
        let flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if !flushes.is_empty() {
            return false;
        }
        // Under the lock, so that `flush_with` sees it or is seen.
        self.silent.store(true, Ordering::SeqCst);
        drop(flushes);
        // Who sleeps already would miss what nobody announces.
        self.wake();
        true
    }

    /// Makes received data visible to the devices.
    fn flush(&self) -> Result<(), Error> {
        let flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        flushes.iter().try_for_each(|flush| flush.flush()).map_err(Error::Flush)
    }

    /// Adds a queue pair on which messages can arrive.
    pub(super) fn open(&self, pair: PairId, strand: Strand) {
        self.state().streams.open(pair, strand);
    }

    /// Removes queue pairs, after taking what has arrived on them.
    pub(super) fn close(&self, pairs: impl Iterator<Item = PairId>) {
        // What fails here fails again where somebody hears of it.
        let _ = self.take();
        let mut state = self.state();
        pairs.for_each(|pair| state.streams.close(pair));
    }

    /// Takes all messages that have arrived, and returns whether there were any.
    pub(crate) fn take(&self) -> Result<bool, Error> {
        let mut state = self.state();
        let mut any = false;
        for number in 0..self.cards.len() {
            any |= self.take_from(&mut state, number)?;
        }
        drop(state);
        if any {
            self.wake();
        }
        Ok(any)
    }

    fn take_from(&self, state: &mut State, number: usize) -> Result<bool, Error> {
        let card = &self.cards[number];
        let mut any = false;
        loop {
            let State { batch, .. } = &mut *state;
            batch.resize(BATCH, ibv_wc::default());
            let taken = card.cq.poll(batch)?;
            if taken > 0 {
                self.flush()?;
            }
            for index in 0..taken {
                let completion = state.batch[index];
                any |= arrive(&mut state.streams, (number, card), &completion);
                // On an error only the number of the request is sure.
                let sent = completion.status == ibv_wc_status::SUCCESS
                    && completion.opcode.0 & ibv_wc_opcode::RECV.0 == 0;
                if !sent {
                    card.receive(completion.wr_id)?;
                }
            }
            if taken < BATCH {
                return Ok(any);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Whole after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an engine whose thread sleeps until a flag changes.
    pub(crate) fn add(&self, alarm: &Arc<Alarm>) {
        let mut alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.retain(|alarm| alarm.strong_count() > 0);
        alarms.push(Arc::downgrade(alarm));
    }

    /// Wakes the sleeping threads after a flag was stored.
    pub(crate) fn wake(&self) {
        // Orders the store before the look for sleepers; they announce themselves before they look.
        fence(Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) == 0 {
            return;
        }
        let alarms = self.alarms.lock().unwrap_or_else(PoisonError::into_inner);
        alarms.iter().filter_map(Weak::upgrade).for_each(|alarm| alarm.ring());
    }

    /// Requests an event at the next arrival.
    pub(crate) fn arm(&self) -> Result<(), Error> {
        self.cards.iter().try_for_each(|card| card.cq.arm())
    }

    /// Takes the events that ended a sleep.
    pub(crate) fn drain_events(&self) {
        let state = self.state();
        self.cards.iter().for_each(|card| card.cq.drain_events());
        drop(state);
    }
}

/// Processes one completion and returns whether it stored a flag.
fn arrive(streams: &mut Streams, (number, card): (usize, &Card), completion: &ibv_wc) -> bool {
    if completion.status != ibv_wc_status::SUCCESS {
        return false;
    }
    let pair = (number, completion.qp_num);
    match completion.opcode {
        ibv_wc_opcode::RECV if completion.byte_len as usize == MESSAGE_BYTES => {
            streams.message(pair, card.message(completion.wr_id))
        }
        ibv_wc_opcode::RECV_RDMA_WITH_IMM => streams.immediate(pair, completion.imm_data),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Needed;

    impl Flush for Needed {
        fn flush(&self) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn peers_write_flags_or_what_has_come_is_flushed_but_never_both() {
        let arrivals = || Arrivals::new(Arc::from(Vec::new()));
        let (written, flushed) = (arrivals(), arrivals());
        assert!(written.allow_writes());
        let error = written.flush_with(Arc::new(Needed)).unwrap_err().to_string();
        assert!(error.ends_with("set `signal` to Message"), "{error}");
        flushed.flush_with(Arc::new(Needed)).unwrap();
        assert!(!flushed.allow_writes() && !flushed.silent.load(Ordering::SeqCst));
    }
}
