//! Defines the handle of a start on a stream.

use std::fmt;

use peerlane_hal::ErrorKind;

use super::{Operation, OutputPart};
use crate::error::Error;
use crate::group::buffer::MemoryRange;
use crate::run::buffers::Start;

/// A handle to an operation that [`Operation::start_on`] has enqueued on a stream.
///
/// While it exists, no further start can be made. Drop it when the work that reads this output is
/// on that stream, or on a stream that has been joined to it, so that the work comes before the
/// next start. Dropping does not wait for the start to complete; many starts can be in progress.
#[must_use = "a dropped lease says that what reads the output is already on the stream"]
pub struct Lease<'a, T> {
    operation: &'a mut Operation<T>,
    start: Start,
}

impl<'a, T> Lease<'a, T> {
    pub(super) fn new(operation: &'a mut Operation<T>, start: Start) -> Self {
        Self { operation, start }
    }

    /// Returns the address range of the output that this start writes, for work that is enqueued
    /// after it.
    ///
    /// With two outputs in turn, consecutive starts have different places. With several output
    /// buffers this is the first.
    pub fn output(&self) -> MemoryRange {
        self.operation.state.output_memory(self.start)
    }

    /// Returns the address range of a part of the output that this start writes.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such part, or it is not
    /// contiguous.
    pub fn output_of(&self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        self.operation.state.memory_of(self.start, part.into())
    }

    /// Returns the sequence number of this start, counted from 1, or `None` if a graph has recorded
    /// the operation.
    pub fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured(_) => None,
        }
    }

    /// Blocks the calling thread until the output of this start is complete.
    ///
    /// The timeout of a start begins when it is enqueued, or when the start before it was seen to
    /// be complete, whichever is later.
    ///
    /// # Errors
    /// As [`Operation::run`]; [`InvalidArgument`](ErrorKind::InvalidArgument) if it was recorded
    /// into a graph.
    pub fn wait(&mut self) -> Result<(), Error> {
        let epoch = self.eager()?;
        self.operation.state.prepared.wait(epoch, None)
    }

    /// Returns whether the output of this start is complete, without blocking.
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
