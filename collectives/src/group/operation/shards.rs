//! Converts lengths in elements to a layout in bytes, and checks them before anything is exchanged.

use peerlane_hal::{ErrorKind, Rank};

use crate::element::DType;
use crate::error::Error;
use crate::layout::{BUFFERS_MAX, BufferPosition, Layout, Lengths};

/// The destination of a shard in a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The output buffer, from 0.
    pub buffer: usize,
    /// Elements from the start of the buffer.
    pub offset: usize,
}

/// The number of elements that each rank provides, equal on all ranks.
#[derive(Clone, Debug)]
pub(in crate::group) enum Shards {
    /// Every rank contributes this number of elements.
    Equal(usize),
    /// A number from one rank only.
    Root(Rank, usize),
    /// An equal share of this number of elements.
    Shared(usize),
    /// A number for each rank.
    Uneven(Vec<usize>),
    /// A number for each tensor, the same from every rank.
    Tensors(Vec<usize>),
    /// A number for each tensor and rank.
    UnevenTensors(Vec<Vec<usize>>),
}

impl Shards {
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument), naming what does not fit.
    pub(super) fn layout(&self, dtype: DType, ranks: usize, chunks: u32) -> Result<Layout, Error> {
        let tensors = match self {
            Self::Equal(len) => {
                vec![Lengths::equal(ranks, bytes(dtype, "shard_len", *len)?)?]
            }
            Self::Root(root, len) => {
                let bytes = bytes(dtype, "len", *len)?;
                let of_rank = |rank| if rank == *root { bytes } else { 0 };
                vec![Lengths::of(&Rank::all(ranks).map(of_rank).collect::<Vec<_>>())?]
            }
            Self::Shared(len) if len % ranks != 0 => {
                return Err(invalid(format!(
                    "the range has {len} elements, expected a multiple of {ranks}, the number of \
                     ranks"
                )));
            }
            Self::Shared(len) => {
                vec![Lengths::equal(ranks, bytes(dtype, "shard_len", len / ranks)?)?]
            }
            Self::Uneven(lens) => vec![uneven(dtype, "shard_lens", lens, ranks)?],
            Self::Tensors(lens) => (0..)
                .zip(lens)
                .map(|(index, &len): (usize, _)| {
                    Lengths::equal(ranks, bytes(dtype, &format!("tensor_lens[{index}]"), len)?)
                })
                .collect::<Result<_, Error>>()?,
            Self::UnevenTensors(lens) => (0..)
                .zip(lens)
                .map(|(index, lens): (usize, _)| {
                    uneven(dtype, &format!("tensor_lens[{index}]"), lens, ranks)
                })
                .collect::<Result<_, Error>>()?,
        };
        Layout::of_tensors(tensors, chunks)
    }

    /// Returns the values that must be equal on all ranks.
    pub(super) fn fields(&self, layout: &Layout) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        let mut add = |name: String, value: u64| fields.push((name, value.to_string()));
        match self {
            Self::Equal(_) | Self::Shared(_) => {
                add("shard_bytes".into(), layout.shard_bytes(Rank(0)))
            }
            Self::Root(root, _) => add("bytes".into(), layout.shard_bytes(*root)),
            Self::Uneven(_) => named("shard_bytes", layout.shards(), &mut add),
            Self::Tensors(lens) => {
                add("tensors".into(), layout.tensors() as u64);
                for tensor in 0..lens.len() {
                    let name = format!("shard_bytes of tensor {tensor}");
                    add(name, layout.piece_bytes(tensor, Rank(0)));
                }
            }
            Self::UnevenTensors(lens) => {
                add("tensors".into(), layout.tensors() as u64);
                for tensor in 0..lens.len() {
                    let name = format!("shard_bytes of tensor {tensor}");
                    named(&name, layout.tensor(tensor), &mut add);
                }
            }
        }
        fields
    }
}

/// Largest number of lengths that are compared one by one, so that an error can name the length that
/// differs.
const NAMED_LENGTHS_MAX: usize = 64;

fn named(name: &str, lengths: &Lengths, add: &mut impl FnMut(String, u64)) {
    if lengths.ranks() <= NAMED_LENGTHS_MAX {
        for (rank, bytes) in Rank::all(lengths.ranks()).zip(lengths.iter()) {
            add(format!("{name} of rank {rank}"), bytes);
        }
        return;
    }
    add(format!("the sum of {name}"), lengths.total());
    // FNV-1a: the same in every build.
    let mix = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    let digest = lengths.iter().flat_map(u64::to_le_bytes).fold(0xcbf2_9ce4_8422_2325, mix);
    add(format!("the digest of {name}"), digest);
}

fn uneven(dtype: DType, name: &str, lens: &[usize], ranks: usize) -> Result<Lengths, Error> {
    if lens.len() != ranks {
        let text =
            format!("{name} has {} lengths, expected {ranks}, one for each rank", lens.len());
        return Err(invalid(text));
    }
    let of_rank = |(rank, &len)| bytes(dtype, &format!("{name}[{rank}]"), len);
    let bytes: Vec<u64> = lens.iter().enumerate().map(of_rank).collect::<Result<_, Error>>()?;
    Lengths::of(&bytes)
}

/// Returns the size of `len` elements in bytes.
pub(in crate::group) fn bytes(dtype: DType, name: &str, len: usize) -> Result<u64, Error> {
    let bytes = len.checked_mul(dtype.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| {
        invalid(format!("{name} is {len} elements of {dtype}, which exceed the address space"))
    })
}

/// Returns the positions of the destinations of a list.
///
/// # Errors
/// [`InvalidArgument`](ErrorKind::InvalidArgument): there is not one for each rank, or an offset is too large.
pub(super) fn spots(
    dtype: DType,
    destinations: &[Destination],
    ranks: usize,
) -> Result<Vec<BufferPosition>, Error> {
    if destinations.len() != ranks {
        let seen = destinations.len();
        let text = format!("destinations has {seen} entries, expected {ranks}, one for each rank");
        return Err(invalid(text));
    }
    let spot = |(shard, to): (usize, &Destination)| {
        let buffer = u32::try_from(to.buffer).ok().filter(|&buffer| buffer < BUFFERS_MAX);
        let buffer = buffer.ok_or_else(|| {
            let seen = to.buffer;
            invalid(format!(
                "destinations[{shard}].buffer is {seen}, expected a number below {BUFFERS_MAX}"
            ))
        })?;
        let offset = bytes(dtype, &format!("destinations[{shard}].offset"), to.offset)?;
        Ok(BufferPosition { buffer, offset })
    };
    destinations.iter().enumerate().map(spot).collect()
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(lens: Vec<usize>) -> Vec<(String, String)> {
        let ranks = lens.len();
        let shards = Shards::Uneven(lens);
        shards.fields(&shards.layout(DType::U8, ranks, 1).unwrap())
    }

    #[test]
    fn few_lengths_are_compared_one_by_one_and_many_at_once() {
        let few = fields((0..64).collect());
        assert_eq!((few.len(), few[63].0.as_str()), (64, "shard_bytes of rank 63"));
        let many = |last| fields((0..64).chain([last, 100]).collect());
        let (one, same, other) = (many(1), many(1), many(2));
        let names: Vec<_> = one.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["the sum of shard_bytes", "the digest of shard_bytes"]);
        assert_eq!(one, same);
        assert!(one.iter().zip(&other).all(|(one, other)| one != other));
    }
}
