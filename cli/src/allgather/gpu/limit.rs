//! Measures how fast all ranks copy their blocks at the same time, to all peers or to the next
//! rank, with plain copies and without flags. Memory, IPC handles and copies are those of the
//! driver, not of the measured operation.

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

/// Plain copies to peers, which are distributed over a number of streams.
struct ConcurrentCopies<'a> {
    buffers: &'a LimitBuffers,
    copies: Rc<[PeerCopy]>,
    streams: Vec<Rc<Stream>>,
    timing: Rc<Stream>,
}

/// One copy from the input of this rank into the output of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PeerCopy {
    /// The steps from this rank to the peer.
    step: usize,
    src_offset: u64,
    dst_offset: u64,
    bytes: u64,
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

    /// Returns the ways to copy that may be the fastest: to all peers or to the next rank alone,
    /// each on sets of streams, from one stream up to one per peer. There are never more copies at
    /// once than copy engines, because that is far slower.
    pub(super) fn schemes<'a>(
        &'a self,
        layout: &Layout,
        rank: Rank,
        timing: &Rc<Stream>,
    ) -> Vec<(Box<dyn Implementation + 'a>, Span)> {
        let most = self.streams.len() / SETS;
        let sets = (2..=most).flat_map(|count| (0..SETS).map(move |set| (count, set)));
        let sets: Vec<_> = std::iter::once((most.min(1), 0)).chain(sets).collect();

        let ways = [Some(copies_to_all(layout, rank)), copies_to_next(layout, rank)];
        let scheme = |(copies, (count, set)): (Rc<[PeerCopy]>, (usize, usize))| {
            // Adjacent streams, every second stream, or every third stream.
            let streams = (0..count).map(|index| Rc::clone(&self.streams[index * (set + 1)]));
            let (streams, timing) = (streams.collect(), Rc::clone(timing));
            let copies = ConcurrentCopies { buffers: self, copies, streams, timing };
            let input = Span { bytes: layout.input_bytes(rank), ..self.input.span() };
            (Box::new(copies) as Box<dyn Implementation + 'a>, input)
        };
        let of_way = |copies: Vec<PeerCopy>| {
            let copies: Rc<[PeerCopy]> = copies.into();
            sets.clone().into_iter().map(move |set| (Rc::clone(&copies), set))
        };
        ways.into_iter().flatten().flat_map(of_way).map(scheme).collect()
    }

    /// Unmaps the memory of the peers, and waits until all ranks have done so. Collective.
    pub(super) fn close(mut self, comm: &Comm) -> Result<()> {
        self.peers.clear();
        comm.share("end of the limit", &()).map(drop)
    }
}

/// Returns the copies of the operation itself: each block to its peer, starting with the next rank.
fn copies_to_all(layout: &Layout, rank: Rank) -> Vec<PeerCopy> {
    let own = Cell { block: rank, chunk: 0 };
    let copy = |step: usize| {
        let peer = Rank::at((rank.index() + step) % layout.ranks());
        let BlockSpan { src, dst, bytes, .. } =
            layout.spans(own, (rank, Source::Input), peer).next()?;
        Some(PeerCopy { step, src_offset: src.offset, dst_offset: dst.offset, bytes })
    };
    (1..layout.ranks()).filter_map(copy).collect()
}

/// Returns copies of the same bytes that all go to the next rank, one after another in its output,
/// or `None` if they say nothing about the operation.
///
/// Ranks that copy without flags get out of step, and then the copies of several ranks meet at one
/// peer. Copies to the next rank never meet. They are a limit of the operation only if every rank
/// sends to each peer what it receives from it, and they differ from the copies of the operation
/// only if there are several peers.
fn copies_to_next(layout: &Layout, rank: Rank) -> Option<Vec<PeerCopy>> {
    let ranks = layout.ranks();
    let mut copies = copies_to_all(layout, rank);
    let bytes = copies.first()?.bytes;
    let is_equal = |rank| {
        let copies = copies_to_all(layout, Rank::at(rank));
        copies.len() == ranks - 1 && copies.iter().all(|copy| copy.bytes == bytes)
    };
    let is_in_output = |rank| layout.output_bytes(Rank::at(rank)) >= bytes * copies.len() as u64;
    if ranks < 3 || !(0..ranks).all(|rank| is_equal(rank) && is_in_output(rank)) {
        return None;
    }

    for (copy, position) in copies.iter_mut().zip(0..) {
        (copy.step, copy.dst_offset) = (1, position * bytes);
    }
    Some(copies)
}

impl Implementation for ConcurrentCopies<'_> {
    fn name(&self) -> &'static str {
        "bare copies"
    }

    fn start(&mut self) -> Result<()> {
        let LimitBuffers { gpu, input, peers, .. } = self.buffers;
        for (index, copy) in self.copies.iter().enumerate() {
            let stream = &self.streams[index % self.streams.len()];
            let to = peers[copy.step - 1].address() + copy.dst_offset;
            let from = input.span().address + copy.src_offset;
            // SAFETY: both ranges fit the largest size and are closed after the streams are finished.
            // Nothing reads the outputs.
            unsafe { gpu.copy(stream, to, from, copy.bytes) }?;
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

#[cfg(test)]
mod tests {
    use peerlane_planning::collective::Collective;

    use super::*;

    fn to_next(collective: Collective, block_bytes: &[u64]) -> Option<Vec<(usize, u64, u64)>> {
        let layout = Layout::new(collective, block_bytes, 1).unwrap();
        let copies = copies_to_next(&layout, Rank::at(1))?;
        Some(copies.iter().map(|copy| (copy.step, copy.src_offset, copy.dst_offset)).collect())
    }

    #[test]
    fn copies_to_the_next_rank_have_the_bytes_of_those_to_all() {
        let gathered = to_next(Collective::AllGather, &[64; 4]).unwrap();
        assert_eq!(gathered, [(1, 0, 0), (1, 0, 64), (1, 0, 128)]);

        // Rank 1 sends blocks 2, 3 and 0 of its input.
        let exchanged = to_next(Collective::AllToAll, &[64; 4]).unwrap();
        assert_eq!(exchanged, [(1, 128, 0), (1, 192, 64), (1, 0, 128)]);
    }

    #[test]
    fn a_limit_that_no_operation_has_is_not_measured() {
        assert_eq!(to_next(Collective::AllGather, &[64; 2]), None, "they are the same copies");
        assert_eq!(to_next(Collective::AllGather, &[64, 64, 32, 64]), None);

        // The links of the root are the limit, and copies to the next rank do not meet there.
        let root = Rank(0);
        assert_eq!(to_next(Collective::Gather { root }, &[64; 4]), None);
        assert_eq!(to_next(Collective::Broadcast { root }, &[64; 4]), None);
    }

    #[test]
    fn copies_to_the_next_rank_fit_its_output() {
        for ranks in 3..=9 {
            for collective in [Collective::AllGather, Collective::AllToAll] {
                let layout = Layout::new(collective, &vec![48; ranks], 1).unwrap();
                for rank in (0..ranks).map(Rank::at) {
                    let copies = copies_to_next(&layout, rank).unwrap();
                    let end = copies.iter().map(|copy| copy.dst_offset + copy.bytes).max();
                    assert!(end.unwrap() <= layout.output_bytes(rank), "{collective:?}, {rank}");
                }
            }
        }
    }
}
