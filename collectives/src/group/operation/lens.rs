//! Checks the block lengths of a collective operation, and converts them from elements to bytes.

use peerlane_hal::wire::checksum;
use peerlane_hal::{ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use crate::element::DType;
use crate::error::Error;
use crate::group::agreement::{Offer, decode, encode};
use crate::layout::{BUFFERS_MAX, BlockBytes, BufferPosition, Layout, Lengths};

/// The number of elements that each rank contributes to a collective operation.
///
/// A block is what one rank provides for an output. Equal lengths are one number, and different
/// lengths a list with one number for each rank, which can be 0: of the block that it provides, or
/// in a scatter or reduce-scatter of the block that it receives. An all-reduce has one length, that
/// of the whole input. Except with [`send_receive`](Self::send_receive),
/// every rank gives the same lengths.
///
/// ```
/// use peerlane::BlockLens;
///
/// let equal = BlockLens::from(1024);
/// let different = BlockLens::from([1, 0, 3]);
/// let of_two_tensors = BlockLens::tensors([equal, different]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockLens(Kind);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Equal(usize),
    Each(Vec<usize>),
    Tensors(Vec<BlockLens>),
    SendReceive(PairLens),
    Agreed(Vec<PairLens>),
    ByStart { send_max: usize, receive_max: usize },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct PairLens {
    send: Vec<usize>,
    receive: Vec<usize>,
}

impl BlockLens {
    /// Returns the block lengths for several tensors, each with lengths of its own. The block of a
    /// rank is its pieces of all tensors.
    pub fn tensors(lens: impl IntoIterator<Item = impl Into<Self>>) -> Self {
        Self(Kind::Tensors(lens.into_iter().map(Into::into).collect()))
    }

    /// Returns the block lengths of an [all-to-all](crate::group::Group::all_to_all) whose blocks
    /// differ in length.
    ///
    /// This rank sends `send[r]` elements to rank r and receives `receive[r]` elements from rank r.
    ///
    /// Each rank gives its own lengths. They are exchanged when the operation is prepared, and what
    /// one rank sends to another must be what the other receives from it.
    pub fn send_receive(send: &[usize], receive: &[usize]) -> Self {
        Self(Kind::SendReceive(PairLens { send: send.to_vec(), receive: receive.to_vec() }))
    }

    /// Returns the lengths of an all-to-all whose starts have lengths and places of their own,
    /// within inputs of `send_max` elements and outputs of `receive_max` elements.
    pub(super) fn by_start(send_max: usize, receive_max: usize) -> Self {
        Self(Kind::ByStart { send_max, receive_max })
    }

    pub(super) fn is_by_start(&self) -> bool {
        matches!(self.0, Kind::ByStart { .. })
    }

    /// Returns whether each pair of ranks has a length.
    pub(super) fn is_of_pairs(&self) -> bool {
        matches!(self.0, Kind::ByStart { .. } | Kind::SendReceive(_) | Kind::Agreed(_))
    }

    pub(super) fn tensor_count(&self) -> usize {
        if let Kind::Tensors(tensors) = &self.0 { tensors.len() } else { 1 }
    }

    /// Returns the block lengths that this rank must tell the other ranks; `None` if all ranks know
    /// them already.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they are not one for each rank.
    pub(super) fn offer(&self, ranks: usize) -> Option<Result<Offer, Error>> {
        let Kind::SendReceive(lens) = &self.0 else { return None };
        let check = |name, lens: &[usize]| check_count(name, lens.len(), ranks);
        let checked = check("send", &lens.send).and_then(|()| check("receive", &lens.receive));
        let blob = || encode(lens);
        Some(checked.map(|()| Offer::default().blob(blob())))
    }

    /// Checks that each rank receives as many elements as its peer sends.
    ///
    /// # Errors
    /// [`Mismatch`](ErrorKind::Mismatch), naming two ranks of which one sends another length than
    /// the other receives.
    pub(super) fn agreed(label: &str, offers: &[Offer]) -> Result<Self, Error> {
        let lens = |(rank, offer)| decode::<PairLens>("block lengths", offer, rank, 0);
        let ranks = || Rank::all(offers.len());
        let all = ranks().zip(offers).map(lens).collect::<Result<Vec<_>, _>>()?;

        for (from, to) in ranks().flat_map(|from| ranks().map(move |to| (from, to))) {
            let (sent, received) =
                (all[from.index()].send.get(to.index()), all[to.index()].receive.get(from.index()));
            if sent != received {
                let number = |len: Option<&usize>| len.map_or("nothing".into(), usize::to_string);
                let (sent, received) = (number(sent), number(received));
                let text = format!(
                    "{label}: ranks disagree: send[{to}] is {sent} elements on rank {from}, but receive[{from}] is {received} \
                     elements on rank {to}"
                );
                return Err(Error::new(ErrorKind::Mismatch, text));
            }
        }

        Ok(Self(Kind::Agreed(all)))
    }

    pub(super) fn in_bytes(&self, dtype: DType, ranks: usize) -> Result<BlockBytes, Error> {
        match &self.0 {
            Kind::Tensors(tensors) => (0..)
                .zip(tensors)
                .map(|(index, lens): (usize, _)| {
                    lens.lengths(dtype, &format!("block_lens[{index}]"), ranks)
                })
                .collect::<Result<_, _>>()
                .map(BlockBytes::ByTensor),

            Kind::Agreed(all) => Rank::all(all.len())
                .zip(all)
                .map(|(rank, lens)| each(dtype, &format!("send of rank {rank}"), &lens.send, ranks))
                .collect::<Result<_, _>>()
                .map(BlockBytes::ByPair),

            Kind::ByStart { send_max, receive_max } => Ok(BlockBytes::ByStart {
                ranks,
                input_bytes: bytes(dtype, "send_max", *send_max)?,
                output_bytes: bytes(dtype, "receive_max", *receive_max)?,
            }),

            Kind::Equal(_) => self.lengths(dtype, "block_len", ranks).map(BlockBytes::ByRank),
            Kind::Each(_) | Kind::SendReceive(_) => {
                self.lengths(dtype, "block_lens", ranks).map(BlockBytes::ByRank)
            }
        }
    }

    fn lengths(&self, dtype: DType, name: &str, ranks: usize) -> Result<Lengths, Error> {
        match &self.0 {
            Kind::Equal(len) => Lengths::equal(ranks, bytes(dtype, name, *len)?),
            Kind::Each(lens) => each(dtype, name, lens, ranks),
            Kind::Tensors(_) | Kind::SendReceive(_) | Kind::Agreed(_) | Kind::ByStart { .. } => {
                Err(invalid(format!("{name} is not one length, or one for each rank")))
            }
        }
    }
}

pub(super) fn fields(blocks: &BlockBytes) -> Vec<(String, String)> {
    let mut fields = Vec::new();
    match blocks {
        BlockBytes::ByRank(lengths) => add_lengths("block_bytes", lengths, &mut fields),
        BlockBytes::ByTensor(tensors) => {
            fields.push(("tensors".to_owned(), tensors.len().to_string()));
            for (tensor, lengths) in tensors.iter().enumerate() {
                add_lengths(&format!("block_bytes of tensor {tensor}"), lengths, &mut fields);
            }
        }
        // All ranks have computed them from the same offers.
        BlockBytes::ByPair(_) => {}
        BlockBytes::ByStart { input_bytes, output_bytes, .. } => {
            fields.push(("bytes of the input".to_owned(), input_bytes.to_string()));
            fields.push(("bytes of the output".to_owned(), output_bytes.to_string()));
        }
    }
    fields
}

impl From<usize> for BlockLens {
    fn from(len: usize) -> Self {
        Self(Kind::Equal(len))
    }
}

impl From<Vec<usize>> for BlockLens {
    fn from(lens: Vec<usize>) -> Self {
        Self(Kind::Each(lens))
    }
}

impl From<&[usize]> for BlockLens {
    fn from(lens: &[usize]) -> Self {
        lens.to_vec().into()
    }
}

impl From<&Vec<usize>> for BlockLens {
    fn from(lens: &Vec<usize>) -> Self {
        lens.clone().into()
    }
}

impl<const N: usize> From<[usize; N]> for BlockLens {
    fn from(lens: [usize; N]) -> Self {
        lens.to_vec().into()
    }
}

impl<const N: usize> From<&[usize; N]> for BlockLens {
    fn from(lens: &[usize; N]) -> Self {
        lens.to_vec().into()
    }
}

/// The output buffer and offset to which one block is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The index of the output buffer, from 0.
    pub buffer: usize,
    /// The offset of the block in the output buffer, in elements.
    pub offset: usize,
}

/// Up to this number, ranks compare block lengths one by one, so that an error can name the one
/// that differs.
const NAMED_LENGTHS_MAX: usize = 64;

fn add_lengths(name: &str, lengths: &Lengths, fields: &mut Vec<(String, String)>) {
    let mut add = |name: String, value: u64| fields.push((name, value.to_string()));
    if let Some(bytes) = lengths.uniform() {
        return add(name.to_owned(), bytes);
    }
    if lengths.ranks() <= NAMED_LENGTHS_MAX {
        for (rank, bytes) in Rank::all(lengths.ranks()).zip(lengths.iter()) {
            add(format!("{name} of rank {rank}"), bytes);
        }
        return;
    }
    add(format!("the sum of {name}"), lengths.total());
    let bytes: Vec<u8> = lengths.iter().flat_map(u64::to_le_bytes).collect();
    add(format!("the digest of {name}"), checksum(&bytes));
}

fn each(dtype: DType, name: &str, lens: &[usize], ranks: usize) -> Result<Lengths, Error> {
    check_count(name, lens.len(), ranks)?;
    let of_rank = |(rank, &len)| bytes(dtype, &format!("{name}[{rank}]"), len);
    let bytes: Vec<u64> = lens.iter().enumerate().map(of_rank).collect::<Result<_, Error>>()?;
    Lengths::by_rank(&bytes)
}

fn check_count(name: &str, found: usize, ranks: usize) -> Result<(), Error> {
    if found == ranks {
        return Ok(());
    }
    Err(invalid(format!("{name} has {found} lengths, expected {ranks}, one for each rank")))
}

pub(in crate::group) fn bytes(dtype: DType, name: &str, len: usize) -> Result<u64, Error> {
    let bytes = len.checked_mul(dtype.bytes()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes.map(|bytes| bytes as u64).ok_or_else(|| {
        invalid(format!("{name} is {len} elements of {dtype}, which exceed the address space"))
    })
}

/// Returns the positions of the destinations of a list, of which there is one for each block of an
/// output.
pub(super) fn positions(
    dtype: DType,
    destinations: &[Destination],
    layout: &Layout,
) -> Result<Vec<BufferPosition>, Error> {
    let (found, tensors) = (destinations.len(), layout.tensors());
    let (expected, why) = match layout.requested_collective() {
        collective if collective.is_reduction() => {
            (1, format!("because the output of {} is one block", collective.with_article()))
        }
        _ => (layout.ranks(), "one for each rank".to_owned()),
    };
    if found != expected {
        let text = format!("destinations has {found} entries, expected {expected}, {why}");
        return Err(invalid(text));
    }
    if tensors != 1 {
        let text =
            format!("there are {tensors} tensors, expected 1 for an output with destinations");
        return Err(invalid(text));
    }

    let position = |(block, to): (usize, &Destination)| {
        let buffer = u32::try_from(to.buffer).ok().filter(|&buffer| buffer < BUFFERS_MAX);
        let buffer = buffer.ok_or_else(|| {
            let seen = to.buffer;
            invalid(format!(
                "destinations[{block}].buffer is {seen}, expected a number below {BUFFERS_MAX}"
            ))
        })?;
        let offset = bytes(dtype, &format!("destinations[{block}].offset"), to.offset)?;
        Ok(BufferPosition { buffer, offset })
    };
    destinations.iter().enumerate().map(position).collect()
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(lens: Vec<usize>) -> Vec<(String, String)> {
        let ranks = lens.len();
        super::fields(&BlockLens::from(lens).in_bytes(DType::U8, ranks).unwrap())
    }

    #[test]
    fn few_lengths_are_compared_one_by_one_and_many_at_once() {
        let few = fields((0..64).collect());
        assert_eq!((few.len(), few[63].0.as_str()), (64, "block_bytes of rank 63"));
        let many = |last| fields((0..64).chain([last, 100]).collect());
        let (one, same, other) = (many(1), many(1), many(2));
        let names: Vec<_> = one.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["the sum of block_bytes", "the digest of block_bytes"]);
        assert_eq!(one, same);
        assert!(one.iter().zip(&other).all(|(one, other)| one != other));
    }

    #[test]
    fn a_list_of_equal_lengths_is_as_good_as_one_length() {
        assert_eq!(fields(vec![7; 3]), [("block_bytes".to_owned(), "7".to_owned())]);
    }
}
