//! Layouts: the bytes of cells and the words of flags.
//!
//! Every rank contributes a shard: one piece for each of one or several tensors, one after another. Chunks divide the whole
//! shard, so a plan does not depend on tensors. A cell is a range of bytes of a shard, with as many [spans](Span) as there
//! are pieces that it touches.
//!
//! Each rank chooses where its input and its output are: its [`Places`]. By default the output is all tensors one after
//! another, each with its pieces in rank order and without gaps.

use std::ops::Range;
use std::sync::Arc;

use peerlane_hal::{ErrorKind, Rank};

use crate::collective::Collective;
use crate::error::Error;
use crate::plan::{Cell, Source};

mod flags;
mod lengths;
mod places;

pub(crate) use flags::reader;
pub use flags::{FLAG_WORDS, FlagLayout};
pub use lengths::Lengths;
pub use places::{BUFFERS_MAX, InputPlaces, OutputPlaces, Places, Spot};

/// Alignment of chunks relative to the start of their shard, in bytes. If the shard is aligned to a cache line, no two chunks
/// share one.
pub const CHUNK_ALIGN_BYTES: u64 = 64;

/// The byte ranges of all cells of one operation. Shards may have different lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    tensors: Box<[Lengths]>,
    /// The offset of each tensor after the tensors before it.
    tensor_offsets: Box<[u64]>,
    /// The bytes that each rank contributes to all tensors together.
    shards: Lengths,
    chunks: u32,
    /// Whether each rank has a block for every output, as in an all-to-all.
    has_block_per_output: bool,
    /// The places of each rank, or one element if all are equal.
    places: Box<[Arc<Places>]>,
}

/// The place of a cell if every rank has [`Places::JOINED`] and there is one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellSpan {
    /// Offset from the start of the provider's block, in bytes.
    pub input_offset: u64,
    /// Offset from the start of the output, in bytes.
    pub output_offset: u64,
    /// Length in bytes; 0 if the shard is too short to fill every chunk.
    pub bytes: u64,
}

/// A part of a cell that is contiguous in its source and in its destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// The source: in an input or output of the rank that has the bytes.
    pub src: Spot,
    /// The destination: in an output of the rank that receives the bytes.
    pub dst: Spot,
    /// Length in bytes; never 0.
    pub bytes: u64,
}

impl Layout {
    /// Creates the layout of one tensor: shards of `shard_bytes` bytes in rank order, each in `chunks` chunks.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no shard, `chunks` is 0, or the output is longer than 2^64 - 1
    /// bytes.
    pub fn new(shard_bytes: &[u64], chunks: u32) -> Result<Self, Error> {
        Self::of_tensors(vec![Lengths::of(shard_bytes)?], chunks)
    }

    /// Creates the layout of several tensors, each with the lengths of its pieces.
    ///
    /// # Errors
    /// As [`new`](Self::new); also if there is no tensor, or the tensors have different numbers of ranks.
    pub fn of_tensors(tensors: Vec<Lengths>, chunks: u32) -> Result<Self, Error> {
        let shards = Lengths::sum(&tensors)?;
        if chunks == 0 {
            return Err(invalid("chunks is 0, expected at least 1".into()));
        }
        let mut end = 0;
        let begins = tensors.iter().map(|tensor| {
            end += tensor.total();
            end - tensor.total()
        });
        let tensor_offsets = begins.collect();
        let places = [Arc::new(Places::JOINED)].into();
        let tensors = tensors.into();
        Ok(Self { tensors, tensor_offsets, shards, chunks, has_block_per_output: false, places })
    }

    /// Returns the layout with the inputs that `collective` has.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) for an all-to-all with several tensors or blocks of different
    /// lengths.
    pub fn for_collective(mut self, collective: Collective) -> Result<Self, Error> {
        if collective.has_equal_outputs() {
            return Ok(self);
        }
        if self.tensors() != 1 {
            let tensors = self.tensors();
            return Err(invalid(format!("tensors is {tensors}, expected 1 in an {collective}")));
        }
        if self.shards.uniform().is_none() {
            let text =
                format!("blocks have different lengths, expected equal ones in an {collective}");
            return Err(invalid(text));
        }
        self.has_block_per_output = true;
        Ok(self)
    }

    /// Returns the layout with other places on every rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is not one for each rank, or as [`Places::check`].
    pub fn with_places(mut self, places: Vec<Places>) -> Result<Self, Error> {
        let (seen, ranks) = (places.len(), self.ranks());
        if seen != ranks {
            return Err(invalid(format!("places of {seen} ranks, expected {ranks}")));
        }
        let mut shared: Vec<Arc<Places>> = Vec::with_capacity(ranks);
        for (rank, places) in Rank::all(ranks).zip(places) {
            places.check(&self, rank)?;
            // Mostly all ranks have the same, and a rank has a spot for every other one.
            let known = shared.iter().take(1).chain(shared.last()).find(|known| ***known == places);
            let places = known.map_or_else(|| Arc::new(places), Arc::clone);
            shared.push(places);
        }
        if shared.iter().all(|places| Arc::ptr_eq(places, &shared[0])) {
            shared.truncate(1);
        }
        self.places = shared.into();
        Ok(self)
    }

    /// Returns the number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        self.shards.ranks()
    }

    /// Returns the number of tensors, at least 1.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the number of chunks of each shard, at least 1.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Returns the length of an output in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.shards.total()
    }

    /// Returns the length of the shard of `rank` in bytes.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn shard_bytes(&self, rank: Rank) -> u64 {
        self.shards.bytes(rank)
    }

    /// Returns the length of the input of `rank`: its shard, or in an all-to-all a block for every rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn input_bytes(&self, rank: Rank) -> u64 {
        if self.has_block_per_output { self.shards.total() } else { self.shard_bytes(rank) }
    }

    /// Returns the lengths of all shards.
    pub fn shards(&self) -> &Lengths {
        &self.shards
    }

    /// Returns the length of a whole tensor in bytes.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn tensor_bytes(&self, tensor: usize) -> u64 {
        self.tensors[tensor].total()
    }

    /// Returns the lengths of the pieces of a tensor.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn tensor(&self, tensor: usize) -> &Lengths {
        &self.tensors[tensor]
    }

    /// Returns the bytes that `rank` contributes to a tensor.
    ///
    /// # Panics
    /// If there is no such tensor or rank.
    pub fn piece_bytes(&self, tensor: usize, rank: Rank) -> u64 {
        self.tensors[tensor].bytes(rank)
    }

    /// Returns the places of the input and output of `rank`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn places(&self, rank: Rank) -> &Places {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        self.places.get(rank.index()).unwrap_or(&self.places[0])
    }

    /// Returns the place of `cell` in its shard and in an output without gaps.
    ///
    /// The cells of a shard follow each other without gaps, in chunk order. Their lengths differ by at most [`CHUNK_ALIGN_BYTES`],
    /// except that the last one may be shorter by as much again.
    ///
    /// # Panics
    /// If there is no such shard or chunk.
    pub fn cell(&self, cell: Cell) -> CellSpan {
        let Range { start, end } = self.range(cell);
        let output_offset = self.shards.offset(cell.shard) + start;
        CellSpan { input_offset: start, output_offset, bytes: end - start }
    }

    /// Returns the copies that bring `cell` from rank `of` into the output of `into`. A cell of no bytes has none.
    ///
    /// # Panics
    /// If there is no such shard, chunk or rank, or `from` is the input of a rank that does not provide the cell.
    pub fn spans(
        &self,
        cell: Cell,
        (of, from): (Rank, Source),
        into: Rank,
    ) -> impl Iterator<Item = Span> {
        assert!(from == Source::Output || of == cell.shard, "rank {of} does not own {cell}");
        let Range { start, end } = self.range(cell);
        let mut piece_end = 0;
        (0..self.tensors()).filter_map(move |tensor| {
            let piece_start = piece_end;
            piece_end += self.piece_bytes(tensor, cell.shard);
            let (first, last) = (start.max(piece_start), end.min(piece_end));
            if first >= last {
                return None;
            }
            let spot = |spot: Spot| Spot { offset: spot.offset + (first - piece_start), ..spot };
            let src = match from {
                Source::Input => {
                    let block =
                        if self.has_block_per_output { self.shards.offset(into) } else { 0 };
                    let spot = self.input_spot(of, tensor, piece_start);
                    Spot { offset: spot.offset + block, ..spot }
                }
                Source::Output => self.output_spot(of, tensor, cell.shard),
            };
            let dst = self.output_spot(into, tensor, cell.shard);
            Some(Span { src: spot(src), dst: spot(dst), bytes: last - first })
        })
    }

    /// Returns the place of the piece of `tensor` that `rank` provides.
    ///
    /// # Panics
    /// If there is no such rank or tensor.
    pub fn own_spot(&self, rank: Rank, tensor: usize, from: Source) -> Spot {
        match from {
            Source::Input => {
                let before = (0..tensor).map(|tensor| self.piece_bytes(tensor, rank)).sum();
                self.input_spot(rank, tensor, before)
            }
            Source::Output => self.output_spot(rank, tensor, rank),
        }
    }

    /// Returns the place of the piece of `tensor` in the input of `rank`; `before` is the bytes of the shard before it.
    fn input_spot(&self, rank: Rank, tensor: usize, before: u64) -> Spot {
        match &self.places(rank).input {
            InputPlaces::Joined(spot) => Spot { offset: spot.offset + before, ..*spot },
            InputPlaces::ByTensor(spots) => spots[tensor],
        }
    }

    /// Returns the place of the piece of `shard` of `tensor` in the output of `rank`.
    ///
    /// # Panics
    /// If there is no such rank, tensor or shard.
    pub fn output_spot(&self, rank: Rank, tensor: usize, shard: Rank) -> Spot {
        let (spot, before) = match &self.places(rank).output {
            OutputPlaces::Joined(spot) => (*spot, self.tensor_offsets[tensor]),
            OutputPlaces::ByTensor(spots) => (spots[tensor], 0),
            OutputPlaces::ByShard(spots) => return spots[shard.index()],
        };
        Spot { offset: spot.offset + before + self.tensors[tensor].offset(shard), ..spot }
    }

    /// Returns the bytes of `cell` in its shard.
    fn range(&self, cell: Cell) -> Range<u64> {
        assert!(cell.chunk < self.chunks, "cell {cell} is not one of {} chunks", self.chunks);
        let shard_bytes = self.shard_bytes(cell.shard);
        self.chunk_offset(shard_bytes, cell.chunk)..self.chunk_offset(shard_bytes, cell.chunk + 1)
    }

    fn chunk_offset(&self, shard_bytes: u64, chunk: u32) -> u64 {
        if chunk == self.chunks {
            return shard_bytes;
        }
        let units = u128::from(shard_bytes.div_ceil(CHUNK_ALIGN_BYTES));
        let before = units * u128::from(chunk) / u128::from(self.chunks);
        u64::try_from(before).expect("fewer units than the shard has") * CHUNK_ALIGN_BYTES
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests;
