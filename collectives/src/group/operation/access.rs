//! Access to the input between starts, and the places of input and output.

use std::ops::Range;

use peerlane_hal::{ErrorKind, Rank, Region};

use super::Operation;
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer;
use crate::group::buffer::MemoryRange;
use crate::layout::{BufferPosition, InputPlacement, OutputPlacement};
use crate::plan::Source;
use crate::run::buffers::{BufferId, Start};

/// A range of bytes of a buffer.
pub(super) type Bytes = (BufferId, Range<u64>);

impl<T: Element> Operation<T> {
    /// Returns the input for writing. If an earlier start is not complete, waits for it first.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write the input, it is not contiguous (then use
    /// [`input_piece_mut`](Self::input_piece_mut)), or it is in a window.
    pub fn input_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.input_bytes()?;
        self.own_mut(bytes)
    }

    /// Returns this rank's piece of a tensor, to be filled before a start, after waiting for a start that is still open.
    ///
    /// # Errors
    /// The reason why the group has ended, or if only a device can write it, there is no such tensor, or it is in a window.
    pub fn input_piece_mut(&mut self, tensor: usize) -> Result<&mut [T], Error> {
        self.settle()?;
        self.check_tensor(tensor)?;
        let bytes = self.input_piece_bytes(tensor);
        self.own_mut(bytes)
    }

    /// Returns the [`output`](Self::output) for writing.
    ///
    /// # Errors
    /// As [`output`](Self::output).
    pub fn output_mut(&mut self) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.output_bytes()?;
        self.own_mut(bytes)
    }

    /// Returns an output buffer for writing.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer).
    pub fn output_buffer_mut(&mut self, number: usize) -> Result<&mut [T], Error> {
        self.settle()?;
        let bytes = self.output_buffer_bytes(number)?;
        self.own_mut(bytes)
    }

    /// Returns the memory of the input, for work on a stream before a start.
    ///
    /// With several tensors it may be in pieces; this is the first piece then.
    pub fn input_memory(&self) -> MemoryRange {
        self.memory(self.input_bytes().unwrap_or_else(|_| self.input_piece_bytes(0)))
    }

    /// Returns the memory of the last start's output. With two outputs in turn, the next start uses the other.
    ///
    /// With several output buffers this is the first.
    pub fn output_memory(&self) -> MemoryRange {
        self.memory_of_output(Start::Eager(self.state.prepared.started()))
    }

    /// Returns the memory of what `rank` contributes to a tensor in the last start.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no such tensor or rank.
    pub fn piece_memory(&self, tensor: usize, rank: Rank) -> Result<MemoryRange, Error> {
        self.place_of_piece(Start::Eager(self.state.prepared.started()), tensor, rank)
    }

    pub(super) fn place_of_piece(
        &self,
        start: Start,
        tensor: usize,
        rank: Rank,
    ) -> Result<MemoryRange, Error> {
        self.check_tensor(tensor)?;
        self.check_rank(rank)?;
        Ok(self.memory(self.piece_bytes(start, tensor, rank)))
    }

    pub(super) fn memory_of_output(&self, start: Start) -> MemoryRange {
        let bytes = match &self.state.layout.placement(self.state.rank).output {
            OutputPlacement::Contiguous(spot) => {
                let begin = self.state.view.output_offset(start) + spot.offset;
                begin..begin + self.state.layout.output_bytes(self.state.rank)
            }
            _ => 0..self.state.view.region(BufferId::OUTPUT).bytes(),
        };
        self.memory((BufferId::OUTPUT, bytes))
    }

    fn memory(&self, (buffer, bytes): Bytes) -> MemoryRange {
        MemoryRange::within(self.state.view.region(buffer), bytes.start, bytes.end - bytes.start)
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
                "the input consists of {tensors} pieces, one of each tensor; use `input_piece_mut` \
                 for each piece"
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
        // SAFETY: no start is open, so no engine of this rank uses it, and no peer writes, as in
        // `received`; `&mut self` keeps the next start away.
        element::cast_mut(unsafe { buffer::bytes_mut(self.state.view.region(buffer), bytes) }?)
    }

    /// Returns an error if the buffer is in a window, because only the window knows its users.
    pub(super) fn check_no_window(&self, buffer: BufferId) -> Result<(), Error> {
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

pub(super) fn invalid<R>(text: String) -> Result<R, Error> {
    Err(Error::new(ErrorKind::InvalidArgument, text))
}
