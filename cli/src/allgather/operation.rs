//! Accesses the buffers of operations on host memory as bytes, whatever their element type.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use peerlane::group::Report;
use peerlane::trace::Trace;
use peerlane::{Element, Operation, OutputPart, Rank};

use crate::error::Result;

/// A prepared operation on host memory whose buffers are accessed as bytes.
pub(super) trait HostOperation {
    fn run(&mut self) -> Result<()>;

    fn report(&self) -> &Report;

    /// Returns the timed steps of the traced runs; `None` if the operation was prepared without a trace.
    fn trace(&self) -> Option<Trace>;

    fn output_buffer_mut(&mut self, buffer: usize) -> Result<&mut [u8]>;

    fn input_piece_mut(&mut self, tensor: usize) -> Result<&mut [u8]>;

    /// Returns the bytes that `source` has contributed to a tensor of the output.
    fn piece(&mut self, tensor: usize, source: Rank) -> Result<&[u8]>;

    fn output_elements(&mut self, buffer: usize, elements: Range<usize>) -> Result<&[u8]>;
}

impl<T: Element> HostOperation for Operation<T> {
    fn run(&mut self) -> Result<()> {
        Ok(Self::run(self)?)
    }

    fn report(&self) -> &Report {
        Self::report(self)
    }

    fn trace(&self) -> Option<Trace> {
        Self::trace(self)
    }

    fn output_buffer_mut(&mut self, buffer: usize) -> Result<&mut [u8]> {
        Ok(cast_slice_mut(Self::output_mut_of(self, OutputPart::Buffer(buffer))?))
    }

    fn input_piece_mut(&mut self, tensor: usize) -> Result<&mut [u8]> {
        Ok(cast_slice_mut(Self::input_piece_mut(self, tensor)?))
    }

    fn piece(&mut self, tensor: usize, source: Rank) -> Result<&[u8]> {
        Ok(cast_slice(Self::output_of(self, OutputPart::Piece { tensor, rank: source })?))
    }

    fn output_elements(&mut self, buffer: usize, elements: Range<usize>) -> Result<&[u8]> {
        Ok(cast_slice(&Self::output_of(self, OutputPart::Buffer(buffer))?[elements]))
    }
}
