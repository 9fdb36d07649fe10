//! Computes the lengths of blocks, and of the inputs and outputs of a collective operation.

use peerlane_hal::Rank;

use super::{CHUNK_ALIGN_BYTES, Layout, Lengths, invalid};
use crate::collective::Collective;
use crate::error::Error;

/// Specifies the lengths in bytes of the blocks that ranks send and receive in a collective
/// operation.
///
/// The length of a rank that provides no block, such as a rank other than the root of a broadcast,
/// is ignored.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum BlockBytes {
    /// One block length for each rank.
    ///
    /// It is the length of the block that the rank provides or, in a scatter, receives. In an
    /// all-to-all and in scans all lengths are equal.
    ByRank(Lengths),
    /// One piece length for each tensor and rank.
    ///
    /// A block consists of the pieces of one rank.
    ByTensor(Vec<Lengths>),
    /// One block length for each pair of ranks, for an all-to-all.
    ///
    /// The lengths are ordered by provider and then by receiver.
    ByPair(Vec<Lengths>),
    /// The lengths of every input and of every output, for an all-to-all.
    ///
    /// Each start has block lengths and places of its own within them. Before the first start, all
    /// blocks are empty.
    ByStart {
        /// The number of ranks, at least 1.
        ranks: usize,
        /// The length of the input of each rank.
        input_bytes: u64,
        /// The length of the output of each rank.
        output_bytes: u64,
    },
}

/// Stores the block lengths of a layout in the form that its collective needs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Sizes {
    /// One length for each rank that provides a block; the block is the same in all outputs.
    ///
    /// A block has a piece of each tensor. `tensor_offsets` are the offsets of the tensors in an
    /// output.
    Provided { tensors: Box<[Lengths]>, tensor_offsets: Box<[u64]>, blocks: Lengths },
    /// One length for each receiving rank, which is that of every block that the rank receives.
    ///
    /// A block of a reduction has a piece of each tensor; other blocks are of one tensor.
    /// `tensor_offsets` are the offsets of the tensors in an input with a block for every rank.
    Received { tensors: Box<[Lengths]>, tensor_offsets: Box<[u64]>, blocks: Lengths },
    /// One length for each pair of ranks, in `rows` by provider and in `columns` by receiver.
    ///
    /// `now` replaces the blocks of one rank in the current start. If `is_placed` is set, only the
    /// totals of `rows` and `columns` are valid, because each start has lengths and places of its
    /// own.
    Pairs { rows: Box<[Lengths]>, columns: Box<[Lengths]>, now: Option<PairsNow>, is_placed: bool },
}

/// Stores the blocks that `rank` sends and receives in the current start of an operation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct PairsNow {
    rank: Rank,
    send: Box<[PlacedBlock]>,
    receive: Box<[PlacedBlock]>,
}

impl PairsNow {
    /// Returns the block from `provider` to `receiver`, or `None` if neither is the rank whose
    /// blocks are stored.
    fn block(&self, provider: Rank, receiver: Rank) -> Option<PlacedBlock> {
        if provider == self.rank {
            return Some(self.send[receiver.index()]);
        }
        (receiver == self.rank).then(|| self.receive[provider.index()])
    }
}

/// Stores the length of a block, and its offsets in the input of its provider and in the output of
/// its receiver, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[doc(hidden)]
pub struct PlacedBlock {
    pub bytes: u64,
    pub input_offset: u64,
    pub output_offset: u64,
}

/// Specifies the block lengths in bytes for one start of a resizable operation.
#[derive(Clone, Copy)]
#[doc(hidden)]
#[expect(missing_debug_implementations, reason = "it holds functions")]
pub enum StartBytes<'a> {
    Equal(u64),
    ByRank(&'a dyn Fn(Rank) -> u64),
    /// The lengths of the blocks that `rank` sends to each rank, and receives from each rank.
    ByPair {
        rank: Rank,
        send: &'a dyn Fn(Rank) -> u64,
        receive: &'a dyn Fn(Rank) -> u64,
    },
    /// The blocks that `rank` sends and receives, by provider and receiver.
    Placed {
        rank: Rank,
        block: &'a dyn Fn(Rank, Rank) -> PlacedBlock,
    },
}

impl BlockBytes {
    /// Creates block lengths from one number of bytes for each rank.
    ///
    /// # Errors
    /// As [`Lengths::by_rank`].
    pub fn by_rank(bytes: &[u64]) -> Result<Self, Error> {
        Lengths::by_rank(bytes).map(Self::ByRank)
    }

    /// Returns the lengths of the parts of an all-reduce of such inputs. Rank i adds the
    /// contributions to part i of each tensor.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the lengths differ between
    /// ranks.
    pub fn parts(&self) -> Result<Self, Error> {
        let differ = || {
            let text = "the lengths of an all-reduce differ between ranks, expected one length";
            invalid(text.to_owned())
        };
        let parts = |lengths: &Lengths| {
            let (bytes, ranks) = (lengths.uniform().ok_or_else(differ)?, lengths.ranks());
            let part = |rank| part_bytes(bytes, ranks, rank);
            Lengths::by_rank(&Rank::all(ranks).map(part).collect::<Vec<_>>())
        };

        match self {
            Self::ByRank(lengths) => parts(lengths).map(Self::ByRank),
            Self::ByTensor(tensors) => {
                tensors.iter().map(parts).collect::<Result<_, _>>().map(Self::ByTensor)
            }
            Self::ByPair(_) | Self::ByStart { .. } => Err(differ()),
        }
    }
}

/// Returns the length of the part of `rank` if `ranks` ranks share a tensor of `bytes` bytes.
fn part_bytes(bytes: u64, ranks: usize, rank: Rank) -> u64 {
    // Parts begin at multiples of the alignment of chunks, and the last ones can be shorter.
    let units = u128::from(bytes.div_ceil(CHUNK_ALIGN_BYTES));
    let begin = |rank: usize| {
        let units = units * rank as u128 / ranks as u128;
        u64::try_from(units)
            .map_or(bytes, |units| bytes.min(units.saturating_mul(CHUNK_ALIGN_BYTES)))
    };

    begin(rank.index() + 1) - begin(rank.index())
}

impl Sizes {
    /// Converts `blocks` to the form that `collective` needs, or fails if the collective cannot
    /// have such blocks.
    pub(super) fn new(collective: Collective, blocks: BlockBytes) -> Result<Self, Error> {
        match blocks {
            BlockBytes::ByPair(rows) if collective.has_block_per_pair() => {
                Self::of_pairs(rows.into())
            }

            BlockBytes::ByStart { ranks, input_bytes, output_bytes }
                if collective.has_block_per_pair() =>
            {
                Self::of_totals(ranks, input_bytes, output_bytes)
            }

            BlockBytes::ByPair(_) | BlockBytes::ByStart { .. } => Err(invalid(format!(
                "blocks have a length for each pair of ranks, expected one for each rank in {}",
                collective.with_article()
            ))),
            BlockBytes::ByRank(lengths) => Self::of_lengths(collective, vec![lengths]),
            BlockBytes::ByTensor(tensors) => Self::of_lengths(collective, tensors),
        }
    }

    /// Converts `tensors`, which have one length for each rank, to the form that `collective`
    /// needs.
    fn of_lengths(collective: Collective, tensors: Vec<Lengths>) -> Result<Self, Error> {
        if collective.has_equal_outputs() {
            // A rank without a block may have a length, which would move the blocks after it.
            let only = |tensor: Lengths| tensor.only(|rank| collective.has_block_of(rank));
            return Self::of_tensors(tensors.into_iter().map(only).collect::<Result<_, _>>()?);
        }

        let name = collective.with_article();
        // A reduction has one block in each output, so the pieces of its tensors follow each other
        // there. Outputs with a block of every rank would need an order of blocks and tensors.
        if tensors.len() != 1 && !collective.is_reduction() {
            return Err(invalid(format!("tensors is {}, expected 1 for {name}", tensors.len())));
        }

        let differ = |lengths: &Lengths| lengths.uniform().is_none();
        if !collective.lengths_may_differ() && tensors.iter().any(differ) {
            let or_pairs = match collective.has_block_per_pair() {
                true => ", or a length for each pair of ranks",
                false => "",
            };
            return Err(invalid(format!(
                "blocks have different lengths, expected equal lengths for {name}{or_pairs}"
            )));
        }

        let (tensor_offsets, blocks) = offsets_and_sum(&tensors)?;
        Ok(Self::Received { tensors: tensors.into(), tensor_offsets, blocks })
    }

    fn of_tensors(tensors: Vec<Lengths>) -> Result<Self, Error> {
        let (tensor_offsets, blocks) = offsets_and_sum(&tensors)?;
        Ok(Self::Provided { tensors: tensors.into(), tensor_offsets, blocks })
    }

    fn of_pairs(rows: Box<[Lengths]>) -> Result<Self, Error> {
        let ranks = rows.len();
        if let Some(row) = rows.iter().find(|row| row.ranks() != ranks) {
            let text = format!("a rank has blocks for {} ranks, expected {ranks}", row.ranks());
            return Err(invalid(text));
        }

        let column = |receiver| {
            let bytes: Vec<_> = rows.iter().map(|row| row.bytes(receiver)).collect();
            Lengths::by_rank(&bytes)
        };
        let columns = Rank::all(ranks).map(column).collect::<Result<_, _>>()?;
        Ok(Self::Pairs { rows, columns, now: None, is_placed: false })
    }

    /// Creates the lengths of inputs and outputs of which each start places the blocks.
    fn of_totals(ranks: usize, input_bytes: u64, output_bytes: u64) -> Result<Self, Error> {
        // Only the total of the lengths is used, so one of them has all bytes.
        let lengths = |total| {
            let mut bytes = vec![0; ranks];
            if let Some(first) = bytes.first_mut() {
                *first = total;
            }
            let lengths = Lengths::by_rank(&bytes)?;
            Ok::<_, Error>(vec![lengths; ranks].into())
        };

        let (rows, columns) = (lengths(input_bytes)?, lengths(output_bytes)?);
        Ok(Self::Pairs { rows, columns, now: None, is_placed: true })
    }

    /// Returns the block from `provider` to `receiver` if each pair of ranks has a length of its
    /// own.
    fn pair(&self, provider: Rank, receiver: Rank) -> Option<PlacedBlock> {
        let Self::Pairs { rows, columns, now, is_placed } = self else { return None };

        let in_start = now.as_ref().and_then(|now| now.block(provider, receiver));
        let prepared = || match is_placed {
            true => PlacedBlock::default(),
            false => PlacedBlock {
                bytes: rows[provider.index()].bytes(receiver),
                input_offset: rows[provider.index()].offset(receiver),
                output_offset: columns[receiver.index()].offset(provider),
            },
        };
        Some(in_start.unwrap_or_else(prepared))
    }
}

/// Returns the offset of each tensor if all follow each other, and the lengths of all together.
fn offsets_and_sum(tensors: &[Lengths]) -> Result<(Box<[u64]>, Lengths), Error> {
    // The sum is refused if it overflows, so no offset overflows.
    let blocks = Lengths::sum(tensors)?;
    let mut end = 0;
    let mut offsets = Vec::with_capacity(tensors.len());
    for tensor in tensors {
        offsets.push(end);
        end += tensor.total();
    }

    Ok((offsets.into(), blocks))
}

impl Layout {
    /// Returns the collective operation of the layout.
    pub fn collective(&self) -> Collective {
        self.collective
    }

    /// Returns the collective operation that the caller has asked for.
    ///
    /// An all-reduce moves whole inputs as a reduce-scatter.
    #[doc(hidden)]
    pub fn requested_collective(&self) -> Collective {
        let is_whole = self.is_input_shared && !self.collective.contributes_whole_input();
        if is_whole { Collective::AllReduce } else { self.collective }
    }

    /// Returns the number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        match &self.blocks {
            Sizes::Provided { blocks, .. } | Sizes::Received { blocks, .. } => blocks.ranks(),
            Sizes::Pairs { rows, .. } => rows.len(),
        }
    }

    /// Returns the number of tensors, at least 1.
    pub fn tensors(&self) -> usize {
        match &self.blocks {
            Sizes::Provided { tensors, .. } | Sizes::Received { tensors, .. } => tensors.len(),
            Sizes::Pairs { .. } => 1,
        }
    }

    /// Returns the number of chunks of each block, at least 1.
    pub fn chunks(&self) -> u32 {
        self.chunks
    }

    /// Returns the length in bytes of the longest input or output of any rank.
    pub fn total_bytes(&self) -> u64 {
        self.input_bytes_max().max(self.output_bytes_max())
    }

    /// Returns the length in bytes of the longest input of any rank.
    pub fn input_bytes_max(&self) -> u64 {
        match &self.blocks {
            Sizes::Provided { blocks, .. } if self.collective.is_reduction() => blocks.total(),
            Sizes::Provided { blocks, .. } => blocks.max(),
            Sizes::Received { blocks, .. } if self.is_input_shared => blocks.max(),
            Sizes::Received { blocks, .. } => blocks.total(),
            Sizes::Pairs { rows, .. } => rows.iter().map(Lengths::total).max().unwrap_or(0),
        }
    }

    /// Returns the length in bytes of the longest output of any rank.
    pub fn output_bytes_max(&self) -> u64 {
        match &self.blocks {
            Sizes::Provided { blocks, .. } => blocks.total(),
            Sizes::Received { blocks, .. } => self.providers_before(None) * blocks.max(),
            Sizes::Pairs { columns, .. } => columns.iter().map(Lengths::total).max().unwrap_or(0),
        }
    }

    /// Returns the length in bytes of the largest inbox, which holds the contributions to a rank's
    /// block.
    #[doc(hidden)]
    pub fn inbox_bytes_max(&self) -> u64 {
        Rank::all(self.ranks()).map(|rank| self.inbox_bytes(rank)).max().unwrap_or(0)
    }

    /// Returns the length in bytes of the block from `provider` in the output of `receiver`; 0 if
    /// there is none.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn block_bytes(&self, provider: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.requires(provider, receiver) => 0,
            Sizes::Provided { blocks, .. } => blocks.bytes(provider),
            Sizes::Received { blocks, .. } => blocks.bytes(receiver),
            sizes @ Sizes::Pairs { .. } => {
                sizes.pair(provider, receiver).map_or(0, |block| block.bytes)
            }
        }
    }

    /// Returns the number of bytes of `tensor` in the block from `provider` to `receiver`.
    ///
    /// # Panics
    /// If there is no such tensor or rank.
    pub fn piece_bytes(&self, tensor: usize, provider: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.requires(provider, receiver) => 0,
            Sizes::Provided { tensors, .. } => tensors[tensor].bytes(provider),
            Sizes::Received { tensors, .. } => tensors[tensor].bytes(receiver),
            Sizes::Pairs { .. } => self.block_bytes(provider, receiver),
        }
    }

    /// Returns the number of bytes of `tensor` in the input of `rank`.
    ///
    /// # Panics
    /// If there is no such tensor or rank.
    pub fn input_piece_bytes(&self, tensor: usize, rank: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.is_provider(rank) => 0,
            Sizes::Provided { tensors, .. } if self.collective.is_reduction() => {
                tensors[tensor].total()
            }
            Sizes::Provided { tensors, .. } => tensors[tensor].bytes(rank),
            Sizes::Received { tensors, .. } if self.is_input_shared => tensors[tensor].bytes(rank),
            Sizes::Received { tensors, .. } => tensors[tensor].total(),
            Sizes::Pairs { .. } => self.input_bytes(rank),
        }
    }

    /// Returns the length in bytes of the block for `receiver` in the input of `rank`.
    ///
    /// It is that of the whole input if the rank provides the same block for all outputs, and 0 if
    /// the rank provides no block.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn input_block_bytes(&self, rank: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.is_provider(rank) => 0,
            Sizes::Provided { blocks, .. } if self.collective.is_reduction() => {
                blocks.bytes(receiver)
            }
            Sizes::Received { blocks, .. } if !self.is_input_shared => blocks.bytes(receiver),
            Sizes::Pairs { .. } => self.block_bytes(rank, receiver),
            Sizes::Provided { .. } | Sizes::Received { .. } => self.input_bytes(rank),
        }
    }

    /// Returns the length of the input of `rank` in bytes; 0 if the rank provides no block.
    ///
    /// An input is one block, or has a block for every rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn input_bytes(&self, rank: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.is_provider(rank) => 0,
            Sizes::Provided { blocks, .. } if self.collective.is_reduction() => blocks.total(),
            Sizes::Provided { blocks, .. } => blocks.bytes(rank),
            Sizes::Received { blocks, .. } if self.is_input_shared => blocks.bytes(rank),
            Sizes::Received { blocks, .. } => blocks.total(),
            Sizes::Pairs { rows, .. } => rows[rank.index()].total(),
        }
    }

    /// Returns the length of the output of `rank` in bytes; 0 if the rank receives no block.
    ///
    /// An output holds a block from every rank that provides one. If each start places its blocks,
    /// the output of the rank that has placed them ends with the last one.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn output_bytes(&self, rank: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.is_receiver(rank) => 0,
            Sizes::Provided { blocks, .. } => blocks.total(),
            Sizes::Received { blocks, .. } => self.providers_before(None) * blocks.bytes(rank),
            Sizes::Pairs { now: Some(now), is_placed: true, .. } if now.rank == rank => {
                let ends = now.receive.iter().map(|block| block.output_offset + block.bytes);
                ends.max().unwrap_or(0)
            }
            Sizes::Pairs { columns, .. } => columns[rank.index()].total(),
        }
    }

    /// Returns an average block length in bytes for each rank, for use in the cost model.
    ///
    /// In an all-to-all with different blocks, it is the average of the blocks that the rank sends
    /// or of those that it receives, whichever is larger.
    pub fn average_blocks(&self) -> Vec<u64> {
        match &self.blocks {
            Sizes::Provided { blocks, .. } | Sizes::Received { blocks, .. } => {
                blocks.iter().collect()
            }
            Sizes::Pairs { rows, columns, .. } => {
                let ranks = rows.len() as u64;
                // The larger of its input and its output limits a rank.
                let average = |(row, column): (&Lengths, &Lengths)| {
                    row.total().max(column.total()).div_ceil(ranks)
                };
                rows.iter().zip(columns).map(average).collect()
            }
        }
    }

    /// Returns the lengths of the shortest and of the longest block in bytes.
    pub fn block_bytes_min_max(&self) -> (u64, u64) {
        let min_max = |lengths: &Lengths| (lengths.min(), lengths.max());
        match &self.blocks {
            Sizes::Provided { blocks, .. } | Sizes::Received { blocks, .. } => min_max(blocks),
            Sizes::Pairs { rows, .. } => rows
                .iter()
                .map(min_max)
                .reduce(|one, other| (one.0.min(other.0), one.1.max(other.1)))
                .unwrap_or_default(),
        }
    }

    /// Returns the length of the whole `tensor` in the output of `rank`, in bytes.
    ///
    /// # Panics
    /// If there is no such tensor or rank.
    pub fn tensor_bytes(&self, tensor: usize, rank: Rank) -> u64 {
        match &self.blocks {
            _ if !self.collective.is_receiver(rank) => 0,
            Sizes::Provided { tensors, .. } => tensors[tensor].total(),
            Sizes::Received { tensors, .. } => {
                self.providers_before(None) * tensors[tensor].bytes(rank)
            }
            Sizes::Pairs { .. } => self.output_bytes(rank),
        }
    }

    /// Returns the length in bytes of the data of a start, by which a resizable operation chooses
    /// its plan.
    ///
    /// It is that of all blocks together. If every rank contributes its whole input to every sum,
    /// it is the length of one input, as if the input were cut into parts.
    #[doc(hidden)]
    pub fn data_bytes(&self) -> u64 {
        match &self.blocks {
            Sizes::Received { blocks, .. } if self.is_input_shared => blocks.max(),
            Sizes::Provided { blocks, .. } | Sizes::Received { blocks, .. } => blocks.total(),
            Sizes::Pairs { .. } => u64::MAX,
        }
    }

    /// Returns whether the inputs of all ranks have one length in every start of an all-reduce, in
    /// any of its forms.
    #[doc(hidden)]
    pub fn has_one_length(&self) -> bool {
        self.has_parts() || self.is_input_shared
    }

    /// Returns whether the whole input of a rank has one length, which is cut into a part for each
    /// rank, as in an all-reduce.
    pub(super) fn has_parts(&self) -> bool {
        self.collective.is_reduction() && self.collective.all_ranks_get_the_same()
    }

    /// Returns whether each start has block lengths and places of its own within the inputs and
    /// outputs.
    pub(super) fn has_placed_blocks(&self) -> bool {
        matches!(self.blocks, Sizes::Pairs { is_placed: true, .. })
    }

    /// Replaces the block lengths by those of one start of a resizable operation.
    ///
    /// Blocks follow each other without gaps. But if each pair of ranks has a length, the blocks
    /// stay where they are. Of an all-reduce, the length is that of the whole input; if the layout
    /// has a part for each rank, it cuts the input anew.
    ///
    /// # Errors
    /// [`InvalidArgument`](peerlane_hal::ErrorKind::InvalidArgument) if the layout has another kind
    /// of lengths.
    #[doc(hidden)]
    pub fn set_blocks(&mut self, bytes: StartBytes<'_>) -> Result<(), Error> {
        let collective = self.collective;
        let requested = self.requested_collective();
        let (has_parts, ranks) = (self.has_parts(), self.ranks());
        let lengths_may_differ = collective.lengths_may_differ() && !self.is_input_shared;

        match (&mut self.blocks, bytes) {
            (Sizes::Provided { tensors, blocks, .. }, StartBytes::Equal(bytes)) if has_parts => {
                for lengths in [&mut tensors[0], blocks] {
                    lengths.set(|rank| part_bytes(bytes, ranks, rank));
                }
            }

            (
                Sizes::Provided { tensors, blocks, .. },
                StartBytes::Equal(_) | StartBytes::ByRank(_),
            ) if !has_parts => {
                let bytes_of = |rank| match bytes {
                    // The offset of a block is the sum of the lengths before it, so a rank without
                    // a block has the length 0.
                    _ if !collective.has_block_of(rank) => 0,
                    StartBytes::ByRank(bytes) => bytes(rank),
                    StartBytes::Equal(bytes) => bytes,
                    StartBytes::ByPair { .. } | StartBytes::Placed { .. } => 0,
                };

                // A layout that can be resized has one tensor, so its pieces are the blocks.
                for lengths in [&mut tensors[0], blocks] {
                    match bytes {
                        // This takes no time per rank if the lengths are equal already. If only
                        // one rank has a block, the lengths of the other ranks stay 0.
                        StartBytes::Equal(bytes) if !collective.has_one_block() => {
                            lengths.set_equal(bytes);
                        }
                        _ => lengths.set(bytes_of),
                    }
                }
            }

            (Sizes::Received { tensors, blocks, .. }, StartBytes::Equal(bytes)) => {
                tensors[0].set_equal(bytes);
                blocks.set_equal(bytes);
            }
            (Sizes::Received { tensors, blocks, .. }, StartBytes::ByRank(bytes))
                if lengths_may_differ =>
            {
                tensors[0].set(bytes);
                blocks.set(bytes);
            }

            (
                Sizes::Pairs { rows, columns, now, is_placed: false },
                StartBytes::ByPair { rank, send, receive },
            ) => {
                // A rank knows only its own lengths in this start, so `rows` and `columns` keep
                // those of the layout.
                set_now(now, rank, ranks, |provider, receiver| PlacedBlock {
                    bytes: if provider == rank { send(receiver) } else { receive(provider) },
                    input_offset: rows[provider.index()].offset(receiver),
                    output_offset: columns[receiver.index()].offset(provider),
                });
            }

            (
                Sizes::Pairs { rows, columns, now, is_placed: true },
                StartBytes::Placed { rank, block },
            ) => {
                let ends = [rows[0].total(), columns[0].total()];
                for peer in Rank::all(ranks) {
                    check_placed((rank, peer), block(rank, peer), ends)?;
                    check_placed((peer, rank), block(peer, rank), ends)?;
                }
                set_now(now, rank, ranks, block);
            }

            (Sizes::Pairs { .. }, _) => {
                return Err(invalid(
                    "one length is given, or one for each rank; expected the lengths that this rank sends and receives, as \
                     when the operation was prepared"
                        .to_owned(),
                ));
            }

            _ => {
                return Err(invalid(format!(
                    "the lengths do not have the form with which the operation was prepared; expected one length{} for {}",
                    if lengths_may_differ && !has_parts { ", or one for each rank," } else { "" },
                    requested.with_article()
                )));
            }
        }

        Ok(())
    }

    /// Returns the block length of each rank, or `None` if each pair of ranks has its own length.
    #[doc(hidden)]
    pub fn lengths(&self) -> Option<&Lengths> {
        match &self.blocks {
            Sizes::Provided { blocks, .. } | Sizes::Received { blocks, .. } => Some(blocks),
            Sizes::Pairs { .. } => None,
        }
    }

    /// Finds the first block that is longer than in `other`, and returns its description and its
    /// two lengths.
    ///
    /// The first length is that in this layout. Returns `None` if no block is longer.
    ///
    /// The layouts differ only in lengths.
    #[doc(hidden)]
    pub fn longer_than(&self, other: &Self) -> Option<(String, u64, u64)> {
        let longer = |what: &str, rank: Rank, found: u64, most: u64| {
            (found > most).then(|| (format!("{what} of rank {rank}"), found, most))
        };

        // The parts of a shorter input are not all shorter, so the inputs count.
        if self.has_one_length() {
            let (found, most) = (self.data_bytes(), other.data_bytes());
            return (found > most).then(|| ("the input".to_owned(), found, most));
        }

        let mut ranks = Rank::all(self.ranks());
        match (&self.blocks, &other.blocks) {
            (Sizes::Provided { blocks: new, .. }, Sizes::Provided { blocks: old, .. })
            | (Sizes::Received { blocks: new, .. }, Sizes::Received { blocks: old, .. }) => {
                match (new.uniform(), old.uniform()) {
                    // Either every rank exceeds the old length or none does.
                    (Some(new), Some(old)) => longer("the block", Rank(0), new, old),
                    _ => ranks.find_map(|rank| {
                        longer("the block", rank, new.bytes(rank), old.bytes(rank))
                    }),
                }
            }

            // The rank checks only its own blocks; peers check theirs. `set_blocks` has checked
            // blocks that a start places.
            (
                Sizes::Pairs { now: Some(now), is_placed: false, .. },
                Sizes::Pairs { rows, columns, .. },
            ) => {
                let most_sent = &rows[now.rank.index()];
                let most_received = &columns[now.rank.index()];
                ranks.find_map(|rank| {
                    let send = now.send[rank.index()].bytes;
                    let receive = now.receive[rank.index()].bytes;
                    let longer_sent =
                        longer("the block for the output", rank, send, most_sent.bytes(rank));
                    longer_sent.or_else(|| {
                        longer("the block from the input", rank, receive, most_received.bytes(rank))
                    })
                })
            }

            _ => None,
        }
    }

    /// Returns how many ranks before `rank` provide a block of an output.
    ///
    /// If `rank` is `None`, all ranks that provide one are counted.
    fn providers_before(&self, rank: Option<Rank>) -> u64 {
        if self.collective.is_reduction() {
            // The output of a rank holds only its own block, which no other precedes. Reductions
            // with equal outputs have lengths of another kind.
            return u64::from(rank.is_none());
        }

        let end = rank.map_or(self.ranks(), Rank::index);
        match self.collective.only_provider() {
            None => end as u64,
            Some(only) => u64::from(only.index() < end),
        }
    }

    /// Returns the offset of the block for `receiver` in the contiguous input of `provider`.
    ///
    /// With several tensors, blocks count as if each were contiguous.
    pub(super) fn input_offset(&self, provider: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            Sizes::Provided { blocks, .. } if self.collective.is_reduction() => {
                blocks.offset(receiver)
            }
            Sizes::Received { blocks, .. } if !self.is_input_shared => blocks.offset(receiver),
            sizes @ Sizes::Pairs { .. } => {
                sizes.pair(provider, receiver).map_or(0, |block| block.input_offset)
            }
            Sizes::Provided { .. } | Sizes::Received { .. } => 0,
        }
    }

    /// Returns the offset of the data for `receiver` within `tensor` in the input of `provider`.
    pub(super) fn input_piece_offset(&self, tensor: usize, provider: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            Sizes::Provided { tensors, .. } if self.collective.is_reduction() => {
                tensors[tensor].offset(receiver)
            }
            Sizes::Received { tensors, .. } if !self.is_input_shared => {
                tensors[tensor].offset(receiver)
            }
            Sizes::Pairs { .. } => self.input_offset(provider, receiver),
            Sizes::Provided { .. } | Sizes::Received { .. } => 0,
        }
    }

    /// Returns the offset of the piece of `tensor` in the block from `provider` to `receiver`.
    pub(super) fn piece_start(&self, tensor: usize, provider: Rank, receiver: Rank) -> u64 {
        (0..tensor).map(|before| self.piece_bytes(before, provider, receiver)).sum()
    }

    /// Returns the offset of `tensor` in a contiguous input, in which the tensor begins at
    /// `piece_start` if the input is one block.
    pub(super) fn tensor_offset_in_input(&self, tensor: usize, piece_start: u64) -> u64 {
        match &self.blocks {
            Sizes::Provided { tensor_offsets, .. } if self.collective.is_reduction() => {
                tensor_offsets[tensor]
            }
            Sizes::Received { tensor_offsets, .. } if !self.is_input_shared => {
                tensor_offsets[tensor]
            }
            Sizes::Provided { .. } | Sizes::Received { .. } | Sizes::Pairs { .. } => piece_start,
        }
    }

    /// Returns the offset of `tensor` in a contiguous output, in which the tensor begins at
    /// `piece_start` if the output is one block.
    pub(super) fn tensor_offset_in_output(&self, tensor: usize, piece_start: u64) -> u64 {
        match &self.blocks {
            Sizes::Provided { tensor_offsets, .. } => tensor_offsets[tensor],
            Sizes::Received { .. } | Sizes::Pairs { .. } => piece_start,
        }
    }

    /// Returns the offset of the data from `provider` within `tensor` in the output of `receiver`.
    ///
    /// A rank that provides no block takes no bytes of the output.
    pub(super) fn output_offset(&self, tensor: usize, provider: Rank, receiver: Rank) -> u64 {
        match &self.blocks {
            Sizes::Provided { tensors, .. } => tensors[tensor].offset(provider),
            Sizes::Received { tensors, .. } => {
                self.providers_before(Some(provider)) * tensors[tensor].bytes(receiver)
            }
            sizes @ Sizes::Pairs { .. } => {
                sizes.pair(provider, receiver).map_or(0, |block| block.output_offset)
            }
        }
    }
}

/// Replaces the blocks of `rank` by those of a start.
fn set_now(
    now: &mut Option<PairsNow>,
    rank: Rank,
    ranks: usize,
    block: impl Fn(Rank, Rank) -> PlacedBlock,
) {
    let none = || vec![PlacedBlock::default(); ranks].into();
    let now = now.get_or_insert_with(|| PairsNow { rank, send: none(), receive: none() });

    for peer in Rank::all(ranks) {
        now.send[peer.index()] = block(rank, peer);
        now.receive[peer.index()] = block(peer, rank);
    }
}

/// Checks that a block lies within the input of its provider and the output of its receiver, which
/// have the lengths `ends`.
fn check_placed(
    (provider, receiver): (Rank, Rank),
    block: PlacedBlock,
    ends: [u64; 2],
) -> Result<(), Error> {
    let sides =
        [("input", provider, block.input_offset), ("output", receiver, block.output_offset)];
    for ((side, rank, offset), end) in sides.into_iter().zip(ends) {
        if offset.checked_add(block.bytes).is_none_or(|block_end| block_end > end) {
            return Err(invalid(format!(
                "the block from rank {provider} to rank {receiver} is {} bytes at byte {offset} of \
                 the {side} of rank {rank}, expected a range within its {end} bytes",
                block.bytes
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Cell, Source};

    /// Returns the cells, contributions and sizes of a layout, which do not depend on whether equal
    /// lengths are stored as one.
    fn described(layout: &Layout) -> String {
        let ranks = || Rank::all(layout.ranks());
        let mut text = format!("{} chunks, {} bytes", layout.chunks(), layout.data_bytes());
        for rank in ranks() {
            let bytes = [layout.input_bytes(rank), layout.output_bytes(rank)];
            text += &format!("; {rank}: {bytes:?}, inbox {}", layout.inbox_bytes(rank));
            for (from, chunk) in
                ranks().flat_map(|from| (0..layout.chunks()).map(move |c| (from, c)))
            {
                let cell = Cell { block: from, chunk };
                let given = layout.contribution_spans(cell, Source::Input, rank);
                let given: Vec<_> = given.map(|span| (span.src, span.dst, span.bytes)).collect();
                text += &format!(", {cell}: {given:?} {:?}", layout.cell(cell, rank));
            }
        }
        text
    }

    #[test]
    fn a_shorter_start_has_the_layout_of_an_operation_of_its_length() {
        for ranks in 1..=9 {
            let shared = |bytes: u64| {
                let blocks = BlockBytes::ByRank(Lengths::equal(ranks, bytes).unwrap());
                let whole = Layout::of_blocks(Collective::ReduceScatter, blocks.clone(), 2);
                let parts = blocks.parts().unwrap();
                let parts = Layout::of_blocks(Collective::AllReduce, parts, 2);
                [whole.unwrap().with_shared_input(), parts.unwrap()]
            };
            for (index, mut resized) in shared(64 * 40).into_iter().enumerate() {
                for bytes in [64 * 40, 0, 4, 64, 68, 64 * 5, 64 * 13 + 12, 64 * 40 - 4, 8] {
                    resized.set_blocks(StartBytes::Equal(bytes)).unwrap();
                    let fixed = &shared(bytes)[index];
                    assert_eq!(described(&resized), described(fixed), "{ranks} ranks, {bytes}");
                }
            }

            let blocks = |start: u64| {
                Rank::all(ranks).map(move |rank| (7 * u64::from(rank.0) + start) % 5 * 36)
            };
            let scatter = |start| {
                let bytes: Vec<u64> = blocks(start).collect();
                Layout::new(Collective::ReduceScatter, &bytes, 2).unwrap()
            };
            let mut resized = scatter(0);
            for start in 0..10 {
                let bytes: Vec<u64> = blocks(start).collect();
                let of_rank = |rank: Rank| bytes[rank.index()];
                resized.set_blocks(StartBytes::ByRank(&of_rank)).unwrap();
                assert_eq!(described(&resized), described(&scatter(start)), "{ranks} ranks");
            }
        }
    }

    /// Each start has other lengths and places, and none leaves its input or output.
    #[test]
    fn starts_place_their_blocks_within_the_totals() {
        let blocks = BlockBytes::ByStart { ranks: 2, input_bytes: 100, output_bytes: 60 };
        let mut layout = Layout::of_blocks(Collective::AllToAll, blocks.clone(), 1).unwrap();
        let lengths = |layout: &Layout| {
            let own = [layout.input_bytes(Rank(0)), layout.output_bytes(Rank(0))];
            (own, layout.input_bytes_max(), layout.output_bytes_max())
        };
        assert_eq!(lengths(&layout), ([100, 60], 100, 60));
        assert_eq!(layout.block_bytes(Rank(0), Rank(0)), 0);

        let placed =
            |bytes, input_offset, output_offset| PlacedBlock { bytes, input_offset, output_offset };
        let first = [[placed(10, 90, 0), placed(30, 0, 0)], [placed(7, 3, 10), placed(0, 0, 0)]];
        let block = |from: Rank, to: Rank| first[from.index()][to.index()];
        layout.set_blocks(StartBytes::Placed { rank: Rank(0), block: &block }).unwrap();
        assert_eq!(lengths(&layout), ([100, 17], 100, 60));
        let cell = |layout: &Layout, from, to| {
            let span = layout.cell(Cell { block: Rank(from), chunk: 0 }, Rank(to));
            placed(span.bytes, span.input_offset, span.output_offset)
        };
        assert_eq!([cell(&layout, 0, 0), cell(&layout, 0, 1)], first[0]);
        assert_eq!(cell(&layout, 1, 0), first[1][0]);
        assert_eq!(layout.own_position(Rank(0), 0, Source::Input).offset, 0);

        for (wrong, side) in [(placed(11, 90, 0), "input"), (placed(10, 0, 51), "output")] {
            let block = |from: Rank, to: Rank| {
                if (from, to) == (Rank(1), Rank(0)) { wrong } else { PlacedBlock::default() }
            };
            let error = layout.set_blocks(StartBytes::Placed { rank: Rank(0), block: &block });
            let text = error.unwrap_err().to_string();
            assert!(text.contains("from rank 1 to rank 0") && text.contains(side), "{text}");
            assert_eq!(cell(&layout, 1, 0), first[1][0], "a start that is refused changes nothing");
        }
        let by_pair = StartBytes::ByPair { rank: Rank(0), send: &|_| 1, receive: &|_| 1 };
        assert!(layout.set_blocks(by_pair).is_err());
        assert!(Layout::of_blocks(Collective::AllGather, blocks, 1).is_err());
    }

    /// A shorter input can have a longer part, for which the inbox of the longest input may be too
    /// small.
    #[test]
    fn the_inbox_of_a_resizable_all_reduce_holds_every_shorter_start() {
        let mut is_longer = false;
        for ranks in 1..=9 {
            for units in 0..30 {
                let layout = |bytes: u64| {
                    let blocks = BlockBytes::ByRank(Lengths::equal(ranks, bytes).unwrap());
                    let parts = blocks.parts().unwrap();
                    Layout::of_blocks(Collective::AllReduce, parts, 1).unwrap()
                };
                let longest = layout(units * CHUNK_ALIGN_BYTES);
                for rank in Rank::all(ranks) {
                    let bytes = longest.resizable_inbox_bytes(rank);
                    assert_eq!(bytes, longest.resizable_inbox_bytes(Rank(0)));
                    let shorter = (0..=units * 2).map(|half| half * CHUNK_ALIGN_BYTES / 2);
                    let most = shorter.map(|bytes| layout(bytes).inbox_bytes(rank)).max();
                    assert!(most <= Some(bytes), "{ranks} ranks, rank {rank}, {units} units");
                    is_longer |= most > Some(longest.inbox_bytes(rank));
                }
            }
        }
        assert!(is_longer, "expected a shorter input with a longer part");
    }

    #[test]
    fn lengths_that_do_not_fit_a_start_are_named() {
        let blocks = BlockBytes::ByRank(Lengths::equal(3, 100).unwrap());
        let whole = Layout::of_blocks(Collective::ReduceScatter, blocks.clone(), 1).unwrap();
        let whole = whole.with_shared_input();
        let parts = blocks.parts().unwrap();
        let parts = Layout::of_blocks(Collective::AllReduce, parts, 1).unwrap();
        for mut layout in [whole, parts] {
            let prepared = layout.clone();
            let error = layout.set_blocks(StartBytes::ByRank(&|_| 100)).unwrap_err();
            assert!(error.to_string().contains("expected one length for"), "{error}");
            layout.set_blocks(StartBytes::Equal(104)).unwrap();
            let longer = layout.longer_than(&prepared);
            assert_eq!(longer, Some(("the input".to_owned(), 104, 100)));
        }
    }
}
