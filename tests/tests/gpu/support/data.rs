//! Generates what ranks contribute, and formats failures.

use std::fmt;

use peerlane_collectives::error::Error;
use peerlane_tests::{Failure, Outcome, pattern};

/// What memory holds where nothing may arrive, or nothing has yet.
pub(crate) const POISON: u8 = 0xA5;

/// What `rank` contributes in `round`.
pub(crate) fn block(rank: usize, round: u64, bytes: usize) -> Vec<u8> {
    let mut block = pattern((rank as u64 + 1) << 32 | round, bytes as u64);
    if let Some(first) = block.first_mut() {
        // Also single bytes differ from those of the round before.
        *first = (round * 31 + rank as u64 * 7 + 1) as u8;
    }
    block
}

/// What `round` gathers.
pub(crate) fn gathered(ranks: usize, round: u64, bytes: usize) -> Vec<u8> {
    (0..ranks).map(|rank| block(rank, round, bytes)).collect::<Vec<_>>().concat()
}

/// Fails unless the bytes are the expected ones; names the first that is wrong.
pub(crate) fn same(what: impl fmt::Display, seen: &[u8], wanted: &[u8]) -> Outcome {
    if seen == wanted {
        return Ok(());
    }
    let wrong = seen.iter().zip(wanted).filter(|(seen, wanted)| seen != wanted).count();
    let first = seen.iter().zip(wanted).position(|(seen, wanted)| seen != wanted);
    Err(Failure::new(match first {
        Some(at) => format!(
            "{what}: byte {at} of {} is {:#04x}, expected {:#04x}; {wrong} are wrong",
            wanted.len(),
            seen[at],
            wanted[at]
        ),
        None => format!("{what}: found {} bytes, expected {} bytes", seen.len(), wanted.len()),
    }))
}

/// An error where none was due.
pub(crate) fn unexpected(error: Error) -> Failure {
    Failure::new(format!("{error} ({})", error.kind()))
}

pub(crate) fn check(holds: bool, text: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(Failure::new(text())) }
}
