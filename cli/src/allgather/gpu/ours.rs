//! Peerlane's own all-gather as it is timed.

use std::rc::Rc;

use peerlane::collective::Collective;
use peerlane::hal::Fabric;
use peerlane::{AllGather, Element, Group, Rank};

use super::device::{Span, Stream};
use super::entrant::Gatherer;
use super::lent::Lent;
use crate::allgather::dtype::of_dtype;
use crate::allgather::setup::{Setup, Way};
use crate::error::Result;

/// Prepared, and the stream that it is started on.
struct Ours<T> {
    gather: AllGather<T>,
    stream: Lent,
    /// Keeps the raw stream valid.
    kept: Rc<Stream>,
    ranks: usize,
}

/// What a report of ours is made from.
pub(super) struct Prepared {
    pub(super) gatherer: Box<dyn Gatherer>,
    pub(super) report: peerlane::group::Report,
    /// The own shard, a piece for each tensor.
    pub(super) input: Vec<Span>,
}

/// Prepares an all-gather of shards of `shard_length` elements in the mean. Collective.
///
/// # Errors
/// That of the group.
pub(super) fn prepare<F: Fabric>(
    setup: &Setup<'_>,
    group: &mut Group<F>,
    stream: &Rc<Stream>,
    shard_length: u64,
    way: Way,
) -> Result<Prepared> {
    of_dtype!(setup.options.dtype, T => {
        let gather: AllGather<T> = setup.prepare(group, shard_length, way)?;
        let report = gather.report().clone();
        let input = input(&gather, group.rank(), setup.options.in_place)?;
        let (stream, kept) = (Lent::of(stream), Rc::clone(stream));
        let ours = Ours { gather, stream, kept, ranks: group.ranks() };
        Ok(Prepared { gatherer: Box::new(ours), report, input })
    })
}

/// Returns the blocks of the input: one for each tensor, or in an all-to-all one for each rank.
fn input<T: Element>(gather: &AllGather<T>, rank: Rank, in_place: bool) -> Result<Vec<Span>> {
    let tensors = 0..gather.report().tensors;
    let pieces = tensors.map(|tensor| Ok(span(gather.piece_place(tensor, rank)?)));
    let mut pieces = pieces.collect::<Result<Vec<_>>>()?;
    if gather.report().collective == Collective::AllToAll {
        pieces = vec![pieces[0]; gather.report().ranks];
    }
    if !in_place {
        // As long as in the output, one after another in the input.
        let mut address = span(gather.input_place()).address;
        for piece in &mut pieces {
            piece.address = address;
            address += piece.bytes;
        }
    }
    Ok(pieces)
}

impl<T: Element> Gatherer for Ours<T> {
    fn name(&self) -> &'static str {
        "peerlane"
    }

    fn start(&mut self) -> Result<()> {
        if self.gather.report().takes_streams() {
            self.stream.start(&mut self.gather)
        } else {
            Ok(self.gather.run()?)
        }
    }

    fn fork(&mut self) -> Result<()> {
        if self.gather.report().takes_streams() {
            return Ok(());
        }
        self.kept.gpu().finish(&self.kept, "what comes before starts of the host")
    }

    fn output(&self) -> Result<Vec<Span>> {
        let tensors = 0..self.gather.report().tensors;
        let pieces =
            tensors.flat_map(|tensor| Rank::all(self.ranks).map(move |rank| (tensor, rank)));
        pieces.map(|(tensor, rank)| Ok(span(self.gather.piece_place(tensor, rank)?))).collect()
    }
}

fn span(place: peerlane::group::Place) -> Span {
    Span { address: place.base.as_ptr() as u64, bytes: place.bytes }
}
