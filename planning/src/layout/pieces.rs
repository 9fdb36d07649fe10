//! Defines the lengths of the pieces that ranks contribute to tensors, and their positions in
//! buffers.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::{ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::Layout;
use crate::error::Error;

/// Stores the number of bytes that each rank contributes to one tensor.
///
/// Equal lengths take no memory per rank.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Lengths(Kind);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Kind {
    Equal {
        ranks: u32,
        bytes: u64,
    },
    /// The offset of each rank's piece in the tensor, followed by the length of the tensor.
    Uneven(Box<[u64]>),
}

impl Lengths {
    /// Creates the lengths of a tensor to which each of `ranks` ranks contributes `bytes` bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if there is no rank or more than fit in 32
    /// bits, or the sum is more than 2^64 - 1.
    pub fn equal(ranks: usize, bytes: u64) -> Result<Self, Error> {
        let in_bounds = u32::try_from(ranks).ok().filter(|&ranks| ranks > 0);
        let count = in_bounds.ok_or_else(|| {
            invalid(format!("number of ranks is {ranks}, expected 1 to {}", u32::MAX))
        })?;

        if bytes.checked_mul(count.into()).is_none() {
            return Err(invalid(format!(
                "block_bytes is {bytes} on each of {ranks} ranks, expected at most {} bytes in \
                 total",
                u64::MAX
            )));
        }
        Ok(Self(Kind::Equal { ranks: count, bytes }))
    }

    /// Creates the lengths of a tensor to which rank r contributes `bytes[r]` bytes.
    ///
    /// # Errors
    /// As [`equal`](Self::equal).
    pub fn by_rank(bytes: &[u64]) -> Result<Self, Error> {
        if bytes.is_empty() {
            let text = "block_bytes is empty, expected one length for each rank";
            return Err(invalid(text.to_owned()));
        }

        let mut offsets = Vec::with_capacity(bytes.len() + 1);
        let mut end = 0_u64;
        for (rank, &bytes) in Rank::all(bytes.len()).zip(bytes) {
            offsets.push(end);
            end = end.checked_add(bytes).ok_or_else(|| {
                invalid(format!(
                    "blocks are too long: rank {rank} adds {bytes} bytes to the {end} bytes of \
                     ranks with lower numbers, expected at most {} bytes in total",
                    u64::MAX
                ))
            })?;
        }
        offsets.push(end);

        // Equal lengths take no memory per rank, and compare equal to those that `equal` creates.
        let first = bytes[0];
        if bytes.iter().all(|&bytes| bytes == first) {
            return Self::equal(bytes.len(), first);
        }

        Ok(Self(Kind::Uneven(offsets.into())))
    }

    /// Returns the number of ranks, at least 1.
    pub fn ranks(&self) -> usize {
        match &self.0 {
            Kind::Equal { ranks, .. } => *ranks as usize,
            Kind::Uneven(offsets) => offsets.len() - 1,
        }
    }

    /// Returns the length of every rank's piece, or `None` if the lengths may differ.
    pub fn uniform(&self) -> Option<u64> {
        match self.0 {
            Kind::Equal { bytes, .. } => Some(bytes),
            Kind::Uneven(_) => None,
        }
    }

    /// Returns the number of bytes that `rank` contributes to the tensor.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn bytes(&self, rank: Rank) -> u64 {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        match &self.0 {
            Kind::Equal { bytes, .. } => *bytes,
            Kind::Uneven(offsets) => offsets[rank.index() + 1] - offsets[rank.index()],
        }
    }

    /// Returns the number of bytes that all ranks before `rank` contribute to the tensor.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn offset(&self, rank: Rank) -> u64 {
        assert!(rank.index() < self.ranks(), "rank {rank} is not one of {} ranks", self.ranks());
        match &self.0 {
            Kind::Equal { bytes, .. } => bytes * u64::from(rank.0),
            Kind::Uneven(offsets) => offsets[rank.index()],
        }
    }

    /// Returns the length of the whole tensor in bytes.
    pub fn total(&self) -> u64 {
        match &self.0 {
            Kind::Equal { ranks, bytes } => bytes * u64::from(*ranks),
            Kind::Uneven(offsets) => offsets[offsets.len() - 1],
        }
    }

    /// Returns the smallest number of bytes that a rank contributes to the tensor.
    pub fn min(&self) -> u64 {
        self.uniform().or_else(|| self.iter().min()).unwrap_or(0)
    }

    /// Returns the largest number of bytes that a rank contributes to the tensor.
    pub fn max(&self) -> u64 {
        self.uniform().or_else(|| self.iter().max()).unwrap_or(0)
    }

    /// Sets the length of every rank's piece to `bytes`.
    pub(super) fn set_equal(&mut self, bytes: u64) {
        match &mut self.0 {
            Kind::Equal { bytes: old, .. } => *old = bytes,
            Kind::Uneven(_) => self.set(|_| bytes),
        }
    }

    /// Sets the length of each rank's piece to the number of bytes that `bytes_of` returns.
    ///
    /// Allocates only if the lengths were equal before and are not any more.
    pub(super) fn set(&mut self, bytes_of: impl Fn(Rank) -> u64) {
        let ranks = self.ranks();
        if let Kind::Equal { bytes, .. } = &mut self.0 {
            let first = bytes_of(Rank(0));
            if Rank::all(ranks).all(|rank| bytes_of(rank) == first) {
                *bytes = first;
                return;
            }
            self.0 = Kind::Uneven(vec![0; ranks + 1].into());
        }

        // The offset of rank 0 stays 0.
        let Kind::Uneven(offsets) = &mut self.0 else { return };
        for rank in Rank::all(ranks) {
            offsets[rank.index() + 1] = offsets[rank.index()] + bytes_of(rank);
        }
    }

    /// Returns these lengths, with 0 bytes for every rank that `keeps` rejects.
    pub(super) fn only(self, keeps: impl Fn(Rank) -> bool) -> Result<Self, Error> {
        if Rank::all(self.ranks()).all(&keeps) {
            return Ok(self);
        }

        let kept = |rank| if keeps(rank) { self.bytes(rank) } else { 0 };
        Self::by_rank(&Rank::all(self.ranks()).map(kept).collect::<Vec<_>>())
    }

    /// Returns the number of bytes that each rank contributes to the tensor, in rank order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        Rank::all(self.ranks()).map(|rank| self.bytes(rank))
    }

    /// Returns the number of bytes that each rank contributes to all `tensors` together.
    pub(super) fn sum(tensors: &[Self]) -> Result<Self, Error> {
        let [first, others @ ..] = tensors else {
            return Err(invalid("tensors is 0, expected at least 1".to_owned()));
        };

        let ranks = first.ranks();
        for (index, other) in (1..).zip(others) {
            if other.ranks() != ranks {
                return Err(invalid(format!(
                    "tensor {index} has lengths for {} ranks, expected {ranks} ranks, as tensor 0",
                    other.ranks()
                )));
            }
        }

        let mut total = 0_u64;
        for (index, tensor) in tensors.iter().enumerate() {
            total = total.checked_add(tensor.total()).ok_or_else(|| {
                invalid(format!(
                    "tensors are too long: tensor {index} adds {} bytes to the {total} bytes of \
                     tensors with lower numbers, expected at most {} bytes in total",
                    tensor.total(),
                    u64::MAX
                ))
            })?;
        }

        // If all tensors are uniform, so is their sum. It is at most the total, which has not
        // overflowed.
        if let Some(bytes) = tensors.iter().map(Self::uniform).sum() {
            return Self::equal(ranks, bytes);
        }

        let of_rank = |rank| tensors.iter().map(|tensor| tensor.bytes(rank)).sum();
        Self::by_rank(&Rank::all(ranks).map(of_rank).collect::<Vec<u64>>())
    }
}

impl fmt::Debug for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Equal { ranks, bytes } => write!(f, "{ranks} x {bytes}"),
            Kind::Uneven(_) => f.debug_list().entries(self.iter()).finish(),
        }
    }
}

/// The exclusive upper bound of the buffer numbers of an operation.
pub const BUFFERS_MAX: u32 = 1 << 20;

/// Identifies a byte in one of a rank's input or output buffers, by buffer number and offset.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct BufferPosition {
    /// The number of the input or output buffer, from 0.
    pub buffer: u32,
    /// The offset from the beginning of the buffer in bytes.
    pub offset: u64,
}

/// Stores the position of each tensor in the input buffers of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InputPlacement {
    /// All tensors lie back to back in one input buffer, beginning at the contained position.
    Contiguous(BufferPosition),
    /// Each tensor begins at a position of its own in the input buffers, listed in tensor order.
    ByTensor(Vec<BufferPosition>),
    /// Each block begins at a position of its own in the input buffers, listed in the order of the
    /// ranks that receive them.
    ///
    /// There is only one tensor, and the input has a block for every rank.
    ByBlock(Vec<BufferPosition>),
}

/// Stores the positions of the tensors or blocks in the output buffers of a rank.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputPlacement {
    /// All tensors lie back to back in one output buffer, beginning at the contained position.
    ///
    /// Each has its pieces in rank order.
    Contiguous(BufferPosition),
    /// Each tensor begins at a position of its own in the output buffers, listed in tensor order.
    ByTensor(Vec<BufferPosition>),
    /// Each block begins at a position of its own in the output buffers, listed in rank order.
    ///
    /// There is only one tensor.
    ByBlock(Vec<BufferPosition>),
}

/// Stores the positions of a rank's input and output in its numbered buffers.
///
/// Ranks may have different placements, so a rank that writes to a peer needs the peer's. Ranks
/// exchange them when they prepare an operation, and check those of peers like those of the caller.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// The positions of the rank's input in the input buffers; unused for an operation in place.
    pub input: InputPlacement,
    /// The positions of the rank's tensors or blocks in the output buffers.
    pub output: OutputPlacement,
}

impl Placement {
    /// The placement with one input buffer and one output buffer, both used from their beginning.
    pub const CONTIGUOUS: Self = Self {
        input: InputPlacement::Contiguous(BufferPosition { buffer: 0, offset: 0 }),
        output: OutputPlacement::Contiguous(BufferPosition { buffer: 0, offset: 0 }),
    };

    /// Checks that the number and the values of the positions are valid, and that outputs of `rank`
    /// do not overlap.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument): a wrong number of positions, a buffer
    /// number of [`BUFFERS_MAX`] or more, a position whose end exceeds 2^64 - 1, or outputs that
    /// overlap, naming both.
    pub fn check(&self, layout: &Layout, rank: Rank) -> Result<(), Error> {
        self.check_counts(layout)?;

        let inputs = self.inputs(layout, rank);
        let outputs = self.outputs(layout, rank);
        let named_inputs = inputs.iter().map(|range| ("input", range));
        let named_outputs = outputs.iter().map(|range| ("output", range));
        for (what, range) in named_inputs.chain(named_outputs) {
            let PlacedRange { kind, number, position: BufferPosition { buffer, offset }, bytes } =
                range;

            if *buffer >= BUFFERS_MAX {
                let text = format!(
                    "{what} of rank {rank}: {kind} {number} is in buffer {buffer}, expected a \
                     buffer number below {BUFFERS_MAX}"
                );
                return Err(invalid(text));
            }

            if offset.checked_add(*bytes).is_none() {
                let text = format!(
                    "{what} of rank {rank}: {kind} {number} has {bytes} bytes at offset {offset} \
                     of buffer {buffer}, expected an end offset of at most {}",
                    u64::MAX
                );
                return Err(invalid(text));
            }
        }

        // The error about an overlap names the ends of ranges, which cannot overflow here. Inputs
        // are only read, so they may overlap.
        self.check_overlap(layout, rank)
    }

    /// Checks that the placement has one position for each tensor or block.
    fn check_counts(&self, layout: &Layout) -> Result<(), Error> {
        let tensors = layout.tensors();
        match &self.input {
            InputPlacement::Contiguous(_) => {}
            InputPlacement::ByTensor(positions) => {
                check_count("input", positions.len(), tensors, "tensor")?
            }
            InputPlacement::ByBlock(_) if !layout.has_input_blocks() => {
                let text = format!(
                    "the input has one position for each block, expected one position in {}, \
                     because its input is the same for all outputs",
                    layout.requested_collective().with_article()
                );
                return Err(invalid(text));
            }
            InputPlacement::ByBlock(positions) => {
                check_one_tensor("input", tensors)?;
                check_count("input", positions.len(), layout.ranks(), "block")?;
            }
        }

        match &self.output {
            OutputPlacement::Contiguous(_) => Ok(()),
            OutputPlacement::ByTensor(positions) => {
                check_count("output", positions.len(), tensors, "tensor")
            }
            OutputPlacement::ByBlock(_) if layout.collective().is_reduction() => {
                let text = format!(
                    "the output has one position for each block, expected one position in {}, \
                     whose output is one block",
                    layout.requested_collective().with_article()
                );
                Err(invalid(text))
            }
            OutputPlacement::ByBlock(_) if tensors != 1 => check_one_tensor("output", tensors),
            OutputPlacement::ByBlock(positions) => {
                check_count("output", positions.len(), layout.ranks(), "block")
            }
        }
    }

    /// Returns the ranges of the input buffers that the input of `rank` occupies.
    fn inputs(&self, layout: &Layout, rank: Rank) -> Vec<PlacedRange> {
        match &self.input {
            InputPlacement::Contiguous(position) => {
                vec![PlacedRange::new("block", rank.index(), *position, layout.input_bytes(rank))]
            }
            InputPlacement::ByTensor(positions) => {
                placed("tensor", positions, |tensor| layout.input_piece_bytes(tensor, rank))
            }
            InputPlacement::ByBlock(positions) => placed("block", positions, |receiver| {
                layout.input_block_bytes(rank, Rank::at(receiver))
            }),
        }
    }

    /// Returns the ranges of the output buffers that the output of `rank` occupies.
    fn outputs(&self, layout: &Layout, rank: Rank) -> Vec<PlacedRange> {
        match &self.output {
            OutputPlacement::Contiguous(position) => {
                vec![PlacedRange::new("tensor", 0, *position, layout.output_bytes(rank))]
            }
            OutputPlacement::ByTensor(positions) => {
                placed("tensor", positions, |tensor| layout.tensor_bytes(tensor, rank))
            }
            OutputPlacement::ByBlock(positions) => {
                placed("block", positions, |provider| layout.block_bytes(Rank::at(provider), rank))
            }
        }
    }

    /// Checks that no two ranges of the output of `rank` share a byte.
    fn check_overlap(&self, layout: &Layout, rank: Rank) -> Result<(), Error> {
        // An empty range overlaps nothing, even at a position inside another range.
        let mut outputs = self.outputs(layout, rank);
        outputs.retain(|range| range.bytes > 0);

        // If two ranges overlap, the first of them also overlaps its successor in order of
        // positions.
        outputs.sort_by_key(|range| range.position);
        match outputs.windows(2).find(|pair| pair[0].overlaps(pair[1])) {
            Some(pair) => Err(invalid(format!(
                "outputs of rank {rank} overlap: {}, and {}",
                pair[0], pair[1]
            ))),
            None => Ok(()),
        }
    }

    /// Returns the minimum length in bytes of each buffer that holds a part of the input of `rank`,
    /// by buffer number.
    pub fn input_needs(&self, layout: &Layout, rank: Rank) -> BTreeMap<u32, u64> {
        buffer_bytes(self.inputs(layout, rank))
    }

    /// Returns the minimum length in bytes of each buffer that holds a part of the output of
    /// `rank`, by buffer number.
    pub fn output_needs(&self, layout: &Layout, rank: Rank) -> BTreeMap<u32, u64> {
        buffer_bytes(self.outputs(layout, rank))
    }
}

/// Stores the range of a buffer that one tensor or block occupies, and its description for errors.
#[derive(Clone, Copy, Debug)]
struct PlacedRange {
    kind: &'static str,
    number: usize,
    position: BufferPosition,
    bytes: u64,
}

impl PlacedRange {
    fn new(kind: &'static str, number: usize, position: BufferPosition, bytes: u64) -> Self {
        Self { kind, number, position, bytes }
    }

    /// Returns whether this range shares a byte with `next`, which may not begin before this range.
    fn overlaps(self, next: Self) -> bool {
        let (first, second) = (self.position, next.position);
        first.buffer == second.buffer && second.offset - first.offset < self.bytes
    }
}

impl fmt::Display for PlacedRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, number, position: BufferPosition { buffer, offset }, bytes } = self;
        write!(f, "{kind} {number} is bytes {offset} to {} of buffer {buffer}", offset + bytes)
    }
}

/// Returns the buffer range of each tensor or block, from `positions` and the lengths that `bytes`
/// returns.
fn placed(
    kind: &'static str,
    positions: &[BufferPosition],
    bytes: impl Fn(usize) -> u64,
) -> Vec<PlacedRange> {
    let mut ranges = Vec::with_capacity(positions.len());
    for (number, &position) in positions.iter().enumerate() {
        ranges.push(PlacedRange::new(kind, number, position, bytes(number)));
    }
    ranges
}

/// Checks that there is one tensor, so that blocks can have positions of their own.
fn check_one_tensor(what: &str, tensors: usize) -> Result<(), Error> {
    if tensors == 1 {
        return Ok(());
    }

    let article = if what == "input" { "an input" } else { "an output" };
    let text =
        format!("tensors is {tensors}, expected 1 for {article} with one position for each block");
    Err(invalid(text))
}

/// Checks that `found`, the number of positions of a placement, equals `expected`.
fn check_count(what: &str, found: usize, expected: usize, kind: &str) -> Result<(), Error> {
    if found == expected {
        return Ok(());
    }

    let text = format!("{what} has {found} positions, expected {expected}, one for each {kind}");
    Err(invalid(text))
}

/// Returns the minimum length in bytes of each buffer that contains one or several of `ranges`, by
/// buffer number.
fn buffer_bytes(ranges: Vec<PlacedRange>) -> BTreeMap<u32, u64> {
    let mut lengths = BTreeMap::new();
    for PlacedRange { position, bytes, .. } in ranges {
        let length: &mut u64 = lengths.entry(position.buffer).or_default();
        *length = (*length).max(position.offset.saturating_add(bytes));
    }
    lengths
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    #[test]
    fn equal_lengths_are_uniform() {
        let lengths = Lengths::by_rank(&[7, 7, 7]).unwrap();
        assert_eq!(lengths, Lengths::equal(3, 7).unwrap());
        assert_eq!(
            (lengths.uniform(), lengths.total(), lengths.offset(Rank(2))),
            (Some(7), 21, 14)
        );
    }

    #[test]
    fn uneven_lengths_add_up() {
        let lengths = Lengths::by_rank(&[3, 0, 5]).unwrap();
        assert_eq!((lengths.uniform(), lengths.total(), lengths.ranks()), (None, 8, 3));
        let pairs: Vec<_> =
            Rank::all(3).map(|rank| (lengths.offset(rank), lengths.bytes(rank))).collect();
        assert_eq!(pairs, [(0, 3), (3, 0), (3, 5)]);
        let sum = Lengths::sum(&[lengths, Lengths::equal(3, 2).unwrap()]).unwrap();
        assert_eq!(sum.iter().collect::<Vec<_>>(), [5, 2, 7]);
    }

    #[test]
    fn impossible_lengths_are_named() {
        let text = |result: Result<Lengths, Error>| {
            let error = result.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
            error.to_string()
        };
        assert_snapshot!(text(Lengths::equal(0, 1)), @"number of ranks is 0, expected 1 to 4294967295");
        assert_snapshot!(text(Lengths::equal(2, u64::MAX)), @"block_bytes is 18446744073709551615 on each of 2 ranks, expected at most 18446744073709551615 bytes in total");
        assert_snapshot!(text(Lengths::sum(&[])), @"tensors is 0, expected at least 1");
        let (two, three) = (Lengths::equal(2, 8).unwrap(), Lengths::equal(3, 8).unwrap());
        assert_snapshot!(text(Lengths::sum(&[two.clone(), three])), @"tensor 1 has lengths for 3 ranks, expected 2 ranks, as tensor 0");
        let large = Lengths::equal(2, u64::MAX / 2).unwrap();
        assert_snapshot!(text(Lengths::sum(&[two, large])), @"tensors are too long: tensor 1 adds 18446744073709551614 bytes to the 16 bytes of tensors with lower numbers, expected at most 18446744073709551615 bytes in total");
    }
}
