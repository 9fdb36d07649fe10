//! A start on the caller's stream, and the right to its output.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use super::AllGather;
use crate::element::Element;
use crate::error::Error;
use crate::group::place::Place;
use crate::run::turns::Start;

/// A start that has been put onto a stream by [`AllGather::start_on`].
///
/// While it lives, no further start can be made. Dropping it is a statement: whatever reads this
/// output has been put onto that stream, or onto one that has been joined to it, so that it comes
/// before whatever the next start is put behind. Nothing waits for the start to complete when a
/// lease is dropped; many starts may be under way.
#[must_use = "a dropped lease says that what reads the output is already on the stream"]
pub struct Lease<'a, T> {
    gather: &'a mut AllGather<T>,
    start: Start,
}

impl<'a, T: Element> Lease<'a, T> {
    pub(super) fn new(gather: &'a mut AllGather<T>, start: Start) -> Self {
        Self { gather, start }
    }

    /// Where this start gathers: what the stream gets next may read it. With two outputs in turn,
    /// neighbouring starts have different ones. With several output buffers this is the first.
    pub fn output(&self) -> Place {
        self.gather.place_of_output(self.start)
    }

    /// Where this start gathers what comes from `rank` of a tensor.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor or rank.
    pub fn piece(&self, tensor: usize, rank: Rank) -> Result<Place, Error> {
        self.gather.place_of_piece(self.start, tensor, rank)
    }

    /// The number of this start, from 1; `None` if it was recorded into a graph.
    pub fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured => None,
        }
    }

    /// Waits on the host until every shard is here. A start has its timeout from when it was made or
    /// the start before it was seen to be complete, whichever is later.
    ///
    /// # Errors
    /// As [`AllGather::run`]; [`InvalidArgument`](ErrorKind::InvalidArgument) if it was recorded
    /// into a graph.
    pub fn wait(&mut self) -> Result<(), Error> {
        let epoch = self.eager()?;
        self.gather.prepared.wait(epoch, None)
    }

    /// Whether every shard is here; never waits.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), but for the deadline.
    pub fn poll(&mut self) -> Result<bool, Error> {
        let epoch = self.eager()?;
        self.gather.prepared.poll(epoch)
    }

    fn eager(&self) -> Result<u64, Error> {
        self.epoch().ok_or_else(|| {
            let text = "this start was recorded into a graph, not run; wait for the graph's replay";
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

impl<T> fmt::Debug for Lease<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("start", &self.start).finish_non_exhaustive()
    }
}
