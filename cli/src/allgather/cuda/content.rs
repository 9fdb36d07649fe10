//! What the memory of a GPU holds: random shards put there, and outputs compared byte by byte, in
//! chunks that pass through the host.

use std::thread;

use super::gpu::{Gpu, Span};
use crate::allgather::circle::Circle;
use crate::allgather::data::{Data, Mismatch, POISON, Shard};
use crate::error::{Failure, Result};

/// Bytes of a chunk, a multiple of the pieces that data are made of.
const CHUNK_BYTES: u64 = 32 << 20;
const _: () = assert!(CHUNK_BYTES.is_multiple_of(Shard::PIECE_BYTES as u64));

/// Fills the own shard, which `input` is.
pub(super) fn fill(gpu: &Gpu, data: Data, rank: usize, input: Span) -> Result<()> {
    let stream = gpu.stream()?;
    let mut shard = data.shard(rank);
    let mut staging = Vec::new();
    for chunk in chunks(input) {
        staging.resize(chunk.bytes as usize, 0);
        shard.fill(&mut staging);
        staging = gpu.upload(&stream, chunk.address, staging)?;
    }
    Ok(())
}

/// Overwrites outputs before a gather whose result is compared.
pub(super) fn poison(gpu: &Gpu, outputs: &[Span]) -> Result<()> {
    let stream = gpu.stream()?;
    for output in outputs {
        gpu.set(&stream, *output, POISON)?;
    }
    gpu.finish(&stream, "to poison the output")
}

/// Compares an output of equal shards, a thread for each shard.
///
/// # Errors
/// If a copy fails; the inner result is the first byte that differs.
pub(super) fn compare(
    gpu: &Gpu,
    data: Data,
    ranks: usize,
    output: Span,
) -> Result<std::result::Result<(), Mismatch>> {
    let bytes = output.bytes / ranks as u64;
    let shard = |rank: usize| Span { address: output.address + rank as u64 * bytes, bytes };
    let compared: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..ranks)
            .map(|rank| scope.spawn(move || compare_shard(gpu, data.shard(rank), shard(rank))))
            .collect();
        let lost = || Err(Failure::failed("a thread that compares bytes has died"));
        threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| lost())).collect()
    });
    for shard in compared {
        if let Err(wrong) = shard? {
            return Ok(Err(wrong));
        }
    }
    Ok(Ok(()))
}

fn compare_shard(
    gpu: &Gpu,
    mut wanted: Shard,
    shard: Span,
) -> Result<std::result::Result<(), Mismatch>> {
    let stream = gpu.stream()?;
    let mut scratch = vec![0; Shard::PIECE_BYTES];
    let mut seen = Vec::new();
    for chunk in chunks(shard) {
        seen.resize(chunk.bytes as usize, 0);
        seen = gpu.download(&stream, chunk.address, seen)?;
        if let Err(wrong) = wanted.compare(&seen, &mut scratch) {
            return Ok(Err(wrong));
        }
    }
    Ok(Ok(()))
}

/// Tells all ranks what was found, and ends the run if any found a wrong byte. Collective.
///
/// # Errors
/// The rank, and the first byte.
pub(super) fn agree(
    circle: &Circle,
    what: &str,
    found: std::result::Result<(), Mismatch>,
) -> Result<()> {
    let texts = circle.share("check", &found.err().map(|wrong| wrong.to_string()))?;
    let rank = texts.iter().position(Option::is_some);
    match rank.and_then(|rank| Some((rank, texts[rank].as_ref()?))) {
        None => Ok(()),
        Some((rank, text)) => {
            let text =
                format!("wrong data in the output of rank {rank}, gathered by {what}: {text}");
            Err(Failure::failed(text).with_advice(
                "this is a fault in what moved the bytes, or in the hardware: please report it",
            ))
        }
    }
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
