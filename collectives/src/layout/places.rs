//! The places of a rank's input and output: buffers by number, offsets in bytes.
//!
//! Ranks may have different places, so a rank that writes to a peer needs the peer's. Ranks exchange their places when they
//! prepare an operation, and check those of peers like those of the caller.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::{ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::Layout;
use crate::error::Error;

/// The limit of buffer numbers.
pub const BUFFERS_MAX: u32 = 1 << 20;

/// A position in one of a rank's buffers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Spot {
    /// The number of the input or output buffer, from 0.
    pub buffer: u32,
    /// Offset from its start in bytes.
    pub offset: u64,
}

/// The places of a rank's input: one piece of every tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InputPlaces {
    /// All pieces one after another from this position, without gaps.
    Joined(Spot),
    /// A position for the piece of each tensor.
    ByTensor(Vec<Spot>),
}

/// The places of a rank's output.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputPlaces {
    /// All tensors one after another from this position, without gaps, each with its pieces in rank order.
    Joined(Spot),
    /// A position for each tensor.
    ByTensor(Vec<Spot>),
    /// A position for each shard of the only tensor.
    ByShard(Vec<Spot>),
}

/// The places of a rank's input and output: buffers by number, offsets in bytes.
///
/// Ranks may have different places, so a rank that writes to a peer needs the peer's. Ranks exchange their places when they
/// prepare an operation, and check those of peers like those of the caller.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Places {
    /// The input; unused in place.
    pub input: InputPlaces,
    /// The output.
    pub output: OutputPlaces,
}

impl Places {
    /// One input and one output buffer, both used from their start.
    pub const JOINED: Self = Self {
        input: InputPlaces::Joined(Spot { buffer: 0, offset: 0 }),
        output: OutputPlaces::Joined(Spot { buffer: 0, offset: 0 }),
    };

    /// Checks that `rank` can use these places with `layout`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument): a wrong number of positions, a position whose end exceeds 2^64 - 1, or
    /// outputs that overlap, naming both.
    pub fn check(&self, layout: &Layout, rank: Rank) -> Result<(), Error> {
        self.check_counts(layout)?;
        let (inputs, outputs) = (self.inputs(layout, rank), self.outputs(layout));
        let inputs = inputs.iter().map(|named| ("input", named));
        for (what, named) in inputs.chain(outputs.iter().map(|named| ("output", named))) {
            let Named { kind, number, spot: Spot { buffer, offset }, bytes } = named;
            if *buffer >= BUFFERS_MAX {
                let text = format!(
                    "the {what} of rank {rank}: {kind} {number} is in buffer {buffer}, expected less \
                     than {BUFFERS_MAX}"
                );
                return Err(invalid(text));
            }
            if offset.checked_add(*bytes).is_none() {
                let text = format!(
                    "the {what} of rank {rank}: {kind} {number} has {bytes} bytes from byte {offset} of \
                     buffer {buffer} on, expected an end of at most {}",
                    u64::MAX
                );
                return Err(invalid(text));
            }
        }
        self.check_overlap(layout, rank)
    }

    fn check_counts(&self, layout: &Layout) -> Result<(), Error> {
        let (tensors, ranks) = (layout.tensors(), layout.ranks());
        let check = |what: &str, seen, wanted, kind: &str| {
            let text = format!("{what} has {seen} spots, expected one for each of {wanted} {kind}");
            if seen == wanted { Ok(()) } else { Err(invalid(text)) }
        };
        match &self.input {
            InputPlaces::Joined(_) => {}
            InputPlaces::ByTensor(spots) => check("the input", spots.len(), tensors, "tensors")?,
        }
        match &self.output {
            OutputPlaces::Joined(_) => Ok(()),
            OutputPlaces::ByTensor(spots) => check("the output", spots.len(), tensors, "tensors"),
            OutputPlaces::ByShard(_) if tensors != 1 => {
                let text = format!("tensors is {tensors}, expected 1 where each shard has a spot");
                Err(invalid(text))
            }
            OutputPlaces::ByShard(spots) => check("the output", spots.len(), ranks, "shards"),
        }
    }

    fn inputs(&self, layout: &Layout, rank: Rank) -> Vec<Named> {
        match &self.input {
            InputPlaces::Joined(spot) => {
                vec![Named::new("shard", rank.index(), *spot, layout.input_bytes(rank))]
            }
            InputPlaces::ByTensor(spots) => {
                let bytes = |tensor| match layout.tensors() {
                    1 => layout.input_bytes(rank),
                    _ => layout.piece_bytes(tensor, rank),
                };
                named("tensor", spots, bytes)
            }
        }
    }

    fn outputs(&self, layout: &Layout) -> Vec<Named> {
        match &self.output {
            OutputPlaces::Joined(spot) => {
                vec![Named::new("tensor", 0, *spot, layout.total_bytes())]
            }
            OutputPlaces::ByTensor(spots) => {
                named("tensor", spots, |tensor| layout.tensor_bytes(tensor))
            }
            OutputPlaces::ByShard(spots) => {
                named("shard", spots, |shard| layout.shard_bytes(Rank::at(shard)))
            }
        }
    }

    fn check_overlap(&self, layout: &Layout, rank: Rank) -> Result<(), Error> {
        let mut outputs = self.outputs(layout);
        outputs.retain(|named| named.bytes > 0);
        outputs.sort_by_key(|named| named.spot);
        match outputs.windows(2).find(|pair| pair[0].reaches_into(pair[1])) {
            Some(pair) => {
                Err(invalid(format!("outputs of rank {rank} overlap: {} and {}", pair[0], pair[1])))
            }
            None => Ok(()),
        }
    }

    /// Returns the smallest length of each input buffer that is used, by number.
    pub fn input_needs(&self, layout: &Layout, rank: Rank) -> BTreeMap<u32, u64> {
        needs(self.inputs(layout, rank))
    }

    /// Returns the smallest length of each output buffer that is used, by number.
    pub fn output_needs(&self, layout: &Layout) -> BTreeMap<u32, u64> {
        needs(self.outputs(layout))
    }
}

/// A named range at a position.
#[derive(Clone, Copy, Debug)]
struct Named {
    kind: &'static str,
    number: usize,
    spot: Spot,
    bytes: u64,
}

impl Named {
    fn new(kind: &'static str, number: usize, spot: Spot, bytes: u64) -> Self {
        Self { kind, number, spot, bytes }
    }

    /// Returns whether `next` begins before this range ends.
    fn reaches_into(self, next: Self) -> bool {
        let (at, behind) = (self.spot, next.spot);
        at.buffer == behind.buffer && behind.offset - at.offset < self.bytes
    }
}

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, number, spot: Spot { buffer, offset }, bytes } = self;
        write!(f, "{kind} {number} is bytes {offset} to {} of buffer {buffer}", offset + bytes)
    }
}

fn named(kind: &'static str, spots: &[Spot], bytes: impl Fn(usize) -> u64) -> Vec<Named> {
    let one = |(number, &spot)| Named::new(kind, number, spot, bytes(number));
    spots.iter().enumerate().map(one).collect()
}

fn needs(ranges: Vec<Named>) -> BTreeMap<u32, u64> {
    let mut needs = BTreeMap::new();
    for Named { spot, bytes, .. } in ranges {
        let need: &mut u64 = needs.entry(spot.buffer).or_default();
        *need = (*need).max(spot.offset.saturating_add(bytes));
    }
    needs
}

fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
