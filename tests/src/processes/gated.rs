//! Halts a rank at a chosen exchange of its bootstrap.

use std::fmt;
use std::sync::Arc;

use peerlane_collectives::bootstrap::{Bootstrap, Listener, ProcessState};
use peerlane_collectives::error::Error;
use peerlane_hal::{Deadline, Rank};

/// Label that selects the goodbye.
pub const LEAVE: &str = "goodbye";

/// Calls back just before one exchange of a bootstrap, or before its goodbye.
pub struct Gated<B> {
    inner: B,
    label: Option<&'static str>,
    halt: Box<dyn Fn() + Send + Sync>,
}

impl<B> Gated<B> {
    /// Creates a bootstrap that calls `halt` before the exchange with this label.
    pub fn new(
        inner: B,
        label: Option<&'static str>,
        halt: impl Fn() + Send + Sync + 'static,
    ) -> Self {
        Self { inner, label, halt: Box::new(halt) }
    }

    fn pass(&self, label: &str) {
        if self.label == Some(label) {
            (self.halt)();
        }
    }
}

// SAFETY: all calls are passed on to a bootstrap that upholds the contract.
unsafe impl<B: Bootstrap> Bootstrap for Gated<B> {
    fn rank(&self) -> Rank {
        self.inner.rank()
    }

    fn ranks(&self) -> usize {
        self.inner.ranks()
    }

    fn host(&self) -> &str {
        self.inner.host()
    }

    fn exchange(
        &self,
        label: &str,
        mine: &[u8],
        deadline: Deadline,
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.pass(label);
        self.inner.exchange(label, mine, deadline)
    }

    fn missing(&self) -> Vec<Rank> {
        self.inner.missing()
    }

    fn broadcast(&self, message: &[u8]) -> Result<(), Error> {
        self.inner.broadcast(message)
    }

    fn relay(&self) -> Option<Rank> {
        self.inner.relay()
    }

    fn process(&self, rank: Rank) -> ProcessState {
        self.inner.process(rank)
    }

    fn relay_process(&self) -> ProcessState {
        self.inner.relay_process()
    }

    fn shares_process(&self) -> bool {
        self.inner.shares_process()
    }

    fn abort(&self, record: &[u8]) -> Result<(), Error> {
        self.inner.abort(record)
    }

    fn listen(&self, listener: Arc<dyn Listener>) {
        self.inner.listen(listener);
    }

    fn leave(&self, deadline: Deadline) -> Result<(), Error> {
        self.pass(LEAVE);
        self.inner.leave(deadline)
    }

    fn disconnect(&self) {
        self.inner.disconnect();
    }

    fn shrink(&self, excluded: &[Rank], deadline: Deadline) -> Result<Box<dyn Bootstrap>, Error> {
        self.inner.shrink(excluded, deadline)
    }

    fn subgroup(&self, number: u32, members: &[Rank]) -> Result<Box<dyn Bootstrap>, Error> {
        self.inner.subgroup(number, members)
    }
}

impl<B> fmt::Debug for Gated<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gated").field("label", &self.label).finish_non_exhaustive()
    }
}
