//! Finds the lengths of the blocks of a call from the memory that its caller gives.

use peerlane_hal::{ErrorKind, Rank};

use super::memory::Memory;
use crate::collective::Collective;
use crate::error::Error;

/// The numbers of elements of the blocks of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Lens {
    Equal(usize),
    ByRank(Box<[usize]>),
}

/// What a collective takes from the ranks of a group and gives to them, in one call.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    pub(super) collective: Collective,
    pub(super) ranks: usize,
    pub(super) lens: Lens,
}

impl Shape {
    /// Finds the lengths from those of the input and the output of this rank, and from `counts`,
    /// the lengths of the blocks of all ranks if these differ.
    ///
    /// # Errors
    /// [`InvalidArgument`](ErrorKind::InvalidArgument) if they do not fit.
    pub(super) fn find(
        collective: Collective,
        (rank, ranks): (Rank, usize),
        counts: Option<&[usize]>,
        input: Option<&Memory>,
        output: Option<&Memory>,
    ) -> Result<Self, Error> {
        let [input, output] = [input, output].map(|memory| memory.map(|memory| memory.len));
        let lens = match counts {
            Some(counts) => Lens::ByRank(checked_counts(collective, ranks, counts)?),
            None => Lens::Equal(block_len(collective, ranks, input, output)?),
        };
        let shape = Self { collective, ranks, lens };

        // A broadcast can have its array as input or as output on the root.
        let is_input = collective.is_provider(rank);
        let is_output = collective.is_receiver(rank);
        for (name, found, expected) in [
            ("input", input.filter(|_| is_input), shape.input_len(rank)),
            ("output", output.filter(|_| is_output), shape.output_len(rank)),
        ] {
            if let Some(found) = found.filter(|found| *found != expected) {
                return Err(invalid(format!(
                    "{name} has {found} elements, expected {expected} for {ranks} ranks"
                )));
            }
        }
        Ok(shape)
    }

    /// Returns the shape of the same call on elements of which each of these has `unit`.
    pub(super) fn in_units(mut self, unit: usize) -> Self {
        match &mut self.lens {
            Lens::Equal(len) => *len = len.saturating_mul(unit),
            Lens::ByRank(lens) => lens.iter_mut().for_each(|len| *len = len.saturating_mul(unit)),
        }
        self
    }

    fn block(&self, rank: Rank) -> usize {
        match &self.lens {
            Lens::Equal(len) => *len,
            Lens::ByRank(lens) => lens[rank.index()],
        }
    }

    /// Returns the elements of the blocks of the ranks before `rank`.
    pub(super) fn before(&self, rank: Rank) -> usize {
        match &self.lens {
            Lens::Equal(len) => len.saturating_mul(rank.index()),
            Lens::ByRank(lens) => lens[..rank.index()].iter().sum(),
        }
    }

    fn total(&self) -> usize {
        self.before(Rank::at(self.ranks))
    }

    /// Returns the elements of the input of a rank that has one.
    pub(super) fn input_len(&self, rank: Rank) -> usize {
        match self.collective.has_input_block_per_receiver() {
            true => self.total(),
            false => self.block(rank),
        }
    }

    /// Returns the elements of the output of a rank that has one.
    pub(super) fn output_len(&self, rank: Rank) -> usize {
        match self.collective.has_output_block_per_provider() {
            true => self.total(),
            false => self.block(rank),
        }
    }

    /// Returns the elements of the longest input and of the longest output of all ranks.
    pub(super) fn longest(&self) -> [usize; 2] {
        let longest = |len: &dyn Fn(Rank) -> usize| Rank::all(self.ranks).map(len).max();
        let input = longest(&|rank| self.input_len(rank));
        let output = longest(&|rank| self.output_len(rank));
        [input, output].map(Option::unwrap_or_default)
    }

    /// Returns how many blocks the input and the output have.
    pub(super) fn blocks(&self) -> [usize; 2] {
        let blocks = |all: bool| if all { self.ranks } else { 1 };
        [
            blocks(self.collective.has_input_block_per_receiver()),
            blocks(self.collective.has_output_block_per_provider()),
        ]
    }
}

fn checked_counts(
    collective: Collective,
    ranks: usize,
    counts: &[usize],
) -> Result<Box<[usize]>, Error> {
    // With one block on both sides, or with all of them, there is only one length.
    let has_one_len =
        collective.has_input_block_per_receiver() == collective.has_output_block_per_provider();
    if !collective.lengths_may_differ() || has_one_len {
        return Err(invalid(format!(
            "counts are given, expected none: blocks of {} have one size",
            collective.with_article()
        )));
    }
    if counts.len() != ranks {
        return Err(invalid(format!(
            "counts has {} numbers, expected {ranks}, one for each rank",
            counts.len()
        )));
    }

    let total = counts.iter().try_fold(0_usize, |total, count| total.checked_add(*count));
    match total {
        Some(_) => Ok(counts.into()),
        None => Err(invalid(format!("the sum of counts {counts:?} exceeds {}", usize::MAX))),
    }
}

/// Returns the length of a block from those of the input and the output of this rank.
fn block_len(
    collective: Collective,
    ranks: usize,
    input: Option<usize>,
    output: Option<usize>,
) -> Result<usize, Error> {
    let takes_all = collective.has_input_block_per_receiver();
    let gives_all = collective.has_output_block_per_provider();
    let missing = || {
        let article = collective.with_article();
        invalid(format!("the call has no memory, expected an input or an output of {article}"))
    };

    if !takes_all && !gives_all {
        return input.or(output).ok_or_else(missing);
    }
    if takes_all && gives_all {
        let len = input.or(output).ok_or_else(missing)?;
        return match len.is_multiple_of(ranks) {
            true => Ok(len / ranks),
            false => Err(invalid(format!(
                "input has {len} elements, expected a multiple of {ranks}, the number of ranks"
            ))),
        };
    }

    let (small, large) = if takes_all { (output, input) } else { (input, output) };
    small.or(large.map(|len| len / ranks)).ok_or_else(missing)
}

pub(super) fn invalid(text: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, text)
}
