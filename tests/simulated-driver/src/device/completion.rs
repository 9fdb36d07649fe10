//! Implements a one-time completion that queues and callers wait for.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::sync::lock;

/// How often a waiting thread checks whether to give up.
const LOOK: Duration = Duration::from_millis(5);

/// Not done at first; done from then on.
#[derive(Debug, Default)]
pub(crate) struct Completion {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// When it was done.
    done: Option<Instant>,
    /// Number of threads that wait.
    waiting: usize,
}

impl Completion {
    pub(crate) fn finish(&self) {
        let mut state = lock(&self.state);
        state.done.get_or_insert_with(Instant::now);
        // A notification is a system call even if nobody waits.
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.at().is_some()
    }

    /// Returns when it was done.
    pub(crate) fn at(&self) -> Option<Instant> {
        lock(&self.state).done
    }

    /// Waits until it is done. Returns `false` if `give_up` returned true first.
    pub(crate) fn wait(&self, mut give_up: impl FnMut() -> bool) -> bool {
        let mut state = lock(&self.state);
        while state.done.is_none() {
            if give_up() {
                return false;
            }
            state.waiting += 1;
            let waited = self.changed.wait_timeout(state, LOOK);
            state = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
            state.waiting -= 1;
        }
        true
    }
}
