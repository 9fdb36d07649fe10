//! Where the ranks of a check meet: blobs exchanged out of band, and news of a failure.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use peerlane_hal::{Deadline, Rank};

use crate::failure::{Failure, Outcome};
use crate::harness::OwnMemory;

/// Shared by all ranks of a check.
pub(crate) struct Board {
    ranks: usize,
    timeout: Duration,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// One blob a rank, for each round of the exchange.
    rounds: Vec<Vec<Option<Vec<u8>>>>,
    failed: Option<Rank>,
    /// Registered memory must outlive every import, also when a rank fails early.
    own_memory: Vec<Arc<dyn OwnMemory>>,
}

impl Board {
    pub(crate) fn new(ranks: usize, timeout: Duration) -> Self {
        Self { ranks, timeout, state: Mutex::default(), changed: Condvar::new() }
    }

    /// Everybody's blob of this round, once all have come.
    pub(crate) fn exchange(
        &self,
        rank: Rank,
        round: usize,
        blob: Vec<u8>,
    ) -> Outcome<Vec<Vec<u8>>> {
        let deadline = Deadline::after(self.timeout);
        let mut state = self.state();
        if state.rounds.len() <= round {
            state.rounds.resize(round + 1, vec![None; self.ranks]);
        }
        state.rounds[round][rank.index()] = Some(blob);
        self.changed.notify_all();
        loop {
            // Looked at first: who has all blobs can go on, whatever happens to the others.
            if let Some(blobs) = state.rounds[round].iter().cloned().collect() {
                return Ok(blobs);
            }
            if let Some(failed) = state.failed {
                return Err(Failure::echo(format!("rank {failed} failed")));
            }
            if deadline.has_passed() {
                let missing =
                    Rank::all(self.ranks).find(|r| state.rounds[round][r.index()].is_none());
                let missing = missing.map_or_else(String::new, |rank| rank.to_string());
                return Err(Failure::echo(format!("rank {missing} never came to meeting {round}")));
            }
            let wait = self.changed.wait_timeout(state, deadline.remaining());
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    pub(crate) fn fail(&self, rank: Rank) {
        self.state().failed.get_or_insert(rank);
        self.changed.notify_all();
    }

    pub(crate) fn keep(&self, memory: Arc<dyn OwnMemory>) {
        self.state().own_memory.push(memory);
    }

    /// A bound for a loop that waits for `what`.
    pub(crate) fn patience(&self, what: impl Into<String>) -> Patience<'_> {
        Patience { board: self, what: what.into(), deadline: Deadline::after(self.timeout) }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A rank that panicked has left every blob whole.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends a loop when its time is over or another rank has failed.
pub(crate) struct Patience<'a> {
    board: &'a Board,
    what: String,
    deadline: Deadline,
}

impl Patience<'_> {
    /// Fails if it makes no sense to go on; `seen` says how far it came.
    pub(crate) fn check(&self, seen: impl FnOnce() -> String) -> Outcome {
        if self.deadline.has_passed() {
            let (what, timeout, seen) = (&self.what, self.deadline.timeout(), seen());
            return Err(Failure::new(format!("waited {timeout:?} for {what}; seen {seen}")));
        }
        match self.board.state().failed {
            None => Ok(()),
            Some(rank) => Err(Failure::echo(format!("rank {rank} failed"))),
        }
    }
}
