//! Splits a copy into pieces that an engine can copy at once.

/// A part of a copy that an engine copies at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The offset in bytes from the start of the copy.
    pub offset: u64,
    /// The length in bytes of this part of the copy, at least 1.
    pub bytes: u64,
}

/// Splits a copy of `bytes` bytes into pieces of at most `piece_bytes_max` bytes, in order.
///
/// # Panics
/// Panics if `piece_bytes_max` is 0.
pub fn pieces(bytes: u64, piece_bytes_max: u64) -> impl ExactSizeIterator<Item = Piece> {
    assert!(piece_bytes_max > 0, "a piece holds at least one byte");
    let count = usize::try_from(bytes.div_ceil(piece_bytes_max)).unwrap_or(usize::MAX);
    (0..count).map(move |index| {
        let offset = index as u64 * piece_bytes_max;
        Piece { offset, bytes: piece_bytes_max.min(bytes - offset) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_tile_the_copy() {
        for max in 1..9 {
            for bytes in 0..40 {
                let mut next = 0;
                for piece in pieces(bytes, max) {
                    assert_eq!(piece.offset, next);
                    assert!((1..=max).contains(&piece.bytes));
                    next += piece.bytes;
                }
                assert_eq!(next, bytes);
                assert_eq!(pieces(bytes, max).len() as u64, bytes.div_ceil(max));
            }
        }
    }
}
