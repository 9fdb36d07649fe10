//! Defines the handle of a start that runs beside the work on a stream.

use std::any::Any;
use std::fmt;
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank, Stream};

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
    /// the operation must be [`capturable`](super::OperationBuilder::capturable). A stream that
    /// waits for a block becomes part of the capture, and one behind which a block departs must be.
    ///
    /// Deadlines, aborts and threads are those of [`start_on`](Self::start_on). If a block never
    /// departs, the group ends when the timeout of the operation has passed, by an error that names
    /// this rank and the block.
    ///
    /// # Errors
    /// As [`start_on`](Self::start_on); and [`InvalidArgument`](ErrorKind::InvalidArgument) if the
    /// operation has no handles, or if its blocks depart in a lane of the network.
    pub fn start_beside<S: Stream + Clone + Send>(
        &mut self,
        stream: &S,
    ) -> Result<BesideStart<'_, T>, Error> {
        let handle = Handle::new(&mut self.state, stream)?;
        Ok(BesideStart { operation: self, handle })
    }

    /// Starts the operation as [`start_beside`](Self::start_beside), and returns a handle that owns
    /// it, so that the handle can be stored. Collective.
    ///
    /// # Errors
    /// As [`start_beside`](Self::start_beside). The operation is returned with the error.
    pub fn into_beside<S: Stream + Clone + Send>(
        mut self,
        stream: &S,
    ) -> Result<OwnedBesideStart<T>, Box<(Self, Error)>> {
        match Handle::new(&mut self.state, stream) {
            Ok(handle) => Ok(OwnedBesideStart { operation: Some(self), handle }),
            Err(error) => Err(Box::new((self, error))),
        }
    }
}

/// What the handles of a start beside a stream are made of.
struct Handle {
    stream: Box<dyn Any + Send>,
    /// The streams that read the output.
    readers: Vec<Box<dyn Any + Send>>,
    start: Start,
    is_joined: bool,
}

impl Handle {
    fn new<S: Stream + Clone + Send>(state: &mut State, stream: &S) -> Result<Self, Error> {
        let start = state.start_beside(stream)?;
        let stream = Box::new(stream.clone());
        Ok(Self { stream, readers: Vec::new(), start, is_joined: false })
    }

    fn wait_on<S: Stream + Clone + Send>(
        &mut self,
        state: &State,
        block: BlockPart,
        stream: &S,
    ) -> Result<(), Error> {
        state.order_after_arrival(block, stream)?;
        self.readers.push(Box::new(stream.clone()));
        Ok(())
    }

    fn wait_for_block(
        &self,
        state: &State,
        block: BlockPart,
        limit: Duration,
    ) -> Result<bool, Error> {
        let deadline = state.prepared.tracker().deadline();
        let start = OpenStart { epoch: self.eager()?, deadline };
        state.wait_arrival(start, block, Some(Deadline::after(limit)))
    }

    fn join(&mut self, state: &State) -> Result<(), Error> {
        // In a forked child, streams and engines are those of the parent.
        let is_of_parent = state.prepared.runtime().driver.is_of_parent();
        if std::mem::replace(&mut self.is_joined, true) || is_of_parent {
            return Ok(());
        }

        let readers: Vec<&dyn Any> =
            self.readers.iter().map(|reader| &**reader as &dyn Any).collect();
        state.prepared.join_beside(&readers, &*self.stream)
    }

    fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured(_) => None,
        }
    }

    fn eager(&self) -> Result<u64, Error> {
        self.epoch().ok_or_else(|| {
            let text = "this start was recorded into a graph and has not run; have a stream of the \
                        capture wait for its blocks";
            Error::new(ErrorKind::InvalidArgument, text)
        })
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
    handle: Handle,
}

impl<T> BesideStart<'_, T> {
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
    pub fn wait_on<S: Stream + Clone + Send>(
        &mut self,
        block: impl Into<BlockPart>,
        stream: &S,
    ) -> Result<(), Error> {
        self.handle.wait_on(&self.operation.state, block.into(), stream)
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
        let epoch = self.handle.eager()?;
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
        self.handle.wait_for_block(&self.operation.state, block.into(), limit)
    }

    /// Returns the address range of the output, as [`Lease::output`](super::Lease::output).
    pub fn output(&self) -> MemoryRange {
        self.operation.state.output_memory(self.handle.start)
    }

    /// Returns the address range of a part of the output, such as the block of a [`Rank`].
    ///
    /// # Errors
    /// As [`Lease::output_of`](super::Lease::output_of).
    pub fn output_of(&self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        self.operation.state.memory_of(self.handle.start, part.into())
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
        self.handle.epoch()
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
        self.handle.join(&self.operation.state)
    }
}

impl<T> Drop for BesideStart<'_, T> {
    fn drop(&mut self) {
        // The next call of the operation returns the error of a group that has ended.
        let _ = self.handle.join(&self.operation.state);
    }
}

impl<T> fmt::Debug for BesideStart<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BesideStart").field("start", &self.handle.start).finish_non_exhaustive()
    }
}

/// A handle to a start beside streams that owns the operation, and returns it at the end.
///
/// [`Operation::into_beside`] returns it. It has the methods of [`BesideStart`].
#[must_use = "a dropped handle says that what reads the output is already on the streams"]
pub struct OwnedBesideStart<T> {
    /// `None` after the handle has returned the operation.
    operation: Option<Operation<T>>,
    handle: Handle,
}

impl<T> OwnedBesideStart<T> {
    fn state(&self) -> &State {
        &self.operation.as_ref().expect("only `finish` takes it, with the handle").state
    }

    /// Returns the operation, whose starts this handle keeps away.
    pub fn operation(&self) -> &Operation<T> {
        self.operation.as_ref().expect("only `finish` takes it, with the handle")
    }

    /// Has later work on a stream follow the arrival of a block, as [`BesideStart::wait_on`].
    ///
    /// # Errors
    /// As [`BesideStart::wait_on`].
    pub fn wait_on<S: Stream + Clone + Send>(
        &mut self,
        block: impl Into<BlockPart>,
        stream: &S,
    ) -> Result<(), Error> {
        let state = &self.operation.as_ref().expect("only `finish` takes it").state;
        self.handle.wait_on(state, block.into(), stream)
    }

    /// Lets the start read a block behind the work that a stream holds, as
    /// [`BesideStart::depart_on`].
    ///
    /// # Errors
    /// As [`BesideStart::depart_on`].
    pub fn depart_on<S: Stream>(
        &mut self,
        block: impl Into<BlockPart>,
        stream: &S,
    ) -> Result<(), Error> {
        self.state().depart(block.into(), Some(stream))
    }

    /// Waits on the host until a block has arrived, as [`BesideStart::wait_for_block`].
    ///
    /// # Errors
    /// As [`BesideStart::wait_for_block`].
    pub fn wait_for_block(
        &mut self,
        block: impl Into<BlockPart>,
        limit: Duration,
    ) -> Result<bool, Error> {
        self.handle.wait_for_block(self.state(), block.into(), limit)
    }

    /// Returns the address range of the output, as [`BesideStart::output`].
    pub fn output(&self) -> MemoryRange {
        self.state().output_memory(self.handle.start)
    }

    /// Returns the address range of a part of the output, as [`BesideStart::output_of`].
    ///
    /// # Errors
    /// As [`BesideStart::output_of`].
    pub fn output_of(&self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        self.state().memory_of(self.handle.start, part.into())
    }

    /// Finishes the start, as [`BesideStart::finish`], and returns the operation.
    ///
    /// # Errors
    /// As [`BesideStart::finish`]. The operation is returned with the error.
    pub fn finish(mut self) -> (Operation<T>, Result<(), Error>) {
        let operation = self.operation.take().expect("only this function takes it");
        let joined = self.handle.join(&operation.state);
        (operation, joined)
    }
}

impl<T> Drop for OwnedBesideStart<T> {
    fn drop(&mut self) {
        if let Some(operation) = &self.operation {
            // The next call of the group returns the error that has ended it.
            let _ = self.handle.join(&operation.state);
        }
    }
}

impl<T> fmt::Debug for OwnedBesideStart<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let start = &self.handle.start;
        f.debug_struct("OwnedBesideStart").field("start", start).finish_non_exhaustive()
    }
}
