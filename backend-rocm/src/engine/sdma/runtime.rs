//! Defines the interface of a runtime that copies with SDMA engines, and implements it for tests.

use std::fmt;
use std::time::Duration;

use peerlane_toolkit::Fault;

use super::set::SdmaId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Put,
    Get,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CopyCommand {
    /// The rank at the other end of the copy, which for a self copy is this rank.
    pub(crate) peer: usize,
    pub(crate) direction: Direction,
    /// The SDMA engine that makes the copy, or `None` if the runtime selects one.
    pub(crate) engine: Option<SdmaId>,
    pub(crate) span: Span,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) bytes: u64,
}

impl Span {
    pub(super) fn piece(self, at: u64, bytes: u64) -> Self {
        Self { dst: self.dst + at, src: self.src + at, bytes }
    }

    /// Returns whether two copies must keep their order, because one writes bytes that the other reads or
    /// writes.
    pub(super) fn conflicts_with(self, other: Self) -> bool {
        let overlap = |one: u64, two: u64| one < two + other.bytes && two < one + self.bytes;
        overlap(self.dst, other.dst) || overlap(self.dst, other.src) || overlap(self.src, other.dst)
    }
}

#[derive(Debug)]
pub(crate) enum Submission<E> {
    Accepted,
    NoResources,
    /// The runtime rejected the copy, perhaps only for the selected SDMA engine.
    Rejected(E),
}

/// A runtime that copies with SDMA engines and reports completion by signals.
///
/// Each signal comes with one word that engines can read. The value of a signal is 1 while its copy runs, 0
/// when the copy is complete, and negative if it failed.
///
/// # Safety
/// A copy accesses only its spans, only before its signal is 0 or negative, and after the copies that it depends on if
/// [`waits_for_signals`](Self::waits_for_signals) says so. The word of a signal stays valid until the runtime is dropped, or for ever
/// after [`leak`](Self::leak).
pub(crate) unsafe trait SdmaRuntime: fmt::Debug + Send + 'static {
    type Error: peerlane_hal::Error + Clone + From<Fault>;

    fn signals(&self) -> usize;

    /// Returns whether the runtime itself delays a copy until its dependencies are complete. If not, the caller submits
    /// it only then.
    fn waits_for_signals(&self) -> bool;

    /// Sets a completion signal, on which no copy may depend, to 1 for the next copy.
    fn arm(&self, signal: usize);

    /// Returns the value of a completion signal; once the value is 0, the copied bytes are visible.
    fn value(&self, signal: usize) -> i64;

    /// Sets a completion signal to 0, so that copies that depend on a failed one can run.
    fn clear(&self, signal: usize);

    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }

    /// Stores a value in the signal's word of host memory, and returns its address for SDMA engines. No copy may read
    /// the word at this time.
    fn store_word(&self, signal: usize, value: u64) -> u64;

    /// Submits a copy that starts once the signals in `dependencies` are 0, and that completes `signal`.
    ///
    /// # Safety
    /// The spans must be valid until the signal is complete, without a data race.
    unsafe fn copy(
        &mut self,
        copy: &CopyCommand,
        dependencies: &[usize],
        signal: usize,
    ) -> Submission<Self::Error>;

    fn copy_error(&self, copy: &CopyCommand, value: i64) -> Self::Error;

    /// Keeps all resources allocated until the process ends, because the device still uses some of them.
    fn leak(&mut self);
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::VecDeque;
    use std::sync::{Arc, Mutex, MutexGuard};

    use super::*;

    const SIGNALS: usize = 24;

    #[derive(Clone, Debug, PartialEq, thiserror::Error)]
    #[error("{0}")]
    pub(crate) struct Failure(pub(crate) String);

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
    struct Job {
        copy: CopyCommand,
        dependencies: Vec<usize>,
        signal: usize,
    }

    #[derive(Debug)]
    pub(crate) struct State {
        signals: Vec<i64>,
        words: Vec<u64>,
        engines: Vec<(Option<SdmaId>, VecDeque<Job>)>,
        pub(crate) log: Vec<CopyCommand>,
        pub(crate) room: usize,
        pub(crate) refuses: fn(&CopyCommand) -> bool,
        pub(crate) fails: fn(&CopyCommand) -> bool,
        pub(crate) ignores_dependencies: bool,
        random: u64,
    }

    impl State {
        fn random(&mut self, below: usize) -> usize {
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            (self.random % below as u64) as usize
        }

        /// Runs one of the copies that may run now, and returns whether there was one.
        ///
        /// It is the first or second copy of a random engine, because an engine may overlap adjacent copies.
        pub(crate) fn run_one(&mut self) -> bool {
            let first = self.random(self.engines.len().max(1));
            let turn = self.random(2);
            for offset in 0..self.engines.len() {
                let engine = (first + offset) % self.engines.len();
                for index in [turn, 1 - turn] {
                    let waits = !self.ignores_dependencies;
                    let is_ready = |job: &Job| {
                        !waits || job.dependencies.iter().all(|signal| self.signals[*signal] == 0)
                    };
                    // A copy that waits blocks the copies after it on the same engine.
                    let jobs = &self.engines[engine].1;
                    if jobs.len() > index && jobs.iter().take(index + 1).all(is_ready) {
                        let job = self.engines[engine].1.remove(index).expect("checked above");
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
                self.signals[job.signal] = -7;
                return;
            }
            // SAFETY: tests copy between their own buffers and the words of this state.
            unsafe {
                std::ptr::copy_nonoverlapping(src as *const u8, dst as *mut u8, bytes as usize);
            }
            self.signals[job.signal] -= 1;
            self.log.push(job.copy);
        }
    }

    /// A test runtime whose engines copy real bytes in a random order that only dependencies restrict.
    #[derive(Clone, Debug)]
    pub(crate) struct TestRuntime(Arc<Mutex<State>>);

    impl TestRuntime {
        pub(crate) fn new(seed: u64) -> Self {
            Self(Arc::new(Mutex::new(State {
                signals: vec![0; SIGNALS],
                words: vec![0; SIGNALS],
                engines: Vec::new(),
                log: Vec::new(),
                room: usize::MAX,
                refuses: |_| false,
                fails: |_| false,
                ignores_dependencies: false,
                random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            })))
        }

        pub(crate) fn state(&self) -> MutexGuard<'_, State> {
            self.0.lock().unwrap()
        }
    }

    // SAFETY: `State::run` makes a copy before it changes its signal, and `run_one` selects copies whose dependencies are complete.
    // The words are in the state.
    unsafe impl SdmaRuntime for TestRuntime {
        type Error = Failure;

        fn signals(&self) -> usize {
            SIGNALS
        }

        fn waits_for_signals(&self) -> bool {
            !self.state().ignores_dependencies
        }

        fn arm(&self, signal: usize) {
            let mut state = self.state();
            let mut jobs = state.engines.iter().flat_map(|(_, jobs)| jobs);
            let is_used =
                jobs.any(|job| job.signal == signal || job.dependencies.contains(&signal));
            assert!(!is_used, "signal {signal} is in use");
            state.signals[signal] = 1;
        }

        fn value(&self, signal: usize) -> i64 {
            self.state().signals[signal]
        }

        fn clear(&self, signal: usize) {
            self.state().signals[signal] = 0;
        }

        fn pause(&self, _time: Duration) {
            self.state().run_one();
        }

        fn store_word(&self, signal: usize, value: u64) -> u64 {
            let mut state = self.state();
            state.words[signal] = value;
            &raw const state.words[signal] as u64
        }

        unsafe fn copy(
            &mut self,
            copy: &CopyCommand,
            dependencies: &[usize],
            signal: usize,
        ) -> Submission<Failure> {
            let mut state = self.state();
            assert!(dependencies.iter().all(|dependency| *dependency != signal));
            if (state.refuses)(copy) {
                return Submission::Rejected(Failure(format!("refused on {:?}", copy.engine)));
            }
            if state.room == 0 {
                state.room = 5;
                return Submission::NoResources;
            }
            state.room -= 1;
            let job = Job { copy: *copy, dependencies: dependencies.to_vec(), signal };
            match state.engines.iter_mut().find(|(engine, _)| *engine == copy.engine) {
                Some((_, jobs)) => jobs.push_back(job),
                None => state.engines.push((copy.engine, [job].into())),
            }
            Submission::Accepted
        }

        fn copy_error(&self, copy: &CopyCommand, value: i64) -> Failure {
            Failure(format!("copy to rank {} ended with {value}", copy.peer))
        }

        fn leak(&mut self) {
            panic!("every copy of a test completes");
        }
    }
}
