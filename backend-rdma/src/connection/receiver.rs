//! Receives signals of peers over RDMA, and stores the signalled flags in this rank's memory.
//!
//! A peer may not write a flag directly, because not every NIC guarantees that the data of a write arrives in
//! order. A signal is therefore a message behind the data, on the same queue pair. Its completion here proves
//! that the data has arrived, and only then this rank stores the flag.
//!
//! A message names its flag by registration and word, so a message for freed memory finds nothing. It also
//! gives the flag a short id that this queue pair knows from then on: if the next value is only a little
//! larger, it comes as the immediate value of a write, in one request with the last bytes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ibverbs_sys::{ibv_wc, ibv_wc_opcode, ibv_wc_status};
use peerlane_hal::Flush;
use peerlane_toolkit::Sleepers;

use super::signals::{Message, QpId, QpRole, SignalStreams};
use crate::error::Error;
use crate::nic::{MESSAGE_BYTES, Nic};
use crate::registration::Registration;

const POLL_BATCH: usize = 32;

#[derive(Debug)]
pub(crate) struct SignalReceiver {
    pub(crate) nics: Arc<[Nic]>,
    state: Mutex<State>,
    pub(crate) sleepers: Arc<Sleepers>,
    /// Whether peers write flags directly by RDMA, so that no thread may sleep long, because such a write
    /// causes no event.
    pub(crate) direct_writes: AtomicBool,
    /// The device flushes that run before a flag is stored, so that devices see the received data.
    flushes: Mutex<Vec<Arc<dyn Flush>>>,
}

#[derive(Debug, Default)]
struct State {
    streams: SignalStreams,
    completions: Vec<ibv_wc>,
}

// SAFETY: `ibv_wc` holds numbers only.
unsafe impl Send for State {}

impl SignalReceiver {
    pub(crate) fn new(nics: Arc<[Nic]>) -> Self {
        Self {
            nics,
            state: Mutex::default(),
            sleepers: Arc::default(),
            direct_writes: AtomicBool::new(false),
            flushes: Mutex::default(),
        }
    }

    pub(crate) fn add_flags(&self, generation: u64, registration: &Registration) {
        let (base, count) = (registration.base.cast(), registration.bytes / 8);
        // SAFETY: the registration's owner calls `remove_flags` before it frees the memory.
        unsafe { self.state().streams.add_flags(generation, base, count) };
    }

    pub(crate) fn remove_flags(&self, generation: u64) {
        self.state().streams.remove_flags(generation);
    }

    pub(crate) fn add_flush(&self, flush: Arc<dyn Flush>) -> Result<(), Error> {
        let mut flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.direct_writes.load(Ordering::SeqCst) {
            return Err(Error::unavailable(
                "peers already write the flags of this rank directly, but its device memory must be flushed \
                 before a flag is visible; set `signal` to Message"
                    .to_owned(),
            ));
        }
        if !flushes.iter().any(|known| Arc::ptr_eq(known, &flush)) {
            flushes.push(flush);
        }
        Ok(())
    }

    /// Allows peers to write flags by RDMA, unless a device flush must run before a flag becomes visible.
    ///
    /// Returns whether direct writes are allowed.
    pub(super) fn allow_direct_writes(&self) -> bool {
        let flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        if !flushes.is_empty() {
            return false;
        }
        // Stored under the lock, so that either `add_flush` sees it, or this call sees the flush.
        self.direct_writes.store(true, Ordering::SeqCst);
        drop(flushes);
        // A thread that sleeps already would not see a flag that is written without a message.
        self.wake();
        true
    }

    fn flush(&self) -> Result<(), Error> {
        let flushes = self.flushes.lock().unwrap_or_else(PoisonError::into_inner);
        flushes.iter().try_for_each(|flush| flush.flush()).map_err(Error::Flush)
    }

    pub(super) fn open(&self, qp: QpId, role: QpRole) {
        self.state().streams.open(qp, role);
    }

    pub(super) fn close(&self, queue_pairs: impl Iterator<Item = QpId>) {
        // An error is returned again to the next caller that polls.
        let _ = self.poll();
        let mut state = self.state();
        queue_pairs.for_each(|qp| state.streams.close(qp));
    }

    pub(crate) fn poll(&self) -> Result<bool, Error> {
        let mut state = self.state();
        let mut stored = false;
        for nic in 0..self.nics.len() {
            stored |= self.poll_nic(&mut state, nic)?;
        }
        drop(state);
        if stored {
            self.wake();
        }
        Ok(stored)
    }

    fn poll_nic(&self, state: &mut State, nic_index: usize) -> Result<bool, Error> {
        let nic = &self.nics[nic_index];
        let mut stored = false;
        loop {
            state.completions.resize(POLL_BATCH, ibv_wc::default());
            let count = nic.cq.poll(&mut state.completions)?;
            if count > 0 {
                self.flush()?;
            }
            for index in 0..count {
                let completion = state.completions[index];
                stored |= process(&mut state.streams, (nic_index, nic), &completion);
                // After an error only the `wr_id` of the completion is valid.
                let is_send = completion.status == ibv_wc_status::SUCCESS
                    && completion.opcode.0 & ibv_wc_opcode::RECV.0 == 0;
                if !is_send {
                    nic.post_receive(completion.wr_id)?;
                }
            }
            if count < POLL_BATCH {
                return Ok(stored);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state half changed: it is consistent after every statement.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wake(&self) {
        self.sleepers.wake();
    }

    pub(crate) fn request_events(&self) -> Result<(), Error> {
        self.nics.iter().try_for_each(|nic| nic.cq.request_event())
    }

    pub(crate) fn drain_events(&self) {
        let state = self.state();
        self.nics.iter().for_each(|nic| nic.cq.drain_events());
        drop(state);
    }
}

fn process(streams: &mut SignalStreams, (index, nic): (usize, &Nic), completion: &ibv_wc) -> bool {
    if completion.status != ibv_wc_status::SUCCESS {
        return false;
    }
    let qp = (index, completion.qp_num);
    match completion.opcode {
        ibv_wc_opcode::RECV if completion.byte_len as usize == MESSAGE_BYTES => {
            streams.message(qp, Message::decode(&nic.message(completion.wr_id)))
        }
        ibv_wc_opcode::RECV_RDMA_WITH_IMM => streams.immediate(qp, completion.imm_data),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct NoFlush;

    impl Flush for NoFlush {
        fn flush(&self) -> Result<(), String> {
            Ok(())
        }
    }

    #[test]
    fn direct_writes_of_flags_and_flushes_exclude_each_other() {
        let receiver = || SignalReceiver::new(Arc::from(Vec::new()));
        let (written, flushed) = (receiver(), receiver());
        assert!(written.allow_direct_writes());
        let error = written.add_flush(Arc::new(NoFlush)).unwrap_err().to_string();
        assert!(error.ends_with("set `signal` to Message"), "{error}");
        flushed.add_flush(Arc::new(NoFlush)).unwrap();
        assert!(!flushed.allow_direct_writes() && !flushed.direct_writes.load(Ordering::SeqCst));
    }
}
