//! The ranks of a run, as they talk to each other beside the data.
//!
//! The group owns its bootstrap. A run needs the same one for agreements and results of its own, so
//! both hold it by a shared handle.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use peerlane::bootstrap::{Bootstrap, Listener};
use peerlane::{Deadline, Error, Rank};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::error::{Failure, Result};

/// A shared handle on the bootstrap of a run.
#[derive(Clone)]
pub(crate) struct Circle {
    bootstrap: Arc<dyn Bootstrap>,
    timeout: Duration,
}

impl Circle {
    /// A circle over `bootstrap` in which nobody waits longer than `timeout`.
    pub(crate) fn new(bootstrap: impl Bootstrap + 'static, timeout: Duration) -> Self {
        Self { bootstrap: Arc::new(bootstrap), timeout }
    }

    /// The deadline of a wait that begins now.
    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    /// The longest that a wait may take.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Gives `mine` to every rank and returns what each gave, in rank order.
    ///
    /// # Errors
    /// If a rank is missing or lost, or speaks of something else.
    pub(crate) fn share<T: Serialize + DeserializeOwned>(
        &self,
        label: &str,
        mine: &T,
    ) -> Result<Vec<T>> {
        let mine = serde_json::to_vec(mine).map_err(|error| Failure::failed(error.to_string()))?;
        let parse = |(rank, bytes): (usize, Vec<u8>)| {
            serde_json::from_slice(&bytes).map_err(|error| {
                Failure::failed(format!("what rank {rank} sent for {label:?} is no such: {error}"))
                    .with_advice("run the same build of peerlane on all ranks")
            })
        };
        let all = self.bootstrap.exchange(label, &mine, self.deadline())?;
        all.into_iter().enumerate().map(parse).collect()
    }
}

impl Bootstrap for Circle {
    fn rank(&self) -> Rank {
        self.bootstrap.rank()
    }

    fn ranks(&self) -> usize {
        self.bootstrap.ranks()
    }

    fn host(&self) -> &str {
        self.bootstrap.host()
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> std::result::Result<Vec<Vec<u8>>, Error> {
        self.bootstrap.exchange(label, mine, deadline)
    }

    fn abort(&self, record: &[u8]) -> std::result::Result<(), Error> {
        self.bootstrap.abort(record)
    }

    fn listen(&self, listener: Listener) {
        self.bootstrap.listen(listener);
    }

    fn leave(&self, deadline: Deadline) -> std::result::Result<(), Error> {
        self.bootstrap.leave(deadline)
    }
}

impl fmt::Debug for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Circle")
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}
