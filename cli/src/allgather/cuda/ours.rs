//! Peerlane's own all-gather as it is timed.

use std::sync::Arc;

use cudarc::driver::CudaStream;
use peerlane::{AllGather, DType, Element, Group, cuda};

use super::entrant::Gatherer;
use super::gpu::Span;
use super::track::borrowed;
use crate::allgather::options::{AlgorithmChoice, Options};
use crate::error::{Failure, Result};

/// Prepared, and the stream that it is started on.
struct Ours<T> {
    gather: AllGather<T>,
    stream: cuda::Stream,
    /// Keeps the raw stream valid.
    _stream: Arc<CudaStream>,
}

/// What a report of ours is made from.
pub(super) struct Prepared {
    pub(super) gatherer: Box<dyn Gatherer>,
    pub(super) report: peerlane::group::Report,
    pub(super) input: Span,
}

/// Prepares an all-gather of `shard_length` elements from each rank. Collective.
///
/// # Errors
/// That of the group.
pub(super) fn prepare(
    options: &Options,
    group: &mut Group<cuda::Fabric>,
    stream: &Arc<CudaStream>,
    shard_length: u64,
) -> Result<Prepared> {
    match options.dtype {
        DType::U8 => prepare_of::<u8>(options, group, stream, shard_length),
        DType::I32 => prepare_of::<i32>(options, group, stream, shard_length),
        DType::I64 => prepare_of::<i64>(options, group, stream, shard_length),
        DType::F16 => prepare_of::<half::f16>(options, group, stream, shard_length),
        DType::Bf16 => prepare_of::<half::bf16>(options, group, stream, shard_length),
        DType::F32 => prepare_of::<f32>(options, group, stream, shard_length),
        DType::F64 => prepare_of::<f64>(options, group, stream, shard_length),
        other => Err(Failure::usage(format!("--dtype {other} is not measured by this program"))),
    }
}

fn prepare_of<T: Element>(
    options: &Options,
    group: &mut Group<cuda::Fabric>,
    stream: &Arc<CudaStream>,
    shard_length: u64,
) -> Result<Prepared> {
    let length = usize::try_from(shard_length)
        .map_err(|_| Failure::usage("--max-bytes is more than this machine can address"))?;
    let mut builder = group.all_gather::<T>(length).timeout(options.timeout);
    if let AlgorithmChoice::Named(algorithm) = options.algorithm {
        builder = builder.algorithm(algorithm);
    }
    if options.in_place {
        builder = builder.in_place();
    }
    if let Some(outputs) = options.outputs {
        builder = builder.outputs(outputs);
    }
    if options.graph {
        builder = builder.capturable();
    }
    let gather = builder.prepare()?;
    let report = gather.report().clone();
    let input = span(gather.input_place());
    let ours = Ours { gather, stream: borrowed(stream), _stream: Arc::clone(stream) };
    Ok(Prepared { gatherer: Box::new(ours), report, input })
}

impl<T: Element> Gatherer for Ours<T> {
    fn name(&self) -> &'static str {
        "peerlane"
    }

    fn start(&mut self) -> Result<Span> {
        // Nothing on the device reads the output between two starts; the host does, after it has
        // waited for the stream. So the lease can end at once.
        let lease = self.gather.start_on(&self.stream)?;
        Ok(span(lease.output()))
    }
}

fn span(place: peerlane::group::Place) -> Span {
    Span { address: place.base.as_ptr() as u64, bytes: place.bytes }
}
