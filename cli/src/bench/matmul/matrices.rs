//! Holds matrices in GPU memory, and the streams that multiply them.

use std::ops::Range;
use std::rc::Rc;

use half::bf16;
use peerlane::bootstrap::Bootstrap as _;
use peerlane::{Group, Window, cuda};

use super::Work;
use super::options::{Options, Shape};
use crate::allgather::gpu::content::fill_with_bf16;
use crate::allgather::gpu::device::{Event, Gpu, Memory, Span, Stream};
use crate::cublas::{Cublas, Matrices};
use crate::error::{Failure, Result};
use crate::ranks::comm::Comm;
use crate::units::Size;

/// The workspace of cuBLAS for each stream.
const WORKSPACE_BYTES: u64 = 32 << 20;

/// A stream with a handle of cuBLAS, which multiplies on it alone, so that products are equal
/// whatever runs beside them.
pub(super) struct ProductStream {
    /// Declared first so that it is destroyed before what it uses.
    cublas: Cublas,
    stream: Rc<Stream>,
    /// Recorded where the stream is joined.
    event: Event,
    _workspace: Memory,
}

impl ProductStream {
    fn open(gpu: &Gpu, options: &Options) -> Result<Self> {
        gpu.enter()?;
        let cublas = Cublas::open(options.cublas.as_deref())?;
        let (stream, event) = (gpu.stream()?, gpu.event()?);
        let workspace = gpu.allocate(WORKSPACE_BYTES)?;
        // SAFETY: stream and workspace are dropped after `cublas` (field order), and the GPU is
        // current.
        unsafe { cublas.run_on(stream.raw(), workspace.span().address, WORKSPACE_BYTES as usize) }?;
        Ok(Self { cublas, stream, event, _workspace: workspace })
    }

    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the stream as operations take it.
    pub(super) fn peerlane(&self) -> cuda::Stream {
        // SAFETY: the stream belongs to the primary context of the GPU, and outlives the
        // operations, which `Methods` drops first.
        unsafe { cuda::Stream::from_raw(self.stream.raw()) }
    }

    /// Has later work on this stream follow what another stream holds now.
    pub(super) fn follow(&self, gpu: &Gpu, other: &Self) -> Result<()> {
        gpu.record(&other.event, &other.stream)?;
        gpu.stream_wait_event(&self.stream, &other.event)
    }
}

/// The factors and the product of one rank. The window holds what the collective moves: the rows
/// that are gathered, or the products that are added.
pub(super) struct RankMatrices {
    pub(super) gpu: Gpu,
    pub(super) shape: Shape,
    pub(super) window: Window<bf16>,
    /// The stream of starts and of products without overlap.
    pub(super) first: ProductStream,
    /// The streams of blocks.
    pub(super) others: Vec<ProductStream>,
    pub(super) left: Span,
    right: Span,
    pub(super) product: Span,
    _memory: [Memory; 2],
}

impl RankMatrices {
    /// Allocates the matrices and fills the factors with random elements. Collective.
    pub(super) fn open(
        work: Work,
        options: &Options,
        shape: Shape,
        gpu: &Gpu,
        (group, comm): (&mut Group, &Comm),
        seed: u64,
    ) -> Result<Self> {
        let Shape { rows, inner, columns, .. } = shape;
        let streams = options.streams.iter().copied().max().unwrap_or(1);
        let sizes = [(rows, inner), (inner, columns), (rows, columns)];
        let [left, right, product] = sizes.map(|(rows, columns)| Shape::bytes(rows, columns));
        check_device_memory(
            gpu,
            left + right + product + u64::from(streams + 1) * WORKSPACE_BYTES,
        )?;

        // Peers access only the window.
        let (moved, own) = match work {
            Work::AllGatherMatmul => (left, product),
            Work::MatmulReduceScatter => (product, left),
        };
        let length = (moved / size_of::<bf16>() as u64) as usize;
        let window = group.window::<bf16>(length)?;
        let base = window.memory(0..length)?.base.as_ptr() as u64;
        let moved = Span { address: base, bytes: moved };
        let memory = [gpu.allocate(right)?, gpu.allocate(own)?];
        let [right, own] = memory.each_ref().map(Memory::span);
        let (left, product) = match work {
            Work::AllGatherMatmul => (moved, own),
            Work::MatmulReduceScatter => (own, moved),
        };

        let first = ProductStream::open(gpu, options)?;
        let others = (0..streams).map(|_| ProductStream::open(gpu, options));
        let others = others.collect::<Result<_>>()?;
        let mut random = fastrand::Rng::with_seed(seed.wrapping_add(u64::from(comm.rank().0)));
        for factor in [left, right] {
            fill_with_bf16(gpu, first.stream(), factor, &mut random)?;
        }
        let (gpu, _memory) = (gpu.clone(), memory);
        Ok(Self { gpu, shape, window, first, others, left, right, product, _memory })
    }

    /// Enqueues the product of some rows.
    pub(super) fn multiply(&self, on: &ProductStream, rows: Range<u32>) -> Result<()> {
        let Shape { inner, columns, .. } = self.shape;
        let part = Matrices {
            // The command line allows only numbers that fit.
            rows: rows.len() as i32,
            inner: inner.cast_signed(),
            columns: columns.cast_signed(),
            left: self.left.address + Shape::bytes(rows.start, inner),
            right: self.right.address,
            product: self.product.address + Shape::bytes(rows.start, columns),
        };
        self.gpu.enter()?;
        // SAFETY: the rows are within the matrices, which live as long as `self`, and every caller
        // waits for the stream, or for the first one behind it.
        unsafe { on.cublas.multiply(part) }
    }

    /// Copies GPU memory to the host.
    pub(super) fn download(&self, from: Span) -> Result<Vec<u8>> {
        let staging = vec![0; from.bytes as usize];
        self.gpu.download(self.first.stream(), from.address, staging)
    }
}

fn check_device_memory(gpu: &Gpu, required: u64) -> Result<()> {
    let free = gpu.free_bytes()?;
    if required <= free {
        return Ok(());
    }
    let text = format!(
        "the matrices need {} of memory on each GPU, but only {} are free",
        Size(required),
        Size(free)
    );
    Err(Failure::failed(text).with_advice(
        "lower --rows, --inner or --columns, or run nvidia-smi to see which process uses the memory",
    ))
}
