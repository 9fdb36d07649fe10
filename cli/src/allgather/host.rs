//! Measures collectives on host memory, over the host backend or over NICs.

use std::time::Duration;

use peerlane::Rank;
use peerlane::bootstrap::Bootstrap;
use peerlane::hal::DynFabric;
use peerlane::open::Backend;

use super::limit::{Limit, LimitCopies};
use super::measure::{Bench, Candidates, Checked, Measurement, Point, RankContext};
use super::operation::HostOperation;
use super::printer::Activity;
use super::setup::{Setup, Variant};
use super::shape::{GAP, destinations};
use super::timer::{Timing, TimingOptions};
use super::topology;
use crate::error::Result;
use crate::ranks::data::{Block, Mismatch, TestData, UNWRITTEN, overwrite};
use crate::ranks::statistics::longest_of_each;

struct HostBench {
    limit: Option<Limit>,
    timing_options: TimingOptions,
}

struct HostCandidate {
    operation: Box<dyn HostOperation>,
    block_length: u64,
}

pub(super) fn run(context: RankContext<'_>, backend: Backend) -> Result<()> {
    let (options, hosts) = (context.options, context.rank_topology.hosts);
    let limit_fabrics = limit_fabrics(&context, backend)?;
    let mut measurement = context.open(backend, None)?;
    let limit = match limit_fabrics.is_empty() {
        true => None,
        false => Some(Limit::open(limit_fabrics, &measurement.comm, hosts)?),
    };

    let timing_options = TimingOptions { warmup: options.warmup, iterations: options.iterations };
    let mut bench = HostBench { limit, timing_options };
    measurement.sweep(&mut bench)?;

    // Imported regions must be dropped before the peers free them.
    drop(bench);
    Ok(measurement.group.close()?)
}

/// Opens the fabrics whose bare copies are timed, as the limit of an operation.
///
/// On the host, one copies through the cache, the other with streaming stores.
fn limit_fabrics(context: &RankContext<'_>, backend: Backend) -> Result<Vec<DynFabric>> {
    let RankContext { options, comm, rank_topology, .. } = context;
    if !options.limit {
        return Ok(Vec::new());
    }

    let layer = options.node_options.throttle_inside();
    let open = |streaming_bytes_min| -> Result<DynFabric> {
        let mut fabrics = topology::fabric_options(options, rank_topology);
        fabrics.host.streaming_bytes_min = streaming_bytes_min;
        let fabric = fabrics.open(backend, comm.rank(), comm.ranks())?;
        Ok(topology::throttled(fabric, layer))
    };

    // Which of the two ways to copy is faster depends on the size and on the processor.
    match backend {
        Backend::Host => Ok(vec![open(Some(u64::MAX))?, open(Some(0))?]),
        _ => Ok(vec![open(None)?]),
    }
}

impl Bench for HostBench {
    type Candidate = HostCandidate;

    fn limit(&mut self, run: &mut Measurement<'_>, at: Point) -> Result<Option<Duration>> {
        let Some(limit) = &mut self.limit else { return Ok(None) };
        run.report_activity(Activity::Limit, at)?;

        let Measurement { setup, comm, group, .. } = run;
        let layout = setup.layout(at.block_length)?;
        let copies = LimitCopies { layout: &layout, in_place: setup.options.in_place };
        limit.measure(copies, self.timing_options, comm, group).map(Some)
    }

    fn prepare(
        &mut self,
        run: &mut Measurement<'_>,
        at: Point,
    ) -> Result<Candidates<HostCandidate>> {
        let (Measurement { setup, group, .. }, Point { block_length, .. }) = (run, at);
        let candidate = |algorithm| {
            let variant = Variant { algorithm, captured: false, traced: false };
            let operation = setup.prepare_on_host(group, block_length, variant)?;
            Ok(HostCandidate { operation, block_length })
        };

        let all = setup.algorithms().into_iter().map(candidate).collect::<Result<Vec<_>>>()?;
        let reports = all.iter().map(|candidate| candidate.operation.report().clone()).collect();
        Ok(Candidates { all, reports })
    }

    fn time(
        &mut self,
        run: &mut Measurement<'_>,
        candidates: &mut [HostCandidate],
        _at: Point,
    ) -> Result<Vec<Timing>> {
        let once = |candidate: &mut HostCandidate| candidate.operation.run();
        self.timing_options.time(&run.comm, &mut run.group, longest_of_each, candidates, once)
    }
}

impl Checked for HostCandidate {
    fn name(&self) -> &'static str {
        self.operation.report().algorithm.name()
    }

    fn check(&mut self, run: &Measurement<'_>, data: TestData) -> Result<Option<String>> {
        let (operation, block) = (&mut *self.operation, (run.comm.rank(), self.block_length));
        let mut found: Comparison = Ok(());

        // With two outputs each start fills the other one. After these starts every output has been
        // overwritten, filled and compared.
        for _ in 0..operation.report().outputs {
            fill(&run.setup, operation, block, data)?;
            operation.run()?;
            found = found.and(compare(&run.setup, operation, block, data)?);
        }
        Ok(found.err().map(|wrong| wrong.to_string()))
    }
}

type Comparison = std::result::Result<(), Difference>;

/// The first byte of an output buffer that has a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Difference {
    /// A byte of a block that differs from the byte that its rank has sent.
    Byte(Mismatch),
    /// An element between two blocks that was overwritten although no rank sends it.
    Gap { buffer: usize, element: usize },
}

/// Overwrites the output buffers with a known byte, then fills the input blocks of this rank.
fn fill(
    setup: &Setup<'_>,
    operation: &mut dyn HostOperation,
    (rank, block_length): (Rank, u64),
    data: TestData,
) -> Result<()> {
    let collective = setup.options.goal.collective;
    for buffer in 0..setup.options.shape.output_buffers(setup.ranks()) {
        overwrite(operation.output_buffer_mut(buffer)?);
    }

    let numbering = setup.numbering(rank);
    if !collective.has_input_block_per_receiver() {
        for tensor in 0..operation.report().tensors {
            numbering.input(data, tensor).fill(operation.input_piece_mut(tensor)?);
        }
        return Ok(());
    }

    // The blocks for all receivers follow each other in one input.
    let blocks = setup.input_blocks(block_length, rank)?;
    let mut input = operation.input_piece_mut(0)?;
    for (block, bytes) in blocks.into_iter().enumerate() {
        let (of_block, rest) = input.split_at_mut(bytes as usize);
        numbering.input(data, block).fill(of_block);
        input = rest;
    }
    Ok(())
}

/// Compares every byte of the output blocks, and of the gaps between the blocks of a list.
fn compare(
    setup: &Setup<'_>,
    operation: &mut dyn HostOperation,
    (rank, block_length): (Rank, u64),
    data: TestData,
) -> Result<Comparison> {
    let (ranks, tensors) = (setup.ranks(), operation.report().tensors);
    let numbering = setup.numbering(rank);
    let mut sum = numbering.sum(data);
    let mut scratch = vec![0; Block::PIECE_BYTES];

    for tensor in 0..tensors {
        for source in Rank::all(ranks) {
            let found = operation.piece(tensor, source)?;
            // A sum is a single block, whose pieces are read one after the other.
            let mut of_source = numbering.output(data, tensor * ranks + source.index());
            let expected = sum.as_mut().unwrap_or(&mut of_source);
            if let Err(wrong) = expected.compare(found, &mut scratch) {
                return Ok(Err(Difference::Byte(wrong)));
            }
        }
    }

    if setup.options.shape.list {
        let pieces = setup.options.shape.pieces(setup.options.goal, block_length, ranks)?;
        for destination in destinations(&pieces[0]) {
            let (buffer, gap) = (destination.buffer, destination.offset - GAP..destination.offset);
            let begin = gap.start;
            let found = operation.output_elements(buffer, gap)?;
            if let Some(at) = found.iter().position(|byte| *byte != UNWRITTEN) {
                let element = begin + at / setup.options.dtype.bytes();
                return Ok(Err(Difference::Gap { buffer, element }));
            }
        }
    }
    Ok(Ok(()))
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Byte(wrong) => wrong.fmt(f),
            Self::Gap { buffer, element } => {
                write!(
                    f,
                    "output buffer {buffer}, element {element}: the element is outside of all \
                     blocks but was overwritten"
                )
            }
        }
    }
}
