//! Generates test data: seeded patterns, and sizes derived from an engine's limits.

use peerlane_hal::Caps;

/// Value of destination bytes before anything arrives.
pub const POISON: u8 = 0xA5;

/// Largest piece that lengths are derived from: a larger one would take long and show nothing new.
const PIECE_BYTES_TRIED: u64 = 4 << 20;

/// Returns `total` poisoned bytes with `sent` at offset `before`.
pub(crate) fn with_guards(sent: &[u8], before: u64, total: u64) -> Vec<u8> {
    let index = |at| usize::try_from(at).expect("test data fits the address space");
    let mut bytes = vec![POISON; index(total)];
    bytes[index(before)..][..sent.len()].copy_from_slice(sent);
    bytes
}

/// Returns bytes that only this seed gives.
///
/// One random block is repeated, each time with its number in front, so that a block at a wrong
/// offset is detected.
pub fn pattern(seed: u64, bytes: u64) -> Vec<u8> {
    let bytes = usize::try_from(bytes).expect("test data fits the address space");
    let mut block = [0; 1000];
    fastrand::Rng::with_seed(seed).fill(&mut block);
    let mut pattern = Vec::with_capacity(bytes + block.len());
    for number in 0_u32.. {
        if pattern.len() >= bytes {
            break;
        }
        block[..4].copy_from_slice(&(number ^ seed as u32).to_le_bytes());
        pattern.extend_from_slice(&block);
    }
    pattern.truncate(bytes);
    pattern
}

/// Returns the seed of the data that `rank` sends in `round`.
pub(crate) fn seed(rank: usize, round: u64) -> u64 {
    (rank as u64 + 1) << 32 | round
}

/// Rounds `bytes` up to the engine's alignment.
pub(crate) fn aligned(caps: &Caps, bytes: u64) -> u64 {
    bytes.next_multiple_of(caps.put_align_bytes)
}

/// Returns the lengths of puts to test, sorted: odd ones, and those around the largest piece.
pub(crate) fn lengths(caps: &Caps) -> Vec<u64> {
    let mut lengths = vec![0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 255, 4095, 4096, 4097, 65_537, 300_001];
    let piece = caps.piece_bytes_max;
    if piece <= PIECE_BYTES_TRIED {
        lengths.extend([piece - 1, piece, piece + 1, 2 * piece - 1, 2 * piece, 2 * piece + 1]);
    }
    for length in &mut lengths {
        *length = aligned(caps, *length);
    }
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}
