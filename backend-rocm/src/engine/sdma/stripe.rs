//! Cutting a copy into pieces, and giving them to the SDMA engines of its link.
//!
//! A copy of 256 MiB stalled an engine where two of 128 MiB did not (ROCm/rocm-systems#9927), so no piece
//! is larger. A large copy over a link with several engines is cut into pieces of one length, a multiple
//! of the engines in number. They are not dealt out beforehand: an engine holds two at most, so that
//! it goes on while the host sleeps, and takes its second one only while enough are left for the
//! others. So the end of a copy does not find one engine with two pieces and another idle, unless one is
//! more than twice as fast as the other.

/// No piece is larger.
pub(crate) const PIECE_BYTES_MAX: u64 = 128 << 20;
/// Below it, cutting costs more than a second engine gains.
const STRIPED_BYTES_MIN: u64 = 2 << 20;
/// What a piece of a striped copy has if it can: long enough for the host to give the next one.
const PIECE_BYTES: u64 = 16 << 20;
/// Pieces of one copy that one engine holds.
const HELD_MAX: u8 = 2;
/// Pieces begin at multiples of it, relative to the copy.
const ALIGN_BYTES: u64 = 4096;

/// The length of the pieces of a copy over so many engines; the last one is shorter.
pub(super) fn piece_bytes(bytes: u64, engines: usize, piece_bytes_max: u64) -> u64 {
    let engines = engines.max(1) as u64;
    let pieces = if engines > 1 && bytes >= STRIPED_BYTES_MIN {
        engines * bytes.div_ceil(engines * PIECE_BYTES.min(piece_bytes_max))
    } else {
        bytes.div_ceil(piece_bytes_max)
    };
    let even = bytes.div_ceil(pieces.max(1)).next_multiple_of(ALIGN_BYTES);
    even.min(piece_bytes_max).min(bytes)
}

/// An engine that may take a piece of a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate<T> {
    pub(super) engine: T,
    /// Pieces of this copy that it holds.
    pub(super) held: u8,
    /// Bytes that it holds of all copies.
    pub(super) bytes: u64,
}

/// Who takes the next piece of `left` that nobody has; `None` while all have enough.
pub(super) fn taker<T>(
    candidates: impl ExactSizeIterator<Item = Candidate<T>>,
    left: u64,
) -> Option<T> {
    let engines = candidates.len() as u64;
    let next = candidates.min_by_key(|candidate| (candidate.held, candidate.bytes))?;
    let may_take = match next.held {
        0 => true,
        held => held < HELD_MAX && (engines == 1 || left > 2 * engines),
    };
    may_take.then_some(next.engine)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn pieces_are_even_and_never_above_the_limit() {
        for engines in 1..=5 {
            for bytes in [1, 4095, 4097, MIB, 2 * MIB, 2 * MIB + 1, 65 * MIB + 3, 1 << 30, 1 << 40]
            {
                for max in [4096, 64 << 10, PIECE_BYTES_MAX] {
                    let piece = piece_bytes(bytes, engines, max);
                    assert!((1..=max).contains(&piece), "{bytes} over {engines}: {piece}");
                    assert!(piece == bytes || piece.is_multiple_of(ALIGN_BYTES));
                }
            }
        }
        assert_eq!(piece_bytes(129 * MIB, 1, PIECE_BYTES_MAX), 129 * MIB / 2);
        assert_eq!(piece_bytes(128 * MIB, 1, PIECE_BYTES_MAX), 128 * MIB);
        assert_eq!(piece_bytes(128 * MIB, 2, PIECE_BYTES_MAX), 16 * MIB);
        assert_eq!(piece_bytes(4 * MIB, 2, PIECE_BYTES_MAX), 2 * MIB);
        assert_eq!(piece_bytes(2 * MIB - 1, 2, PIECE_BYTES_MAX), 2 * MIB - 1);
        assert_eq!(piece_bytes(0, 2, PIECE_BYTES_MAX), 0);
    }

    fn taken(held: &[(u8, u64)], left: u64) -> Option<usize> {
        let candidates = held.iter().enumerate();
        let candidates =
            candidates.map(|(engine, &(held, bytes))| Candidate { engine, held, bytes });
        taker(candidates, left)
    }

    #[test]
    fn the_second_piece_waits_for_the_others_to_be_provided_for() {
        assert_eq!(taken(&[(1, 5), (0, 9)], 1), Some(1), "the idle one");
        assert_eq!(taken(&[(0, 5), (0, 3)], 9), Some(1), "the one with less to do");
        assert_eq!(taken(&[(1, 5), (1, 3)], 5), Some(1));
        assert_eq!(taken(&[(1, 5), (1, 3)], 4), None, "the others may need them");
        assert_eq!(taken(&[(2, 5), (2, 3)], 9), None);
        assert_eq!(taken(&[(1, 5)], 1), Some(0), "there is no other");
        assert_eq!(taken(&[], 1), None);
    }

    /// Engines of unlike speed take pieces; after each step all that may be given is given.
    #[test]
    fn no_engine_idles_while_another_holds_two() {
        for engines in 1..=6 {
            for pieces in [1, 2, 3, 5, 12, 13, 40_u64] {
                for slow in 10..=20_u64 {
                    run(engines, pieces, slow);
                }
            }
        }
    }

    fn run(engines: usize, pieces: u64, slow: u64) {
        // What is left of the piece at hand, and how many are held.
        let mut work = vec![(0_u64, 0_u8); engines];
        let (mut left, mut done) = (pieces, 0);
        while done < pieces {
            loop {
                let held: Vec<_> = work.iter().map(|&(_, held)| (held, 0)).collect();
                let Some(engine) = taken(&held, left).filter(|_| left > 0) else { break };
                left -= 1;
                work[engine].1 += 1;
            }
            let idle = work.iter().any(|&(_, held)| held == 0);
            let two = work.iter().any(|&(_, held)| held == 2);
            assert!(!(idle && two), "{engines} engines, {pieces} pieces, {left} left: {work:?}");
            for (engine, (todo, held)) in work.iter_mut().enumerate() {
                if *held == 0 {
                    continue;
                }
                if *todo == 0 {
                    *todo = if engine == 0 { slow } else { 10 };
                }
                *todo -= 1;
                if *todo == 0 {
                    *held -= 1;
                    done += 1;
                }
            }
        }
    }
}
