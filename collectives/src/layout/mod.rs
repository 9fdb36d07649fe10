//! Where the cells of a plan lie in bytes, and where its flags lie in words.
//!
//! Every rank contributes a shard: a piece of each of one or several tensors, one piece after another.
//! Parts divide the shard as a whole, so that a plan knows nothing of tensors; a cell is a run of
//! bytes of a shard, and lies in as many [spans](Span) as there are pieces that it touches.
//!
//! Where a rank keeps its shard and what it gathers is its own affair: its [`Places`]. Without others
//! the output is all tensors one after another, each its pieces in rank order, without a gap.

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

/// Parts begin at multiples of this many bytes from the start of their shard: no two parts share a
/// cache line where the shard itself is aligned to one.
pub const PART_ALIGN_BYTES: u64 = 64;

/// The byte ranges of all cells of one all-gather; shards may have unlike lengths.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    tensors: Box<[Lengths]>,
    /// Where each tensor begins behind those before it.
    tensor_offsets: Box<[u64]>,
    /// What each rank contributes to all tensors together.
    shards: Lengths,
    parts: u32,
    /// Whether each rank has a block for every output, as in an all-to-all.
    has_block_per_output: bool,
    /// By rank; one for all that are alike.
    places: Box<[Arc<Places>]>,
}

/// Where one cell lies if every rank has [`Places::JOINED`] and there is one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CellSpan {
    /// Bytes from the start of the owner's shard.
    pub input_offset: u64,
    /// Bytes from the start of the first shard, if shards lie one after another.
    pub output_offset: u64,
    /// The length in bytes; 0 where the shard has fewer bytes than it takes to fill every part.
    pub bytes: u64,
}

/// Bytes of a cell that lie in one piece where they are read and where they are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Span {
    /// Where they are read: in an input or in an output of the rank that has them.
    pub src: Spot,
    /// Where they are written: in an output of the rank that gets them.
    pub dst: Spot,
    /// How many; never 0.
    pub bytes: u64,
}

impl Layout {
    /// One tensor: shards of `shard_bytes` bytes in rank order, each in `parts` parts.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no shard, `parts` is 0, or the
    /// output is longer than 2^64 - 1 bytes.
    pub fn new(shard_bytes: &[u64], parts: u32) -> Result<Self, Error> {
        Self::of_tensors(vec![Lengths::of(shard_bytes)?], parts)
    }

    /// Several tensors that are gathered at once, each with the lengths of its pieces.
    ///
    /// # Errors
    /// As [`new`](Self::new); also if there is no tensor, or they differ in their number of ranks.
    pub fn of_tensors(tensors: Vec<Lengths>, parts: u32) -> Result<Self, Error> {
        let shards = Lengths::sum(&tensors)?;
        if parts == 0 {
            return Err(invalid("parts is 0, expected at least 1".into()));
        }
        let mut end = 0;
        let begins = tensors.iter().map(|tensor| {
            end += tensor.total();
            end - tensor.total()
        });
        let tensor_offsets = begins.collect();
        let places = [Arc::new(Places::JOINED)].into();
        let tensors = tensors.into();
        Ok(Self { tensors, tensor_offsets, shards, parts, has_block_per_output: false, places })
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

    /// The same with other places on every rank.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is not one for each rank, or as
    /// [`Places::check`].
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

    /// How many ranks there are, at least 1.
    pub fn ranks(&self) -> usize {
        self.shards.ranks()
    }

    /// How many tensors there are, at least 1.
    pub fn tensors(&self) -> usize {
        self.tensors.len()
    }

    /// How many parts each shard has, at least 1.
    pub fn parts(&self) -> u32 {
        self.parts
    }

    /// The length of what every rank gathers.
    pub fn total_bytes(&self) -> u64 {
        self.shards.total()
    }

    /// The length of the shard of `rank`.
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

    /// The lengths of all shards.
    pub fn shards(&self) -> &Lengths {
        &self.shards
    }

    /// The length of a whole tensor.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn tensor_bytes(&self, tensor: usize) -> u64 {
        self.tensors[tensor].total()
    }

    /// The lengths of the pieces of a tensor.
    ///
    /// # Panics
    /// If there is no such tensor.
    pub fn tensor(&self, tensor: usize) -> &Lengths {
        &self.tensors[tensor]
    }

    /// What `rank` contributes to a tensor.
    ///
    /// # Panics
    /// If there is no such tensor or rank.
    pub fn piece_bytes(&self, tensor: usize, rank: Rank) -> u64 {
        self.tensors[tensor].bytes(rank)
    }

    /// Where `rank` keeps its shard and what it gathers.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn places(&self, rank: Rank) -> &Places {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        self.places.get(rank.index()).unwrap_or(&self.places[0])
    }

    /// Where `cell` lies in its shard, and among shards that lie one after another. The cells of a
    /// shard tile it, in part order; their lengths differ by at most [`PART_ALIGN_BYTES`], but for
    /// the last, which may be up to that much shorter still.
    ///
    /// # Panics
    /// If there is no such shard or part.
    pub fn cell(&self, cell: Cell) -> CellSpan {
        let Range { start, end } = self.range(cell);
        let output_offset = self.shards.offset(cell.shard) + start;
        CellSpan { input_offset: start, output_offset, bytes: end - start }
    }

    /// The copies that bring `cell` from `of`, which has it in its input or its output as `from` says,
    /// into the output of `into`. A cell of no bytes has none.
    ///
    /// # Panics
    /// If there is no such shard, part or rank, or `from` is the input of a rank that does not own
    /// the shard.
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

    /// Where `rank` keeps its piece of `tensor` before a start.
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

    /// Where the input of `rank` has its piece of `tensor`, which has `before` bytes before it in the
    /// shard.
    fn input_spot(&self, rank: Rank, tensor: usize, before: u64) -> Spot {
        match &self.places(rank).input {
            InputPlaces::Joined(spot) => Spot { offset: spot.offset + before, ..*spot },
            InputPlaces::ByTensor(spots) => spots[tensor],
        }
    }

    /// Where the output of `rank` has the piece of `shard` of `tensor`.
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

    /// The bytes of `cell` in its shard.
    fn range(&self, cell: Cell) -> Range<u64> {
        assert!(cell.part < self.parts, "cell {cell} is not one of {} parts", self.parts);
        let shard_bytes = self.shard_bytes(cell.shard);
        self.part_offset(shard_bytes, cell.part)..self.part_offset(shard_bytes, cell.part + 1)
    }

    fn part_offset(&self, shard_bytes: u64, part: u32) -> u64 {
        if part == self.parts {
            return shard_bytes;
        }
        let units = u128::from(shard_bytes.div_ceil(PART_ALIGN_BYTES));
        let before = units * u128::from(part) / u128::from(self.parts);
        u64::try_from(before).expect("fewer units than the shard has") * PART_ALIGN_BYTES
    }
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests;
