//! Reads and writes the input and output memory of an operation between its starts.
//!
//! `State` finds the range of a part of the memory. [`Operation`] returns it as an address range,
//! as bytes, or as elements.

use std::ops::Range;

use peerlane_hal::{ErrorKind, Rank};

use super::{Operation, State};
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer::{self, MemoryRange};
use crate::layout::{BufferPosition, InputPlacement, OutputPlacement, Placement};
use crate::plan::Source;
use crate::run::buffers::{BufferId, Start};

/// Some bytes of a buffer of the operation.
type BufferRange = (BufferId, Range<u64>);

impl State {
    fn input_range(&self) -> Result<BufferRange, Error> {
        let tensors = self.layout.tensors();
        if tensors == 1 {
            return self.checked_input_piece_range(0);
        }

        let Placement { input, output } = self.layout.placement(self.rank);
        let is_joined = match self.from {
            Source::Input => matches!(input, InputPlacement::Contiguous(_)),
            // In place, only a reduction has all of its output as its input.
            Source::Output => {
                self.layout.collective().is_reduction()
                    && matches!(output, OutputPlacement::Contiguous(_))
            }
        };
        if is_joined {
            let (buffer, Range { start, .. }) = self.input_piece_range(0);
            return Ok((buffer, start..start + self.layout.input_bytes(self.rank)));
        }
        invalid(format!(
            "the input consists of {tensors} pieces, one of each tensor; use `input_piece_mut` or \
             `input_piece_memory` for each piece"
        ))
    }

    /// Returns the range of this rank's part of a tensor that exists.
    fn input_piece_range(&self, tensor: usize) -> BufferRange {
        let BufferPosition { buffer, offset } =
            self.layout.own_position(self.rank, tensor, self.from);
        let bytes = offset..offset + self.layout.input_piece_bytes(tensor, self.rank);
        match self.from {
            Source::Input => (BufferId::Input(buffer), bytes),
            Source::Output => (BufferId::Output(buffer), bytes),
        }
    }

    fn checked_input_piece_range(&self, tensor: usize) -> Result<BufferRange, Error> {
        self.check_tensor(tensor)?;
        if matches!(self.layout.placement(self.rank).input, InputPlacement::ByBlock(_)) {
            let ranks = self.layout.ranks();
            return invalid(format!(
                "the input consists of {ranks} blocks, one for each rank; use `input_block_mut` or \
                 `input_block_memory` for each block"
            ));
        }
        Ok(self.input_piece_range(tensor))
    }

    /// Returns the range of the block for `receiver` in the input of a single tensor.
    fn input_block_range(&self, receiver: Rank) -> Result<BufferRange, Error> {
        self.check_rank(receiver)?;
        let tensors = self.layout.tensors();
        if tensors > 1 {
            return invalid(format!(
                "a block consists of {tensors} pieces, one of each tensor; use `input_piece_mut` \
                 or `input_piece_memory` for each tensor"
            ));
        }
        if !self.layout.has_input_blocks() || self.layout.has_columns() {
            let text = "the input has no contiguous block for each rank; use `input_mut` or \
                        `input_memory`";
            return invalid(text.to_owned());
        }

        // Operations with such inputs do not run in place.
        let BufferPosition { buffer, offset } = self.layout.input_position(self.rank, 0, receiver);
        let bytes = self.layout.input_block_bytes(self.rank, receiver);
        Ok((BufferId::Input(buffer), offset..offset + bytes))
    }

    fn check_rank(&self, rank: Rank) -> Result<(), Error> {
        let ranks = self.layout.ranks();
        if rank.index() < ranks {
            return Ok(());
        }
        invalid(format!("rank {rank} does not exist, expected a rank below {ranks}"))
    }

    fn output_range(&self) -> Result<BufferRange, Error> {
        let buffers = self.output_buffers;
        if buffers > 1 {
            return invalid(format!(
                "the output consists of {buffers} buffers; use `output_of` for one of them, a tensor or a block"
            ));
        }
        self.output_buffer_range(0)
    }

    fn output_buffer_range(&self, number: usize) -> Result<BufferRange, Error> {
        let buffers = self.output_buffers;
        if number >= buffers as usize {
            return invalid(format!(
                "output buffer {number} does not exist, expected a number below {buffers}"
            ));
        }

        let buffer = BufferId::Output(Rank::at(number).0);
        Ok((buffer, self.output_buffer_bytes(self.last, buffer)))
    }

    /// Returns the bytes of an output buffer that a start writes.
    fn output_buffer_bytes(&self, start: Start, buffer: BufferId) -> Range<u64> {
        match &self.layout.placement(self.rank).output {
            OutputPlacement::Contiguous(position) => {
                let begin = self.view.output_offset(start) + position.offset;
                begin..begin + self.layout.output_bytes(self.rank)
            }
            _ => 0..self.buffer_bytes(buffer),
        }
    }

    /// Returns the range of the piece that a rank contributes to a tensor, both of which exist.
    fn piece_range(&self, start: Start, tensor: usize, rank: Rank) -> BufferRange {
        let BufferPosition { buffer, offset } =
            self.layout.output_position(self.rank, tensor, rank);
        let begin = self.view.output_offset(start) + offset;
        let bytes = self.layout.piece_bytes(tensor, rank, self.rank);
        (BufferId::Output(buffer), begin..begin + bytes)
    }

    fn checked_piece_range(
        &self,
        start: Start,
        tensor: usize,
        rank: Rank,
    ) -> Result<BufferRange, Error> {
        self.check_tensor(tensor)?;
        self.check_rank(rank)?;
        if self.layout.has_columns_in_output() {
            let text = "the output is a matrix, in which a block is a range of columns, expected blocks that are contiguous";
            return invalid(text.to_owned());
        }
        Ok(self.piece_range(start, tensor, rank))
    }

    /// Returns the range of a part of the output of a start.
    fn part_range(&self, start: Start, part: OutputPart) -> Result<BufferRange, Error> {
        match part {
            OutputPart::Buffer(number) => self.output_buffer_range(number),
            OutputPart::Tensor(tensor) => self.tensor_range(tensor),
            OutputPart::Piece { tensor, rank } => self.checked_piece_range(start, tensor, rank),

            // A block of several tensors is not contiguous.
            OutputPart::Block(rank) => {
                let tensors = self.layout.tensors();
                if tensors > 1 {
                    return invalid(format!(
                        "a block consists of {tensors} pieces, one of each tensor; use \
                         `OutputPart::Piece` for each piece"
                    ));
                }
                self.checked_piece_range(start, 0, rank)
            }
        }
    }

    fn tensor_range(&self, tensor: usize) -> Result<BufferRange, Error> {
        self.check_tensor(tensor)?;
        let Some(position) = self.layout.tensor_position(self.rank, tensor) else {
            return invalid(
                "each block has its own destination, so no tensor is contiguous; use \
                 `OutputPart::Block` for each block"
                    .to_owned(),
            );
        };

        let begin = self.view.output_offset(self.last) + position.offset;
        let bytes = begin..begin + self.layout.tensor_bytes(tensor, self.rank);
        Ok((BufferId::Output(position.buffer), bytes))
    }

    fn check_tensor(&self, tensor: usize) -> Result<(), Error> {
        let tensors = self.layout.tensors();
        if tensor < tensors {
            return Ok(());
        }
        invalid(format!("tensor {tensor} does not exist, expected a number below {tensors}"))
    }

    fn address_range(&self, (buffer, bytes): BufferRange) -> MemoryRange {
        let (region, bytes) = self.memory(buffer, bytes);
        MemoryRange::within(region, bytes.start, bytes.end - bytes.start)
    }

    pub(super) fn output_memory(&self, start: Start) -> MemoryRange {
        let buffer = BufferId::OUTPUT;
        self.address_range((buffer, self.output_buffer_bytes(start, buffer)))
    }

    pub(super) fn memory_of(&self, start: Start, part: OutputPart) -> Result<MemoryRange, Error> {
        let range = self.part_range(start, part)?;
        Ok(self.address_range(range))
    }

    /// Waits for an open start, and returns the bytes of a range for reading.
    fn settled_bytes(
        &self,
        range: impl FnOnce(&Self) -> Result<BufferRange, Error>,
    ) -> Result<&[u8], Error> {
        self.settle()?;
        let (buffer, bytes) = range(self)?;
        self.check_no_window(buffer)?;

        let (region, bytes) = self.memory(buffer, bytes);
        // SAFETY: no start is open, and `&self` keeps the next one away, because a start takes
        // `&mut self`. Until then peers write at most to the other output: to this one only between
        // this rank's `ready` and their `arrived`, or after it has entered the next start. No
        // replay is in progress, which the caller of `capturable` guarantees.
        unsafe { buffer::bytes(region, bytes) }
    }

    /// Returns the bytes of a block that has arrived in the open start.
    pub(super) fn arrived_bytes(&self, block: Rank) -> Result<&[u8], Error> {
        let (buffer, bytes) = self.part_range(self.last, block.into())?;
        self.check_no_window(buffer)?;

        let (region, bytes) = self.memory(buffer, bytes);
        // SAFETY: the block has arrived, and each byte of an output is written once in a start.
        // Peers write to it again in a later start, which `&self` keeps away.
        unsafe { buffer::bytes(region, bytes) }
    }

    /// Returns the bytes of a block in the input for writing, of which the open start does not read
    /// any yet.
    pub(super) fn departing_bytes(&mut self, block: Rank) -> Result<&mut [u8], Error> {
        self.check_departing(block.into())?;
        let (buffer, bytes) = self.departing_range(block)?;
        self.check_no_window(buffer)?;

        let (region, bytes) = self.memory(buffer, bytes);
        // SAFETY: the engines of this rank read no chunk of the block before it has departed, and
        // peers read no inputs in an operation with departures.
        unsafe { buffer::bytes_mut(region, bytes) }
    }

    /// Returns the address range of a block in the input that departs by itself.
    pub(super) fn departing_memory(&self, block: Rank) -> Result<MemoryRange, Error> {
        self.departing_range(block).map(|range| self.address_range(range))
    }

    fn departing_range(&self, block: Rank) -> Result<BufferRange, Error> {
        match self.layout.has_input_blocks() {
            true => self.input_block_range(block),
            false => self.checked_input_piece_range(0),
        }
    }

    /// Waits for an open start, and returns the bytes of a range for writing.
    fn settled_bytes_mut(
        &mut self,
        range: impl FnOnce(&Self) -> Result<BufferRange, Error>,
    ) -> Result<&mut [u8], Error> {
        self.settle()?;
        let (buffer, bytes) = range(self)?;
        self.check_no_window(buffer)?;

        let (region, bytes) = self.memory(buffer, bytes);
        // SAFETY: no start is open, so no engine of this rank uses it, and no peer writes, as in
        // `settled_bytes`; `&mut self` keeps the next start away, and the caller of `capturable`
        // the replays.
        unsafe { buffer::bytes_mut(region, bytes) }
    }

    /// Refuses access to a buffer in a window, which keeps its slices and starts apart itself.
    fn check_no_window(&self, buffer: BufferId) -> Result<(), Error> {
        let (window, what) = match buffer {
            BufferId::Input(_) => (&self.windows[0], "input"),
            _ => (&self.windows[1], "output"),
        };
        if window.is_some() {
            return invalid(format!(
                "the {what} is a range of a window; use `Window::slice` to access it"
            ));
        }
        Ok(())
    }
}

/// Selects a part of the output of an operation.
///
/// ```
/// # use peerlane::bootstrap::{Bootstrap, in_process};
/// # use peerlane::{BlockLens, Group, OutputPart, Rank, host};
/// # in_process::run(2, |bootstrap| {
/// # let fabric = host::Fabric::open(bootstrap.rank(), bootstrap.ranks())?;
/// # let mut group = Group::open(bootstrap, fabric)?;
/// let mut tensors = group.all_gather::<u8>(BlockLens::tensors([1, 2])).prepare()?;
/// tensors.input_piece_mut(0)?.fill(group.rank().0 as u8);
/// tensors.input_piece_mut(1)?.fill(group.rank().0 as u8 + 10);
/// tensors.run()?;
/// assert_eq!(tensors.output_of(OutputPart::Tensor(1))?, [10, 10, 11, 11]);
/// assert_eq!(tensors.output_of(OutputPart::Piece { tensor: 1, rank: Rank(1) })?, [11, 11]);
/// # group.close()
/// # }).unwrap();
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum OutputPart {
    /// One of several output buffers, with the gaps between the destinations in it.
    Buffer(usize),
    /// A tensor: the pieces of all ranks, in rank order. It is not contiguous if each block has a
    /// destination of its own.
    Tensor(usize),
    /// What the last start received from a rank, if there is one tensor.
    Block(Rank),
    /// What the last start received from a rank for a tensor.
    Piece {
        /// The number of the tensor.
        tensor: usize,
        /// The rank that has contributed the piece.
        rank: Rank,
    },
}

impl From<Rank> for OutputPart {
    fn from(rank: Rank) -> Self {
        Self::Block(rank)
    }
}

impl<T> Operation<T> {
    /// Returns the bytes of the input for writing. If an earlier start is not complete, waits for
    /// it first.
    ///
    /// # Errors
    /// As [`input_mut`](Self::input_mut).
    pub fn input_bytes_mut(&mut self) -> Result<&mut [u8], Error> {
        self.state.settled_bytes_mut(State::input_range)
    }

    /// Returns the bytes of the output. If a start is not complete, waits for it first.
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn output_bytes(&self) -> Result<&[u8], Error> {
        self.state.settled_bytes(State::output_range)
    }

    /// Returns the address range of the operation's input, which work on a stream can fill.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if the input consists of several pieces; see
    /// [`input_piece_memory`](Self::input_piece_memory).
    pub fn input_memory(&self) -> Result<MemoryRange, Error> {
        self.state.input_range().map(|range| self.state.address_range(range))
    }

    /// Returns the address range of this rank's part of an input tensor, which work on a stream can
    /// fill.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor.
    pub fn input_piece_memory(&self, tensor: usize) -> Result<MemoryRange, Error> {
        let range = self.state.checked_input_piece_range(tensor)?;
        Ok(self.state.address_range(range))
    }

    /// Returns the address range of the block for a rank in the input, which work on a stream can
    /// fill.
    ///
    /// # Errors
    /// As [`input_block_mut`](Self::input_block_mut), except that a device may be the only one that
    /// can write it.
    pub fn input_block_memory(&self, receiver: Rank) -> Result<MemoryRange, Error> {
        let range = self.state.input_block_range(receiver)?;
        Ok(self.state.address_range(range))
    }

    /// Returns the address range of the newest output, which work on a stream can read. With two
    /// outputs in turn, the next start uses the other.
    ///
    /// With several output buffers this is the first.
    pub fn output_memory(&self) -> MemoryRange {
        self.state.output_memory(self.state.last)
    }

    /// Returns the address range of a part of the newest output.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such part, or it is not
    /// contiguous.
    pub fn output_memory_of(&self, part: impl Into<OutputPart>) -> Result<MemoryRange, Error> {
        self.state.memory_of(self.state.last, part.into())
    }
}

impl<T: Element> Operation<T> {
    /// Returns the input elements of this operation for writing. If an earlier start is not
    /// complete, waits for it first.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write the input, it is not
    /// contiguous (then use [`input_piece_mut`](Self::input_piece_mut)), or it is in a window.
    pub fn input_mut(&mut self) -> Result<&mut [T], Error> {
        element::cast_mut(self.input_bytes_mut()?)
    }

    /// Returns this rank's part of an input tensor for writing. If an earlier start is not
    /// complete, waits for it first.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write it, there is no such
    /// tensor, or it is in a window.
    pub fn input_piece_mut(&mut self, tensor: usize) -> Result<&mut [T], Error> {
        let range = |state: &State| state.checked_input_piece_range(tensor);
        element::cast_mut(self.state.settled_bytes_mut(range)?)
    }

    /// Returns the block for a rank in the input for writing. If an earlier start is not complete,
    /// waits for it first.
    ///
    /// The inputs of an all-to-all, a scatter and a reduce-scatter have such blocks.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such rank or block, the block
    /// is not contiguous, only a device can write it, or it is in a window; the reason why the
    /// group has ended.
    pub fn input_block_mut(&mut self, receiver: Rank) -> Result<&mut [T], Error> {
        let range = |state: &State| state.input_block_range(receiver);
        element::cast_mut(self.state.settled_bytes_mut(range)?)
    }

    /// Returns all elements of the output: one tensor after another, each with its blocks in rank
    /// order. If a start is not complete, waits for it first.
    ///
    /// The buffer of a list also contains the gaps between its destinations.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if only a device can read it, if there are
    /// several output buffers (then use [`output_of`](Self::output_of)), or the output is in a
    /// window; the reason why the group has ended: then the output is undefined.
    pub fn output(&self) -> Result<&[T], Error> {
        element::cast(self.output_bytes()?)
    }

    /// Returns the elements of a part of the output, such as the block of a [`Rank`]. If a start is
    /// not complete, waits for it first.
    ///
    /// # Errors
    /// As [`output`](Self::output), for the part; if there is no such part, or it is not
    /// contiguous.
    pub fn output_of(&self, part: impl Into<OutputPart>) -> Result<&[T], Error> {
        let part = part.into();
        let range = |state: &State| state.part_range(state.last, part);
        element::cast(self.state.settled_bytes(range)?)
    }

    /// Returns the output elements of this operation for writing; see [`output`](Self::output).
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn output_mut(&mut self) -> Result<&mut [T], Error> {
        element::cast_mut(self.state.settled_bytes_mut(State::output_range)?)
    }

    /// Returns the elements of a part of the output for writing.
    ///
    /// # Errors
    /// As [`output_of`](Self::output_of).
    pub fn output_mut_of(&mut self, part: impl Into<OutputPart>) -> Result<&mut [T], Error> {
        let part = part.into();
        let range = |state: &State| state.part_range(state.last, part);
        element::cast_mut(self.state.settled_bytes_mut(range)?)
    }
}

fn invalid<R>(text: String) -> Result<R, Error> {
    Err(Error::new(ErrorKind::InvalidArgument, text))
}
