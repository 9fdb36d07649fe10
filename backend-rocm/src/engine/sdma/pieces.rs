//! Divides copies into pieces, and selects an SDMA engine for each piece.
//!
//! A copy of 256 MiB stalled an engine where two of 128 MiB did not (ROCm/rocm-systems#9927), so no piece is
//! larger than that. A large copy over a link with several engines is divided into pieces of equal length,
//! whose number is a multiple of the number of engines.
//!
//! Pieces are not assigned to engines in advance. An engine holds at most two, so that it continues while the
//! host sleeps, and takes the second only if enough remain for the other engines. At the end of a copy no
//! engine then holds two pieces while another is idle, unless one is more than twice as fast as the other.

use super::set::{SdmaId, SdmaSet};

pub(crate) const PIECE_BYTES_MAX: u64 = 128 << 20;
/// Below this copy size in bytes, the division among SDMA engines costs more than a second engine gains.
const STRIPED_BYTES_MIN: u64 = 2 << 20;
/// The preferred size in bytes of a piece, if several SDMA engines share the copy. It gives the host enough time to
/// submit the next piece.
const PIECE_BYTES: u64 = 16 << 20;
const PIECES_HELD_MAX: u8 = 2;
/// The alignment of pieces in bytes, counted from the start of the copy.
const ALIGN_BYTES: u64 = 4096;
/// The largest number of copies that an SDMA engine holds at a time, because with a full ring, the call of the
/// runtime blocks.
const COPIES_HELD_MAX: usize = 32;

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

#[derive(Clone, Copy, Debug)]
struct Candidate<T> {
    engine: T,
    held: u8,
    bytes: u64,
}

fn pick_engine<T>(
    candidates: impl ExactSizeIterator<Item = Candidate<T>>,
    remaining: u64,
) -> Option<T> {
    let engines = candidates.len() as u64;
    let next = candidates.min_by_key(|candidate| (candidate.held, candidate.bytes))?;
    let may_take = match next.held {
        0 => true,
        held => held < PIECES_HELD_MAX && (engines == 1 || remaining > 2 * engines),
    };
    may_take.then_some(next.engine)
}

#[derive(Clone, Copy, Debug)]
struct EngineLoad {
    engine: Option<SdmaId>,
    copies: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct EngineLoads(Vec<EngineLoad>);

impl EngineLoads {
    /// Selects the SDMA engine for the next piece of a copy, or returns `None` if every engine holds enough pieces.
    ///
    /// `held` is the number of pieces of the copy on each engine. Returns the index of the engine's load and the
    /// engine.
    pub(super) fn pick(
        &mut self,
        set: SdmaSet,
        held: &[u8; SdmaId::COUNT],
        remaining: u64,
    ) -> Option<(usize, Option<SdmaId>)> {
        let choices = set.ids().map(Some).chain(set.is_empty().then_some(None));
        let mut candidates = [None; SdmaId::COUNT];
        let mut count = 0;
        for engine in choices {
            let index = self.index_of(engine);
            let EngineLoad { copies, bytes, .. } = self.0[index];
            let held = held[engine.map_or(0, SdmaId::index)];
            // A full engine must not take a piece.
            let held = if copies < COPIES_HELD_MAX { held } else { u8::MAX };
            candidates[count] = Some(Candidate { engine: (index, engine), held, bytes });
            count += 1;
        }
        let candidates = candidates[..count].iter();
        pick_engine(candidates.map(|candidate| candidate.expect("set above")), remaining)
    }

    fn index_of(&mut self, engine: Option<SdmaId>) -> usize {
        let known = self.0.iter().position(|load| load.engine == engine);
        known.unwrap_or_else(|| {
            self.0.push(EngineLoad { engine, copies: 0, bytes: 0 });
            self.0.len() - 1
        })
    }

    pub(super) fn add(&mut self, index: usize, bytes: u64) {
        self.0[index].copies += 1;
        self.0[index].bytes += bytes;
    }

    pub(super) fn remove(&mut self, index: usize, bytes: u64) {
        self.0[index].copies -= 1;
        self.0[index].bytes -= bytes;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn pieces_are_even_and_at_most_the_maximum() {
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

    fn picked(held: &[(u8, u64)], remaining: u64) -> Option<usize> {
        let candidates = held.iter().enumerate();
        let candidates =
            candidates.map(|(engine, &(held, bytes))| Candidate { engine, held, bytes });
        pick_engine(candidates, remaining)
    }

    #[test]
    fn an_engine_takes_a_second_piece_only_if_enough_remain() {
        assert_eq!(picked(&[(1, 5), (0, 9)], 1), Some(1), "the idle engine");
        assert_eq!(picked(&[(0, 5), (0, 3)], 9), Some(1), "the engine with fewer bytes");
        assert_eq!(picked(&[(1, 5), (1, 3)], 5), Some(1));
        assert_eq!(picked(&[(1, 5), (1, 3)], 4), None, "the other engine may need them");
        assert_eq!(picked(&[(2, 5), (2, 3)], 9), None);
        assert_eq!(picked(&[(1, 5)], 1), Some(0), "there is no other engine");
        assert_eq!(picked(&[], 1), None);
    }

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
        // Remaining time of the current piece, and number of pieces held, for each engine.
        let mut loads = vec![(0_u64, 0_u8); engines];
        let (mut remaining, mut done) = (pieces, 0);
        while done < pieces {
            loop {
                let held: Vec<_> = loads.iter().map(|&(_, held)| (held, 0)).collect();
                let Some(engine) = picked(&held, remaining).filter(|_| remaining > 0) else {
                    break;
                };
                remaining -= 1;
                loads[engine].1 += 1;
            }
            let idle = loads.iter().any(|&(_, held)| held == 0);
            let two = loads.iter().any(|&(_, held)| held == 2);
            assert!(
                !(idle && two),
                "{engines} engines, {pieces} pieces, {remaining} remaining: {loads:?}"
            );
            for (engine, (time, held)) in loads.iter_mut().enumerate() {
                if *held == 0 {
                    continue;
                }
                if *time == 0 {
                    *time = if engine == 0 { slow } else { 10 };
                }
                *time -= 1;
                if *time == 0 {
                    *held -= 1;
                    done += 1;
                }
            }
        }
    }
}
