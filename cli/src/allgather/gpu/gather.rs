//! Runs Peerlane's operations on a stream of CUDA or HIP, to be checked and timed.

use std::rc::Rc;

use peerlane::element::with_element;
use peerlane::{Element, Group, Operation, OutputPart, Rank};

use super::candidate::Implementation;
use super::device::{Span, Stream};
use crate::allgather::setup::{Setup, Variant};
use crate::error::Result;

struct PeerlaneGather<T> {
    operation: Operation<T>,
    stream: Rc<Stream>,
    ranks: usize,
}

pub(super) struct Prepared {
    pub(super) implementation: Box<dyn Implementation>,
    pub(super) report: peerlane::group::Report,
    pub(super) input: Vec<Span>,
}

/// Prepares the collective of the options with blocks of `block_length` elements on average.
/// Collective.
pub(super) fn prepare(
    setup: &Setup<'_>,
    group: &mut Group,
    stream: &Rc<Stream>,
    block_length: u64,
    variant: Variant,
) -> Result<Prepared> {
    with_element!(setup.options.dtype, T => {
        let operation: Operation<T> = setup.prepare(group, block_length, variant)?;
        let report = operation.report().clone();
        let input = input(setup, &operation, group.rank(), block_length)?;
        let ours = PeerlaneGather { operation, stream: Rc::clone(stream), ranks: group.ranks() };
        Ok(Prepared { implementation: Box::new(ours), report, input })
    })
}

/// Returns the address ranges of the input blocks, one per tensor or one per receiving rank.
fn input<T: Element>(
    setup: &Setup<'_>,
    operation: &Operation<T>,
    rank: Rank,
    block_length: u64,
) -> Result<Vec<Span>> {
    if setup.options.in_place && !setup.options.goal.collective.is_reduction() {
        let tensors = 0..operation.report().tensors;
        let piece = |tensor| {
            let piece = OutputPart::Piece { tensor, rank };
            Ok(span(operation.output_memory_of(piece)?))
        };
        return tensors.map(piece).collect();
    }

    let blocks = setup.input_blocks(block_length, rank)?.into_iter();
    let mut address = span(operation.input_memory()?).address;
    let block = |bytes| {
        let block = Span { address, bytes };
        address += bytes;
        block
    };
    Ok(blocks.map(block).collect())
}

impl<T: Element> Implementation for PeerlaneGather<T> {
    fn name(&self) -> &'static str {
        "peerlane"
    }

    fn start(&mut self) -> Result<()> {
        if self.operation.report().takes_streams() {
            self.stream.start(&mut self.operation)
        } else {
            Ok(self.operation.run()?)
        }
    }

    fn check(&self) -> Result<()> {
        Ok(self.operation.check()?)
    }

    fn fork(&mut self) -> Result<()> {
        if self.operation.report().takes_streams() {
            return Ok(());
        }
        self.stream.gpu().finish(&self.stream, "earlier work on the stream")
    }

    fn output(&self) -> Result<Vec<Span>> {
        let tensors = 0..self.operation.report().tensors;
        let pieces = tensors.flat_map(|tensor| {
            Rank::all(self.ranks).map(move |rank| OutputPart::Piece { tensor, rank })
        });
        pieces.map(|piece| Ok(span(self.operation.output_memory_of(piece)?))).collect()
    }
}

fn span(memory: peerlane::group::MemoryRange) -> Span {
    Span { address: memory.base.as_ptr() as u64, bytes: memory.bytes }
}
