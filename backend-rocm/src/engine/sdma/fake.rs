//! A runtime for tests: engines that copy real bytes, in an order that only dependencies decide.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use peerlane_toolkit::device::Fault;

use super::hardware::{Copy, Given, Hardware, Span};
use super::placement::SdmaId;

const SLOTS: usize = 24;

/// A failure in words; the backend's own errors are of the runtime.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{0}")]
pub(super) struct Failure(pub(super) String);

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self(fault.to_string())
    }
}

impl peerlane_hal::Error for Failure {
    fn kind(&self) -> peerlane_hal::ErrorKind {
        peerlane_hal::ErrorKind::Other
    }
}

#[derive(Debug)]
pub(super) struct Job {
    copy: Copy,
    after: Vec<usize>,
    slot: usize,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) signals: Vec<i64>,
    pub(super) words: Vec<u64>,
    pub(super) engines: Vec<(Option<SdmaId>, VecDeque<Job>)>,
    pub(super) log: Vec<Copy>,
    /// Copies that are taken before the next one meets a full ring.
    pub(super) room: usize,
    pub(super) refuses: fn(&Copy) -> bool,
    pub(super) fails: fn(&Copy) -> bool,
    /// Copies run whatever they were to wait for.
    pub(super) forgets_to_wait: bool,
    pub(super) random: u64,
}

impl State {
    fn random(&mut self, below: usize) -> usize {
        // Xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    /// Runs one copy that may run: of some engine the first or the second, since an engine may
    /// overlap copies that follow one another. Whether there was one.
    pub(super) fn run_one(&mut self) -> bool {
        let first = self.random(self.engines.len().max(1));
        let turn = self.random(2);
        for offset in 0..self.engines.len() {
            let engine = (first + offset) % self.engines.len();
            for place in [turn, 1 - turn] {
                let waits = !self.forgets_to_wait;
                let ready =
                    |job: &Job| !waits || job.after.iter().all(|slot| self.signals[*slot] == 0);
                // Who waits keeps the engine from whatever is behind.
                let jobs = &self.engines[engine].1;
                let runs = jobs.len() > place && jobs.iter().take(place + 1).all(ready);
                if runs {
                    let job = self.engines[engine].1.remove(place).expect("looked at");
                    self.run(&job);
                    return true;
                }
            }
        }
        false
    }

    fn run(&mut self, job: &Job) {
        let Span { dst, src, bytes } = job.copy.span;
        if (self.fails)(&job.copy) {
            self.signals[job.slot] = -7;
            return;
        }
        // SAFETY: tests copy between their own buffers, and words of this state.
        unsafe {
            std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, bytes as usize);
        }
        self.signals[job.slot] -= 1;
        self.log.push(job.copy);
    }
}

#[derive(Clone, Debug)]
pub(super) struct Fake(Arc<Mutex<State>>);

impl Fake {
    pub(super) fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            signals: vec![0; SLOTS],
            words: vec![0; SLOTS],
            engines: Vec::new(),
            log: Vec::new(),
            room: usize::MAX,
            refuses: |_| false,
            fails: |_| false,
            forgets_to_wait: false,
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
        })))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl Hardware for Fake {
    type Error = Failure;

    fn slots(&self) -> usize {
        SLOTS
    }

    fn waits_for_signals(&self) -> bool {
        !self.state().forgets_to_wait
    }

    fn arm(&self, slot: usize) {
        let mut state = self.state();
        let mut jobs = state.engines.iter().flat_map(|(_, jobs)| jobs);
        let looked_at = jobs.any(|job| job.slot == slot || job.after.contains(&slot));
        assert!(!looked_at, "slot {slot} is in use");
        state.signals[slot] = 1;
    }

    fn value(&self, slot: usize) -> i64 {
        self.state().signals[slot]
    }

    fn excuse(&self, slot: usize) {
        self.state().signals[slot] = 0;
    }

    fn pause(&self, _time: Duration) {
        self.state().run_one();
    }

    fn store_word(&self, slot: usize, value: u64) -> u64 {
        let mut state = self.state();
        state.words[slot] = value;
        &raw const state.words[slot] as u64
    }

    unsafe fn copy(&mut self, copy: &Copy, after: &[usize], slot: usize) -> Given<Failure> {
        let mut state = self.state();
        assert!(after.iter().all(|before| *before != slot));
        if (state.refuses)(copy) {
            return Given::Refused(Failure(format!("refused on {:?}", copy.on)));
        }
        if state.room == 0 {
            state.room = 5;
            return Given::Exhausted;
        }
        state.room -= 1;
        let job = Job { copy: *copy, after: after.to_vec(), slot };
        let on = copy.on;
        match state.engines.iter_mut().find(|(engine, _)| *engine == on) {
            Some((_, jobs)) => jobs.push_back(job),
            None => state.engines.push((on, [job].into())),
        }
        Given::Taken
    }

    fn failure(&self, copy: &Copy, value: i64) -> Failure {
        Failure(format!("copy to rank {} ended with {value}", copy.peer))
    }

    fn abandon(&mut self) {
        panic!("everything here ends");
    }
}
