//! Peerlane's own all-gather as it is timed.
//!
//! A stream as Peerlane takes it, which is of each backend's own type.

use std::rc::Rc;

use peerlane::hal::Fabric;
use peerlane::{AllGather, Element, Group, Rank, cuda, rocm};

use super::candidate::Implementation;
use super::device::{Span, Stream};
use crate::allgather::backend::Backend;
use crate::allgather::setup::{Setup, Variant, with_dtype};
use crate::error::Result;

/// Prepared, and the stream that it is started on.
struct PeerlaneGather<T> {
    gather: AllGather<T>,
    stream: StreamArg,
    /// Keeps the raw stream valid.
    kept: Rc<Stream>,
    ranks: usize,
}

/// What a report of ours is made from.
pub(super) struct Prepared {
    pub(super) implementation: Box<dyn Implementation>,
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
    variant: Variant,
) -> Result<Prepared> {
    with_dtype!(setup.options.dtype, T => {
        let gather: AllGather<T> = setup.prepare(group, shard_length, variant)?;
        let report = gather.report().clone();
        let input = input(&gather, group.rank(), setup.options.in_place)?;
        let (stream, kept) = (StreamArg::of(stream), Rc::clone(stream));
        let ours = PeerlaneGather { gather, stream, kept, ranks: group.ranks() };
        Ok(Prepared { implementation: Box::new(ours), report, input })
    })
}

/// The pieces of the own shard, one for each tensor.
fn input<T: Element>(gather: &AllGather<T>, rank: Rank, in_place: bool) -> Result<Vec<Span>> {
    let tensors = 0..gather.report().tensors;
    let pieces = tensors.map(|tensor| Ok(span(gather.piece_place(tensor, rank)?)));
    let mut pieces = pieces.collect::<Result<Vec<_>>>()?;
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

impl<T: Element> Implementation for PeerlaneGather<T> {
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

/// A stream of the measurement.
pub(super) enum StreamArg {
    Cuda(cuda::Stream),
    Rocm(rocm::Stream),
}

impl StreamArg {
    /// Lends a stream; whoever has it keeps the stream longer.
    pub(super) fn of(stream: &Stream) -> Self {
        match stream.gpu().backend() {
            // SAFETY: a stream of this GPU's only context; that it is kept is the caller's duty.
            Backend::Rocm => Self::Rocm(unsafe { rocm::Stream::from_raw(stream.raw()) }),
            // SAFETY: as above.
            _ => Self::Cuda(unsafe { cuda::Stream::from_raw(stream.raw()) }),
        }
    }

    /// Starts behind what the stream holds; where the host drives the engines, it waits for that and for
    /// the end.
    ///
    /// # Errors
    /// That of the start.
    pub(super) fn start_behind<T: Element>(
        &self,
        stream: &Stream,
        gather: &mut AllGather<T>,
    ) -> Result<()> {
        if gather.report().takes_streams() {
            return self.start(gather);
        }
        stream.gpu().finish(stream, "what comes before a start")?;
        Ok(gather.run()?)
    }

    /// Puts a start on the stream. Nothing on the device reads the output between two starts; the host
    /// does, after it has waited for the stream. So the lease can end at once.
    ///
    /// # Errors
    /// That of the start.
    pub(super) fn start<T: Element>(&self, gather: &mut AllGather<T>) -> Result<()> {
        match self {
            Self::Cuda(stream) => drop(gather.start_on(stream)?),
            Self::Rocm(stream) => drop(gather.start_on(stream)?),
        }
        Ok(())
    }
}
