//! Where one rank keeps its own shard and what it gathers: buffers by number, offsets in bytes.
//!
//! Ranks may keep them at unlike places, so whoever writes to a peer needs the peer's: ranks exchange
//! them when they prepare. What a peer says is checked like what a caller says.

use std::collections::BTreeMap;
use std::fmt;

use peerlane_hal::{ErrorKind, Rank};
use serde::{Deserialize, Serialize};

use super::Layout;
use crate::error::Error;

/// Buffers are numbered below this; more have no use.
pub const BUFFERS_MAX: u32 = 1 << 20;

/// A byte of one of a rank's buffers.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Spot {
    /// Which of the rank's input buffers, or of its output buffers, from 0.
    pub buffer: u32,
    /// Bytes from its start.
    pub offset: u64,
}

/// Where a rank keeps its own shard: a piece of every tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InputPlaces {
    /// One piece after another from here on, without a gap.
    Joined(Spot),
    /// The piece of each tensor at a spot of its own.
    ByTensor(Vec<Spot>),
}

/// Where a rank gathers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum OutputPlaces {
    /// One tensor after another from here on, without a gap; each is its pieces in rank order.
    Joined(Spot),
    /// Each tensor at a spot of its own.
    ByTensor(Vec<Spot>),
    /// Each shard of the only tensor at a spot of its own.
    ByShard(Vec<Spot>),
}

/// Where one rank keeps its own shard and what it gathers.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Places {
    /// The own shard. In place it says nothing: then the own shard lies in the output.
    pub input: InputPlaces,
    /// The shards of all ranks.
    pub output: OutputPlaces,
}

impl Places {
    /// One input and one output buffer, both filled from the start.
    pub const JOINED: Self = Self {
        input: InputPlaces::Joined(Spot { buffer: 0, offset: 0 }),
        output: OutputPlaces::Joined(Spot { buffer: 0, offset: 0 }),
    };

    /// Whether `rank`, whose places these are, can gather with `layout`.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument): a number of spots that does not fit, a spot
    /// so far behind that its end is beyond 2^64 - 1, outputs that overlap, naming both.
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

    /// How long each input buffer must be at least, by number; what nothing needs is left out.
    pub fn input_needs(&self, layout: &Layout, rank: Rank) -> BTreeMap<u32, u64> {
        needs(self.inputs(layout, rank))
    }

    /// The same of the output buffers.
    pub fn output_needs(&self, layout: &Layout) -> BTreeMap<u32, u64> {
        needs(self.outputs(layout))
    }
}

/// What lies at a spot.
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

    /// Whether the next one begins before this one has ended.
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
