//! Runs a collective and a product in one of several ways, on the streams of a GPU.

use std::ops::Range;
use std::time::Duration;

use half::bf16;
use peerlane::bootstrap::Bootstrap as _;
use peerlane::group::{OperationBuilder, Report};
use peerlane::{BlockChunk, Group, Operation, Rank};

use super::Work;
use super::matrices::RankMatrices;
use super::options::{Options, Shape};
use crate::allgather::gpu::device::{Event, Span};
use crate::error::Result;
use crate::ranks::comm::Comm;
use crate::ranks::data::UNWRITTEN;

/// One way to get the product and the result of the collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Method {
    /// The product alone.
    Matmul,
    /// The collective and the product one after the other on one stream.
    Sequence,
    /// The product of each block, when it has arrived or before it departs.
    Blocks {
        /// The number of streams that multiply by turns.
        streams: u32,
        /// The place of the number of chunks in the shape.
        chunks: usize,
    },
}

impl Method {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Matmul => "matmul",
            Self::Sequence => "sequence",
            Self::Blocks { .. } => "blocks",
        }
    }
}

/// An operation that moves blocks of `chunks` chunks, with handles.
struct Blocks {
    operation: Operation<bf16>,
    /// The same operation without handles, which adds what its blocks depart with.
    plain: Option<Operation<bf16>>,
    chunks: u32,
}

/// The operations of all methods over one set of matrices.
pub(super) struct Methods<'a> {
    work: Work,
    options: &'a Options,
    comm: Comm,
    sequence: Operation<bf16>,
    blocks: Vec<Blocks>,
    /// An all-gather of 0 bytes, which lets the GPUs begin together.
    start_barrier: Operation<u8>,
    begin: Event,
    end: Event,
    /// Declared last so that the operations are dropped before the streams.
    matrices: RankMatrices,
}

impl<'a> Methods<'a> {
    /// Prepares all operations. Collective.
    pub(super) fn prepare(
        work: Work,
        options: &'a Options,
        matrices: RankMatrices,
        (group, comm): (&mut Group, &Comm),
    ) -> Result<Self> {
        let sequence = operation(work, group, &matrices).prepare()?;
        let blocks = |&chunks: &u32| {
            let builder = operation(work, group, &matrices).chunks(chunks);
            let (operation, plain) = match work {
                Work::AllGatherMatmul => (builder.arrivals().prepare()?, None),
                Work::MatmulReduceScatter => {
                    let departing = builder.departures().prepare()?;
                    // Another algorithm can add in another order.
                    let report = departing.report();
                    let (algorithm, kind) = (report.algorithm, report.choice.engine.clone());
                    let plain = operation(work, group, &matrices).chunks(chunks);
                    let plain = plain.algorithm(algorithm).engine(kind);
                    (departing, Some(plain.prepare()?))
                }
            };
            Ok(Blocks { operation, plain, chunks })
        };
        let blocks = matrices.shape.chunks.iter().map(blocks).collect::<Result<_>>()?;
        let start_barrier = group.all_gather::<u8>(0).prepare()?;

        let (begin, end) = (matrices.gpu.event()?, matrices.gpu.event()?);
        let comm = comm.clone();
        Ok(Self { work, options, comm, sequence, blocks, start_barrier, begin, end, matrices })
    }

    /// Returns all methods, in the order of the rows.
    pub(super) fn all(&self) -> Vec<Method> {
        let blocks = (0..self.blocks.len()).flat_map(|chunks| {
            let streams = self.options.streams.iter();
            streams.map(move |&streams| Method::Blocks { streams, chunks })
        });
        [Method::Matmul, Method::Sequence].into_iter().chain(blocks).collect()
    }

    /// Returns the report of the operation that a method starts.
    pub(super) fn report(&self, method: Method) -> Option<&Report> {
        match method {
            Method::Matmul => None,
            Method::Sequence => Some(self.sequence.report()),
            Method::Blocks { chunks, .. } => Some(self.blocks[chunks].operation.report()),
        }
    }

    /// Returns the time of one of many calls in a row on the GPU of this rank. Collective.
    pub(super) fn time(&mut self, method: Method) -> Result<Duration> {
        self.matrices.first.stream().start_after(&mut self.start_barrier)?;
        for _ in 0..self.options.warmup {
            self.enqueue(method)?;
        }
        self.matrices.gpu.record(&self.begin, self.matrices.first.stream())?;
        for _ in 0..self.options.iterations {
            self.enqueue(method)?;
        }
        self.matrices.gpu.record(&self.end, self.matrices.first.stream())?;

        self.matrices.gpu.wait(&self.end, method.name())?;
        let elapsed = self.matrices.gpu.elapsed(&self.begin, &self.end)?;
        Ok(elapsed / self.options.iterations.max(1))
    }

    /// Enqueues one call. The first stream follows all of it.
    fn enqueue(&mut self, method: Method) -> Result<()> {
        let (matrices, first) = (&self.matrices, &self.matrices.first);
        let all = 0..matrices.shape.rows;
        match method {
            Method::Matmul => matrices.multiply(first, all),
            Method::Sequence if self.work == Work::AllGatherMatmul => {
                first.stream().start(&mut self.sequence)?;
                matrices.multiply(first, all)
            }
            Method::Sequence => {
                matrices.multiply(first, all)?;
                first.stream().start(&mut self.sequence)
            }

            // A block has streams of its own, which the first one follows.
            Method::Blocks { streams, chunks } => {
                let (blocks, streams) = (&mut self.blocks[chunks], streams as usize);
                match self.work {
                    Work::AllGatherMatmul => {
                        multiply_arrivals(matrices, blocks, streams, self.comm.rank())
                    }
                    Work::MatmulReduceScatter => multiply_departures(matrices, blocks, streams),
                }
            }
        }
    }

    /// Compares the result by blocks with that of products that run alone. Returns the text of the
    /// first difference. Collective.
    pub(super) fn check(&mut self, method: Method) -> Result<Option<String>> {
        let Method::Blocks { streams, chunks } = method else { return Ok(None) };
        let number = self.blocks[chunks].chunks;
        let what = format!("{} on {streams} streams, chunks {number}", self.work.name());
        let [found, expected] = match self.work {
            Work::AllGatherMatmul => self.gathered_products(method, chunks)?,
            Work::MatmulReduceScatter => self.sums(method, chunks)?,
        };

        let differs = found.iter().zip(&expected).position(|(found, expected)| found != expected);
        Ok(differs.map(|byte| {
            let element = byte as u64 / size_of::<bf16>() as u64;
            let columns = u64::from(self.matrices.shape.columns);
            let (row, column) = (element / columns, element % columns);
            format!(
                "{what}: row {row}, column {column} of the result differs from that of the same \
                 products without overlap"
            )
        }))
    }

    /// Returns the product by blocks, and that of the same blocks after an all-gather.
    fn gathered_products(&mut self, method: Method, chunks: usize) -> Result<[Vec<u8>; 2]> {
        self.matrices.first.stream().start(&mut self.sequence)?;
        let rank = self.comm.rank();
        self.matrices.multiply(&self.matrices.first, self.matrices.shape.rows_of_block(rank))?;
        for part in self.blocks[chunks].parts_of_peers(&self.matrices.shape, rank) {
            self.matrices.multiply(&self.matrices.first, part)?;
        }
        let product = self.matrices.product;
        let expected = self.matrices.download(product)?;

        // Until all ranks are here, a peer can read what it passes on.
        self.comm.share("products after an all-gather", &())?;
        let (left, own) = (self.matrices.left, self.matrices.shape.rows_of_block(rank));
        let bytes = |row| Shape::bytes(row, self.matrices.shape.inner);
        let before = Span { bytes: bytes(own.start), ..left };
        let begin = bytes(own.end);
        let behind = Span { address: left.address + begin, bytes: left.bytes - begin };
        for span in [before, behind, product] {
            self.overwrite(span)?;
        }

        self.enqueue(method)?;
        let found = self.matrices.download(product)?;
        self.comm.share("products of blocks", &())?;
        Ok([found, expected])
    }

    /// Returns the sum by blocks, and that of a start after the products of the same blocks.
    fn sums(&mut self, method: Method, chunks: usize) -> Result<[Vec<u8>; 2]> {
        let product = self.matrices.product;
        let output = |operation: &Operation<bf16>| {
            let memory = operation.output_memory();
            Span { address: memory.base.as_ptr() as u64, bytes: memory.bytes }
        };
        self.overwrite(product)?;
        self.overwrite(output(&self.blocks[chunks].operation))?;
        self.enqueue(method)?;
        let found = self.matrices.download(output(&self.blocks[chunks].operation))?;

        // Until all ranks are here, a peer can read the products of this one.
        self.comm.share("sums of blocks", &())?;
        self.overwrite(product)?;
        let departures = self.blocks[chunks].operation.departures().to_vec();
        for chunk in departures {
            let rows = self.matrices.shape.rows_of(chunk, self.blocks[chunks].chunks);
            self.matrices.multiply(&self.matrices.first, rows)?;
        }
        let mut expected = Vec::new();
        if let Some(plain) = &mut self.blocks[chunks].plain {
            self.matrices.first.stream().start(plain)?;
            expected = self.matrices.download(output(plain))?;
        }
        self.comm.share("sums after products", &())?;
        Ok([found, expected])
    }

    /// Overwrites GPU memory with a known byte, in the order of the first stream.
    fn overwrite(&self, span: Span) -> Result<()> {
        if span.bytes == 0 {
            return Ok(());
        }
        self.matrices.gpu.set(self.matrices.first.stream(), span, UNWRITTEN)
    }
}

impl Blocks {
    /// Returns the chunks of other ranks in the order in which they arrive.
    fn peers(&self, rank: Rank) -> Vec<BlockChunk> {
        let arrivals = self.operation.arrivals().iter().copied();
        arrivals.filter(|chunk| chunk.block != rank).collect()
    }

    /// Returns their rows.
    fn parts_of_peers(&self, shape: &Shape, rank: Rank) -> Vec<Range<u32>> {
        self.peers(rank).into_iter().map(|chunk| shape.rows_of(chunk, self.chunks)).collect()
    }
}

/// Describes the collective over the window, without handles.
fn operation<'g>(
    work: Work,
    group: &'g mut Group,
    matrices: &RankMatrices,
) -> OperationBuilder<'g, bf16> {
    let Shape { ranks, rows, inner, columns, .. } = matrices.shape;
    let rows_of_block = rows as usize / ranks;
    match work {
        Work::AllGatherMatmul => {
            let gather = group.all_gather::<bf16>(rows_of_block * inner as usize);
            gather.output_into(&matrices.window, 0).in_place()
        }
        Work::MatmulReduceScatter => {
            let scatter = group.reduce_scatter::<bf16>(rows_of_block * columns as usize);
            scatter.input_from(&matrices.window, 0)
        }
    }
}

/// Gathers the rows of all ranks. The own ones are multiplied at once, and the others as they
/// arrive.
fn multiply_arrivals(
    matrices: &RankMatrices,
    blocks: &mut Blocks,
    streams: usize,
    rank: Rank,
) -> Result<()> {
    let RankMatrices { gpu, shape, first, .. } = matrices;
    let readers = &matrices.others[..streams];
    let (chunks, arrivals) = (blocks.chunks, blocks.peers(rank));
    for reader in readers {
        reader.follow(gpu, first)?;
    }

    let mut start = blocks.operation.start_beside(&first.peerlane())?;
    matrices.multiply(&readers[0], shape.rows_of_block(rank))?;
    for (number, chunk) in (1..).zip(arrivals) {
        let reader = &readers[number % streams];
        start.wait_on(chunk, &reader.peerlane())?;
        matrices.multiply(reader, shape.rows_of(chunk, chunks))?;
    }
    start.finish()?;

    // The handle knows only the streams that waited for a block.
    readers.iter().try_for_each(|reader| first.follow(gpu, reader))
}

/// Multiplies the rows for each rank in the order in which they leave, and lets them depart behind
/// their product.
fn multiply_departures(matrices: &RankMatrices, blocks: &mut Blocks, streams: usize) -> Result<()> {
    let RankMatrices { gpu, shape, first, .. } = matrices;
    let writers = &matrices.others[..streams];
    let departures = blocks.operation.departures().to_vec();
    for writer in writers {
        writer.follow(gpu, first)?;
    }

    let mut start = blocks.operation.start_beside(&first.peerlane())?;
    for (number, chunk) in departures.into_iter().enumerate() {
        let writer = &writers[number % streams];
        matrices.multiply(writer, shape.rows_of(chunk, blocks.chunks))?;
        start.depart_on(chunk, &writer.peerlane())?;
    }
    start.finish()?;
    Ok(())
}
