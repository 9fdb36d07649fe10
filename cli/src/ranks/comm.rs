//! Exchanges small messages between the ranks of a run, and compares their options.
//!
//! A group owns its bootstrap. The run needs the same bootstrap for its own messages, so both share
//! it.

use std::sync::Arc;
use std::time::Duration;

use peerlane::bootstrap::{AbortRecord, Bootstrap, Listener, ProcessState};
use peerlane::{Deadline, Error, ErrorKind, Rank};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::error::{Failure, Result};

/// A shared handle to the bootstrap of a run, with the timeout of its waits.
#[derive(Clone)]
pub(crate) struct Comm {
    bootstrap: Arc<dyn Bootstrap>,
    timeout: Duration,
}

impl Comm {
    /// Creates a handle to a bootstrap whose waits end after `timeout`.
    pub(crate) fn new(bootstrap: impl Bootstrap + 'static, timeout: Duration) -> Self {
        Self { bootstrap: Arc::new(bootstrap), timeout }
    }

    /// Tells the other ranks why this one fails, unless the group has already ended.
    pub(crate) fn report(&self, failure: &Failure) {
        let kind = failure.kind().unwrap_or(ErrorKind::Other);
        let record = AbortRecord::failed(self.rank(), kind, failure.text());
        // If it cannot be sent, the other ranks learn that this one is lost.
        let _ = self.abort(&record.encode());
    }

    pub(crate) fn deadline(&self) -> Deadline {
        Deadline::after(self.timeout)
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sends a value to all ranks and returns the values of all ranks, in rank order. Collective.
    pub(crate) fn share<T: Serialize + DeserializeOwned>(
        &self,
        label: &str,
        mine: &T,
    ) -> Result<Vec<T>> {
        let mine = serde_json::to_vec(mine).map_err(|error| Failure::failed(error.to_string()))?;
        let parse = |(rank, bytes): (usize, Vec<u8>)| {
            serde_json::from_slice(&bytes).map_err(|error| {
                Failure::failed(format!(
                    "cannot decode the message of rank {rank} in the exchange {label:?}: {error}"
                ))
                .with_advice("run the same build of peerlane on all ranks")
            })
        };
        let all = self.bootstrap.exchange(label, &mine, self.deadline())?;
        all.into_iter().enumerate().map(parse).collect()
    }

    /// Exchanges the fault that each rank has found, and returns the first one with its rank.
    /// Collective.
    pub(crate) fn first_fault(&self, mine: Option<String>) -> Result<Option<(usize, String)>> {
        let texts = self.share("check", &mine)?;
        Ok(texts.into_iter().enumerate().find_map(|(rank, text)| Some((rank, text?))))
    }
}

// SAFETY: all calls are passed on to a bootstrap that upholds the contract.
unsafe impl Bootstrap for Comm {
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

    fn missing(&self) -> Vec<Rank> {
        self.bootstrap.missing()
    }

    fn broadcast(&self, message: &[u8]) -> std::result::Result<(), Error> {
        self.bootstrap.broadcast(message)
    }

    fn relay(&self) -> Option<Rank> {
        self.bootstrap.relay()
    }

    fn shares_process(&self) -> bool {
        self.bootstrap.shares_process()
    }

    fn abort(&self, record: &[u8]) -> std::result::Result<(), Error> {
        self.bootstrap.abort(record)
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.bootstrap.listen(listener);
    }

    fn leave(&self, deadline: Deadline) -> std::result::Result<(), Error> {
        self.bootstrap.leave(deadline)
    }

    fn process(&self, rank: Rank) -> ProcessState {
        self.bootstrap.process(rank)
    }

    fn relay_process(&self) -> ProcessState {
        self.bootstrap.relay_process()
    }

    fn disconnect(&self) {
        self.bootstrap.disconnect();
    }

    fn shrink(
        &self,
        excluded: &[Rank],
        deadline: Deadline,
    ) -> std::result::Result<Box<dyn Bootstrap>, Error> {
        self.bootstrap.shrink(excluded, deadline)
    }

    fn subgroup(
        &self,
        number: u32,
        members: &[Rank],
    ) -> std::result::Result<Box<dyn Bootstrap>, Error> {
        self.bootstrap.subgroup(number, members)
    }
}

/// The options that must be equal on all ranks, and the seed of the test data.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Settings {
    options: Vec<(String, String)>,
    seed: u64,
}

impl Settings {
    /// Creates the settings of this rank from option names and values, and its seed.
    pub(crate) fn new(
        options: impl IntoIterator<Item = (&'static str, String)>,
        seed: Option<u64>,
    ) -> Self {
        let version = ("version", env!("CARGO_PKG_VERSION").to_owned());
        let options = std::iter::once(version).chain(options);
        Self {
            options: options.map(|(name, value)| (name.to_owned(), value)).collect(),
            seed: seed.unwrap_or_else(|| fastrand::u64(..)),
        }
    }

    /// Compares the settings of all ranks and returns the seed of rank 0. Collective.
    pub(crate) fn agree(self, comm: &Comm) -> Result<u64> {
        let all = comm.share("settings", &self)?;
        for (rank, other) in all.iter().enumerate() {
            self.compare(comm.rank().index(), rank, other)?;
        }
        Ok(all.first().map_or(self.seed, |first| first.seed))
    }

    /// Compares the settings of this rank, `me`, with those of another rank.
    pub(crate) fn compare(&self, me: usize, rank: usize, other: &Self) -> Result<()> {
        let pairs = self.options.iter().zip(&other.options);
        match pairs.into_iter().find(|(mine, theirs)| mine != theirs) {
            None => Ok(()),
            Some(((name, mine), (_, theirs))) => Err(Failure::failed(format!(
                "ranks have different values of {name}: {theirs} on rank {rank}, {mine} on rank \
                 {me}"
            ))
            .with_advice("start all ranks with the same program and the same options")),
        }
    }
}

/// Returns the text that stands for an optional option in the comparison.
pub(crate) fn given(value: Option<String>) -> String {
    value.unwrap_or_else(|| "not given".to_owned())
}
