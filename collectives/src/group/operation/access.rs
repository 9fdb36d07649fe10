//! Methods that read and write the input and output memory of an operation.

use std::fmt;
use std::ops::Range;

use peerlane_hal::{ErrorKind, Rank};

use super::Operation;
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer::{self, MemoryRange};
use crate::layout::{BufferPosition, InputPlacement, OutputPlacement};
use crate::plan::Source;
use crate::run::buffers::{BufferId, Start};

type Bytes = (BufferId, Range<u64>);

impl<T: Element> Operation<T> {
    /// Returns the input elements of this operation for writing. If an earlier start is not complete, waits for it
    /// first.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write the input, it is not contiguous (then use
    /// [`input_piece_mut`](Self::input_piece_mut)), or it is in a window.
    pub fn input_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.input_bytes()?;
        self.own_mut(bytes)
    }

    /// Returns this rank's part of an input tensor for writing. If an earlier start is not complete, waits for it
    /// first.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write it, there is no such tensor, or it is in a window.
    pub fn input_piece_mut(&mut self, tensor: usize) -> Result<&mut [T], Error> {
        self.settle()?;
        self.check_tensor(tensor)?;
        let bytes = self.input_piece_bytes(tensor);
        self.own_mut(bytes)
    }

    /// Returns the output elements of this operation for writing; see [`output`](Self::output).
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn output_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.output_bytes()?;
        self.own_mut(bytes)
    }

    /// Returns the elements of one output buffer for writing.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer).
    pub fn output_buffer_mut(&mut self, number: usize) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.output_buffer_bytes(number)?;
        self.own_mut(bytes)
    }

    /// Returns the address range of the operation's input, which work on a stream can fill.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the input consists of several pieces; see
    /// [`input_piece_memory`](Self::input_piece_memory).
    pub fn input_memory(&self) -> Result<MemoryRange, Error> {
        self.input_bytes().map(|bytes| self.memory(bytes))
    }

    /// Returns the address range of this rank's part of an input tensor, which work on a stream can fill.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor.
    pub fn input_piece_memory(&self, tensor: usize) -> Result<MemoryRange, Error> {
        self.check_tensor(tensor)?;
        Ok(self.memory(self.input_piece_bytes(tensor)))
    }

    /// Returns the address range of the newest output, which work on a stream can read. With two outputs in turn, the
    /// next start uses the other.
    ///
    /// With several output buffers this is the first.
    pub fn output_memory(&self) -> MemoryRange {
        self.memory_of_output(Start::Eager(self.state.prepared.started()))
    }

    /// Returns the address range of the elements that `rank` contributed to a tensor in the last start.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor or rank, or the output is a matrix.
    pub fn piece_memory(&self, tensor: usize, rank: Rank) -> Result<MemoryRange, Error> {
        self.place_of_piece(Start::Eager(self.state.prepared.started()), tensor, rank)
    }

    fn place_of_piece(
        &self,
        start: Start,
        tensor: usize,
        rank: Rank,
    ) -> Result<MemoryRange, Error> {
        self.check_piece(tensor, rank)?;
        Ok(self.memory(self.piece_bytes(start, tensor, rank)))
    }

    fn check_piece(&self, tensor: usize, rank: Rank) -> Result<(), Error> {
        self.check_tensor(tensor)?;
        self.check_rank(rank)?;
        if self.state.layout.has_columns_in_output() {
            let text = "the output is a matrix, in which a block is a range of columns, expected blocks that are contiguous";
            return invalid(text.to_owned());
        }
        Ok(())
    }

    fn memory_of_output(&self, start: Start) -> MemoryRange {
        let bytes = match &self.state.layout.placement(self.state.rank).output {
            OutputPlacement::Contiguous(position) => {
                let begin = self.state.view.output_offset(start) + position.offset;
                begin..begin + self.state.layout.output_bytes(self.state.rank)
            }
            _ => 0..self.state.buffer_bytes(BufferId::OUTPUT),
        };
        self.memory((BufferId::OUTPUT, bytes))
    }

    fn memory(&self, (buffer, bytes): Bytes) -> MemoryRange {
        let (region, bytes) = self.state.memory(buffer, bytes);
        MemoryRange::within(region, bytes.start, bytes.end - bytes.start)
    }

    fn input_bytes(&self) -> Result<Bytes, Error> {
        let joined = matches!(
            self.state.layout.placement(self.state.rank).input,
            InputPlacement::Contiguous(_)
        );
        let (buffer, Range { start, end }) = self.input_piece_bytes(0);
        match (self.state.layout.tensors(), self.state.from) {
            (1, _) => Ok((buffer, start..end)),
            (_, Source::Input) if joined => {
                Ok((buffer, start..start + self.state.layout.input_bytes(self.state.rank)))
            }
            (tensors, _) => invalid(format!(
                "the input consists of {tensors} pieces, one of each tensor; use `input_piece_mut` or \
                 `input_piece_memory` for each piece"
            )),
        }
    }

    fn input_piece_bytes(&self, tensor: usize) -> Bytes {
        let BufferPosition { buffer, offset } =
            self.state.layout.own_position(self.state.rank, tensor, self.state.from);
        let bytes = self.state.layout.input_piece_bytes(tensor, self.state.rank);
        let bytes = offset..offset + bytes;
        match self.state.from {
            Source::Input => (BufferId::Input(buffer), bytes),
            Source::Output => (BufferId::Output(buffer), bytes),
        }
    }

    fn own_mut(&mut self, (buffer, bytes): Bytes) -> Result<&mut [T], Error> {
        self.check_no_window(buffer)?;
        let (region, bytes) = self.state.memory(buffer, bytes);
        // SAFETY: no start is open, so no engine of this rank uses it, and no peer writes, as in
        // `received`; `&mut self` keeps the next start away, and the caller of `capturable` the replays.
        element::cast_mut(unsafe { buffer::bytes_mut(region, bytes) }?)
    }

    fn check_no_window(&self, buffer: BufferId) -> Result<(), Error> {
        let (window, what) = match buffer {
            BufferId::Input(_) => (self.state.windows[0].is_some(), "input"),
            _ => (self.state.windows[1].is_some(), "output"),
        };
        if window {
            return invalid(format!(
                "the {what} is a range of a window; use `Window::slice` to access it"
            ));
        }
        Ok(())
    }
}

fn invalid<R>(text: String) -> Result<R, Error> {
    Err(Error::new(ErrorKind::InvalidArgument, text))
}

/// Read access to the output of an operation; the operation cannot start again while this value exists.
pub struct Received<'a, T> {
    operation: &'a Operation<T>,
}

impl<'a, T: Element> Received<'a, T> {
    /// Returns all elements of the output buffer: one tensor after another, each with its blocks in rank order.
    ///
    /// The buffer of a list also contains the gaps between its destinations.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if only a device can read it, if there are several output
    /// buffers, or the output is in a window.
    pub fn output(&self) -> Result<&'a [T], Error> {
        self.operation.readable(self.operation.output_bytes()?)
    }

    /// Returns all elements of one output buffer.
    ///
    /// # Errors
    /// As [`output`](Self::output), for one buffer; if there is no such buffer.
    pub fn output_buffer(&self, number: usize) -> Result<&'a [T], Error> {
        self.operation.readable(self.operation.output_buffer_bytes(number)?)
    }

    /// Returns the block that the last start received from `rank`.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer); if there is no such rank, or there are several tensors: then use
    /// [`piece`](Self::piece).
    pub fn block(&self, rank: Rank) -> Result<&'a [T], Error> {
        let tensors = self.operation.state.layout.tensors();
        if tensors > 1 {
            return invalid(format!(
                "a block consists of {tensors} pieces, one of each tensor; use `piece` for each \
                 piece"
            ));
        }
        self.piece(0, rank)
    }

    /// Returns the piece of a tensor that the last start received from `rank`.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer); if there is no such tensor or rank, or the output is a matrix.
    pub fn piece(&self, tensor: usize, rank: Rank) -> Result<&'a [T], Error> {
        self.operation.check_piece(tensor, rank)?;
        self.operation.readable(self.operation.piece_bytes(self.last(), tensor, rank))
    }

    /// Returns all elements of an output tensor: its pieces in rank order.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer); if there is no such tensor, or each block has a destination of its own.
    pub fn tensor(&self, tensor: usize) -> Result<&'a [T], Error> {
        self.operation.check_tensor(tensor)?;
        let layout = &self.operation.state.layout;
        if matches!(layout.placement(self.operation.state.rank).output, OutputPlacement::ByBlock(_))
        {
            return invalid(
                "each block has its own destination, so no tensor is contiguous; use `block` for \
                 each block"
                    .to_owned(),
            );
        }
        let (buffer, Range { start, .. }) =
            self.operation.piece_bytes(self.last(), tensor, Rank(0));
        self.operation.readable((
            buffer,
            start..start + layout.tensor_bytes(tensor, self.operation.state.rank),
        ))
    }

    fn last(&self) -> Start {
        Start::Eager(self.operation.state.prepared.started())
    }
}

impl<T: Element> Operation<T> {
    /// Waits for an open start, and returns read access to the output of the operation.
    ///
    /// # Errors
    /// The reason why the group has ended: then the output is undefined.
    pub fn received(&mut self) -> Result<Received<'_, T>, Error> {
        self.settle()?;
        Ok(Received { operation: self })
    }

    /// Waits for an open start, and returns all elements of the output buffer, like [`Received::output`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::output`].
    pub fn output(&mut self) -> Result<&[T], Error> {
        self.received()?.output()
    }

    /// Waits for an open start, and returns all elements of one output buffer, like [`Received::output_buffer`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::output_buffer`].
    pub fn output_buffer(&mut self, number: usize) -> Result<&[T], Error> {
        self.received()?.output_buffer(number)
    }

    /// Waits for an open start, and returns the block received from `rank`, like [`Received::block`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::block`].
    pub fn block(&mut self, rank: Rank) -> Result<&[T], Error> {
        self.received()?.block(rank)
    }

    /// Waits for an open start, and returns the piece of a tensor received from `rank`, like [`Received::piece`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::piece`].
    pub fn piece(&mut self, tensor: usize, rank: Rank) -> Result<&[T], Error> {
        self.received()?.piece(tensor, rank)
    }

    /// Waits for an open start, and returns all elements of an output tensor, like [`Received::tensor`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::tensor`].
    pub fn tensor(&mut self, tensor: usize) -> Result<&[T], Error> {
        self.received()?.tensor(tensor)
    }

    fn output_bytes(&self) -> Result<Bytes, Error> {
        let buffers = self.state.output_buffers;
        if buffers > 1 {
            return invalid(format!(
                "the output consists of {buffers} buffers; use `block`, `tensor` or `output_buffer`"
            ));
        }
        self.output_buffer_bytes(0)
    }

    fn output_buffer_bytes(&self, number: usize) -> Result<Bytes, Error> {
        let buffers = self.state.output_buffers;
        if number >= buffers as usize {
            return invalid(format!(
                "output buffer {number} does not exist, expected a number below {buffers}"
            ));
        }
        let buffer = BufferId::Output(Rank::at(number).0);
        let placement = &self.state.layout.placement(self.state.rank).output;
        if let OutputPlacement::Contiguous(position) = placement {
            let start = Start::Eager(self.state.prepared.started());
            let begin = self.state.view.output_offset(start) + position.offset;
            return Ok((buffer, begin..begin + self.state.layout.output_bytes(self.state.rank)));
        }
        Ok((buffer, 0..self.state.buffer_bytes(buffer)))
    }

    fn piece_bytes(&self, start: Start, tensor: usize, block: Rank) -> Bytes {
        let BufferPosition { buffer, offset } =
            self.state.layout.output_position(self.state.rank, tensor, block);
        let begin = self.state.view.output_offset(start) + offset;
        let bytes = self.state.layout.piece_bytes(tensor, block, self.state.rank);
        (BufferId::Output(buffer), begin..begin + bytes)
    }

    fn check_tensor(&self, tensor: usize) -> Result<(), Error> {
        let tensors = self.state.layout.tensors();
        if tensor < tensors {
            return Ok(());
        }
        invalid(format!("tensor {tensor} does not exist, expected a number below {tensors}"))
    }

    fn check_rank(&self, rank: Rank) -> Result<(), Error> {
        let ranks = self.state.layout.ranks();
        if rank.index() < ranks {
            return Ok(());
        }
        invalid(format!("rank {rank} does not exist, expected a rank below {ranks}"))
    }

    fn readable(&self, (buffer, bytes): Bytes) -> Result<&[T], Error> {
        self.check_no_window(buffer)?;
        let (region, bytes) = self.state.memory(buffer, bytes);
        // SAFETY: whoever has a `Received` has settled and keeps the next start away. No start is
        // open, and until the next one peers write at most to the other output: to this one only
        // between this rank's `ready` and their `arrived`, or after it has entered the next start. No
        // replay is in progress, which the caller of `capturable` guarantees.
        element::cast(unsafe { buffer::bytes(region, bytes) }?)
    }
}

impl<T> fmt::Debug for Received<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received").field("operation", self.operation).finish()
    }
}

/// A handle to an operation that [`Operation::start_on`] has enqueued on a stream.
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

    /// Returns the address range of the output that this start writes, for work that is enqueued after it.
    ///
    /// With two outputs in turn, consecutive starts have different places. With several output buffers this is the first.
    pub fn output(&self) -> MemoryRange {
        self.operation.memory_of_output(self.start)
    }

    /// Returns the address range of the piece that `rank` contributes to a tensor in this start.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor or rank.
    pub fn piece(&self, tensor: usize, rank: Rank) -> Result<MemoryRange, Error> {
        self.operation.place_of_piece(self.start, tensor, rank)
    }

    /// Returns the sequence number of this start, counted from 1, or `None` if a graph has recorded the operation.
    pub fn epoch(&self) -> Option<u64> {
        match self.start {
            Start::Eager(epoch) => Some(epoch),
            Start::Captured => None,
        }
    }

    /// Blocks the calling thread until the output of this start is complete.
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
