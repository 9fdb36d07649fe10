//! Describes the messages of a channel, and finds copies that form the rows of one copy.

use peerlane_hal as hal;

use super::invalid;
use crate::error::Error;

/// A copy between this rank and a peer, in elements of the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRange {
    /// The first element that is read.
    pub from: usize,
    /// The first element that is written.
    pub to: usize,
    /// The number of elements.
    pub len: usize,
}

/// Rows of equal length with a constant stride, such as those of a tensor with gaps.
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
    /// Returns the copies of `count` of these rows to the rows `to`, for [`Channel::puts`](super::Channel::puts) or [`Channel::gets`](super::Channel::gets).
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

/// A copy in bytes, from this rank's window to a peer's or back.
#[derive(Clone, Copy)]
pub(super) struct BytesCopy {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
}

/// A message to one peer.
#[derive(Clone, Copy)]
pub(super) enum Message {
    Put(BytesCopy),
    Get(BytesCopy),
    Signal { word: u64, value: u64 },
    Wait { word: u64, value: u64 },
}

/// Returns how many of the first messages are copies of equal length with a constant stride, as the rows of one copy.
pub(super) fn rows_at(messages: &[Message]) -> hal::Rows {
    let copy = |message: &Message| match *message {
        Message::Put(copy) => Some((copy, false)),
        Message::Get(copy) => Some((copy, true)),
        Message::Signal { .. } | Message::Wait { .. } => None,
    };
    let mut copies = messages.iter().map_while(copy);
    let (Some((first, is_get)), Some((second, _))) = (copies.next(), copies.next()) else {
        return hal::Rows::ONE;
    };
    let pitches = (second.to.wrapping_sub(first.to), second.from.wrapping_sub(first.from));
    let (dst_pitch, src_pitch) = pitches;
    if dst_pitch < first.bytes || src_pitch < first.bytes {
        return hal::Rows::ONE;
    }
    let continues = |(row, one): (u64, (BytesCopy, bool))| {
        let expected = |begin: u64, pitch: u64| pitch.checked_mul(row)?.checked_add(begin);
        let (to, from) = (expected(first.to, dst_pitch), expected(first.from, src_pitch));
        (Some(one.0.to), Some(one.0.from), one.0.bytes, one.1) == (to, from, first.bytes, is_get)
    };
    let rows = (1..).zip(messages[1..].iter().map_while(copy)).take_while(|row| continues(*row));
    match rows.count() as u64 {
        0 => hal::Rows::ONE,
        more => hal::Rows { count: 1 + more, dst_pitch, src_pitch },
    }
}
