//! Starts on the caller's stream.

use std::fmt;

use peerlane_hal::{ErrorKind, Rank};

use super::Operation;
use crate::element::Element;
use crate::error::Error;
use crate::group::buffer::MemoryRange;
use crate::run::buffers::Start;

/// A start that [`Operation::start_on`] has enqueued on a stream.
///
/// While it exists, no further start can be made. Drop it when the work that reads this output is on that stream, or on a
/// stream that has been joined to it, so that the work comes before the next start. Dropping does not wait for the start to
/// complete; many starts can be in progress.
#[must_use = "a dropped lease says that what reads the output is already on the stream"]
pub struct Lease<'a, T> {
    operation: &'a mut Operation<T>,
    start: Start,
}

impl<'a, T: Element> Lease<'a, T> {
    pub(super) fn new(operation: &'a mut Operation<T>, start: Start) -> Self {
        Self { operation, start }
    }

    /// Returns the memory of this start's output, for work that is enqueued next.
    ///
    /// With two outputs in turn, consecutive starts have different places. With several output buffers this is the first.
    pub fn output(&self) -> MemoryRange {
        self.operation.memory_of_output(self.start)
    }

    /// Returns the memory of what `rank` contributes to a tensor.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor or rank.
    pub fn piece(&self, tensor: usize, rank: Rank) -> Result<MemoryRange, Error> {
        self.operation.place_of_piece(self.start, tensor, rank)
    }

    /// Returns the number of this start, from 1, or `None` if it was recorded into a graph.
    pub fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured => None,
        }
    }

    /// Waits on the host until the output is complete.
    ///
    /// The timeout of a start begins when it is enqueued, or when the start before it was seen to be complete, whichever is
    /// later.
    ///
    /// # Errors
    /// As [`Operation::run`]; [`InvalidArgument`](ErrorKind::InvalidArgument) if it was recorded into a graph.
    pub fn wait(&mut self) -> Result<(), Error> {
        let epoch = self.eager()?;
        self.operation.state.prepared.wait(epoch, None)
    }

    /// Returns whether the output is complete, without waiting.
    ///
    /// # Errors
    /// As [`wait`](Self::wait), but for the deadline.
    pub fn poll(&mut self) -> Result<bool, Error> {
        let epoch = self.eager()?;
        self.operation.state.prepared.poll(epoch)
    }

    fn eager(&self) -> Result<u64, Error> {
        self.epoch().ok_or_else(|| {
            let text =
                "this start was recorded into a graph and has not run; wait for the replay of the \
                 graph";
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

impl<T> fmt::Debug for Lease<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("start", &self.start).finish_non_exhaustive()
    }
}
