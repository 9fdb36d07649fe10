//! Fills GPU memory with random blocks and compares output blocks byte by byte, through buffers on
//! the host.

use std::thread::{self, ScopedJoinHandle};

use peerlane_toolkit::limits::{self, SystemError};

use super::device::{Gpu, Span, Stream};
use crate::error::{Failure, Result};
use crate::ranks::data::{Block, Mismatch, Numbering, TestData, UNWRITTEN};

/// The bytes that one copy between GPU and host moves, a multiple of the granularity of the test
/// data.
const CHUNK_BYTES: u64 = 32 << 20;
/// The maximum number of blocks that are compared at the same time, each on its own thread.
const THREADS_MAX: usize = 8;
/// The length of the random elements that are generated once and repeated over a matrix.
const MATRIX_PIECE_BYTES: u64 = 8 << 20;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(Block::PIECE_BYTES as u64));

pub(super) fn fill(gpu: &Gpu, data: TestData, numbering: Numbering, input: &[Span]) -> Result<()> {
    let stream = gpu.stream()?;
    let mut staging = Vec::new();
    for (index, piece) in input.iter().enumerate() {
        let mut block = numbering.input(data, index);
        for chunk in chunks(*piece) {
            staging.resize(chunk.bytes as usize, 0);
            block.fill(&mut staging);
            staging = gpu.upload(&stream, chunk.address, staging)?;
        }
    }
    Ok(())
}

/// Fills a matrix with bf16 elements with magnitudes from 0.5 to 2, because zeros would use less
/// power than real data.
pub(crate) fn fill_with_bf16(
    gpu: &Gpu,
    stream: &Stream,
    matrix: Span,
    random: &mut fastrand::Rng,
) -> Result<()> {
    let mut piece = vec![0; matrix.bytes.min(MATRIX_PIECE_BYTES) as usize];
    for element in piece.chunks_exact_mut(2) {
        let magnitude = random.f32().mul_add(1.5, 0.5);
        let value = if random.bool() { magnitude } else { -magnitude };
        element.copy_from_slice(&half::bf16::from_f32(value).to_le_bytes());
    }

    for offset in (0..matrix.bytes).step_by(MATRIX_PIECE_BYTES as usize) {
        piece.truncate((matrix.bytes - offset).min(MATRIX_PIECE_BYTES) as usize);
        piece = gpu.upload(stream, matrix.address + offset, piece)?;
    }
    Ok(())
}

/// Overwrites all output buffers with a known byte before a checked run.
pub(super) fn overwrite(gpu: &Gpu, outputs: &[Vec<Span>]) -> Result<()> {
    let stream = gpu.stream()?;
    for block in outputs.iter().flatten().filter(|block| block.bytes > 0) {
        gpu.set(&stream, *block, UNWRITTEN)?;
    }
    gpu.finish(&stream, "overwriting the output")
}

/// Compares the output blocks with the test data on several threads.
pub(super) fn compare(
    gpu: &Gpu,
    data: TestData,
    numbering: Numbering,
    blocks: &[Span],
) -> Result<std::result::Result<(), Mismatch>> {
    if let Some(mut sum) = numbering.sum(data) {
        // The parts of a sum follow each other.
        for block in blocks {
            if let Err(wrong) = compare_block(gpu, &mut sum, *block)? {
                return Ok(Err(wrong));
            }
        }
        return Ok(Ok(()));
    }
    let numbered: Vec<_> = blocks.iter().copied().enumerate().collect();
    for some in numbered.chunks(THREADS_MAX) {
        let compared: Vec<_> = thread::scope(|scope| {
            let compare = |&(index, block): &(usize, Span)| {
                limits::spawn_scoped(scope, "compare", move || {
                    compare_block(gpu, &mut numbering.output(data, index), block)
                })
            };
            let threads: Vec<_> = some.iter().map(compare).collect();
            let lost = || {
                Err(Failure::failed(
                    "a thread that compares the output panicked; this is a bug in Peerlane",
                ))
            };
            let join =
                |thread: std::result::Result<ScopedJoinHandle<'_, _>, SystemError>| match thread {
                    Ok(thread) => thread.join().unwrap_or_else(|_| lost()),
                    Err(error) => Err(Failure::of_system(&error)),
                };
            threads.into_iter().map(join).collect()
        });
        for block in compared {
            if let Err(wrong) = block? {
                return Ok(Err(wrong));
            }
        }
    }
    Ok(Ok(()))
}

fn compare_block(
    gpu: &Gpu,
    expected: &mut Block,
    block: Span,
) -> Result<std::result::Result<(), Mismatch>> {
    let stream = gpu.stream()?;
    let mut scratch = vec![0; Block::PIECE_BYTES];
    let mut found = Vec::new();
    for chunk in chunks(block) {
        found.resize(chunk.bytes as usize, 0);
        found = gpu.download(&stream, chunk.address, found)?;
        if let Err(wrong) = expected.compare(&found, &mut scratch) {
            return Ok(Err(wrong));
        }
    }
    Ok(Ok(()))
}

fn chunks(span: Span) -> impl Iterator<Item = Span> {
    let Span { address, bytes } = span;
    (0..bytes.div_ceil(CHUNK_BYTES)).map(move |index| {
        let offset = index * CHUNK_BYTES;
        Span { address: address + offset, bytes: CHUNK_BYTES.min(bytes - offset) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_a_span_once() {
        for bytes in [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES] {
            let mut next = 77;
            for chunk in chunks(Span { address: 77, bytes }) {
                assert_eq!(chunk.address, next);
                assert!(chunk.bytes > 0 && chunk.bytes <= CHUNK_BYTES);
                next += chunk.bytes;
            }
            assert_eq!(next, 77 + bytes);
        }
    }
}
