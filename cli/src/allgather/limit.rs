//! Measures plain copies of the bytes that an operation moves between the same ranks, as its speed
//! limit on the host. No flags are used; a barrier separates the iterations.

use std::time::Duration;

use peerlane::bootstrap::Bootstrap;
use peerlane::hal::{At, DynFabric, Op, Role};
use peerlane::{Group, Rank};
use peerlane_planning::layout::{Layout, Span};
use peerlane_planning::plan::{Cell, Source};

use super::timer::{Reduce, TimingOptions};
use crate::error::Result;
use crate::ranks::affinity;
use crate::ranks::bare_fabric::{BareEngine, BareFabric};
use crate::ranks::comm::Comm;
use crate::ranks::statistics::{longest_of_each, span_of_each};

/// The layout of an operation whose bytes are copied without flags.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LimitCopies<'a> {
    pub(crate) layout: &'a Layout,
    /// Whether input and output are the same memory, so that there is no self copy.
    pub(crate) in_place: bool,
}

/// Times bare copies over several fabrics that copy in different ways; the fastest fabric is the
/// limit.
pub(crate) struct Limit {
    copiers: Vec<(BareFabric, BareEngine)>,
    /// Reduces the times of all ranks to one time per iteration.
    reduce: Reduce,
}

impl Limit {
    /// Connects the fabrics of all ranks, which run on `hosts` hosts. Collective.
    pub(crate) fn open(copiers: Vec<DynFabric>, comm: &Comm, hosts: usize) -> Result<Self> {
        let copiers = copiers.into_iter().map(|fabric| {
            let mut fabric = BareFabric::open(fabric, comm)?;
            let engine = fabric.engine()?;
            Ok((fabric, engine))
        });
        // If each rank has its own core, the times of the ranks count. Ranks that share cores run one
        // after the other, which the time of one rank does not show. The span of all ranks needs a
        // common clock, which exists only on one host.
        let own = hosts > 1 || comm.ranks() <= affinity::cores();
        let reduce = if own { longest_of_each } else { span_of_each };
        Ok(Self { copiers: copiers.collect::<Result<_>>()?, reduce })
    }

    /// Returns the median time of the bare copies over the fastest fabric. Collective.
    pub(crate) fn measure(
        &mut self,
        copies: LimitCopies<'_>,
        timing_options: TimingOptions,
        comm: &Comm,
        group: &mut Group,
    ) -> Result<Duration> {
        let mut best = Duration::MAX;
        let reduce = self.reduce;
        for copier in &mut self.copiers {
            best = best.min(measure_one(copier, copies, timing_options, (comm, group), reduce)?);
        }
        Ok(best)
    }
}

fn measure_one(
    (fabric, engine): &mut (BareFabric, BareEngine),
    LimitCopies { layout, in_place }: LimitCopies<'_>,
    timing_options: TimingOptions,
    (comm, group): (&Comm, &mut Group),
    reduce: Reduce,
) -> Result<Duration> {
    let (rank, ranks) = (comm.rank(), comm.ranks());
    let output = fabric.allocate(layout.output_bytes(rank), Role::Data)?;
    let input_bytes = if in_place { 0 } else { layout.input_bytes(rank) };
    let input = fabric.allocate(input_bytes, Role::Data)?;
    let outputs = fabric.import(&output)?;
    let (region, source) =
        if in_place { (&output, Source::Output) } else { (&input, Source::Input) };
    let first = if in_place { 1 } else { 0 };
    let peers = (first..ranks).map(|step| Rank::at((rank.index() + step) % ranks));
    let own = Cell { block: rank, chunk: 0 };
    let spans = peers
        .flat_map(|peer| layout.spans(own, (rank, source), peer).map(move |span| (peer, span)));
    let puts: Vec<_> = spans
        .map(|(peer, Span { src, dst, bytes, .. })| Op::Put {
            dst: At { region: &outputs[peer.index()], offset: dst.offset },
            src: At { region, offset: src.offset },
            bytes,
        })
        .collect();
    let copy = |engine: &mut &mut BareEngine| {
        // SAFETY: the regions outlive the last ticket on this rank and, because of the barrier below,
        // on every rank. Nothing else reads or writes the ranges that the puts cover.
        let ticket = unsafe { engine.submit(&puts) }?;
        engine.finish(ticket)
    };
    let timings = timing_options.time(comm, group, reduce, &mut [engine], copy)?;
    // Peers may still copy into the output of this rank.
    group.barrier()?;
    Ok(timings[0].statistics.median)
}
