//! Defines the handle of a start that runs beside the work on a stream.

use std::any::Any;
use std::fmt;

use peerlane_hal::{Deadline, ErrorKind, Rank, Stream};
use std::time::Duration;

use super::handles::BlockPart;
use super::{OpenStart, Operation, OutputPart, State, begin_use};
use crate::error::Error;
use crate::group::buffer::MemoryRange;
use crate::run::buffers::Start;

impl State {
    pub(super) fn start_beside(&mut self, stream: &dyn Any) -> Result<Start, Error> {
        if !self.chunks.any() {
            let text = "the operation tells no arrivals and waits for no departures; prepare it with \
                        `arrivals()` or `departures()`, or use `start_on`";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }
        if !self.prepared.departs_in_one_lane() {
            let text = "a lane of the network reads the input too, which cannot wait for a stream; use `start` and let \
                        the blocks depart on the host";
            return Err(Error::new(ErrorKind::InvalidArgument, text));
        }

        // Held until the start is open.
        let begun = begin_use(&self.uses, &self.prepared, true)?;
        let start = self.prepared.start_beside(stream, self.timeout)?;
        drop(begun);
        self.last = start;
        Ok(start)
    }
}

impl<T> Operation<T> {
    /// Starts the operation behind the work that the caller's stream holds now, and beside what is
    /// enqueued later. Collective.
    ///
    /// The operation must be prepared with [`arrivals`](super::OperationBuilder::arrivals) or
    /// [`departures`](super::OperationBuilder::departures). The stream does not wait for the start.
    /// Instead, any stream can wait for the arrival of a block by [`BesideStart::wait_on`], and
    /// each block of the input departs behind the work of a stream by [`BesideStart::depart_on`].
    /// When the handle is finished or dropped, the work that `stream` holds later follows the whole
    /// start and everything that the streams of the handle held until then.
    ///
    /// A start with departures reads nothing from the input before it departs. One without
    /// departures reads the input after the work that `stream` holds now, so do not overwrite the
    /// input before the handle is finished.
    ///
    /// While the stream captures, the start and its handles are recorded into the graph. For that
    /// the operation must be [`capturable`](super::OperationBuilder::capturable). All streams of
    /// the handle must then be part of the capture.
    ///
    /// Deadlines, aborts and threads are those of [`start_on`](Self::start_on). If a block never
    /// departs, the group ends when the timeout of the operation has passed, by an error that names
    /// this rank and the block.
    ///
    /// # Errors
    /// As [`start_on`](Self::start_on); and [`InvalidArgument`](ErrorKind::InvalidArgument) if the
    /// operation has no handles, or if its blocks depart in a lane of the network.
    pub fn start_beside<'a, S: Stream>(
        &'a mut self,
        stream: &'a S,
    ) -> Result<BesideStart<'a, T>, Error> {
        let start = self.state.start_beside(stream)?;
        Ok(BesideStart { operation: self, stream, readers: Vec::new(), start, is_joined: false })
    }
}

/// A handle to a start that runs beside the work on streams.
///
/// [`Operation::start_beside`] returns it. While it exists, no further start can be made. It is
/// finished when what reads the output is on the streams that it knows: those that
/// [wait](Self::wait_on) for a block, and the one that the start began on.
#[must_use = "a dropped handle says that what reads the output is already on the streams"]
pub struct BesideStart<'a, T> {
    operation: &'a mut Operation<T>,
    stream: &'a dyn Any,
    /// The other streams that read the output.
    readers: Vec<&'a dyn Any>,
    start: Start,
    is_joined: bool,
}

impl<'a, T> BesideStart<'a, T> {
    /// Has later work on a stream follow the arrival of a block in the output.
    ///
    /// The stream reads the block before the next start overwrites it, and before the work that the
    /// stream of the start holds after [`finish`](Self::finish). It can wait for several blocks,
    /// and several streams can wait for one.
    ///
    /// If the group ends, the wait passes, and the block is undefined: check for an error before
    /// results leave the program.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the operation tells no arrivals, no such
    /// block arrives on this rank, or the lane must first read a block that has not departed;
    /// [`Mismatch`](ErrorKind::Mismatch) for a stream of another backend or device; the reason why
    /// the group has ended.
    pub fn wait_on<S: Stream>(
        &mut self,
        block: impl Into<BlockPart>,
        stream: &'a S,
    ) -> Result<(), Error> {
        let stream: &dyn Any = stream;
        self.operation.state.order_after_arrival(block.into(), stream)?;
        self.add_reader(stream);
        Ok(())
    }

    /// Lets the start read a block of the input behind the work that a stream holds now.
    ///
    /// The caller may overwrite the block again after the handle is finished, on the stream of the
    /// start.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the operation waits for no departures,
    /// the start reads no such block, or the block has departed already;
    /// [`Mismatch`](ErrorKind::Mismatch) for a stream of another backend or device; the reason why
    /// the group has ended.
    pub fn depart_on<S: Stream>(
        &mut self,
        block: impl Into<BlockPart>,
        stream: &S,
    ) -> Result<(), Error> {
        self.operation.state.depart(block.into(), Some(stream))
    }

    /// Returns whether a block has arrived, without blocking.
    ///
    /// # Errors
    /// As [`Started::has_arrived`](super::Started::has_arrived);
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the start was recorded into a graph.
    pub fn has_arrived(&mut self, block: impl Into<BlockPart>) -> Result<bool, Error> {
        let epoch = self.eager()?;
        self.operation.state.has_arrived(epoch, block.into())
    }

    /// Blocks the calling thread until a block has arrived, but at most for `limit`. Returns
    /// whether it has.
    ///
    /// # Errors
    /// As [`has_arrived`](Self::has_arrived), and [`Timeout`](ErrorKind::Timeout) when the timeout
    /// of the operation passes.
    pub fn wait_for_block(
        &mut self,
        block: impl Into<BlockPart>,
        limit: Duration,
    ) -> Result<bool, Error> {
        let state = &self.operation.state;
        let start =
            OpenStart { epoch: self.eager()?, deadline: state.prepared.tracker().deadline() };
        state.wait_arrival(start, block.into(), Some(Deadline::after(limit)))
    }

    /// Returns the address range of the output, as [`Lease::output`](super::Lease::output).
    pub fn output(&self) -> MemoryRange {
        self.operation.state.output_memory(self.start)
    }

    /// Returns the address range of a part of the output, such as the block of a [`Rank`].
    ///
    /// # Errors
    /// As [`Lease::output_of`](super::Lease::output_of).
    pub fn output_of(&self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        self.operation.state.memory_of(self.start, part.into())
    }

    /// Returns the address range of the block for a rank in the input.
    ///
    /// # Errors
    /// As [`Operation::input_block_memory`].
    pub fn input_block_memory(&mut self, receiver: Rank) -> Result<MemoryRange, Error> {
        self.operation.state.departing_memory(receiver)
    }

    /// Returns the sequence number of this start, or `None` if a graph has recorded it.
    pub fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured(_) => None,
        }
    }

    /// Has the later work of the stream of the start follow the whole start, and what the streams
    /// that waited for blocks hold now.
    ///
    /// Dropping the handle does the same, without the error.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a block has not departed, which is named;
    /// the reason why the group has ended.
    pub fn finish(mut self) -> Result<(), Error> {
        self.join()
    }

    fn join(&mut self) -> Result<(), Error> {
        if std::mem::replace(&mut self.is_joined, true) {
            return Ok(());
        }
        self.operation.state.prepared.join_beside(&self.readers, self.stream)
    }

    fn add_reader(&mut self, stream: &'a dyn Any) {
        let is_same = |known: &&dyn Any| std::ptr::addr_eq(*known, stream);
        if !is_same(&self.stream) && !self.readers.iter().any(is_same) {
            self.readers.push(stream);
        }
    }

    fn eager(&self) -> Result<u64, Error> {
        self.epoch().ok_or_else(|| {
            let text = "this start was recorded into a graph and has not run; have a stream of the capture wait for \
                        its blocks";
            Error::new(ErrorKind::InvalidArgument, text)
        })
    }
}

impl<T> Drop for BesideStart<'_, T> {
    fn drop(&mut self) {
        // The next call of the operation returns the error of a group that has ended.
        let _ = self.join();
    }
}

impl<T> fmt::Debug for BesideStart<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BesideStart").field("start", &self.start).finish_non_exhaustive()
    }
}
