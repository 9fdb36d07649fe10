//! Describes the messages of a channel, and finds copies that form the rows of one copy.

use peerlane_hal::{self as hal, Command, Direction, Rank};

use super::{BytesCopy, invalid};
use crate::error::Error;

/// Describes a copy between this rank and a peer, in elements of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The first element that is read.
    pub from: usize,
    /// The first element that is written.
    pub to: usize,
    /// The number of elements.
    pub len: usize,
}

/// Describes rows of equal length with a constant stride, such as those of a tensor with gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// The first element of the first row.
    pub begin: usize,
    /// The number of elements of a row.
    pub len: usize,
    /// The distance between the beginnings of two adjacent rows, in elements.
    pub stride: usize,
}

impl Rows {
    /// Returns the copies of `count` of these rows to the rows `to`, for
    /// [`Channel::puts`](super::Channel::puts) or [`Channel::gets`](super::Channel::gets).
    ///
    /// # Errors
    /// [`InvalidArgument`](hal::ErrorKind::InvalidArgument) if the rows differ in length.
    pub fn copies(self, to: Self, count: usize) -> Result<Vec<CopyRange>, Error> {
        if self.len != to.len {
            return Err(invalid(format!(
                "rows of {} elements are copied to rows of {}, expected equal lengths",
                self.len, to.len
            )));
        }

        let begin =
            |rows: Self, row: usize| rows.begin.saturating_add(row.saturating_mul(rows.stride));
        let copy = |row| CopyRange { from: begin(self, row), to: begin(to, row), len: self.len };
        Ok((0..count).map(copy).collect())
    }
}

/// Returns the commands of copies: copies that follow each other with equal lengths and a constant
/// stride become one copy of rows.
pub(super) fn join_rows(copies: &[BytesCopy], direction: Direction, peer: Rank) -> Vec<Command> {
    let mut commands = Vec::new();
    let mut rest = copies;

    while let [first, ..] = rest {
        let joined = rows_at(rest);
        rest = &rest[joined.count as usize..];

        let mut command = first.command(direction, peer);
        if let Command::Copy { rows, .. } = &mut command {
            *rows = joined;
        }
        commands.push(command);
    }

    commands
}

/// Returns how many of the first copies are rows of one copy, and their pitches.
fn rows_at(copies: &[BytesCopy]) -> hal::Rows {
    let [first, second, ..] = copies else { return hal::Rows::ONE };
    let dst_pitch = second.to.wrapping_sub(first.to);
    let src_pitch = second.from.wrapping_sub(first.from);

    // Rows of one copy ascend and do not overlap. If the second copy is in front of the first one,
    // the difference has wrapped, and the checked sum below overflows.
    if dst_pitch < first.bytes || src_pitch < first.bytes {
        return hal::Rows::ONE;
    }

    let continues = |(row, copy): &(u64, &BytesCopy)| {
        let expected = |begin: u64, pitch: u64| pitch.checked_mul(*row)?.checked_add(begin);
        let places = (expected(first.to, dst_pitch), expected(first.from, src_pitch));
        (Some(copy.to), Some(copy.from)) == places && copy.bytes == first.bytes
    };

    let rows = (1..).zip(&copies[1..]).take_while(continues);
    match rows.count() as u64 {
        0 => hal::Rows::ONE,
        more => hal::Rows { count: 1 + more, dst_pitch, src_pitch },
    }
}
