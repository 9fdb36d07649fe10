//! Computes the byte ranges of blocks and chunks in the buffers of ranks, and the memory words of
//! flags.
//!
//! Every rank contributes a block: one piece for each of one or several tensors, one after another.
//! Chunks divide the whole block, so a plan does not depend on tensors. A cell is a range of bytes
//! of a block, with as many [spans](Span) as there are pieces that it touches, or with up to three
//! where the input or the output is a matrix.
//!
//! Each rank has a [`Placement`] of its input and output in buffers. By default the output is all
//! tensors one after another, each with its pieces in rank order and without gaps.

// The files of this module:
//
// | file | holds |
// | --- | --- |
// | `mod.rs` | the layout of an operation: cells and spans |
// | `blocks.rs` | lengths of blocks, inputs and outputs |
// | `pieces.rs` | lengths of pieces, and positions in buffers |
// | `flags.rs` | the words of flags |

use std::ops::Range;
use std::sync::Arc;

use peerlane_hal::{ErrorKind, Rank, Rows};

use crate::collective::Collective;
use crate::error::Error;
use crate::plan::{Cell, Source};

mod blocks;
mod flags;
mod pieces;

pub use blocks::BlockBytes;
use blocks::Sizes;
#[doc(hidden)]
pub use blocks::{PlacedBlock, StartBytes};
#[doc(hidden)]
pub use flags::reader;
pub use flags::{FLAG_WORDS, FlagLayout};
pub use pieces::{
    BUFFERS_MAX, BufferPosition, InputPlacement, Lengths, OutputPlacement, Placement,
};

/// The alignment of chunks relative to the beginning of their block, in bytes.
///
/// If the block is aligned to a cache line, no two chunks share a cache line.
pub const CHUNK_ALIGN_BYTES: u64 = 64;

/// Stores the block lengths and buffer positions of a collective, and computes the byte range of
/// each chunk.
///
/// Blocks may have different lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    collective: Collective,
    blocks: Sizes,
    chunks: u32,
    /// The placement of each rank, or only the first if all ranks have the same placement.
    placements: Box<[Arc<Placement>]>,
    /// Whether a rank contributes its whole input to every output of a reduction, instead of one
    /// block to each.
    is_input_shared: bool,
    columns: Option<Columns>,
}

/// Specifies whether inputs, outputs or both are row-major matrices, in which each block is a range
/// of columns.
///
/// In an input or output that is no matrix, a block consists of all its rows, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Columns {
    /// The number of rows of each block, at least 1.
    pub rows: u64,
    /// Whether the input of each rank is a row-major matrix.
    pub input: bool,
    /// Whether the output of each rank is a row-major matrix.
    pub output: bool,
}

/// Stores the position of one chunk in a contiguous input and in a contiguous output.
///
/// Every rank then has [`Placement::CONTIGUOUS`], and there is one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellSpan {
    /// The byte offset of the chunk in the input of the rank that provides the chunk.
    pub input_offset: u64,
    /// The byte offset of the chunk in the output.
    pub output_offset: u64,
    /// The length of the chunk in bytes; 0 if the block is too short to fill every chunk.
    pub bytes: u64,
}

/// Describes a copy of one or several rows of bytes from one buffer to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The position of the first byte in the buffer that is read.
    pub src: BufferPosition,
    /// The position of the first byte in the buffer that is written.
    pub dst: BufferPosition,
    /// The number of bytes in each row; never 0.
    pub bytes: u64,
    /// The number of rows, and the distances between their beginnings in the source and in the
    /// destination.
    pub rows: Rows,
}

impl Span {
    /// Returns the span of the bytes of this span and of `next`, or `None` unless they follow each
    /// other both in the source and in the destination.
    #[must_use]
    pub fn joined(self, next: Self) -> Option<Self> {
        let follows = |first: BufferPosition, second: BufferPosition| {
            first.buffer == second.buffer
                && first.offset.checked_add(self.bytes) == Some(second.offset)
        };
        let is_one_row = self.rows == Rows::ONE && next.rows == Rows::ONE;
        let is_neighbor = follows(self.src, next.src) && follows(self.dst, next.dst);

        (is_one_row && is_neighbor).then(|| Self { bytes: self.bytes + next.bytes, ..self })
    }
}

impl Layout {
    /// Creates the layout of contiguous inputs and outputs, with one block length for each rank.
    ///
    /// It is otherwise like [`of_blocks`](Self::of_blocks).
    ///
    /// # Errors
    /// As [`of_blocks`](Self::of_blocks).
    pub fn new(collective: Collective, block_bytes: &[u64], chunks: u32) -> Result<Self, Error> {
        Self::of_blocks(collective, BlockBytes::by_rank(block_bytes)?, chunks)
    }

    /// Creates the layout of a collective operation, with contiguous inputs and outputs.
    ///
    /// Each of the blocks has `chunks` chunks.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no rank or no tensor, the
    /// collective cannot have such blocks, `chunks` is 0, or an input or output is longer than
    /// 2^64 - 1 bytes.
    pub fn of_blocks(
        collective: Collective,
        blocks: BlockBytes,
        chunks: u32,
    ) -> Result<Self, Error> {
        let blocks = Sizes::new(collective, blocks)?;

        if chunks == 0 {
            return Err(invalid("chunks is 0, expected at least 1".into()));
        }

        // A placement that all ranks share is stored once.
        let placements = [Arc::new(Placement::CONTIGUOUS)].into();
        let is_input_shared = collective.contributes_whole_input();
        Ok(Self { collective, blocks, chunks, placements, is_input_shared, columns: None })
    }

    /// Makes the input of each rank a single block, which the rank contributes to every output of a
    /// reduce-scatter.
    ///
    /// Every output then is the sum of the inputs.
    #[doc(hidden)]
    pub fn with_shared_input(mut self) -> Self {
        self.is_input_shared = true;
        self
    }

    /// Makes the inputs or outputs of all ranks row-major matrices, as `columns` specifies.
    ///
    /// There is one tensor, and inputs and outputs are contiguous.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if a block does not consist of that number
    /// of rows of whole elements.
    #[doc(hidden)]
    pub fn with_columns(mut self, columns: Columns, element_bytes: u64) -> Result<Self, Error> {
        let ranks = self.ranks();
        let pairs = Rank::all(ranks).flat_map(|from| Rank::all(ranks).map(move |to| (from, to)));
        let required = pairs.filter(|&(from, to)| self.collective.requires(from, to));

        let unit = columns.rows.saturating_mul(element_bytes);
        for (from, to) in required {
            let bytes = self.block_bytes(from, to);
            // Without rows the unit is 0, and the length of an empty block is a multiple of 0.
            if unit == 0 || !bytes.is_multiple_of(unit) {
                return Err(invalid(format!(
                    "the block from rank {from} to rank {to} has {} elements, expected a multiple of the {} rows of the matrix",
                    bytes / element_bytes,
                    columns.rows
                )));
            }
        }

        self.columns = Some(columns);
        Ok(self)
    }

    /// Returns whether the input or the output is a matrix.
    #[doc(hidden)]
    pub fn has_columns(&self) -> bool {
        self.columns.is_some()
    }

    /// Returns whether the output is a matrix, in which blocks are not contiguous.
    #[doc(hidden)]
    pub fn has_columns_in_output(&self) -> bool {
        self.columns.is_some_and(|columns| columns.output)
    }

    /// Replaces the buffer positions of all inputs and outputs by `placements`, one for each rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is not one placement for each rank,
    /// or as [`Placement::check`].
    pub fn with_placements(mut self, placements: Vec<Placement>) -> Result<Self, Error> {
        let found = placements.len();
        let ranks = self.ranks();
        if found != ranks {
            return Err(invalid(format!(
                "number of placements is {found}, expected {ranks}, one for each rank"
            )));
        }

        let mut shared: Vec<Arc<Placement>> = Vec::with_capacity(ranks);
        for (rank, placement) in Rank::all(ranks).zip(placements) {
            placement.check(&self, rank)?;

            // Usually all ranks have the same placement. It can have a position for every rank, so
            // equal ones are stored once. The first and the last one are enough to find most equal
            // ones, and comparing with all would take quadratic time.
            let mut candidates = shared.iter().take(1).chain(shared.last());
            let equal = candidates.find(|known| ***known == placement);
            let placement = equal.map_or_else(|| Arc::new(placement), Arc::clone);
            shared.push(placement);
        }

        // `Self::placement` returns the first entry for ranks without an entry.
        if shared.iter().all(|placement| Arc::ptr_eq(placement, &shared[0])) {
            shared.truncate(1);
        }
        self.placements = shared.into();
        Ok(self)
    }

    /// Sets the byte offsets at which the contiguous inputs and outputs of all ranks begin in their
    /// buffers.
    ///
    /// Ranks whose blocks have positions of their own keep them.
    #[doc(hidden)]
    pub fn set_offsets(&mut self, input_offset: u64, output_offset: u64) {
        for placement in &mut self.placements {
            let Placement { input, output } = Arc::make_mut(placement);
            if let InputPlacement::Contiguous(position) = input {
                position.offset = input_offset;
            }
            if let OutputPlacement::Contiguous(position) = output {
                position.offset = output_offset;
            }
        }
    }

    /// Sets the number of chunks of each block, at least 1.
    #[doc(hidden)]
    pub fn set_chunks(&mut self, chunks: u32) {
        self.chunks = chunks;
    }

    /// Returns the byte offsets at which the contiguous input and output of `rank` begin in their
    /// buffers.
    ///
    /// The offset is 0 for an input or output that is not contiguous.
    #[doc(hidden)]
    pub fn offsets(&self, rank: Rank) -> [u64; 2] {
        let Placement { input, output } = self.placement(rank);

        let input = match input {
            InputPlacement::Contiguous(position) => position.offset,
            InputPlacement::ByTensor(_) | InputPlacement::ByBlock(_) => 0,
        };

        let output = match output {
            OutputPlacement::Contiguous(position) => position.offset,
            OutputPlacement::ByTensor(_) | OutputPlacement::ByBlock(_) => 0,
        };

        [input, output]
    }

    /// Returns the positions of the input and output of `rank` in its buffers.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn placement(&self, rank: Rank) -> &Placement {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        self.placements.get(rank.index()).unwrap_or(&self.placements[0])
    }

    /// Returns the byte range of the chunk `cell` in its provider's input and in the output of
    /// `receiver`.
    ///
    /// The input and the output may not have gaps.
    ///
    /// The cells of a block follow each other without gaps, in chunk order. Their lengths differ by
    /// at most [`CHUNK_ALIGN_BYTES`], except that the last one may be shorter by as much again.
    ///
    /// # Panics
    /// If there is no such rank or chunk.
    pub fn cell(&self, cell: Cell, receiver: Rank) -> CellSpan {
        let Range { start, end } = self.range(cell, receiver);
        let input_offset = self.input_offset(cell.block, receiver) + start;

        // With several tensors, the blocks count as if each were contiguous in the output.
        let before = match &self.blocks {
            Sizes::Provided { blocks, .. } => blocks.offset(cell.block),
            _ => self.output_offset(0, cell.block, receiver),
        };
        CellSpan { input_offset, output_offset: before + start, bytes: end - start }
    }

    /// Returns whether the input of a rank has a block for every output, instead of the same bytes
    /// for all.
    pub fn has_input_blocks(&self) -> bool {
        self.collective.has_input_block_per_receiver() && !self.is_input_shared
    }

    /// Returns the byte range of one rank's contribution to a chunk of the block that `receiver`
    /// reduces.
    ///
    /// It is a range of the input of the rank that contributes, `cell.block`, and of the inbox of
    /// `receiver` instead of its output. The input may not have gaps, as in [`cell`](Self::cell).
    ///
    /// # Panics
    /// If there is no such rank or chunk.
    pub fn contribution(&self, cell: Cell, receiver: Rank) -> CellSpan {
        // The bytes are a chunk of the receiver's block, whoever contributes them.
        let Range { start, end } = self.range(Cell { block: receiver, ..cell }, receiver);
        let input_offset = self.input_offset(cell.block, receiver) + start;

        let inbox_offset = self.inbox_stride(receiver).saturating_mul(cell.block.0.into());
        CellSpan {
            input_offset,
            output_offset: inbox_offset.saturating_add(start),
            bytes: end - start,
        }
    }

    /// Returns the spans that copy one rank's contribution to a chunk of the block that `receiver`
    /// reduces, from the input or the output of the rank, `cell.block`, to the inbox.
    ///
    /// A destination is an offset in the inbox of `receiver`, and its buffer is 0. The spans are
    /// the same parts of the chunk as those of the result in the output of `receiver`, whoever
    /// contributes. A chunk of no bytes has none.
    ///
    /// # Panics
    /// If there is no such rank or chunk.
    pub fn contribution_spans(
        &self,
        cell: Cell,
        from: Source,
        receiver: Rank,
    ) -> impl Iterator<Item = Span> {
        let Range { start, end } = self.range(Cell { block: receiver, ..cell }, receiver);
        let inbox_offset = self.inbox_stride(receiver).saturating_mul(cell.block.0.into());

        let mut piece_end = 0;
        (0..self.tensors()).filter_map(move |tensor| {
            let piece_start = piece_end;
            piece_end += self.piece_bytes(tensor, receiver, receiver);
            let bytes = start.max(piece_start)..end.min(piece_end);
            if bytes.is_empty() {
                return None;
            }

            let piece = match from {
                Source::Input => self.place_in_input(cell.block, (tensor, piece_start), receiver),
                Source::Output => self.place_in_output(cell.block, (tensor, piece_start), receiver),
            };
            let src = BufferPosition { offset: piece.offset + bytes.start - piece_start, ..piece };
            let offset = inbox_offset.saturating_add(bytes.start);
            let dst = BufferPosition { buffer: 0, offset };
            Some(Span { src, dst, bytes: bytes.end - bytes.start, rows: Rows::ONE })
        })
    }

    /// Returns the length in bytes of the memory for the contributions to the block that `rank`
    /// reduces.
    ///
    /// This memory is the inbox of `rank`, which has a place for each rank up to the last one that
    /// contributes. The length is 0 if `rank` reduces no block.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn inbox_bytes(&self, rank: Rank) -> u64 {
        let places = self.collective.contributors(rank, Rank::at(self.ranks()).0).end;
        self.inbox_stride(rank).saturating_mul(places.into())
    }

    /// Returns the length in bytes of the inbox of `rank` that is enough for all starts of a
    /// resizable operation, of which none is longer than this layout.
    ///
    /// A shorter input can have a longer part for `rank`: of two units for three ranks, the last
    /// two ranks get one each, and of one unit only the last rank gets one.
    ///
    /// # Panics
    /// If there is no such rank.
    #[doc(hidden)]
    pub fn resizable_inbox_bytes(&self, rank: Rank) -> u64 {
        if !self.has_parts() {
            return self.inbox_bytes(rank);
        }

        let (units, ranks) = (self.data_bytes().div_ceil(CHUNK_ALIGN_BYTES), self.ranks() as u64);
        let part_units_max = units.div_ceil(ranks);
        part_units_max.saturating_mul(CHUNK_ALIGN_BYTES).saturating_mul(ranks)
    }

    /// Returns the distance in bytes between the contributions of consecutive ranks in the inbox of
    /// `rank`.
    ///
    /// It is aligned, so no two contributions share a cache line.
    fn inbox_stride(&self, rank: Rank) -> u64 {
        self.block_bytes(rank, rank).checked_next_multiple_of(CHUNK_ALIGN_BYTES).unwrap_or(u64::MAX)
    }

    /// Returns the spans that copy the chunk `cell` from a buffer of rank `owner` to the output of
    /// rank `into`.
    ///
    /// A chunk of no bytes has none.
    ///
    /// # Panics
    /// If there is no such chunk or rank, or `from` is the input of a rank that does not provide
    /// the cell.
    pub fn spans(
        &self,
        cell: Cell,
        (owner, from): (Rank, Source),
        into: Rank,
    ) -> impl Iterator<Item = Span> {
        assert!(from == Source::Output || owner == cell.block, "rank {owner} does not own {cell}");

        let Range { start, end } = self.range(cell, into);
        // An empty chunk has no spans. If its block is empty too, the rows have a width of 0, by
        // which `spans_of_columns` would divide.
        let of_columns = self.columns.filter(|_| start < end).map(|columns| {
            self.spans_of_columns(columns, cell.block, (start, end), (owner, from), into)
        });

        // The spans of a matrix cover the whole chunk already, so none are left for its tensor.
        let tensors = if self.columns.is_some() { 0 } else { self.tensors() };
        let mut piece_end = 0;
        let pieces = (0..tensors).filter_map(move |tensor| {
            let piece_start = piece_end;
            piece_end += self.piece_bytes(tensor, cell.block, into);

            let bytes = start.max(piece_start)..end.min(piece_end);
            self.span_of_piece((cell.block, tensor), piece_start, bytes, (owner, from), into)
        });

        of_columns.into_iter().flatten().flatten().chain(pieces)
    }

    /// Returns the span that copies `bytes`, a range of a block that lies within the block's piece
    /// of `tensor`.
    ///
    /// Returns `None` if the range is empty.
    ///
    /// The piece begins at the byte `piece_start` of the block.
    fn span_of_piece(
        &self,
        (block, tensor): (Rank, usize),
        piece_start: u64,
        bytes: Range<u64>,
        (owner, from): (Rank, Source),
        into: Rank,
    ) -> Option<Span> {
        if bytes.is_empty() {
            return None;
        }

        let src = match from {
            Source::Input => self.place_in_input(owner, (tensor, piece_start), into),
            Source::Output => self.place_in_output(owner, (tensor, piece_start), block),
        };
        let dst = self.place_in_output(into, (tensor, piece_start), block);

        let skipped = bytes.start - piece_start;
        let after_skipped = |position: BufferPosition| BufferPosition {
            offset: position.offset + skipped,
            ..position
        };
        Some(Span {
            src: after_skipped(src),
            dst: after_skipped(dst),
            bytes: bytes.end - bytes.start,
            rows: Rows::ONE,
        })
    }

    /// Returns the spans that copy the bytes from `start` to `end` of a block of a matrix.
    ///
    /// They are the rest of a first row, whole rows, and the beginning of a last row.
    fn spans_of_columns(
        &self,
        columns: Columns,
        block: Rank,
        (start, end): (u64, u64),
        (owner, from): (Rank, Source),
        into: Rank,
    ) -> [Option<Span>; 3] {
        let width = self.block_bytes(block, into) / columns.rows;
        // Returns where the block begins in an input or output of `total` bytes, and the distance
        // of its rows there. Outside of a matrix it begins at `position`, after `before` bytes of
        // other blocks. In a matrix, only the first rows of these blocks precede it.
        let side = |is_matrix, position: BufferPosition, before: u64, total: u64| {
            let inset = if is_matrix { before - before / columns.rows } else { 0 };
            let pitch = if is_matrix { total / columns.rows } else { width };
            (BufferPosition { offset: position.offset - inset, ..position }, pitch)
        };
        let output = |rank| {
            let position = self.output_position(rank, 0, block);
            let before = self.output_offset(0, block, rank);
            side(columns.output, position, before, self.output_bytes(rank))
        };

        let (src, src_pitch) = match from {
            Source::Input => {
                let before = self.input_offset(owner, into);
                let begin = self.input_position(owner, 0, into);
                side(columns.input, begin, before, self.input_bytes(owner))
            }
            Source::Output => output(owner),
        };
        let (dst, dst_pitch) = output(into);

        let position_in = |position: BufferPosition, pitch: u64, byte: u64| BufferPosition {
            offset: position.offset + byte / width * pitch + byte % width,
            ..position
        };
        let part = |begin: u64, bytes: u64, count: u64| {
            let src = position_in(src, src_pitch, begin);
            let dst = position_in(dst, dst_pitch, begin);
            let rows = if count == 1 { Rows::ONE } else { Rows { count, dst_pitch, src_pitch } };
            (bytes > 0 && count > 0).then_some(Span { src, dst, bytes, rows })
        };

        // If the chunk begins after the beginning of a row and ends in that row, `first` is the end
        // of the chunk. The row begins before `first`, so the maximum makes the last part empty.
        let first = start.next_multiple_of(width).min(end);
        let last = first.max(end / width * width);
        [
            part(start, first - start, 1),
            part(first, width, (last - first) / width),
            part(last, end - last, 1),
        ]
    }

    /// Returns the position of the data that `rank` contributes to `tensor`, in the buffers that
    /// `from` selects.
    ///
    /// If each block of the input has a position of its own, it is that of the first one.
    ///
    /// # Panics
    /// If there is no such rank or tensor.
    pub fn own_position(&self, rank: Rank, tensor: usize, from: Source) -> BufferPosition {
        match (from, &self.placement(rank).input) {
            // The first block can be anywhere in an input in which each start places the blocks.
            (Source::Input, InputPlacement::Contiguous(position)) if self.has_placed_blocks() => {
                *position
            }
            (Source::Input, _) => self.input_position(rank, tensor, Rank(0)),
            // In place, a rank contributes all of its output.
            (Source::Output, _) if self.collective.is_reduction() => {
                self.output_position(rank, tensor, Rank(0))
            }
            (Source::Output, _) => self.output_position(rank, tensor, rank),
        }
    }

    /// Returns the position at which the input of `rank` holds the piece of `tensor` for
    /// `receiver`.
    ///
    /// # Panics
    /// May panic if there is no such rank, receiver or tensor.
    pub fn input_position(&self, rank: Rank, tensor: usize, receiver: Rank) -> BufferPosition {
        // Only an input that is one block begins with the pieces of the tensors before.
        let pieces = (0..tensor).map(|before| self.input_piece_bytes(before, rank));
        self.place_in_input(rank, (tensor, pieces.sum()), receiver)
    }

    /// Returns the position of a piece in the input of `rank`, as `input_position`.
    ///
    /// `piece_start` is the offset of the piece in its block, which callers with many tensors know.
    fn place_in_input(
        &self,
        rank: Rank,
        (tensor, piece_start): (usize, u64),
        receiver: Rank,
    ) -> BufferPosition {
        let (position, tensor_offset) = match &self.placement(rank).input {
            InputPlacement::Contiguous(position) => {
                (*position, self.tensor_offset_in_input(tensor, piece_start))
            }
            InputPlacement::ByTensor(positions) => (positions[tensor], 0),
            InputPlacement::ByBlock(positions) => return positions[receiver.index()],
        };

        let offset = tensor_offset + self.input_piece_offset(tensor, rank, receiver);
        BufferPosition { offset: position.offset + offset, ..position }
    }

    /// Returns the position at which `tensor` begins in the output of `rank`, or `None` if each
    /// block has a position of its own.
    ///
    /// # Panics
    /// May panic if there is no such rank or tensor.
    pub fn tensor_position(&self, rank: Rank, tensor: usize) -> Option<BufferPosition> {
        match &self.placement(rank).output {
            OutputPlacement::Contiguous(position) => {
                let tensors = (0..tensor).map(|before| self.tensor_bytes(before, rank));
                let offset = position.offset + tensors.sum::<u64>();
                Some(BufferPosition { offset, ..*position })
            }
            OutputPlacement::ByTensor(positions) => Some(positions[tensor]),
            OutputPlacement::ByBlock(_) => None,
        }
    }

    /// Returns the position at which the output of `rank` holds the piece of `tensor` from
    /// `provider`.
    ///
    /// # Panics
    /// May panic if there is no such rank, provider or tensor.
    pub fn output_position(&self, rank: Rank, tensor: usize, provider: Rank) -> BufferPosition {
        let piece_start = self.piece_start(tensor, provider, rank);
        self.place_in_output(rank, (tensor, piece_start), provider)
    }

    /// Returns the position of a piece in the output of `rank`, as `output_position`.
    ///
    /// `piece_start` is the offset of the piece in its block, which callers with many tensors know.
    fn place_in_output(
        &self,
        rank: Rank,
        (tensor, piece_start): (usize, u64),
        provider: Rank,
    ) -> BufferPosition {
        let (position, tensor_offset) = match &self.placement(rank).output {
            OutputPlacement::Contiguous(position) => {
                (*position, self.tensor_offset_in_output(tensor, piece_start))
            }
            OutputPlacement::ByTensor(positions) => (positions[tensor], 0),
            OutputPlacement::ByBlock(positions) => return positions[provider.index()],
        };

        // An output without a block of `provider` may end before the offset of such a block.
        if !self.collective.requires(provider, rank) {
            return position;
        }

        let offset = tensor_offset + self.output_offset(tensor, provider, rank);
        BufferPosition { offset: position.offset + offset, ..position }
    }

    /// Returns the byte range of the chunk `cell` within its block; the length of the block can
    /// depend on `receiver`.
    fn range(&self, cell: Cell, receiver: Rank) -> Range<u64> {
        assert!(cell.chunk < self.chunks, "cell {cell} is not one of {} chunks", self.chunks);
        let bytes = self.block_bytes(cell.block, receiver);
        self.chunk_offset(bytes, cell.chunk)..self.chunk_offset(bytes, cell.chunk + 1)
    }

    /// Returns the byte offset of chunk `chunk` in a block of `block_bytes` bytes.
    ///
    /// If `chunk` is the number of chunks, the offset is the length of the block.
    fn chunk_offset(&self, block_bytes: u64, chunk: u32) -> u64 {
        // The ends of a block are known. Its last unit can be shorter than the others, so whole
        // units, as computed below, could be longer than the block.
        if chunk == 0 || chunk == self.chunks {
            return if chunk == 0 { 0 } else { block_bytes };
        }

        // The product of units and chunks can exceed 64 bits.
        let units = u128::from(block_bytes.div_ceil(CHUNK_ALIGN_BYTES));
        let before = units * u128::from(chunk) / u128::from(self.chunks);
        u64::try_from(before).expect("fewer units than the block has") * CHUNK_ALIGN_BYTES
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use insta::assert_snapshot;

    use super::*;

    fn all_gather(block_bytes: &[u64], chunks: u32) -> Result<Layout, Error> {
        Layout::new(Collective::AllGather, block_bytes, chunks)
    }

    fn of_tensors(tensors: Vec<Lengths>, chunks: u32) -> Layout {
        Layout::of_blocks(Collective::AllGather, BlockBytes::ByTensor(tensors), chunks).unwrap()
    }

    fn check_tiling(layout: &Layout, context: &str) {
        let mut output_end = 0;
        for block in Rank::all(layout.ranks()) {
            let mut input_end = 0;
            for chunk in 0..layout.chunks() {
                let span = layout.cell(Cell { block, chunk }, Rank(0));
                let offsets = (span.input_offset, span.output_offset);
                assert_eq!(offsets, (input_end, output_end), "{context}, cell {block}.{chunk}");
                if span.input_offset < layout.input_bytes(block) {
                    assert_eq!(
                        span.input_offset % CHUNK_ALIGN_BYTES,
                        0,
                        "{context}, {block}.{chunk}"
                    );
                }
                input_end += span.bytes;
                output_end += span.bytes;
            }
            assert_eq!(input_end, layout.input_bytes(block), "{context}, block {block}");
        }
        assert_eq!(output_end, layout.total_bytes(), "{context}");
    }

    #[test]
    fn cells_tile_the_output_exactly() {
        for seed in 0..500 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let ranks = rng.usize(1..=9);
            let chunks = rng.u32(1..=17);
            let around = [0, 1, 3, 63, 64, 65, 4095, 4096, 4097, 1 << 33];
            let block_bytes: Vec<u64> = (0..ranks)
                .map(|_| if rng.bool() { *rng.choice(&around).unwrap() } else { rng.u64(..10_000) })
                .collect();
            let layout = all_gather(&block_bytes, chunks).unwrap();
            check_tiling(&layout, &format!("seed {seed}, blocks {block_bytes:?}, {chunks} chunks"));
        }
    }

    #[test]
    fn the_largest_block_and_the_most_chunks_do_not_overflow() {
        let layout = all_gather(&[u64::MAX], u32::MAX).unwrap();
        let last = layout.cell(Cell { block: Rank(0), chunk: u32::MAX - 1 }, Rank(0));
        assert_eq!(last.input_offset + last.bytes, u64::MAX);
    }

    #[test]
    fn chunks_are_even_to_one_unit() {
        let layout = all_gather(&[10 * 64], 4).unwrap();
        let bytes = |chunk| layout.cell(Cell { block: Rank(0), chunk }, Rank(0)).bytes;
        assert_eq!([bytes(0), bytes(1), bytes(2), bytes(3)], [128, 192, 128, 192]);
    }

    #[test]
    fn impossible_layouts_are_named() {
        let text = |block_bytes: &[u64], chunks| {
            let error = all_gather(block_bytes, chunks).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_snapshot!(text(&[], 1), @"block_bytes is empty, expected one length for each rank");
        assert_snapshot!(text(&[8], 0), @"chunks is 0, expected at least 1");
        assert_snapshot!(text(&[1, u64::MAX], 1), @"blocks are too long: rank 1 adds 18446744073709551615 bytes to the 1 bytes of ranks with lower numbers, expected at most 18446744073709551615 bytes in total");
    }

    fn random_layout(rng: &mut fastrand::Rng) -> Layout {
        let (ranks, chunks) = (rng.usize(1..=6), rng.u32(1..=5));
        let tensors = rng.usize(1..=4);
        let around = [0, 1, 3, 63, 64, 65, 127, 200];
        let lengths = |rng: &mut fastrand::Rng| match rng.bool() {
            true => Lengths::equal(ranks, *rng.choice(&around).unwrap()),
            false => {
                let bytes: Vec<u64> = (0..ranks).map(|_| *rng.choice(&around).unwrap()).collect();
                Lengths::by_rank(&bytes)
            }
        };
        let lengths = (0..tensors).map(|_| lengths(rng).unwrap()).collect();
        let layout = of_tensors(lengths, chunks);
        if rng.bool() {
            return layout;
        }
        let placements = Rank::all(ranks).map(|rank| {
            let pieces: Vec<u64> =
                (0..tensors).map(|t| layout.input_piece_bytes(t, rank)).collect();
            let wholes: Vec<u64> = (0..tensors).map(|t| layout.tensor_bytes(t, rank)).collect();
            let blocks = layout.average_blocks();
            let joined = BufferPosition { buffer: rng.u32(..3), offset: rng.u64(..100) };
            let input = match rng.bool() {
                true => InputPlacement::Contiguous(joined),
                false => InputPlacement::ByTensor(scatter(rng, &pieces)),
            };
            let output = match (rng.u32(..3), tensors) {
                (0, _) => OutputPlacement::Contiguous(joined),
                (1, 1) => OutputPlacement::ByBlock(scatter(rng, &blocks)),
                _ => OutputPlacement::ByTensor(scatter(rng, &wholes)),
            };
            Placement { input, output }
        });
        let placements = placements.collect();
        layout.with_placements(placements).unwrap()
    }

    fn scatter(rng: &mut fastrand::Rng, bytes: &[u64]) -> Vec<BufferPosition> {
        let mut order: Vec<usize> = (0..bytes.len()).collect();
        rng.shuffle(&mut order);
        let mut ends = [0; 3];
        let mut positions = vec![BufferPosition::default(); bytes.len()];
        for index in order {
            let buffer = rng.usize(..3);
            let offset = ends[buffer] + rng.u64(..20);
            ends[buffer] = offset + bytes[index];
            positions[index] = BufferPosition { buffer: buffer as u32, offset };
        }
        positions
    }

    /// A simulated byte is a number that identifies its content.
    type Memory = BTreeMap<u32, Vec<u32>>;

    fn zeroed(needs: BTreeMap<u32, u64>) -> Memory {
        needs.into_iter().map(|(buffer, bytes)| (buffer, vec![0; bytes as usize])).collect()
    }

    fn bytes_at(position: BufferPosition, bytes: u64) -> Range<usize> {
        position.offset as usize..(position.offset + bytes) as usize
    }

    fn content(rank: Rank, tensor: usize, index: u64) -> u32 {
        1 + index as u32 + 1000 * (tensor as u32 + 10 * rank.0)
    }

    fn copy(spans: impl Iterator<Item = Span>, from: &Memory, into: &mut Memory, context: &str) {
        for Span { src, dst, bytes, .. } in spans {
            assert!(bytes > 0, "{context}");
            let read = &from[&src.buffer][bytes_at(src, bytes)];
            let written = &mut into.get_mut(&dst.buffer).unwrap()[bytes_at(dst, bytes)];
            assert!(written.iter().all(|byte| *byte == 0), "{context}: written twice");
            written.copy_from_slice(read);
        }
    }

    fn all_cells(layout: &Layout) -> impl Iterator<Item = Cell> {
        let chunks = layout.chunks();
        Rank::all(layout.ranks())
            .flat_map(move |block| (0..chunks).map(move |chunk| Cell { block, chunk }))
    }

    fn check_output(layout: &Layout, rank: Rank, output: &Memory, context: &str) {
        let mut checked = 0;
        for tensor in 0..layout.tensors() {
            for block in Rank::all(layout.ranks()) {
                let bytes = layout.piece_bytes(tensor, block, rank);
                let position = layout.output_position(rank, tensor, block);
                let expected = (0..bytes).map(|index| content(block, tensor, index));
                if bytes > 0 {
                    let held = output[&position.buffer][bytes_at(position, bytes)].iter().copied();
                    assert!(held.eq(expected), "{context}: tensor {tensor}, block {block}");
                }
                checked += bytes as usize;
            }
        }
        let written = output.values().flatten().filter(|byte| **byte != 0).count();
        assert_eq!(written, checked, "{context}: bytes outside of the output");
    }

    #[test]
    fn every_byte_is_copied_to_its_position_from_inputs_and_from_outputs() {
        for seed in 0..500 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let layout = random_layout(&mut rng);
            let context = format!("seed {seed}, {layout:?}");
            let inputs: Vec<Memory> = Rank::all(layout.ranks())
                .map(|rank| {
                    let mut input = zeroed(layout.placement(rank).input_needs(&layout, rank));
                    for tensor in 0..layout.tensors() {
                        let bytes = layout.input_piece_bytes(tensor, rank);
                        let position = layout.own_position(rank, tensor, Source::Input);
                        for index in 0..bytes {
                            let buffer = input.get_mut(&position.buffer).unwrap();
                            buffer[(position.offset + index) as usize] =
                                content(rank, tensor, index);
                        }
                    }
                    input
                })
                .collect();
            let outputs: Vec<Memory> = Rank::all(layout.ranks())
                .map(|rank| zeroed(layout.placement(rank).output_needs(&layout, rank)))
                .collect();
            let mut first = outputs[0].clone();
            for cell in all_cells(&layout) {
                let spans = layout.spans(cell, (cell.block, Source::Input), Rank(0));
                copy(spans, &inputs[cell.block.index()], &mut first, &context);
            }
            check_output(&layout, Rank(0), &first, &context);
            for (rank, mut output) in Rank::all(layout.ranks()).zip(outputs) {
                for cell in all_cells(&layout) {
                    let spans = layout.spans(cell, (Rank(0), Source::Output), rank);
                    copy(spans, &first, &mut output, &context);
                }
                check_output(&layout, rank, &output, &context);
            }
        }
    }

    #[test]
    fn equal_placements_of_many_ranks_are_stored_once() {
        let layout = of_tensors(vec![Lengths::equal(16_384, 1 << 20).unwrap()], 64);
        assert_eq!((layout.placements.len(), layout.ranks()), (1, 16_384));
        let layout = layout.with_placements(vec![Placement::CONTIGUOUS; 16_384]).unwrap();
        assert_eq!(layout.placements.len(), 1);
        let cell = Cell { block: Rank(16_383), chunk: 63 };
        let spans: Vec<_> = layout.spans(cell, (cell.block, Source::Input), Rank(5)).collect();
        let position = |offset| BufferPosition { buffer: 0, offset };
        let bytes = 1 << 14;
        let (src, dst) = (position((1 << 20) - bytes), position((1 << 34) - bytes));
        assert_eq!(spans, [Span { src, dst, bytes, rows: Rows::ONE }]);
    }

    #[test]
    fn impossible_placements_are_named() {
        let layout = all_gather(&[8, 0, 16], 1).unwrap();
        let position = |buffer, offset| BufferPosition { buffer, offset };
        let text = |layout: &Layout, output| {
            let placement = Placement { output, ..Placement::CONTIGUOUS };
            let error = placement.check(layout, Rank(1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        let by_block = |positions: &[BufferPosition]| OutputPlacement::ByBlock(positions.to_vec());
        assert_snapshot!(text(&layout, by_block(&[position(0, 0)])), @"output has 1 positions, expected 3, one for each block");
        assert_snapshot!(text(&layout, OutputPlacement::ByTensor(Vec::new())), @"output has 0 positions, expected 1, one for each tensor");
        assert_snapshot!(text(&layout, by_block(&[position(1, 9), position(1, 10), position(1, 0)])), @"outputs of rank 1 overlap: block 2 is bytes 0 to 16 of buffer 1, and block 0 is bytes 9 to 17 of buffer 1");
        assert_snapshot!(text(&layout, by_block(&[position(0, u64::MAX), position(1, 0), position(2, 0)])), @"output of rank 1: block 0 has 8 bytes at offset 18446744073709551615 of buffer 0, expected an end offset of at most 18446744073709551615");
        let blocks = [position(0, 16), position(0, 3), position(0, 0)];
        let placement = Placement { output: by_block(&blocks), ..Placement::CONTIGUOUS };
        placement.check(&layout, Rank(0)).unwrap();
        let two = vec![Lengths::equal(3, 8).unwrap(); 2];
        let two = of_tensors(two, 1);
        assert_snapshot!(text(&two, by_block(&blocks)), @"tensors is 2, expected 1 for an output with one position for each block");
        let error = two.with_placements(vec![Placement::CONTIGUOUS]).unwrap_err();
        assert_snapshot!(error, @"number of placements is 1, expected 3, one for each rank");
    }
}
