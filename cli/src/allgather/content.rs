//! Fills input buffers in host memory with random blocks, and compares output buffers byte by byte.

use peerlane::Rank;

use super::host_operation::HostOperation;
use super::setup::Setup;
use super::shape::{GAP, destinations};
use crate::error::Result;
use crate::ranks::data::{Mismatch, TestData, UNWRITTEN, overwrite};

pub(super) type Comparison = std::result::Result<(), Difference>;

/// The first byte of an output buffer that has a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Difference {
    /// A byte of a block that differs from the byte that its rank has sent.
    Byte(Mismatch),
    /// An element between two blocks that was overwritten although no rank sends it.
    Gap { buffer: usize, element: usize },
}

/// Overwrites the output buffers with a known byte, then fills the input blocks of this rank.
pub(super) fn fill(
    setup: &Setup<'_>,
    operation: &mut dyn HostOperation,
    (rank, block_length): (Rank, u64),
    data: TestData,
) -> Result<()> {
    let collective = setup.options.goal.collective;
    for buffer in 0..setup.options.shape.output_buffers(setup.ranks()) {
        overwrite(operation.output_buffer_mut(buffer)?);
    }
    let numbering = setup.numbering(rank);
    if collective.has_equal_outputs() {
        for tensor in 0..operation.report().tensors {
            data.fill(numbering.of_input(tensor), operation.input_piece_mut(tensor)?);
        }
        return Ok(());
    }
    let blocks = setup.input_blocks(block_length, rank)?;
    let mut input = operation.input_piece_mut(0)?;
    for (block, bytes) in blocks.into_iter().enumerate() {
        let (of_block, rest) = input.split_at_mut(bytes as usize);
        data.fill(numbering.of_input(block), of_block);
        input = rest;
    }
    Ok(())
}

/// Compares every byte of the output blocks, and of the gaps between the blocks of a list.
pub(super) fn compare(
    setup: &Setup<'_>,
    operation: &mut dyn HostOperation,
    (rank, block_length): (Rank, u64),
    data: TestData,
) -> Result<Comparison> {
    let (ranks, tensors) = (setup.ranks(), operation.report().tensors);
    let numbering = setup.numbering(rank);
    for tensor in 0..tensors {
        for source in Rank::all(ranks) {
            let found = operation.piece(tensor, source)?;
            let number = numbering.of_output(tensor * ranks + source.index());
            if let Err(wrong) = data.check(number, found) {
                return Ok(Err(Difference::Byte(wrong)));
            }
        }
    }
    if setup.options.shape.list {
        let pieces = setup.options.shape.pieces(setup.options.goal, block_length, ranks)?;
        for destination in destinations(&pieces[0]) {
            let (buffer, gap) = (destination.buffer, destination.offset - GAP..destination.offset);
            let begin = gap.start;
            let found = operation.output_elements(buffer, gap)?;
            if let Some(at) = found.iter().position(|byte| *byte != UNWRITTEN) {
                let element = begin + at / setup.options.dtype.bytes();
                return Ok(Err(Difference::Gap { buffer, element }));
            }
        }
    }
    Ok(Ok(()))
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Byte(wrong) => wrong.fmt(f),
            Self::Gap { buffer, element } => {
                write!(
                    f,
                    "output buffer {buffer}, element {element}: the element is outside of all \
                     blocks but was overwritten"
                )
            }
        }
    }
}
