//! Threads that do one thing after the other, and what they were told while they captured.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// What a stream does; at each replay again, where it is captured.
pub(super) type Job = Arc<dyn Fn() + Send + Sync>;

/// A queue on which a caller computes.
#[derive(Clone)]
pub struct Stream(Arc<Handle>);

/// What a stream was told while it captured.
#[derive(Clone)]
pub struct Graph(Arc<[Job]>);

struct Handle(Arc<Queue>);

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    busy: bool,
    closed: bool,
    captured: Option<Vec<Job>>,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        // A job that panics leaves the state whole, and ends its stream.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        loop {
            let mut state = self.state();
            state.busy = false;
            self.changed.notify_all();
            let job = loop {
                if let Some(job) = state.jobs.pop_front() {
                    break job;
                }
                if state.closed {
                    return;
                }
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            };
            state.busy = true;
            drop(state);
            job();
        }
    }
}

impl Stream {
    /// A stream with nothing to do.
    ///
    /// # Panics
    /// If the system has no thread left.
    pub fn new() -> Self {
        let queue = Arc::new(Queue::default());
        let worker = Arc::clone(&queue);
        let thread = std::thread::Builder::new().name("stream".to_owned());
        thread.spawn(move || worker.work()).expect("a test has a thread for each stream");
        Self(Arc::new(Handle(queue)))
    }

    /// Does `work` after what it was told before; records it if it captures.
    pub fn run(&self, work: impl Fn() + Send + Sync + 'static) {
        self.push(Arc::new(work));
    }

    pub(super) fn push(&self, job: Job) {
        let mut state = self.0.0.state();
        match &mut state.captured {
            Some(captured) => captured.push(job),
            None => state.jobs.push_back(job),
        }
        drop(state);
        self.0.0.changed.notify_all();
    }

    /// Whether it has done everything within `limit`.
    pub fn is_idle_within(&self, limit: Duration) -> bool {
        let queue = &self.0.0;
        let idle = queue
            .changed
            .wait_timeout_while(queue.state(), limit, |state| state.busy || !state.jobs.is_empty());
        let (_state, waited) = idle.unwrap_or_else(PoisonError::into_inner);
        !waited.timed_out()
    }

    /// From now on it records what it is told.
    pub fn begin_capture(&self) {
        self.0.0.state().captured = Some(Vec::new());
    }

    /// What it was told since.
    pub fn end_capture(&self) -> Graph {
        Graph(self.0.0.state().captured.take().unwrap_or_default().into())
    }

    pub(super) fn captures(&self) -> bool {
        self.0.0.state().captured.is_some()
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::new()
    }
}

impl Graph {
    /// Does everything again, on `stream`.
    pub fn replay(&self, stream: &Stream) {
        self.0.iter().for_each(|job| stream.push(Arc::clone(job)));
    }

    /// How many things were recorded.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // What it was told is done all the same.
        self.0.state().closed = true;
        self.0.changed.notify_all();
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("captures", &self.captures()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("jobs", &self.len()).finish()
    }
}
