//! A step in 8 bytes, so that the plans of thousands of ranks fit in memory at once.

const KIND_BITS: u32 = 3;
const WHO_BITS: u32 = 22;
const WHAT_BITS: u32 = u64::BITS - KIND_BITS - WHO_BITS;

/// The largest number of a rank, or of a lane among those of all ranks.
pub(super) const WHO_MAX: u64 = (1 << WHO_BITS) - 1;
/// The most bytes of a cell, and the largest number of a flag or of a step.
pub(super) const WHAT_MAX: u64 = (1 << WHAT_BITS) - 2;
/// No step.
const NONE: u64 = WHAT_MAX + 1;

/// What a step does, as far as its time depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Bytes to another rank's output, or the own; `passed_on` where a peer has put them here.
    Put { peer: u32, bytes: u64, passed_on: bool },
    /// Bytes from another rank, or the own.
    Get { peer: u32, bytes: u64 },
    /// To a lane, counted over all ranks. `what` is the number of the flag until the program is
    /// linked, then the step that waits.
    Signal { lane: u32, what: u64 },
    /// For the step that signals; `None` until the program is linked, or if there is none.
    Wait { signal: Option<u32> },
}

/// A [`Move`] in 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Packed(u64);

impl Packed {
    /// The move. Numbers above [`WHO_MAX`] and [`WHAT_MAX`] are cut off; the caller has refused
    /// them.
    pub(super) fn new(step: Move) -> Self {
        let (kind, who, what) = match step {
            Move::Put { peer, bytes, passed_on: false } => (0, peer, bytes),
            Move::Put { peer, bytes, passed_on: true } => (4, peer, bytes),
            Move::Get { peer, bytes } => (1, peer, bytes),
            Move::Signal { lane, what } => (2, lane, what),
            Move::Wait { signal } => (3, 0, signal.map_or(NONE, u64::from)),
        };
        debug_assert!(u64::from(who) <= WHO_MAX && what <= NONE, "{step:?}");
        Self(kind | u64::from(who) << KIND_BITS | what << (KIND_BITS + WHO_BITS))
    }

    pub(super) fn unpack(self) -> Move {
        let who = (self.0 >> KIND_BITS & WHO_MAX) as u32;
        let what = self.0 >> (KIND_BITS + WHO_BITS);
        match self.0 & ((1 << KIND_BITS) - 1) {
            kind @ (0 | 4) => Move::Put { peer: who, bytes: what, passed_on: kind == 4 },
            1 => Move::Get { peer: who, bytes: what },
            2 => Move::Signal { lane: who, what },
            _ => Move::Wait { signal: u32::try_from(what).ok() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_has_8_bytes_and_comes_back() {
        assert_eq!(size_of::<Packed>(), 8);
        let who = WHO_MAX as u32;
        for step in [
            Move::Put { peer: 0, bytes: WHAT_MAX, passed_on: false },
            Move::Put { peer: who, bytes: 0, passed_on: true },
            Move::Get { peer: 1, bytes: 17 },
            Move::Signal { lane: who, what: WHAT_MAX },
            Move::Wait { signal: None },
            Move::Wait { signal: Some(0) },
            Move::Wait { signal: Some(u32::MAX - 1) },
        ] {
            assert_eq!(Packed::new(step).unpack(), step);
        }
    }
}
