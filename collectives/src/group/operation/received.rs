//! Access to the output between starts.

use std::fmt;
use std::ops::Range;

use peerlane_hal::Rank;
use peerlane_hal::Region as _;

use super::Operation;
use super::access::{Bytes, invalid};
use crate::element::{self, Element};
use crate::error::Error;
use crate::group::buffer;
use crate::layout::{BufferPosition, OutputPlacement};
use crate::run::buffers::{BufferId, Start};

/// Gives access to the output of the last start, and prevents the next start.
pub struct Received<'a, T> {
    operation: &'a Operation<T>,
}

impl<'a, T: Element> Received<'a, T> {
    /// Returns the whole output buffer: one tensor after another, each with its blocks in rank order.
    ///
    /// The buffer of a list also contains the gaps between its destinations.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if only a device can read it, if there are several output
    /// buffers, or the output is in a window.
    pub fn output(&self) -> Result<&'a [T], Error> {
        self.operation.readable(self.operation.output_bytes()?)
    }

    /// Returns a whole output buffer.
    ///
    /// # Errors
    /// As [`output`](Self::output), for one buffer; if there is no such buffer.
    pub fn output_buffer(&self, number: usize) -> Result<&'a [T], Error> {
        self.operation.readable(self.operation.output_buffer_bytes(number)?)
    }

    /// Returns the block that came from `rank`.
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

    /// Returns the piece of a tensor that came from `rank`.
    ///
    /// # Errors
    /// As [`output_buffer`](Self::output_buffer); if there is no such tensor or rank.
    pub fn piece(&self, tensor: usize, rank: Rank) -> Result<&'a [T], Error> {
        self.operation.check_tensor(tensor)?;
        self.operation.check_rank(rank)?;
        self.operation.readable(self.operation.piece_bytes(self.last(), tensor, rank))
    }

    /// Returns a whole tensor: its pieces in rank order.
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
    /// Returns access to the output of the last start, after waiting for a start that is still open.
    ///
    /// # Errors
    /// The reason why the group has ended: then the output is undefined.
    pub fn received(&mut self) -> Result<Received<'_, T>, Error> {
        self.settle()?;
        Ok(Received { operation: self })
    }

    /// Returns the output of the last start: see [`Received::output`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::output`].
    pub fn output(&mut self) -> Result<&[T], Error> {
        self.received()?.output()
    }

    /// Returns an output buffer: see [`Received::output_buffer`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::output_buffer`].
    pub fn output_buffer(&mut self, number: usize) -> Result<&[T], Error> {
        self.received()?.output_buffer(number)
    }

    /// Returns the block that came from `rank`: see [`Received::block`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::block`].
    pub fn block(&mut self, rank: Rank) -> Result<&[T], Error> {
        self.received()?.block(rank)
    }

    /// Returns the piece of a tensor that came from `rank`: see [`Received::piece`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::piece`].
    pub fn piece(&mut self, tensor: usize, rank: Rank) -> Result<&[T], Error> {
        self.received()?.piece(tensor, rank)
    }

    /// Returns a whole tensor: see [`Received::tensor`].
    ///
    /// # Errors
    /// As [`received`](Self::received) and [`Received::tensor`].
    pub fn tensor(&mut self, tensor: usize) -> Result<&[T], Error> {
        self.received()?.tensor(tensor)
    }

    pub(super) fn output_bytes(&self) -> Result<Bytes, Error> {
        let buffers = self.state.output_buffers;
        if buffers > 1 {
            return invalid(format!(
                "the output consists of {buffers} buffers; use `block`, `tensor` or `output_buffer`"
            ));
        }
        self.output_buffer_bytes(0)
    }

    pub(super) fn output_buffer_bytes(&self, number: usize) -> Result<Bytes, Error> {
        let buffers = self.state.output_buffers;
        if number >= buffers as usize {
            return invalid(format!(
                "output buffer {number} does not exist, expected a number below {buffers}"
            ));
        }
        let buffer = BufferId::Output(Rank::at(number).0);
        if let OutputPlacement::Contiguous(_) = self.state.layout.placement(self.state.rank).output
        {
            let begin = self.state.view.output_offset(Start::Eager(self.state.prepared.started()));
            return Ok((buffer, begin..begin + self.state.layout.output_bytes(self.state.rank)));
        }
        Ok((buffer, 0..self.state.view.region(buffer).bytes()))
    }

    pub(super) fn piece_bytes(&self, start: Start, tensor: usize, block: Rank) -> Bytes {
        let BufferPosition { buffer, offset } =
            self.state.layout.output_position(self.state.rank, tensor, block);
        let begin = self.state.view.output_offset(start) + offset;
        let bytes = self.state.layout.piece_bytes(tensor, block, self.state.rank);
        (BufferId::Output(buffer), begin..begin + bytes)
    }

    pub(super) fn check_tensor(&self, tensor: usize) -> Result<(), Error> {
        let tensors = self.state.layout.tensors();
        if tensor < tensors {
            return Ok(());
        }
        invalid(format!("tensor {tensor} does not exist, expected a number below {tensors}"))
    }

    pub(super) fn check_rank(&self, rank: Rank) -> Result<(), Error> {
        let ranks = self.state.layout.ranks();
        if rank.index() < ranks {
            return Ok(());
        }
        invalid(format!("rank {rank} does not exist, expected a rank below {ranks}"))
    }

    fn readable(&self, (buffer, bytes): Bytes) -> Result<&[T], Error> {
        self.check_no_window(buffer)?;
        // SAFETY: whoever has a `Received` has settled and keeps the next start away. No start is
        // open, and until the next one peers write at most to the other output: to this one only
        // between this rank's `ready` and their `arrived`, or after it has entered the next start.
        element::cast(unsafe { buffer::bytes(self.state.view.region(buffer), bytes) }?)
    }
}

impl<T> fmt::Debug for Received<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received").field("operation", self.operation).finish()
    }
}
