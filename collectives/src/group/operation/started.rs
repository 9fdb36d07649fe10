//! Defines the handles of starts that are not complete yet, by which a caller waits: it blocks,
//! polls, awaits a future, or watches a descriptor.

use std::fmt;
use std::future::Future;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use peerlane_hal::{Deadline, ErrorKind, Rank};

use super::prepared::FuturePolls;
use super::{Arrival, BlockPart, OpenStart, Operation, OutputPart, State};
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer::MemoryRange;

impl<T> Operation<T> {
    /// Starts the operation and returns a handle by which the caller waits for its completion.
    /// Collective.
    ///
    /// Until then, peers may read the input and write the output.
    ///
    /// Copy engines of GPUs move the bytes by themselves. Engines of the host and of some NICs move
    /// them only while a thread of this rank polls them. These threads do so:
    /// - the caller in [`Started::wait`] and [`Started::poll`], even in those of other operations
    ///   and groups that it uses;
    /// - the progress thread, if the start is awaited as a future or with a
    ///   [descriptor](Started::descriptor), or if
    ///   [`GroupOptions::progress_thread`](crate::group::GroupOptions::progress_thread) is set.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn start(&mut self) -> Result<Started<'_, T>, Error> {
        let start = self.state.start()?;
        Ok(Started { operation: self, start, polls: FuturePolls::default() })
    }

    /// Starts the operation and returns a handle that owns it, so that the handle can be stored.
    /// Collective.
    ///
    /// # Errors
    /// As [`run`](Self::run). The operation is dropped then.
    pub fn into_started(mut self) -> Result<OwnedStart<T>, Error> {
        let start = self.state.start()?;
        Ok(OwnedStart { operation: Some(self), start, polls: FuturePolls::default() })
    }
}

/// A handle to an operation that has started and may not be complete yet.
///
/// It is also a future; any executor can poll it. A poll moves the start and calls the waker
/// itself, so that the executor polls again. When nothing has moved for 100 µs, the progress thread
/// of the group goes on and calls the waker when the start is complete. On the host, a poll copies
/// for up to about a millisecond.
///
/// If the handle is dropped, the start goes on, and the next start of the operation waits for it
/// first.
#[must_use = "a start is finished by `wait` or `.await`"]
pub struct Started<'a, T> {
    operation: &'a mut Operation<T>,
    start: OpenStart,
    polls: FuturePolls,
}

impl<T> Started<'_, T> {
    /// Waits until the output of the operation is complete.
    ///
    /// # Errors
    /// As [`Operation::run`].
    pub fn wait(self) -> Result<(), Error> {
        self.operation.state.wait(self.start)
    }

    /// Waits until the output of the operation is complete, but at most for `limit`. Returns
    /// whether it is complete.
    ///
    /// A limit that passes does not end the group, unlike the timeout of the operation.
    ///
    /// # Errors
    /// As [`Operation::run`].
    pub fn wait_for(&mut self, limit: Duration) -> Result<bool, Error> {
        let OpenStart { epoch, deadline, .. } = self.start;
        let limit = Some(Deadline::after(limit));
        self.operation.state.prepared.wait_until(epoch, Some(deadline), limit)
    }

    /// Returns whether the output of the operation is complete, without blocking.
    ///
    /// # Errors
    /// As [`Operation::run`], but for the deadline.
    pub fn poll(&mut self) -> Result<bool, Error> {
        self.operation.state.prepared.poll(self.start.epoch)
    }

    /// Returns a file descriptor for an event loop, which becomes readable when the start is
    /// complete or the group has ended; do not read from it.
    ///
    /// [`poll`](Self::poll) or [`wait`](Self::wait) then returns the result at once. The operation
    /// keeps the descriptor: it is the same for each start, and the next start makes it unreadable.
    ///
    /// # Errors
    /// As [`Operation::run`]; [`Other`](ErrorKind::Other) if the process has no descriptor or no
    /// thread left.
    pub fn descriptor(&mut self) -> Result<BorrowedFd<'_>, Error> {
        self.operation.state.prepared.descriptor(self.start.epoch)
    }

    /// Returns whether a block has arrived in the output, without blocking.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the operation tells no
    /// [arrivals](super::OperationBuilder::arrivals), or no such block arrives on this rank.
    /// Otherwise as [`poll`](Self::poll).
    pub fn has_arrived(&mut self, block: impl Into<BlockPart>) -> Result<bool, Error> {
        self.operation.state.has_arrived(self.start.epoch, block.into())
    }

    /// Waits until a block has arrived in the output, but at most for `limit`. Returns whether it
    /// has.
    ///
    /// # Errors
    /// As [`has_arrived`](Self::has_arrived), and [`Timeout`](ErrorKind::Timeout) when the timeout
    /// of the operation passes.
    pub fn wait_for_block(
        &mut self,
        block: impl Into<BlockPart>,
        limit: Duration,
    ) -> Result<bool, Error> {
        let limit = Some(Deadline::after(limit));
        self.operation.state.wait_arrival(self.start, block.into(), limit)
    }

    /// Returns a future that is ready when a block has arrived in the output. As the start itself,
    /// any executor can poll it.
    ///
    /// # Errors
    /// As [`has_arrived`](Self::has_arrived).
    pub fn arrival(&mut self, block: impl Into<BlockPart>) -> Result<Arrival<'_>, Error> {
        Arrival::new(&self.operation.state, self.start, block.into())
    }

    /// Lets the start read a block of the input, which the caller has written and does not change
    /// any more.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the operation waits for no
    /// [departures](super::OperationBuilder::departures), the start reads no such block, or the
    /// block has departed already. Otherwise as [`poll`](Self::poll).
    pub fn depart(&mut self, block: impl Into<BlockPart>) -> Result<(), Error> {
        self.operation.state.depart(block.into(), None)
    }

    /// Returns the sequence number of this start of the operation, counted from 1.
    pub fn epoch(&self) -> u64 {
        self.start.epoch
    }
}

impl<T: Element> Started<'_, T> {
    /// Waits until the block of a rank has arrived, and returns its elements in the output.
    ///
    /// # Errors
    /// As [`wait_for_block`](Self::wait_for_block) and [`Operation::output_of`].
    pub fn block(&mut self, rank: Rank) -> Result<&[T], Error> {
        let state = &self.operation.state;
        state.wait_arrival(self.start, rank.into(), None)?;
        element::cast(state.arrived_bytes(rank)?)
    }

    /// Has `write` fill the block for a rank in the input, and lets it depart.
    ///
    /// # Errors
    /// As [`depart`](Self::depart) and [`Operation::input_block_mut`]. If `write` panics, the block
    /// has not departed.
    pub fn fill(&mut self, rank: Rank, write: impl FnOnce(&mut [T])) -> Result<(), Error> {
        let state = &mut self.operation.state;
        write(element::cast_mut(state.departing_bytes(rank)?)?);
        state.depart(rank.into(), None)
    }
}

impl<T> Future for Started<'_, T> {
    type Output = Result<(), Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self { operation, start, polls } = self.get_mut();
        let prepared = &operation.state.prepared;
        prepared.poll_future((start.epoch, &[][..]), start.deadline, polls, context.waker())
    }
}

/// A handle that owns an operation that has started, and returns the operation when the start is
/// complete.
///
/// As [`Started`], it is also a future. If it is dropped, the drop waits until the start is
/// complete or its timeout has passed, because the memory of the operation is in use.
#[must_use = "a start is finished by `wait` or `.await`"]
pub struct OwnedStart<T> {
    /// `None` after the future has returned the operation.
    operation: Option<Operation<T>>,
    start: OpenStart,
    polls: FuturePolls,
}

impl<T> OwnedStart<T> {
    /// Notes that the caller has refused another start, as [`Operation::note_refusal`].
    pub fn note_refusal(&self, error: &Error) {
        if let Some(operation) = &self.operation {
            operation.note_refusal(error);
        }
    }

    fn state(&mut self) -> Result<&mut State, Error> {
        let operation = self.operation.as_mut().ok_or_else(|| {
            let text = "the start was polled again after it had returned its operation";
            Error::new(ErrorKind::InvalidArgument, text)
        })?;
        Ok(&mut operation.state)
    }

    /// Waits until the output of the operation is complete, and returns the operation.
    ///
    /// # Errors
    /// As [`Operation::run`].
    pub fn wait(mut self) -> Result<Operation<T>, Error> {
        let start = self.start;
        self.state()?.wait(start)?;
        Ok(self.operation.take().expect("checked above"))
    }

    /// Waits until the output of the operation is complete, as [`Started::wait_for`].
    ///
    /// # Errors
    /// As [`Operation::run`].
    pub fn wait_for(&mut self, limit: Duration) -> Result<bool, Error> {
        let OpenStart { epoch, deadline, .. } = self.start;
        let limit = Some(Deadline::after(limit));
        self.state()?.prepared.wait_until(epoch, Some(deadline), limit)
    }

    /// Waits until the output of the operation is complete, but at most for `part`, so that the
    /// caller can look at something else, such as signals, before it calls this again. Returns
    /// whether it is complete.
    ///
    /// For other ranks the calls are one wait without a limit: if these wait for another call, the
    /// group ends by a mismatch, as in [`wait`](Self::wait).
    ///
    /// # Errors
    /// As [`Operation::run`].
    pub fn wait_part(&mut self, part: Duration) -> Result<bool, Error> {
        let OpenStart { epoch, deadline, .. } = self.start;
        self.state()?.prepared.wait_part(epoch, Some(deadline), Deadline::after(part))
    }

    /// Returns whether the output of the operation is complete, without blocking.
    ///
    /// # Errors
    /// As [`Operation::run`], but for the deadline.
    pub fn poll(&mut self) -> Result<bool, Error> {
        let epoch = self.start.epoch;
        self.state()?.prepared.poll(epoch)
    }

    /// Returns a file descriptor for an event loop, as [`Started::descriptor`].
    ///
    /// # Errors
    /// As [`Started::descriptor`].
    pub fn descriptor(&mut self) -> Result<BorrowedFd<'_>, Error> {
        let epoch = self.start.epoch;
        self.state()?.prepared.descriptor(epoch)
    }

    /// Waits until a block has arrived, as [`Started::wait_for_block`].
    ///
    /// # Errors
    /// As [`Started::wait_for_block`].
    pub fn wait_for_block(
        &mut self,
        block: impl Into<BlockPart>,
        limit: Duration,
    ) -> Result<bool, Error> {
        let start = self.start;
        self.state()?.wait_arrival(start, block.into(), Some(Deadline::after(limit)))
    }

    /// Lets the start read a block of the input, as [`Started::depart`].
    ///
    /// # Errors
    /// As [`Started::depart`].
    pub fn depart(&mut self, block: impl Into<BlockPart>) -> Result<(), Error> {
        self.state()?.depart(block.into(), None)
    }

    /// Returns the address range of a part of the output, of which the caller knows that it has
    /// arrived.
    ///
    /// # Errors
    /// As [`Lease::output_of`](super::Lease::output_of).
    pub fn output_of(&mut self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        let state = self.state()?;
        state.memory_of(state.last, part.into())
    }

    /// Returns the sequence number of this start of the operation, counted from 1.
    pub fn epoch(&self) -> u64 {
        self.start.epoch
    }
}

impl<T> Future for OwnedStart<T> {
    type Output = Result<Operation<T>, Error>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let own = self.get_mut();
        let start = own.start;
        // The future owns the operation, so the polls are taken out meanwhile.
        let mut polls = std::mem::take(&mut own.polls);
        let prepared = &own.state()?.prepared;
        let goal = (start.epoch, &[][..]);
        let polled = prepared.poll_future(goal, start.deadline, &mut polls, context.waker());
        own.polls = polls;

        match polled? {
            Poll::Ready(()) => Poll::Ready(Ok(own.operation.take().expect("checked above"))),
            Poll::Pending => Poll::Pending,
        }
    }
}

// The handles never refer to themselves.
impl<T> Unpin for Started<'_, T> {}
impl<T> Unpin for OwnedStart<T> {}

impl<T> fmt::Debug for Started<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Started").field("epoch", &self.start.epoch).finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for OwnedStart<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedStart").field("epoch", &self.start.epoch).finish_non_exhaustive()
    }
}
