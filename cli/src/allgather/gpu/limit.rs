//! Measures how fast all ranks copy their blocks to all peers at the same time, with plain copies
//! and without flags. Memory, IPC handles and copies are those of the driver, not of the measured
//! operation.

use std::rc::Rc;

use peerlane::bootstrap::Bootstrap;

use peerlane::Rank;
use peerlane_planning::layout::{Layout, Span as BlockSpan};
use peerlane_planning::plan::{Cell, Source};

use super::candidate::Implementation;
use super::device::{Event, Gpu, ImportedMemory, Memory, Span, Stream};
use crate::error::Result;
use crate::ranks::comm::Comm;

/// The memory and the streams of the bare copies of one rank, for the largest size.
pub(super) struct LimitBuffers {
    gpu: Gpu,
    input: Memory,
    output: Memory,
    peers: Vec<ImportedMemory>,
    streams: Vec<Rc<Stream>>,
    event: Event,
}

/// Plain copies to all peers, which are distributed over a number of streams.
struct ConcurrentCopies<'a> {
    buffers: &'a LimitBuffers,
    /// The memory ranges that are copied to the peers, starting with the next rank; `None` if a
    /// peer receives nothing.
    blocks: Vec<Option<BlockSpan>>,
    streams: Vec<Rc<Stream>>,
    timing: Rc<Stream>,
}

/// The number of different sets of streams that are tried for each number of streams. The driver
/// assigns streams to copy engines as it likes, and two streams on one engine are slower than one.
const SETS: usize = 3;

impl LimitBuffers {
    /// Allocates memory for the largest input and output, and maps the output buffers of the peers.
    /// Collective.
    pub(super) fn open(
        gpu: &Gpu,
        comm: &Comm,
        (input_bytes, output_bytes): (u64, u64),
    ) -> Result<Self> {
        let (rank, ranks) = (comm.rank().index(), comm.ranks());
        let input = gpu.allocate(input_bytes)?;
        let output = gpu.allocate(output_bytes)?;
        let handles = comm.share("memory of the limit", &output.handle()?)?;
        let peers = (1..ranks).map(|step| gpu.open_memory(&handles[(rank + step) % ranks]));
        let peers = peers.collect::<Result<Vec<_>>>()?;
        let streams = gpu.copy_engines()?.min(peers.len());
        let streams = (0..streams * SETS).map(|_| gpu.stream()).collect::<Result<Vec<_>>>()?;
        let event = gpu.event()?;
        Ok(Self { gpu: gpu.clone(), input, output, peers, streams, event })
    }

    /// Returns the sets of streams that may be the fastest, from one stream up to one per peer.
    /// There are never more copies at once than copy engines, because that is far slower.
    pub(super) fn schemes<'a>(
        &'a self,
        layout: &Layout,
        rank: Rank,
        timing: &Rc<Stream>,
    ) -> Vec<(Box<dyn Implementation + 'a>, Span)> {
        let (ranks, own) = (layout.ranks(), Cell { block: rank, chunk: 0 });
        let peers = (1..ranks).map(|step| Rank::at((rank.index() + step) % ranks));
        let block = |peer| layout.spans(own, (rank, Source::Input), peer).next();
        let blocks: Vec<_> = peers.map(block).collect();
        let most = self.streams.len() / SETS;
        let sets = (2..=most).flat_map(|count| (0..SETS).map(move |set| (count, set)));
        let scheme = |(count, set): (usize, usize)| {
            // Adjacent streams, every second stream, or every third stream.
            let streams = (0..count).map(|index| Rc::clone(&self.streams[index * (set + 1)]));
            let (streams, timing) = (streams.collect(), Rc::clone(timing));
            let copies =
                ConcurrentCopies { buffers: self, blocks: blocks.clone(), streams, timing };
            let input = Span { bytes: layout.input_bytes(rank), ..self.input.span() };
            (Box::new(copies) as Box<dyn Implementation + 'a>, input)
        };
        std::iter::once((most.min(1), 0)).chain(sets).map(scheme).collect()
    }

    /// Unmaps the memory of the peers, and waits until all ranks have done so. Collective.
    pub(super) fn close(mut self, comm: &Comm) -> Result<()> {
        self.peers.clear();
        comm.share("end of the limit", &()).map(drop)
    }
}

impl Implementation for ConcurrentCopies<'_> {
    fn name(&self) -> &'static str {
        "bare copies"
    }

    fn start(&mut self) -> Result<()> {
        let LimitBuffers { gpu, input, peers, .. } = self.buffers;
        for (index, (peer, block)) in peers.iter().zip(&self.blocks).enumerate() {
            let Some(BlockSpan { src, dst, bytes, .. }) = *block else { continue };
            let stream = &self.streams[index % self.streams.len()];
            let (to, from) = (peer.address() + dst.offset, input.span().address + src.offset);
            // SAFETY: both ranges fit the largest size and are closed after the streams are finished.
            // Each rank writes to its own part of the output, which nothing reads.
            unsafe { gpu.copy(stream, to, from, bytes) }?;
        }
        Ok(())
    }

    fn output(&self) -> Result<Vec<Span>> {
        Ok(vec![self.buffers.output.span()])
    }

    fn fork(&mut self) -> Result<()> {
        let LimitBuffers { gpu, event, .. } = self.buffers;
        gpu.record(event, &self.timing)?;
        let wait = |stream: &Rc<Stream>| gpu.stream_wait_event(stream, event);
        self.streams.iter().try_for_each(wait)
    }

    fn join(&mut self) -> Result<()> {
        let LimitBuffers { gpu, event, .. } = self.buffers;
        self.streams.iter().try_for_each(|stream| {
            gpu.record(event, stream)?;
            gpu.stream_wait_event(&self.timing, event)
        })
    }
}
